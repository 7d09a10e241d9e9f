"""Configs that are easily misread, against outputs of the other library that are kept in `goldens/cases.json`.

By default those cases of which no two fail for one mistake; with `GOLDENS=all` (`make goldens`) all of them.
"""

import dataclasses
import functools
import importlib.util
import json
import os
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

import jaxformer
from jaxformer.config import ConfigError
from jaxformer.hf import reading, writing

pytestmark = pytest.mark.usefixtures("rolled")

GOLDENS = Path(__file__).with_name("goldens")
CASES = json.loads((GOLDENS / "cases.json").read_text(encoding="utf-8"))
FEW = (
    "gemma_gelu", "gemma_both_ways", "llama_theta_beside", "llama_head_dim", "llama_dynamic", "llama_yarn_factor",
    "bert_both_biases", "roberta_both_biases", "bart_two_tables", "gpt2_alias", "gpt2_says_outputs", "xlnet_summary",
    "mixtral_router", "deberta_v2_qa", "deberta_absolute_qa", "gpt2_classifier", "llama_classifier_without_pad",
    "opt_350m", "opt_without_biases", "gpt_neo_layers", "gptj", "gpt_neox",
    "gpt_neox_sequential", "bloom", "bloom_residual_after_norm", "xglm", "mt5", "mbart",
    "blenderbot_small", "llama_padded_left", "mixtral_padded", "bert_padded",
    "bert_classifier_padded_left", "bart_padded", "bert_choice", "prelayernorm",
    "roberta_causal", "distilbert_classifier", "albert_equal_widths", "albert_pretraining",
    "big_bird", "longt5", "roformer",
    "pair_bert_gpt2", "pair_roberta", "pair_prelayernorm_untied",
    "gemma2", "gemma3", "gemma3_both_ways", "electra", "electra_generator", "electra_classifier", "electra_choice",
    "deepseek_bias", "deepseek_wide", "olmo2_yarn", "olmo2_classifier",
    "phi_norms", "phi_wide_heads", "phi_token", "gpt_oss", "gpt_oss_odd", "gpt_oss_token",
    "modernbert", "modernbert_biases", "modernbert_classifier", "phi3", "phi3_token",
    "ministral", "ministral3", "qwen2_late_windows",
    "qwen3_next", "qwen3_next_full", "qwen3_next_dense", "qwen3_next_sparse",
    "modernbert_choice",
    "qwen3_answers", "t5_classifier", "mt5_token", "deberta_v2_choice",
    "t5gemma", "t5gemma_wide", "t5gemma_narrow", "t5gemma_encoder_classifier", "t5gemma_classifier",
)  # fmt: skip
NAMES = list(CASES) if os.environ.get("GOLDENS") == "all" else FEW


def weights():
    spec = importlib.util.spec_from_file_location("write_cases", GOLDENS / "write.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.values


VALUES = weights()


def loaded(name, place):
    case = CASES[name]
    tensors = {key: VALUES(key, tuple(shape)) for key, shape in case["tensors"].items()}
    writing.write_checkpoint(place, case["config"], tensors)
    return jaxformer.from_pretrained(place)


def compiled(model):
    """The call of a model with inputs by name, as one program for each set of names: flags are a part of it."""

    @functools.cache
    def program(flags):
        return jax.jit(lambda arrays: dict(model(**arrays, **dict(flags))))

    def call(inputs):
        arrays = {name: np.asarray(value) for name, value in inputs.items() if isinstance(value, list)}
        return program(tuple((name, value) for name, value in inputs.items() if name not in arrays))(arrays)

    return call


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_theirs(name, tmp_path):
    run = compiled(loaded(name, tmp_path / name))
    for number, call in enumerate(CASES[name]["calls"]):
        out = run(call["inputs"])
        assert call["outputs"].keys() <= out.keys()
        for key, parts in call["outputs"].items():
            got = out[key] if isinstance(out[key], tuple) else (out[key],)
            assert len(got) == len(parts), key
            for ours, theirs in zip(got, parts, strict=True):
                ours = np.asarray(ours).reshape(-1)
                np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5, err_msg=f"{name} {number} {key}")


