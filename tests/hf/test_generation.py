"""`generate` against what the other library returned for tiny random models (see `write_generation.py`).

By default some of the cases are compared, each rule at least once; `GOLDENS=all` (`make goldens`) compares all of them.
"""

import contextlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import jaxformer
from jaxformer.config import ConfigError, EmbedConfig, StackConfig
from jaxformer.hf import generation, generation_options, workdirs
from jaxformer.hf.table import CallConvention

PLACE = Path(__file__).parent / "generation"
FEW = {
    "gpt2": ("two_ends", "least", "left_beam_rules"),
    "bart": (
        "lengths_all", "beam_first", "forced_first_beam_rules", "without_mask", "left_greedy", "right_greedy",
        "middle_greedy",
    ),
    "marian": ("left_greedy", "right_greedy", "middle_greedy"),
    "pegasus": ("left_greedy", "right_greedy", "middle_greedy"),
    "t5": ("left_greedy", "right_greedy", "middle_greedy"),
    "llama": (),
}  # fmt: skip
EVERY = json.loads((PLACE / "cases.json").read_text(encoding="utf-8"))
ALL = os.environ.get("GOLDENS") == "all"
CASES = [case for case in EVERY if ALL or case["name"] in FEW[case["model"]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Opens each model once, and once more with each set of files that a case wants beside it."""
    kept = {}

    def load(name, changed=None):
        key = (name, json.dumps(changed, sort_keys=True))
        if key not in kept:
            place = tmp_path_factory.mktemp("generation") / name
            shutil.copytree(PLACE / name, place)
            for file, values in (changed or {}).items():
                path = place / {"config": "config.json", "generation": "generation_config.json"}[file]
                before = json.loads(path.read_text()) if path.exists() else {}
                path.write_text(json.dumps(before | values))
            kept[key] = jaxformer.from_pretrained(place)
        return kept[key]

    return load


def arrays(case):
    return {name: np.asarray(value) for name, value in case["in"].items()}


@pytest.mark.parametrize("case", CASES, ids=[f"{case['model']}-{case['name']}" for case in CASES])
def test_the_same_sequences_and_scores_as_the_other_library(models, case):
    out = models(case["model"], case.get("files")).generate(
        **arrays(case), **case["args"], return_dict_in_generate=True
    )
    assert out.sequences.tolist() == case["sequences"]
    if "scores" in case:
        np.testing.assert_allclose(out.sequences_scores, case["scores"], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["bart", "marian", "pegasus", "t5"])
def test_a_padded_source_is_read_as_the_models_own_call_reads_it(models, name):
    """Each chosen token is the likeliest one of the call with what was chosen before."""
    for side in ("left", "right", "middle"):
        case = next(case for case in EVERY if (case["model"], case["name"]) == (name, f"{side}_greedy"))
        out, model = np.asarray(case["sequences"]), models(name)
        best = np.asarray(model(**arrays(case), decoder_input_ids=out).logits).argmax(-1)[:, :-1]
        going = np.cumprod(np.pad(out[:, 1:-1] != 2, ((0, 0), (1, 0)), constant_values=True), axis=1).astype(bool)
        np.testing.assert_array_equal(best[going], out[:, 1:][going], err_msg=side)


def test_a_decoders_prompt_may_be_padded_anywhere(models):
    model = models("gpt2")
    rows = {"left": [1, 1, 9, 5, 11], "right": [9, 5, 11, 1, 1], "middle": [9, 1, 5, 1, 11]}
    ids = np.asarray(list(rows.values()))
    new = model.generate(input_ids=ids, attention_mask=ids != 1, max_new_tokens=6)[:, 5:]
    np.testing.assert_array_equal(new, np.broadcast_to(new[:1], new.shape))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, [[2], [2]]),
        ([[7, 9], [8, 3]], [[2, 7, 9], [2, 8, 3]]),  # no row begins with the start token: it is added
        ([[2, 9], [2, 3]], [[2, 9], [2, 3]]),
        ([[2, 9], [8, 3]], [[2, 9], [8, 3]]),
    ],
)
def test_a_decoders_input_begins_as_theirs(given, expected):
    settings = {"decoder_start_token_id": 2, "bos_token_id": 0}
    assert generation._decoder_prompts({"decoder_input_ids": given}, settings, 2, 28).tolist() == expected
    each = generation._decoder_prompts({}, {"decoder_start_token_id": [4, 5]}, 2, 28)
    assert each.tolist() == [[4], [5]]


@pytest.mark.parametrize(("positions", "refused"), [("ids", True), ("slots", False)])
def test_padding_in_a_decoders_prompt_is_refused_where_it_has_no_position(positions, refused):
    """RoBERTa beside an encoder; its own counting is that of the other side."""
    stack = StackConfig(embed=EmbedConfig(vocab=28, pad=1))
    other = {"ids": "slots", "slots": "ids"}[positions]
    origin = SimpleNamespace(convention=CallConvention(positions=other, decoder_positions=positions))
    for begin in ([[1], [2]], [[2, 3], [2, 1]]):
        with pytest.raises(ConfigError, match=r"got padding \(1\) as") if refused else contextlib.nullcontext():
            generation._check_positions_of(np.asarray(begin), stack, origin)
    generation._check_positions_of(np.asarray([[2, 3], [2, 4]]), stack, origin)


def test_arguments_become_decoding_options():
    given = {
        "num_beams": 3, "early_stopping": "never", "length_penalty": 2, "forced_bos_token_id": 4,
        "forced_eos_token_id": [2, 5], "bad_words_ids": [[7, 8], [2]], "suppress_tokens": np.asarray([9]),
    }  # fmt: skip
    settings = {**generation_options.DEFAULTS, **given}
    config = generation_options.decode_config(settings, generation_options.TokenLimits(6, 2), 1, (2, 3), 28)
    assert (config.method, config.stopping, config.length_norm, config.length_penalty) == (
        "beam",
        "exact",
        "power",
        2.0,
    )
    assert (config.max_length, config.min_length, config.forced_first, config.forced_last) == (6, 2, 4, (2, 5))
    assert (config.bad_words, config.suppress) == (((7, 8),), (9,))  # an end token alone is never bad
    assert (
        generation_options.decode_config(settings, generation_options.TokenLimits(6, 2), 2, (2, 3), 28).forced_first
        is None
    )
    for early, stopping in ((False, "estimate"), (True, "first")):
        assert generation_options._stopping_rule(early) == stopping


# --- lengths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "prompt", "positions", "expected"),
    [
        ({}, 1, None, (20, 0)),
        ({}, 100, None, (20, 0)),
        ({}, 30, 40, (10, 0)),
        ({"max_length": 20}, 5, 40, (15, 0)),
        ({"max_length": 50}, 5, 40, (45, 0)),
        ({"max_new_tokens": 7}, 5, 10, (7, 0)),
        ({"max_length": 6, "max_new_tokens": 7}, 5, None, (7, 0)),
        ({"min_length": 8}, 5, None, (20, 3)),
        ({"min_length": 8}, 9, None, (20, 0)),
        ({"min_new_tokens": 8}, 5, None, (20, 8)),
        ({"min_length": 20, "min_new_tokens": 3}, 5, None, (20, 3)),
        ({"min_new_tokens": 30}, 5, None, (20, 20)),
    ],
)
def test_lengths_count_what_theirs_count(given, prompt, positions, expected):
    assert generation_options.new_token_limits({**generation_options.DEFAULTS, **given}, prompt, positions) == expected


@pytest.mark.parametrize(
    ("given", "prompt", "message"),
    [
        ({"max_length": 5}, 5, "prompt of 5 tokens with max_length 5, expected room"),
        ({"max_new_tokens": 0}, 5, "max_new_tokens 0"),
        ({}, 40, "prompt of 40 tokens, expected fewer than the model's 40"),
        ({"max_length": "8"}, 5, "max_length '8', expected a whole number"),
        ({"min_length": -1}, 5, "min_length -1, expected at least 0"),
        ({"min_new_tokens": True}, 5, "min_new_tokens True"),
    ],
)
def test_lengths_without_room_are_refused(given, prompt, message):
    with pytest.raises(ConfigError, match=message):
        generation_options.new_token_limits({**generation_options.DEFAULTS, **given}, prompt, 40)


def test_two_lengths_are_said_to_be_one_too_many(caplog):
    generation_options.new_token_limits({**generation_options.DEFAULTS, "max_length": 9, "max_new_tokens": 4}, 1, None)
    generation_options.new_token_limits({**generation_options.DEFAULTS, "min_length": 9, "min_new_tokens": 4}, 1, None)
    generation_options.new_token_limits({**generation_options.DEFAULTS, "min_length": 9, "max_new_tokens": 4}, 1, None)
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(": ")[2] for text in said] == [
        "both max_length and max_new_tokens are set; max_new_tokens counts",
        "both min_length and min_new_tokens are set; min_new_tokens counts",
        "at least 8 new tokens asked for, and at most 4: no end token is chosen",
    ]


def test_outputs_that_the_positions_cut_are_said_to_be(models, caplog):
    out = models("gpt2").generate(input_ids=np.full((1, 37), 5), max_new_tokens=9, eos_token_id=None, pad_token_id=1)
    assert out.shape == (1, 41)  # the last token is never read, and has no position
    assert "no more than 4 new tokens, since the model has 40 positions" in caplog.text


# --- stored options ---------------------------------------------------------------------------------------------------


def test_generation_config_replaces_the_options_of_config_json(models, caplog):
    old = {"num_beams": 2, "max_length": 9, "encoder_no_repeat_ngram_size": 3, "num_beam_groups": 1}
    stored = {"decoder_start_token_id": 3, "typical_p": 0.9}
    assert models("bart", {"config": old}).hf.defaults == {
        "num_beams": 2, "max_length": 9, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 2, "use_cache": True,
    }  # fmt: skip
    assert "config.json: generation here knows no encoder_no_repeat_ngram_size, and" in caplog.text
    assert models("bart", {"config": old, "generation": stored}).hf.defaults == stored
    assert "generation_config.json: generation here knows no typical_p, and" in caplog.text


def test_values_that_ask_for_nothing_are_told_from_those_that_do(tmp_path, caplog):
    asks = {
        "renormalize_logits": True,
        "encoder_no_repeat_ngram_size": 1,
        "diversity_penalty": 1.0,
        "guidance_scale": 0.0,
    }
    nothing = {"num_beam_groups": 1, "typical_p": 1.0, "epsilon_cutoff": 0.0, "penalty_alpha": 0, "sequence_bias": []}
    (tmp_path / "generation_config.json").write_text(json.dumps(asks | nothing | {"token_healing": False}))
    generation_options.read_defaults(tmp_path, {})
    assert f"knows no {', '.join(asks)}, and" in caplog.text
    caplog.clear()
    (tmp_path / "generation_config.json").write_text(json.dumps(nothing))
    generation_options.read_defaults(tmp_path, {})
    assert not caplog.text


def test_a_forced_start_of_the_oldest_files_is_read():
    assert generation_options.config_defaults({"force_bos_token_to_be_generated": True, "bos_token_id": 4}) == {
        "bos_token_id": 4,
        "forced_bos_token_id": 4,
    }


def test_none_switches_a_stored_option_off(models):
    stored = {"suppress_tokens": [3], "top_k": 5, "num_beams": 4, "max_new_tokens": 3}
    model = models("gpt2", {"generation": stored})
    none = dict.fromkeys(stored)
    found = generation_options.resolve_options(model.hf.defaults, none)
    assert [found[name] for name in stored] == [None, 0, 1, None]
    assert [generation_options.resolve_options(model.hf.defaults, {})[name] for name in stored] == list(stored.values())


def test_an_imported_workdir_keeps_the_stored_options(models, tmp_path):
    shutil.copytree(PLACE / "gpt2", tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").write_text('{"max_new_tokens": 3, "pad_token_id": 1}')
    model = workdirs.import_checkpoint(tmp_path / "hf", tmp_path / "run")
    assert workdirs.origin_of_run(model.config, model.tokenizers, tmp_path / "run").defaults == {
        "max_new_tokens": 3,
        "pad_token_id": 1,
    }
    path = tmp_path / "run" / workdirs.SETTINGS_FILE  # as earlier versions imported a directory without that file
    path.write_text(json.dumps(json.loads(path.read_text()) | {"generation": {}}))
    assert workdirs.origin_of_run(model.config, model.tokenizers, tmp_path / "run").defaults["eos_token_id"] == 2


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bad_words_ids": [[]]}, "bad_words_ids, expected a list of at least one token id"),
        ({"bad_words_ids": [3]}, "3 in bad_words_ids"),
        ({"bad_words_ids": 3}, "bad_words_ids 3"),
        ({"bad_words_ids": [[3, -1]]}, "bad_words_ids -1, expected token ids from 0 to 27"),
        ({"bad_words_ids": [[28]]}, "bad_words_ids 28"),
        ({"suppress_tokens": [-1]}, "suppress_tokens -1"),
        ({"suppress_tokens": [28]}, "suppress_tokens 28"),
        ({"suppress_tokens": "the"}, "suppress_tokens 'the', expected a token id"),
        ({"forced_eos_token_id": [2, -2]}, "forced_eos_token_id -2"),
        ({"forced_eos_token_id": [2], "suppress_tokens": [2]}, "forced_eos_token_id .2., expected a token that"),
        ({"forced_bos_token_id": 99}, "forced_bos_token_id 99"),
        ({"forced_bos_token_id": [3, 4]}, "forced_bos_token_id .3, 4., expected one"),
        ({"eos_token_id": 10**12}, "eos_token_id 1000000000000"),
        ({"eos_token_id": -1}, "eos_token_id -1"),
        ({"eos_token_id": 2.5}, "eos_token_id 2.5"),
        ({"input_ids": np.asarray([[7, 28]])}, "input_ids 28"),
        ({"input_ids": np.asarray([[7, -1]])}, "input_ids -1"),
        ({"input_ids": np.asarray([[7.0, 1.0]])}, "float64, expected whole numbers"),
        ({"input_ids": np.zeros((1, 0), int)}, "shape .1, 0."),
        ({"attention_mask": np.zeros((1, 2))}, "row 0 of input_ids without a real token"),
        ({"decoder_input_ids": np.asarray([[3]])}, "this model has no encoder"),
        ({"num_beams": "2"}, "num_beams '2', expected a whole number"),
        ({"temperature": "hot"}, "temperature: got 'hot'"),
        ({"no_repeat_ngram_size": 2.5}, "no_repeat_ngram: got 2.5"),
        ({"early_stopping": []}, "early_stopping"),
        ({"pad_token_id": 10**12}, "pad_token_id 1000000000000, expected one token id"),
        ({"pad_token_id": [1, 2]}, "pad_token_id .1, 2., expected one token id"),
    ],
)
def test_generate_refuses_in_one_line(models, arguments, message):
    with pytest.raises(ConfigError, match=message) as error:
        models("gpt2").generate(**{"input_ids": np.asarray([[7, 8]]), **arguments})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decoder_input_ids": np.asarray([[28]])}, "decoder_input_ids 28"),
        ({"decoder_input_ids": np.asarray([[2], [2]])}, "2 rows of decoder_input_ids, expected 1"),
        ({"decoder_start_token_id": [2, 3]}, "2 of decoder_start_token_id, expected one"),
        ({"decoder_start_token_id": 10**12}, "decoder_start_token_id .1000000000000., expected token ids"),
        ({"decoder_start_token_id": None, "bos_token_id": None}, "no decoder_start_token_id"),
        ({"input_ids": np.full((1, 41), 5)}, "41 slots, expected at most the model's 40"),
        ({"input_ids": np.full((1, 41), 5), "attention_mask": np.arange(41)[None] == 40}, "41 slots"),
    ],
)
def test_generate_refuses_a_translators_arguments(models, arguments, message):
    with pytest.raises(ConfigError, match=message):
        models("bart").generate(**{"input_ids": np.asarray([[7, 8]]), **arguments})


# --- edges ------------------------------------------------------------------------------------------------------------


def test_where_fewer_hypotheses_exist_than_asked_for_the_missing_are_padding(models):
    arguments = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 1, "forced_eos_token_id": 2}
    out = models("gpt2").generate(input_ids=np.asarray([[7, 8]]), **arguments, return_dict_in_generate=True)
    assert out.sequences.tolist() == [[7, 8, 2], [7, 8, 1]]
    assert out.sequences_scores.tolist() == [0.0, -np.inf]


def test_a_source_as_long_as_the_positions_is_read(models):
    """Shapes are powers of two, and no larger than the table of positions."""
    assert models("bart").generate(input_ids=np.full((1, 39), 5), max_new_tokens=2).shape == (1, 3)


def test_a_padding_token_outside_the_vocabulary_only_fills(models):
    case = next(case for case in EVERY if case["name"] == "inferred")
    ids = arrays(case)["input_ids"]
    found = models("gpt2").generate(input_ids=np.where(ids == 1, 77, ids), pad_token_id=77)
    chosen = np.asarray(case["sequences"])
    ended = np.cumsum(chosen[:, 5:-1] == 2, axis=1) > 0
    filled = np.concatenate([ids == 1, np.zeros((2, 1), bool), ended], axis=1)
    np.testing.assert_array_equal(found, np.where(filled, 77, chosen))


def test_padding_that_is_read_is_named(models, caplog):
    real = generation._real_tokens({}, np.asarray([[1, 9], [5, 6]]), 1, (2,), seq2seq=True)
    assert real.all()
    assert "input_ids hold the padding token 1, which is read: give an attention_mask" in caplog.text
