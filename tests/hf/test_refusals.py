"""What a checkpoint directory or a call may get wrong: one line each, and no hang or flood of memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import jaxformer
from jaxformer.config import AttentionConfig, ConfigError, EmbedConfig, EncodingConfig, SparseConfig, StackConfig
from jaxformer.data.vocabularies import MAX_IDS
from jaxformer.hf import arguments, keys, reading, writing
from jaxformer.hf.table import CallConvention, Settings, family_of
from jaxformer.nn import masks

SIZES = {
    "vocab_size": 24, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 12, "pad_token_id": 0,
}  # fmt: skip
CONFIG = {"model_type": "bert", "architectures": ["BertForMaskedLM"], **SIZES}
NORM = ("encoder.layer.0.attention.output.LayerNorm", "encoder.layer.0.output.LayerNorm", "embeddings.LayerNorm")


def tensors():
    rng = np.random.default_rng(0)
    layer = "bert.encoder.layer.0."
    shapes = {f"bert.embeddings.{name}_embeddings.weight": (rows, 8) for name, rows in
              {"word": 24, "position": 12, "token_type": 2}.items()}  # fmt: skip
    for name in ("query", "key", "value"):
        shapes[f"{layer}attention.self.{name}.weight"] = (8, 8)
        shapes[f"{layer}attention.self.{name}.bias"] = (8,)
    for name, shape in {
        "attention.output.dense": (8, 8), "intermediate.dense": (12, 8), "output.dense": (8, 12)
    }.items():  # fmt: skip
        shapes |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
    for name in (*(f"bert.{name}" for name in NORM), "cls.predictions.transform.LayerNorm"):
        shapes |= {f"{name}.weight": (8,), f"{name}.bias": (8,)}
    shapes |= {
        "cls.predictions.transform.dense.weight": (8, 8), "cls.predictions.transform.dense.bias": (8,),
        "cls.predictions.bias": (24,),
    }  # fmt: skip
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def written(place, changed=None, **settings):
    writing.write_checkpoint(place, CONFIG | settings, tensors() | (changed or {}))
    return place


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return jaxformer.from_pretrained(written(tmp_path_factory.mktemp("refusals") / "bert"))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": np.asarray([[2**40]])}, "input_ids 1099511627776, expected numbers of 32 bits"),
        ({"input_ids": np.asarray([[3.0]])}, "input_ids of type float64, expected whole numbers"),
        ({"input_ids": np.zeros((1, 0), int)}, "shape [1, 0], expected at least one token"),
        ({"input_ids": [[3]], "labels": np.asarray([[2**32 + 3]])}, "labels 4294967299, expected numbers of 32 bits"),
        ({"input_ids": [[3, -1]]}, "got input_ids -1, expected 0 to 23"),
        ({"input_ids": [[3, 24]]}, "got input_ids 24, expected 0 to 23"),
        ({"input_ids": [[3, 4]], "token_type_ids": [[0, 2]]}, "got token_type_ids 2, expected 0 to 1"),
        ({"input_ids": [[3, 4]], "token_type_ids": [[0, -1]]}, "got token_type_ids -1"),
        ({"input_ids": [[3, 4]], "position_ids": [[0, 12]]}, "got a position (row of the table) 12, expected 0 to 11"),
        ({"input_ids": [[3, 4]], "position_ids": [[-1, 0]]}, "got a position (row of the table) -1"),
        ({"input_ids": [[3] * 13]}, "got a position (row of the table) 12"),
        ({"input_ids": [[3, 4]], "labels": [[24, -100]]}, "got labels 24, expected 0 to 23"),
        ({"input_ids": [[3, 4]], "return_dict": False}, "got return_dict False"),
    ],
)
def test_a_call_refuses_ids_without_a_row(bert, inputs, message):
    inputs = {name: np.asarray(value) if isinstance(value, list) else value for name, value in inputs.items()}
    with pytest.raises(ConfigError) as error:
        bert(**inputs)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_under_jit_an_id_without_a_row_is_nan(bert):
    call = jax.jit(lambda ids: bert(input_ids=ids).logits)
    assert np.isnan(call(jnp.asarray([[3, -1]]))).all()
    assert not np.isnan(call(jnp.asarray([[3, 23]]))).any()


COUNTED, SHIFTED, AGAIN, GAPS = [0, 0, 0, 1, 2], [2, 3, 4, 5, 6], [0, 1, 2, 0, 1], [0, 1, 2, 4, 7]
LEFT_PADDED = [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("attention", "encoding", "causal", "refused"),
    [
        ({}, "rope", True, {"again", "counted"}),
        ({"window": 3}, "rope", True, {"again", "gaps", "counted"}),
        ({"window": 3}, "rope", False, {"again", "gaps", "counted"}),
        ({}, "deberta", False, {"again", "gaps", "counted"}),
        ({"sparse": SparseConfig()}, "learned", False, set()),
        ({}, "learned", False, set()),
    ],
)
def test_positions_that_would_order_slots_unlike_the_other_library_are_refused(attention, encoding, causal, refused):
    stack = StackConfig(
        embed=EmbedConfig(vocab=8), attention=AttentionConfig(**attention), encoding=EncodingConfig(kind=encoding)
    )
    calls = {"shifted": (SHIFTED, None), "again": (AGAIN, None), "gaps": (GAPS, None), "counted": (COUNTED, None)}
    calls["padded"] = (COUNTED, LEFT_PADDED)
    for name, (positions, mask) in calls.items():
        given = {"input_ids": jnp.asarray([[3, 4, 5, 6, 7]]), "position_ids": jnp.asarray([positions])}
        given |= {} if mask is None else {"attention_mask": jnp.asarray([mask])}
        tokens = jax.jit(lambda given: arguments.make_stream(CallConvention(), stack, given, causal).tokens)(given)
        assert bool((tokens == -1).all()) == (name in refused), name
        if name in refused:
            with pytest.raises(ConfigError, match=r"got position_ids \[\d, .*\] in row 0, expected .*; give each text"):
                arguments.make_stream(CallConvention(), stack, given, causal)
        else:
            arguments.make_stream(CallConvention(), stack, given, causal)


@pytest.mark.parametrize("positions", [None, "counted", "low", "below the first"])
@pytest.mark.parametrize("convention", ["ids", "slots"])
def test_slots_of_padding_see_the_tokens_before_them_whatever_their_positions_are(convention, positions):
    """Hidden slots have outputs, too, which labels read: as in the library, whose masks count slots."""
    real = np.array([[0, 1, 1, 0, 0, 1, 0], [1, 1, 1, 1, 1, 0, 0]])
    count = np.maximum(np.cumsum(real, axis=1) - 1, 0)
    given = {"input_ids": jnp.asarray(np.where(real == 1, 3, 0)), "attention_mask": jnp.asarray(real)}
    found = {"counted": count + 1, "low": np.where(real == 1, count + 1, 0), "below the first": count - 3}
    given |= {} if positions is None else {"position_ids": jnp.asarray(found[positions])}
    encoding = EncodingConfig(kind="learned", offset=4, max_length=16)
    stack = StackConfig(embed=EmbedConfig(vocab=8, pad=0), encoding=encoding)
    slots = arguments.make_stream(CallConvention(positions=convention), stack, given, causal=True).slots
    expected = np.tril(np.ones((7, 7), bool)) & (real[:, None, :] == 1)
    np.testing.assert_array_equal(masks.Mask(slots, slots, causal=True).dense(), expected)


def test_a_loss_of_spans_is_refused_beside_padding_whose_scores_are_of_other_slots():
    """GPT-Neo and BLOOM, which have no other attention; the loss alone reads such slots, so scores are given."""
    shown = np.ones((2, 9), int)
    spans = {"start_positions": [0, 1], "end_positions": [1, 2]}
    left, behind = shown * (np.arange(9) > 1), shown * (np.arange(9) < 6)
    for mask, window, where in ((left, None, 0), (left, 4, 0), (behind, 3, 8)):
        with pytest.raises(
            ConfigError, match=rf"got start_positions and padding in slot {where} of row 0 that sees no"
        ):
            arguments.check_spans({"attention_mask": mask, **spans}, window)
        arguments.check_spans({"attention_mask": mask}, window)
    for mask, window in ((shown, 3), (behind, 4), (behind, None)):
        arguments.check_spans({"attention_mask": mask, **spans}, window)
    jax.jit(lambda mask: arguments.check_spans({"attention_mask": mask, **spans}, 3))(left)
    for model_type in ("gpt_neo", "bloom", "gpt2"):
        assert family_of(Settings({"model_type": model_type})).convention.spans_read_padding == (model_type != "gpt2")


def test_only_families_whose_classes_take_position_ids_take_them():
    heads = {"bloom": "qa", "roformer": "token", "t5": "encoder", "mt5": "token", "longt5": "encoder", "gpt2": "qa"}
    for model_type, head in heads.items():
        settings = Settings({"model_type": model_type})
        family = family_of(settings)
        model = keys.read_model(family, keys.with_defaults(family, settings), head)
        names = arguments.argument_names(model, head, family.convention)
        assert ("position_ids" in names) == (model_type == "gpt2")


def test_embeddings_of_a_call_are_scaled_where_the_classes_scale_more_than_what_they_look_up():
    """As version 5.24 of transformers: given rows are divided where only rows of the table are multiplied there."""
    scaled = {"scale_embedding": True}
    expected = {
        ("gemma", "causal_lm"): (None, False), ("gemma2", "model"): (None, False), ("llama", "token"): (None, True),
        ("xglm", "causal_lm"): (None, False), ("bart", "seq2seq"): (False, False),
        ("blenderbot", "model"): (False, False),
        ("marian", "seq2seq"): (False, True), ("pegasus", "seq2seq"): (False, True), ("t5", "seq2seq"): (True, True),
        ("blenderbot-small", "seq2seq"): (False, True), ("t5gemma", "seq2seq"): (True, True),
    }  # fmt: skip
    for (model_type, head), sides in expected.items():
        settings = Settings({"model_type": model_type, **({} if model_type[:2] in ("ge", "ll", "t5") else scaled)})
        family = family_of(settings)
        settings = keys.with_defaults(family, settings)
        model = keys.read_model(family, settings, head)
        names = ("inputs_embeds", "decoder_inputs_embeds") if sides[0] is not None else ("inputs_embeds",)
        widths = [stack.width for stack in (model.encoder, model.decoder) if stack is not None]
        given = {name: np.ones((1, 2, width), np.float32) for name, width in zip(names, widths, strict=True)}
        batch = arguments.make_batch(family.convention, settings, model, head, given)
        for stream, width, is_kept in zip((batch.source, batch.target), (widths[0], widths[-1]), sides, strict=True):
            if stream is not None:
                np.testing.assert_allclose(
                    stream.tokens, 1.0 if is_kept else width**-0.5, rtol=1e-6, err_msg=model_type
                )


def test_a_big_bird_that_scales_embeddings_scales_those_of_a_call():
    settings = Settings({"model_type": "big_bird", "rescale_embeddings": True})
    family = family_of(settings)
    settings = keys.with_defaults(family, settings)
    model = keys.read_model(family, settings, "masked_lm")
    given = {"inputs_embeds": np.ones((1, 2, 768), np.float32)}
    assert (arguments.make_batch(family.convention, settings, model, "masked_lm", given).source.tokens == 1).all()
    assert model.encoder.embed.scale


def test_bloom_refuses_sums_of_parts_that_leave_biases_out():
    def read(edit):
        settings = Settings({"model_type": "bloom", **edit})
        family = family_of(settings)
        return keys.read_model(family, keys.with_defaults(family, settings), "causal_lm")

    assert read({"pretraining_tp": 2}) == read({"slow_but_exact": True}) == read({})
    with pytest.raises(ConfigError, match="slow_but_exact True with pretraining_tp 2, expected one of them off"):
        read({"pretraining_tp": 2, "slow_but_exact": True})


def test_weights_that_are_no_numbers_are_refused_and_infinities_named(tmp_path, caplog):
    name = "bert.encoder.layer.0.intermediate.dense.weight"
    for value in (np.nan, np.inf):
        changed = tensors()[name]
        changed[1, 2] = value
        place = written(tmp_path / str(value), {name: changed})
        if np.isnan(value):
            with pytest.raises(ConfigError, match=f"got 1 of 96 values of {name} that are NaN, expected numbers"):
                jaxformer.from_pretrained(place)
        else:
            jaxformer.from_pretrained(place)
            assert f"{name} holds infinities" in caplog.text
    large = {name: np.full((12, 8), 1e38, np.float32)}  # their sum is beyond float32, they are not
    caplog.clear()
    jaxformer.from_pretrained(written(tmp_path / "large", large))
    assert "infinities" not in caplog.text


def test_a_tokenizer_beyond_the_table_is_named_and_its_texts_refused(tmp_path, caplog):
    place = written(tmp_path / "bert")
    vocabulary = {f"w{i}": i for i in range(64)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w1"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(place / "tokenizer.json"))
    (place / "generation_config.json").write_text('{"eos_token_id": 77}')
    found = jaxformer.from_pretrained(place, head="model")
    assert "the tokenizer has 64 ids, the table 24 rows" in caplog.text
    assert "generation_config.json: got eos_token_id 77" in caplog.text
    assert np.isfinite(found.embed(["w3 w9"])).all()
    with pytest.raises(ConfigError, match="got a token 40, expected 0 to 23"):
        found.embed(["w3 w40"])


def hostile(place):
    """Directories that must be refused, and how each is made of a good one."""
    deep = {"version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None, "decoder": None}
    word = {"type": "WordLevel", "vocab": {"a": 2**31, "b": 0}, "unk_token": "a"}
    pattern = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}

    def text(name, content):
        return lambda path: (path / name).write_text(content)

    def pair(vocabulary, merges):
        return lambda path: (text("vocab.json", vocabulary)(path), text("merges.txt", merges)(path))

    made = {
        "layers": {"num_hidden_layers": 10**9},
        "positions": {"max_position_embeddings": 10**9},
        "heads": {"num_attention_heads": 10**9},
        "width": {"hidden_size": 2**31 - 1},
        "labels": {"id2label": ["a", "b"], "architectures": ["BertForSequenceClassification"]},
        "end": {"eos_token_id": 10**12},
        "activation": {"hidden_act": ["gelu"]},
        "id": text("tokenizer.json", json.dumps(deep | {"model": word, "pre_tokenizer": None})),
        "endless": lambda path: (path / "tokenizer.json").symlink_to("/dev/zero"),
        "nowhere": lambda path: (path / "tokenizer.json").symlink_to("nowhere"),
        "nested": text("tokenizer.json", "[" * 10**5),
        "pattern": text("tokenizer.json", json.dumps(deep | {"model": word | {"vocab": {"a": 0}},
                                                             "pre_tokenizer": pattern})),
        "vocabulary": pair("{", "a b\n"),
        "vocabulary_ids": pair('{"a": 2147483648}', "#version: 0.2\n"),
        "merges": pair('{"a": 0, "b": 1}', "#version: 0.2\nnot a merge at all\n"),
        "lowercase": lambda path: (text("vocab.txt", "a\nb\n")(path), text("tokenizer_config.json", "{")(path)),
        "pieces": text("spiece.model", "no pieces"),
    }  # fmt: skip
    for name, change in made.items():
        written(place / name, **(change if isinstance(change, dict) else {}))
        if not isinstance(change, dict):
            change(place / name)
    return sorted(made)


RUN = """
import resource, signal, sys
resource.setrlimit(resource.RLIMIT_DATA, (6 * 2**30, 6 * 2**30))
from jaxformer import cli
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in sys.argv[2:]:
    signal.setitimer(signal.ITIMER_PROF, 5)  # of processor time, since the machine may be busy
    print(name, cli.main(["import", f"--source={sys.argv[1]}/{name}", f"--workdir={sys.argv[1]}/run"]), flush=True)
    signal.setitimer(signal.ITIMER_PROF, 0)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_hostile_directory_is_one_line_in_five_seconds_and_a_gigabyte(tmp_path):
    """In one process of its own: a mistake here would take the machine's memory."""
    names = hostile(tmp_path)

    root = Path(jaxformer.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path), *names],
        capture_output=True, text=True, timeout=120, cwd=root,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert not done.returncode, done.stderr
    *codes, megabytes = done.stdout.split("\n")[:-1]
    assert codes == [f"{name} 2" for name in names], done.stderr
    assert int(megabytes) < 1000
    lines = [line for line in done.stderr.splitlines() if "got " in line]
    assert len(lines) == len(names) and not (tmp_path / "run").exists()
    assert len(done.stderr.splitlines()) == len(names), done.stderr


def test_a_pattern_that_gives_up_is_one_line(tmp_path):
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(?:(?:a|aa)+)+$"), "isolated")
    place = written(tmp_path / "bert")
    model.save(str(place / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"tokenizer: got .*tokenizer.json, expected a tokenizer.json or"):
        jaxformer.from_pretrained(place, head="model")


def test_ids_up_to_the_most_are_a_vocabulary():
    assert MAX_IDS > 10 * 262144  # Gemma's
    assert reading.MAX_CONFIG_BYTES < 2**28