def test_an_untied_head_is_written_with_both_names_of_its_bias(tmp_path):
    """The other library reads the decoder's alone, and zeros where it is missing."""
    model = loaded("bert_both_biases", tmp_path / "in")
    model.save_pretrained(tmp_path / "out")
    before, after = (reading.open_tensors(tmp_path / name) for name in ("in", "out"))
    for name in ("cls.predictions.bias", "cls.predictions.decoder.bias"):
        np.testing.assert_array_equal(after[name].array(), before["cls.predictions.decoder.bias"].array())


def test_a_head_for_answers_has_another_prefix_and_the_body_goes_to_other_heads(tmp_path):
    model = loaded("qwen3_answers", tmp_path / "in")
    model.save_pretrained(tmp_path / "out")
    names = {name for name in CASES["qwen3_answers"]["tensors"]}
    assert {name.partition(".")[0] for name in names} == {"transformer", "qa_outputs"}
    assert set(reading.open_tensors(tmp_path / "out")) == names
    body = jaxformer.from_pretrained(tmp_path / "out", head="model")
    body.save_pretrained(tmp_path / "body")
    assert set(reading.open_tensors(tmp_path / "body")) == {
        name.removeprefix("transformer.") for name in names if name.startswith("transformer.")
    }
    again = jaxformer.from_pretrained(tmp_path / "body", head="qa")
    chex.assert_trees_all_equal(again.params["decoder"], model.params["decoder"])
    token = loaded("mt5_token", tmp_path / "token")
    token.save_pretrained(tmp_path / "written")
    assert set(reading.open_tensors(tmp_path / "written")) == set(CASES["mt5_token"]["tensors"])


def test_two_tables_are_written_as_two(tmp_path):
    model = loaded("bart_two_tables", tmp_path / "in")
    model.save_pretrained(tmp_path / "out")
    ids = {"input_ids": np.asarray([[3, 4, 5]]), "decoder_input_ids": np.asarray([[2, 6]])}
    again = jaxformer.from_pretrained(tmp_path / "out")
    np.testing.assert_array_equal(model(**ids).logits, again(**ids).logits)


def test_a_tied_head_over_two_tables_is_refused(tmp_path):
    case = CASES["bart_two_tables"]
    tensors = {key: VALUES(key, tuple(shape)) for key, shape in case["tensors"].items() if key != "lm_head.weight"}
    writing.write_checkpoint(tmp_path / "in", case["config"] | {"tie_word_embeddings": True}, tensors)
    with pytest.raises(ConfigError, match=r"decoder.embed_tokens.weight, which differ, under a tied head"):
        jaxformer.from_pretrained(tmp_path / "in")


def test_several_rows_without_a_padding_token_are_refused(tmp_path):
    model = loaded("llama_classifier_without_pad", tmp_path / "in")
    with pytest.raises(ConfigError, match=r"got 2 rows and no pad_token_id in .*config.json, expected one row"):
        model(input_ids=np.asarray([[3, 4], [5, 6]]))


def test_choices_need_an_axis_of_their_own_and_causal_padding_a_mask(tmp_path):
    choice, causal = (loaded(name, tmp_path / name) for name in ("roberta_choice", "roberta_causal"))
    with pytest.raises(ConfigError, match=r"input_ids of shape \[2, 6\], expected \[batch, choices, length\]"):
        choice(input_ids=np.ones((2, 6), int))
    with pytest.raises(ConfigError, match=r"got \[2, 3\] choices, expected one number in all inputs"):
        choice(input_ids=np.ones((2, 3, 4), int), attention_mask=np.ones((2, 2, 4), int))
    with pytest.raises(ConfigError, match=r"got padding \(1\) that the attention_mask does not hide"):
        causal(input_ids=np.array([[1, 1, 5, 6]]))
    with pytest.raises(ConfigError, match="got 3 for head 'multiple_choice', expected None"):
        jaxformer.from_pretrained(tmp_path / "roberta_choice", classes=3)
    with pytest.raises(ConfigError, match="got is_decoder False, expected True"):
        jaxformer.from_pretrained(tmp_path / "roberta_choice", head="causal_lm")


