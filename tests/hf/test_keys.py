"""Every key of every family's config class is read, refused where it would act, or free for a reason."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import pytest

import jaxformer
from jaxformer.config import ConfigError
from jaxformer.hf import arguments, keys, table
from jaxformer.hf.families import t5gemma
from jaxformer.hf.table import Settings

FAMILIES = dict(table.families())
TABLES = FAMILIES | {"t5gemma_side": t5gemma.SIDE}
"""The families, and what reads a part of a file."""
SOURCES = "".join(path.read_text() for path in (Path(jaxformer.__file__).parent / "hf").glob("*.py"))

BASE = {
    "bloom": {"pretraining_tp": 2},  # else slow_but_exact changes nothing
    "qwen3_next": {"mlp_only_layers": [0]},
    "phi3": {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p"]},
    "encoder-decoder": {"hidden_size": 8, "vocab_size": 24},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p"], "conv_kernel_size": 3},
    "deepseek_v2": {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 4, "first_k_dense_replace": 1},
    "longt5": {"encoder_attention_type": "transient-global"},
    "mt5": {"feed_forward_proj": "relu"},
    "qwen2": {"use_sliding_window": True},
    "qwen3": {"use_sliding_window": True},
    "marian": {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 16},
}
"""What must be set for other keys to act."""

OTHERS = {
    "activation": "relu",
    "architectures": ["X"],
    "attention_bias": True,
    "classifier_dropout_rate": 0.25,
    "dropout_rate": 0.25,
    "cross_attention_hidden_size": 24,
    "hidden_size": 24,
    "max_position_embeddings": 24,
    "num_attention_heads": 24,
    "num_hidden_layers": 24,
    "query_pre_attn_scalar": 24,
    "rms_norm_eps": 0.25,
    "is_decoder": True,
    "attention_layers": ["local"] * 24,
    "attention_types": [[["local"], 24]],
    "attention_type": "original_full",
    "attn_logit_softcapping": 24.0,
    "attn_type": "uni",
    "attention_head_size": 3,
    "classifier_activation": "relu",
    "classifier_dropout": 0.25,
    "classifier_pooling": "mean",
    "cls_dropout": 0.25,
    "conv_act": "relu",
    "conv_groups": 2,
    "conv_kernel_size": 5,
    "d_head": 24,
    "decoder": {"model_type": "gpt2", "is_decoder": True, "add_cross_attention": True},
    "decoder_vocab_size": 24,
    "dense_act_fn": "silu",
    "embedding_size": 48,
    "encoder": {"model_type": "roberta"},
    "encoder_attention_type": "local",
    "feed_forward_proj": "gated-silu",
    "final_logit_softcapping": 24.0,
    "head_dim": 48,
    "hidden_activation": "silu",
    "hidden_dropout": 0.25,
    "image_token_id": 7,
    "intermediate_size": 24,
    "is_gated_act": True,
    "layer_types": ["sliding_attention"],
    "mlp_only_layers": [1],
    "mm_tokens_per_image": 24,
    "n_inner": 24,
    "n_layers": 7,
    "norm_rel_ebd": "layer_norm",
    "num_decoder_layers": 24,
    "num_experts_per_tok": 3,
    "num_key_value_heads": 1,
    "pad_token_id": 7,
    "partial_rotary_factor": 0.25,
    "pooler_hidden_size": 24,
    "pos_att_type": ["p2c"],
    "position_buckets": 24,
    "reuse_len": 24,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0},
    "scale_decoder_outputs": False,
    "share_att_key": True,
    "sliding_window": 24,
    "summary_activation": "relu",
    "summary_first_dropout": 0.25,
    "summary_last_dropout": 0.25,
    "summary_proj_to_labels": True,
    "summary_type": "first",
    "summary_use_proj": True,
    "talking_head": True,
    "text_config": {},
    "tie_word_embeddings": False,
    "token_classification_bias": False,
    "topk_group": 2,
    "topk_method": "greedy",
    "use_bidirectional_attention": True,
    "vision_config": {},
    "word_embed_proj_dim": 24,
}
"""Another value of keys whose default does not tell of which kind they are."""

SECOND = {"summary_type": "mean", "attention_type": "block_sparse"}
"""A further value, for heads that need the one in `OTHERS`."""


def model(family, head, values):
    return keys.read_model(family, keys.with_defaults(family, Settings(values)), head)


def another(name, default):
    """A value of a key that differs from its default."""
    if name in OTHERS and OTHERS[name] != default:
        return OTHERS[name]
    if name in SECOND:
        return SECOND[name]
    if isinstance(default, bool):
        return not default
    if name.endswith(("_act", "_function", "ff_activation")):
        return "silu" if default == "relu" else "relu"
    if isinstance(default, float):
        return default / 2 + 0.25
    if isinstance(default, int):
        return max(2 * default, 24)  # a multiple, which heads and widths divide as before
    raise AssertionError(f"{name}: give a value for it in OTHERS")


def base_of(family, head):
    """What must be set for other keys to act on this head."""
    decodes = "is_decoder" in keys.default_values(family) and head == "causal_lm" and "masked_lm" in family.heads
    own = {"is_decoder": True} if decodes else {}
    if decodes and "attention_type" in keys.default_values(family):
        own["attention_type"] = "original_full"  # BigBird's blocks see the tokens ahead
    return BASE.get(family.model_types[0], {}) | own


def state(family, head, values):
    """The model and its rows, or what the refusal says."""
    try:
        found = model(family, head, values)
    except ConfigError as error:
        return str(error)
    return found


@pytest.mark.parametrize("name", TABLES)
def test_no_key_is_ignored(name):
    family, silent, acting = TABLES[name], [], []
    bases = {head: base_of(family, head) for head in family.heads}
    before = {head: model(family, head, base) for head, base in bases.items()}
    for key, default in keys.default_values(family).items():
        if key in {*keys.KEYS_READ_LATER, *keys.IGNORED_KEYS} and key != "pad_token_id":
            continue
        values = {head: another(key, base.get(key, default)) for head, base in bases.items()}
        after = {head: state(family, head, {**base, key: values[head]}) for head, base in bases.items()}
        if key in family.ignored_keys:
            acting += [key] if after != before else []
        elif after == before and key not in keys.KEYS_READ_LATER:
            silent.append(key)
    assert (silent, acting) == ([], [])


@pytest.mark.parametrize("name", TABLES)
def test_a_silent_file_says_what_the_librarys_defaults_say(name):
    family = TABLES[name]
    written = {key: value for key, value in keys.key_lists()["families"][family.model_types[0]]["defaults"].items()}
    for head in family.heads:
        base = base_of(family, head)
        decodes = {key: base[key] for key in ("is_decoder", "attention_type") if key in base}
        assert model(family, head, decodes) == model(family, head, written | decodes), head


def test_lists_and_families_are_of_the_same_types():
    listed = set(keys.key_lists()["families"])
    assert {family.model_types[0] for family in TABLES.values()} == listed


def test_what_is_read_elsewhere_is_named_there():
    assert [name for name in keys.KEYS_READ_LATER if f'"{name}"' not in SOURCES.replace('": "', "")] == []
    reasons = [*keys.KEYS_READ_LATER.values(), *keys.IGNORED_KEYS.values()]
    reasons += [reason for family in FAMILIES.values() for reason in family.ignored_keys.values()]
    assert all(len(reason) > 7 for reason in reasons)


def test_an_alias_is_the_key_and_contradictions_are_refused():
    gpt2, bart = FAMILIES["gpt2"], FAMILIES["bart"]
    assert model(gpt2, "causal_lm", {"hidden_size": 24, "num_hidden_layers": 3}) == model(
        gpt2, "causal_lm", {"n_embd": 24, "n_layer": 3}
    )
    with pytest.raises(ConfigError, match="encoder_layers 6 and num_hidden_layers 12, expected one"):
        model(bart, "seq2seq", {"encoder_layers": 6, "num_hidden_layers": 12})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"return_dict": False}, "return_dict False, expected True"),
        ({"quantization_config": {"bits": 4}}, "weights in {'bits': 4} (quantization_config), expected plain"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder True, expected False"),
        ({"add_cross_attention": True}, "add_cross_attention True"),
    ],
)
def test_a_key_that_changes_the_computation_is_refused(values, message):
    with pytest.raises(ConfigError) as error:
        model(FAMILIES["gpt2"], "causal_lm", values)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_keys_that_nobody_knows_are_named_in_one_line(caplog):
    values = {"rotary_flavour": 3, "sparkle": None, "transformers_version": "4.0", "n_ctx": 9, "pruned_heads": {}}
    model(FAMILIES["gpt2"], "causal_lm", values)
    (record,) = caplog.records
    assert "got rotary_flavour, sparkle, which nothing reads" in record.getMessage()
    caplog.clear()
    model(FAMILIES["llama"], "causal_lm", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale": 1.0}})
    assert "rope_parameters.mscale" in caplog.text


def test_a_family_that_is_not_listed_is_read_and_its_other_keys_named(caplog, monkeypatch):
    outside = dataclasses.replace(FAMILIES["gpt2"], model_types=("of_another_package",))
    monkeypatch.setattr(table, "families", lambda: [*FAMILIES.items(), ("outside", outside)])
    values = {"n_embd": 24, "n_layer": 3, "sparkle": 1}
    assert model(outside, "causal_lm", values) == model(FAMILIES["gpt2"], "causal_lm", values)
    assert "got sparkle, which nothing reads" in caplog.text


def test_a_rotations_base_is_found_where_it_stands():
    read = lambda **values: model(FAMILIES["llama"], "causal_lm", values).decoder.encoding  # noqa: E731
    assert read(rope_theta=50.0, rope_parameters={"rope_type": "default"}).base == 50.0
    assert read(rope_theta=50.0, rope_scaling={"type": "linear", "factor": 2.0}).base == 50.0
    assert read(rope_theta=50.0, rope_parameters={"rope_theta": 70.0}).base == 70.0
    assert read().base == 10000.0 and model(FAMILIES["mixtral"], "causal_lm", {}).decoder.encoding.base == 1e6
    with pytest.raises(ConfigError, match=r"partial_rotary_factor 0.5, expected 1.0"):
        read(partial_rotary_factor=0.5)


@pytest.mark.parametrize(
    ("name", "head", "values", "dropouts"),
    [
        ("bert", "sequence", {}, (0.0, 0.1)),
        ("bert", "sequence", {"classifier_dropout": 0.3}, (0.0, 0.3)),
        ("bert", "token", {"classifier_dropout": 0.3}, (0.0, 0.3)),
        ("bert", "token", {"classifier_dropout": 0.0}, (0.0, 0.0)),
        ("roberta", "sequence", {"classifier_dropout": 0.3}, (0.3, 0.3)),
        ("bart", "sequence", {"classifier_dropout": 0.3}, (0.3, 0.3)),
        ("gpt2", "token", {}, (0.0, 0.1)),
        ("gpt2", "token", {"classifier_dropout": 0.3}, (0.0, 0.3)),
        ("llama", "token", {"hidden_dropout": 0.2}, (0.0, 0.2)),
        ("llama", "token", {"hidden_dropout": 0.2, "classifier_dropout": 0.0}, (0.0, 0.0)),
        ("llama", "sequence", {"classifier_dropout": 0.3}, (0.0, 0.0)),
        ("deberta_v2", "sequence", {"pooler_dropout": 0.2, "cls_dropout": 0.3}, (0.2, 0.3)),
        ("xlnet", "sequence", {"dropout": 0.5, "summary_first_dropout": 0.5}, (0.75, 0.1)),
        ("xlnet", "model", {"dropout": 0.5}, (0.0, 0.5)),
    ],
)
def test_dropouts_of_heads(name, head, values, dropouts):
    top = model(FAMILIES[name], head, values).head
    assert (top.input_dropout, top.dropout) == pytest.approx(dropouts)
    again = FAMILIES[name].write_config(model(FAMILIES[name], head, values), head)
    assert model(FAMILIES[name], head, again).head.dropout == top.dropout


def test_windows_of_gpt_oss_are_in_the_even_layers_unless_the_file_says_other():
    family, small = FAMILIES["gpt_oss"], {"num_hidden_layers": 3, "vocab_size": 24}
    assert model(family, "causal_lm", small).decoder.windowed_layers == (0, 2)
    full = model(family, "causal_lm", small | {"layer_types": ["full_attention"] * 3})
    assert full.decoder.windowed_layers == () and full.decoder.attention.window is None
    written = family.write_config(full, "causal_lm")
    assert written["sliding_window"] == 128 and model(family, "causal_lm", written) == full


def test_special_tokens_beyond_the_vocabulary_are_named_and_no_numbers_refused(caplog):
    keys.check_special_tokens({"eos_token_id": [3, 99], "pad_token_id": -1, "bos_token_id": 0}, "config.json", 24)
    assert "got eos_token_id 99, pad_token_id -1, which the vocabulary of 24 does not have" in caplog.text
    for token in (10**12, "2", True, 1.5):
        with pytest.raises(ConfigError, match="got eos_token_id"):
            keys.check_special_tokens({"eos_token_id": token}, "config.json", 24)


def test_the_factor_of_linear_scaling_is_read():
    values = {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}, "vocab_size": 32}
    family = table.family_of(Settings(values))
    model = keys.read_model(family, keys.with_defaults(family, Settings(values)), "causal_lm")
    assert model.decoder.encoding.scaling.kind == "linear" and model.decoder.encoding.scaling.factor == 4.0


def test_a_decoders_input_is_its_start_token_and_the_labels_before():
    settings = Settings({"decoder_start_token_id": 2, "pad_token_id": 1})
    labels = jnp.asarray([[5, 6, 7], [8, -100, -100]])
    moved = arguments.shift_right(table.CallConvention(), settings, labels)
    assert moved.tolist() == [[2, 5, 6], [2, 8, 1]]


def test_gelu_in_a_file_of_gemma_is_its_tanh_form_and_the_exact_one_is_written_by_its_other_name():
    gemma, gemma2 = FAMILIES["gemma"], FAMILIES["gemma2"]
    assert model(gemma, "causal_lm", {"hidden_act": "gelu"}).decoder.ffn.activation == "gelu_tanh"
    assert model(gemma2, "causal_lm", {"hidden_activation": "gelu"}).decoder.ffn.activation == "gelu"
    exact = model(gemma, "causal_lm", {"hidden_act": "gelu_python"})
    assert exact.decoder.ffn.activation == "gelu"
    assert model(gemma, "causal_lm", gemma.write_config(exact, "causal_lm")) == exact


@pytest.mark.parametrize("name", ["mistral", "qwen2", "gpt_oss", "phi3"])
def test_no_number_of_key_heads_is_that_of_the_query_heads(name):
    values = {"num_attention_heads": 4, "hidden_size": 24, "num_key_value_heads": None}
    if name == "gpt_oss":
        values["head_dim"] = None
    attention = model(FAMILIES[name], "causal_lm", values).decoder.attention
    assert (attention.kv_heads, attention.head_width) == (4, 6)


def test_an_original_length_beside_the_rotary_parameters_wins_where_they_are_one_table():
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12, "rope_theta": 100.0}
    beside = {"original_max_position_embeddings": 6}
    for name in ("llama", "gpt_neox", "deepseek_v3", "gemma2"):
        for key in ("rope_parameters", "rope_scaling"):
            found = model(FAMILIES[name], "causal_lm", {key: rope, **beside}).decoder.encoding.scaling
            assert found.original == 6, name
        assert model(FAMILIES[name], "causal_lm", {"rope_parameters": rope}).decoder.encoding.scaling.original == 12
    two = {"rope_parameters": {"full_attention": rope, "sliding_attention": {"rope_theta": 50.0}}}
    assert model(FAMILIES["gemma3"], "causal_lm", two | beside).decoder.encoding.scaling.original == 12


def test_a_classifier_of_bart_has_three_classes_where_nothing_says_how_many():
    assert model(FAMILIES["bart"], "sequence", {}).head.classes == 3
    assert model(FAMILIES["mbart"], "sequence", {}).head.classes == 2


def test_null_is_false_where_the_library_asks_whether_it_is_true():
    deepseek = FAMILIES["deepseek_v3"]
    for null, false in (({key: None}, {key: False}) for key in ("norm_topk_prob", "rope_interleave")):
        assert model(deepseek, "causal_lm", null) == model(deepseek, "causal_lm", false)
        assert model(deepseek, "causal_lm", null) != model(deepseek, "causal_lm", {})