def test_choices_of_modernbert_are_padded_on_the_right(tmp_path):
    choice, ids = loaded("modernbert_choice", tmp_path / "in"), np.ones((1, 2, 4), int)
    with pytest.raises(ConfigError, match=r"padding before their first token, expected it after; pad on the right"):
        choice(input_ids=ids, attention_mask=np.tile([0, 1, 1, 1], (1, 2, 1)))
    case = CASES["modernbert_choice_mean"]["calls"][0]
    assert 0 in np.asarray(case["inputs"]["attention_mask"])[..., 0]  # of a mean they may be on the left


def test_sinusoids_of_distilbert_are_no_parameters_and_are_written(tmp_path):
    """A file of the Flax classes has no table beside sinusoids; the other library reads the one that we write."""
    name, case = "distilbert.embeddings.position_embeddings.weight", CASES["distilbert_classifier"]
    table = np.array([[np.sin(p), np.cos(p), *(f(p / 10**k) for k in (1, 2, 3) for f in (np.sin, np.cos))]
                      for p in range(12)], np.float32)  # fmt: skip
    tensors = {key: VALUES(key, tuple(shape)) for key, shape in case["tensors"].items()}
    logits = []
    for kept in ({name: table}, {}):
        place = tmp_path / str(len(kept))
        others = {key: value for key, value in tensors.items() if key != name}
        writing.write_checkpoint(place, case["config"], others | kept)
        model = jaxformer.from_pretrained(place)
        assert model.config.model.encoder.encoding.kind == "sinusoidal" and "position" not in model.params["encoder"]
        logits.append(np.asarray(model(input_ids=np.array([[3, 4, 5]])).logits))
    np.testing.assert_array_equal(*logits)
    model.save_pretrained(tmp_path / "out")
    np.testing.assert_allclose(reading.open_tensors(tmp_path / "out")[name].array(), table, atol=1e-6)
    writing.write_checkpoint(
        tmp_path / "table", case["config"] | {"sinusoidal_pos_embds": False}, tensors | {name: table}
    )
    learned = jaxformer.from_pretrained(tmp_path / "table")
    np.testing.assert_allclose(learned(input_ids=np.array([[3, 4, 5]])).logits, logits[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "albert_pretraining",
        "electra_generator",
        "gemma2",
        "gemma3_both_ways",
        "gpt_oss_odd",
        "phi_norms",
        "phi3",
        "t5gemma",
        "t5gemma_wide",
        "t5gemma_encoder",
    ],
)
def test_written_as_it_was_read(name, tmp_path):
    model = loaded(name, tmp_path / "in")
    model.save_pretrained(tmp_path / "out")
    before, after = (reading.open_tensors(tmp_path / place) for place in ("in", "out"))
    for key, tensor in after.items():
        np.testing.assert_array_equal(tensor.array(), before[key].array(), err_msg=key)
    assert reading.read_config(tmp_path / "out") == CASES[name]["config"]
    assert jaxformer.from_pretrained(tmp_path / "out").config == model.config


def test_what_albert_and_electra_do_not_compute_is_refused(tmp_path):
    values = CASES["albert"]["config"]
    for key in ("num_hidden_groups", "inner_group_num"):
        writing.write_checkpoint(tmp_path / key, values | {key: 2}, {"x": np.zeros(1, np.float32)})
        with pytest.raises(ConfigError, match=f"got {key} 2, expected 1"):
            jaxformer.from_pretrained(tmp_path / key)
    values = CASES["electra_choice"]["config"]
    for number, (edit, message) in enumerate((
        ({"summary_type": "mean"}, "summary_type 'mean', expected 'first'"),
        ({"summary_activation": ""}, "summary_activation '' with summary_use_proj True, expected an activation"),
        ({"summary_use_proj": False}, "summary_activation 'tanh' with summary_use_proj False, expected ''"),
    )):  # fmt: skip
        writing.write_checkpoint(tmp_path / str(number), values | edit, {"x": np.zeros(1, np.float32)})
        with pytest.raises(ConfigError, match=message):
            jaxformer.from_pretrained(tmp_path / str(number))


LONG = {"rope_type": "su", "short_factor": [1.5, 3.0], "long_factor": [2.0, 40.0]}


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("gemma3", {"sliding_window": None}, "sliding_window null with layers of sliding_attention, expected a width"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar 0.0, expected a number above 0"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping -1.0, expected a number above 0"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types .* for each of the 3 layers"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True, expected None or False"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window null with layers of sliding_attention, expected a width"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types .* for each of the 2 layers"),
        ("phi_norms", {"head_dim": 6}, "head_dim 6 with qk_layernorm, expected 4"),
        ("phi3", {"embd_pdrop": 0.1}, "embd_pdrop 0.1, expected 0.0"),
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "'linear', expected default or longrope"),
        ("phi3", {"original_max_position_embeddings": 6}, "5 in rope_parameters and 6 beside them, expected the same"),
        ("phi3", {"rope_parameters": LONG | {"long_factor": [1.0, 0.0]}}, "long_factor .* expected a list of numbers"),
    ],
)
def test_what_gemma_gpt_oss_and_phi_cannot_be_is_refused(name, edit, message, tmp_path):
    writing.write_checkpoint(tmp_path, CASES[name]["config"] | edit, {"x": np.zeros(1, np.float32)})
    with pytest.raises(ConfigError, match=message):
        jaxformer.from_pretrained(tmp_path)


def test_a_fused_tensor_with_more_rows_than_its_parts_is_refused(tmp_path):
    name, case = "model.layers.1.self_attn.qkv_proj.weight", CASES["phi3"]
    tensors = {key: VALUES(key, tuple(shape)) for key, shape in case["tensors"].items()}
    writing.write_checkpoint(tmp_path, case["config"], tensors | {name: np.zeros((34, 16), np.float32)})
    with pytest.raises(ConfigError, match=r"qkv_proj.weight of shape \[34, 16\], expected one that makes"):
        jaxformer.from_pretrained(tmp_path)


def test_the_second_output_of_albert_is_the_order_of_sentences(tmp_path):
    model = loaded("albert_pretraining", tmp_path / "in")
    assert model.config.task.relation == "sentence_order"
    ids = np.asarray([[3, 4, 5]] * 16)
    plain, dropped = model(input_ids=ids), model(input_ids=ids, dropout_key=jax.random.key(0))
    np.testing.assert_array_equal(plain.prediction_logits, dropped.prediction_logits)  # the classifier's dropout alone
    assert not np.array_equal(plain.sop_logits, dropped.sop_logits)
    task = dataclasses.replace(model.config.task, relation="next_sentence")
    other = dataclasses.replace(model, config=dataclasses.replace(model.config, task=task))
    with pytest.raises(
        ConfigError, match="got a model of task.relation next_sentence, expected sentence_order or none"
    ):
        other.save_pretrained(tmp_path / "out")


def test_layers_of_an_encoder_generate_as_they_score(tmp_path):
    """Left-padded prompts go on with the tokens that a call of the whole text finds likeliest."""
    model = loaded("roberta_causal", tmp_path / "in")
    ids = np.array([[1, 1, 3, 4], [5, 6, 7, 8]])
    found = model.generate(input_ids=ids, attention_mask=(ids != 1).astype(int), max_new_tokens=4, do_sample=False)
    for row, start in zip(np.asarray(found), (2, 0), strict=True):
        text = row[start:]
        logits = np.asarray(model(input_ids=text[None]).logits)[0]
        assert logits[3 - start : -1].argmax(axis=-1).tolist() == text[4 - start :].tolist()


def test_positions_of_roberta_leave_out_padding_on_either_side(tmp_path):
    """Position ids count the tokens that are not padding: what padding stands where changes no real token's output."""
    model = loaded("roberta_both_biases", tmp_path / "roberta")
    pad = model.hf.settings("pad_token_id")
    text = [5, 9, 7]
    alone = np.asarray(model(input_ids=np.array([text])).logits)[0]
    for ids in ([pad, pad, *text], [*text, pad, pad]):
        ids = np.array([ids])
        logits = np.asarray(model(input_ids=ids, attention_mask=(ids != pad).astype(np.int32)).logits)[0]
        np.testing.assert_allclose(logits[ids[0] != pad], alone, rtol=2e-5, atol=2e-5)
