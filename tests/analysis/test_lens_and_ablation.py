"""The lens by hand, and parts removed against the same parameters set to zero."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from flax import linen as nn

from jaxformer.analysis import lens, patching, recurrent, sentences
from jaxformer.analysis.layers import Reader
from jaxformer.config import ConfigError, ModelConfig
from jaxformer.models import build

TEXT, TARGET = "a cab", "dab"


def log_softmax(logits):
    return np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))


def test_the_lens_is_the_head_on_each_layer(monkeypatch):
    model = small.model("language_modelling")
    (found,) = model.lens([TEXT], top=3)
    _, logits, sown = small.sown("language_modelling", TEXT)
    length = len(found.tokens)
    states = [sown["decoder"]["input"][0], *sown["decoder"]["blocks"]["output"][0]]
    params, size = model.params, model.tokenizers.target.size
    norm, table = params["decoder"]["final_norm"], params["target_embed"]["table"]
    final = log_softmax(logits[0, :length, :size]).argmax(-1)
    for row, x in enumerate(states):
        x = np.asarray(x[0, :length], np.float64)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + model.config.model.decoder.norm.epsilon)
        by_hand = log_softmax((x * norm["scale"]) @ np.asarray(table, np.float64)[:size].T)
        best = np.argsort(-by_hand, axis=-1)[:, :3]
        np.testing.assert_allclose(found.probs[row], np.exp(np.take_along_axis(by_hand, best, 1)), rtol=1e-4)
        np.testing.assert_array_equal(found.ids[row], best)
        np.testing.assert_allclose(found.entropy[row], -(np.exp(by_hand) * by_hand).sum(-1), rtol=1e-4)
        np.testing.assert_allclose(found.final_probs[row], np.exp(by_hand[np.arange(length), final]), rtol=1e-4)
    np.testing.assert_allclose(found.probs[-1, :, 0], np.exp(log_softmax(logits[0, :length, :size])).max(-1), rtol=1e-4)
    assert found.next_tokens == (*found.tokens[1:], "")
    monkeypatch.setattr(lens, "MAX_POSITIONS", 2)  # the text in parts
    (parts,) = model.lens([TEXT], top=3)
    np.testing.assert_array_equal(parts.ids, found.ids)
    np.testing.assert_allclose(parts.final_probs, found.final_probs, rtol=1e-5)


def test_the_lens_ends_with_the_logits_where_a_last_projection_follows_the_final_norm():
    model = small.model("narrow")
    (found,) = model.lens([TEXT])
    _, logits, _ = small.sown("narrow", TEXT)
    size = model.tokenizers.target.size
    expected = np.exp(log_softmax(logits[0, : len(found.tokens), :size])).max(-1)
    np.testing.assert_allclose(found.probs[-1, :, 0], expected, rtol=1e-4)
    assert model.embed([TEXT]).shape == (1, 4)  # the head's input


def test_a_model_with_adapters_is_the_one_they_are_merged_into():
    model = small.model("adapted")
    merged = model.merge_adapters()
    (maps,), (expected,) = model.attention([TEXT]), merged.attention([TEXT])
    np.testing.assert_allclose(maps["decoder"], expected["decoder"], atol=1e-5)
    (found,), (wanted,) = model.lens([TEXT]), merged.lens([TEXT])
    np.testing.assert_allclose(found.probs, wanted.probs, atol=1e-5)
    zeroed = jax.tree.map_with_path(lambda path, x: x * ("lora_b" not in str(path)), model.params)
    (without,) = dataclasses.replace(model, params=zeroed).attention([TEXT])
    assert np.abs(maps["decoder"] - without["decoder"]).max() > 1e-3


def test_the_lens_of_a_classifier_has_one_position_and_its_classes():
    (found,) = small.model("classification").lens([TEXT])
    _, logits, _ = small.sown("classification", TEXT)
    assert found.tokens == ("[text]",) and found.probs.shape == (3, 1, 3)
    np.testing.assert_allclose(np.sort(found.probs[-1, 0]), np.sort(np.exp(log_softmax(logits[0]))), rtol=1e-4)
    assert set(found.outputs[-1][0]) == {"0", "1", "2"} and found.next_tokens == ("",)


def test_the_lens_of_a_recurrent_decoder_reads_its_layers():
    model = small.model("rnn")
    (found,) = model.lens([TEXT], [TARGET])
    sentence, logits, _ = small.sown("rnn", TEXT, TARGET)
    assert found.probs.shape[:2] == (3, 4)  # the input and two layers, four tokens
    expected = np.exp(log_softmax(logits[0, :4, : model.tokenizers.target.size])).max(-1)
    np.testing.assert_allclose(found.probs[-1, :, 0], expected, rtol=1e-4)
    states = recurrent.layer_outputs(model.module, model.inference_variables(), sentence.batch)
    assert [x.shape for x in states] == [states[0].shape] * 3
    with pytest.raises(ConfigError, match="top: got 0"):
        model.lens([TEXT], top=0)


def zeroed(params, path, index):
    """A copy of the parameters with part of one array set to zero."""
    copy = jax.tree.map(np.array, params)
    node = copy
    for key in path[:-1]:
        node = node[key]
    node[path[-1]][index] = 0.0
    return copy


CASES = [
    ("translation", {"heads": [("cross", 0, 1)]}, [(("decoder", "blocks", "cross", "out", "kernel"), (0, 1))]),
    ("translation", {"heads": [("encoder", 1, 3)]}, [(("encoder", "blocks", "attention", "out", "kernel"), (1, 3))]),
    ("language_modelling", {"heads": [(0, 2)]}, [(("decoder", "blocks", "attention", "out", "kernel"), (0, 2))]),
    (
        "language_modelling",
        {"heads": [(0, 2), (1, 0)], "mlps": [1]},
        [
            (("decoder", "blocks", "attention", "out", "kernel"), (0, 2)),
            (("decoder", "blocks", "attention", "out", "kernel"), (1, 0)),
            (("decoder", "blocks", "ffn", "out", "kernel"), (1,)),
            (("decoder", "blocks", "ffn", "out", "bias"), (1,)),
        ],
    ),
    (
        "latent",
        {"heads": [(0, 2), (1, 0)], "mlps": [0]},
        [
            (("decoder", "dense_blocks", "attention", "out", "kernel"), (0, 2)),
            (("decoder", "blocks", "attention", "out", "kernel"), (0, 0)),
            (("decoder", "dense_blocks", "ffn", "out", "kernel"), (0,)),
            (("decoder", "dense_blocks", "ffn", "out", "bias"), (0,)),
        ],
    ),
    (
        "classification",
        {"mlps": [0]},
        [(("encoder", "blocks", "ffn", "out", name), (0,)) for name in ("kernel", "bias")],
    ),
]


@pytest.mark.parametrize(("name", "parts", "zeros"), CASES)
def test_an_ablation_is_the_parameters_set_to_zero(name, parts, zeros):
    model, target = small.model(name), TARGET if name == "translation" else None
    (found,) = model.ablate([TEXT], **parts, targets=[target] if target else None)
    sentence, logits, _ = small.sown(name, TEXT, target)
    params = model.params
    for path, index in zeros:
        params = zeroed(params, path, index)
    by_hand = np.asarray(model(sentence.batch, params=params))[0]
    size = model.tokenizers.target.size
    if by_hand.ndim == 1:
        own, by_hand = logits[:1], by_hand[None]
    else:
        own, by_hand = logits[0, : len(found.tokens), :size], by_hand[: len(found.tokens), :size]
    np.testing.assert_allclose(found.before, log_softmax(own), atol=1e-5)
    np.testing.assert_allclose(found.after, log_softmax(by_hand), atol=1e-5)
    assert np.abs(found.after - found.before).max() > 1e-3
    if name == "language_modelling":
        assert found.reference_ids[:-1].tolist() == sentence.ids["target"][1:].tolist()
    index = np.arange(len(found.change)), found.reference_ids
    np.testing.assert_allclose(found.change, (log_softmax(by_hand) - log_softmax(own))[index], atol=2e-5)


def test_a_scan_removes_every_part_alone():
    model = small.model("translation")
    (found,) = model.ablate([TEXT], targets=[TARGET])
    assert {kind: values.shape for kind, values in found.heads.items()} == {
        "encoder": (2, 4, 4), "decoder": (2, 4, 4), "cross": (2, 4, 4)
    }  # fmt: skip
    assert {side: values.shape for side, values in found.mlps.items()} == {"encoder": (2, 4), "decoder": (2, 4)}
    for kind, layer, head in (("encoder", 0, 3), ("decoder", 0, 0), ("cross", 0, 2)):
        (one,) = model.ablate([TEXT], heads=[(kind, layer, head)], targets=[TARGET])
        np.testing.assert_allclose(found.heads[kind][layer, head], one.change, atol=1e-5)
    (one,) = model.ablate([TEXT], mlps=[("encoder", 1)], targets=[TARGET])
    np.testing.assert_allclose(found.mlps["encoder"][1], one.change, atol=1e-5)
    assert "<td" in found._repr_html_() and "<td" in one._repr_html_()


@pytest.mark.parametrize(
    ("name", "parts", "message"),
    [
        ("translation", {"heads": [(0, 1)]}, r"heads: got \(0, 1\), expected \('encoder', 0..1, 0..3\) or"),
        ("language_modelling", {"heads": [(2, 0)]}, "heads: got"),
        ("language_modelling", {"heads": [("cross", 0, 0)]}, "heads: got"),
        ("language_modelling", {"heads": [(0, -1)]}, "heads: got"),
        ("language_modelling", {"mlps": [5]}, r"mlps: got 5, expected \('decoder', 0..1\)"),
        ("translation", {"mlps": [0]}, r"mlps: got 0, expected \('encoder', 0..1\) or"),
        ("rnn", {"heads": [(0, 0)]}, "ablate: got a recurrent model"),
    ],
)
def test_parts_that_are_not_there_are_one_line(name, parts, message):
    with pytest.raises(ConfigError, match=message) as error:
        small.model(name).ablate([TEXT], **parts)
    assert "\n" not in str(error.value)


def test_patching_everything_is_the_other_sentence():
    model = small.model("language_modelling")
    found = model.patch("a cab", "a cob")
    assert found.log_probs.shape == (3, len(found.clean_tokens)) and len(found.clean_tokens) == 6
    changed = [t for t in range(6) if found.clean_tokens[t] != found.corrupted_tokens[t]]
    assert changed == [4]
    # The input of the changed token is all that differs, and after the last layer only the slot that is read counts.
    np.testing.assert_allclose(found.log_probs[0, 4], found.clean_log_prob, atol=1e-5)
    np.testing.assert_allclose(np.delete(found.log_probs[0], 4), found.corrupted_log_prob, atol=1e-5)
    np.testing.assert_allclose(found.log_probs[-1, -1], found.clean_log_prob, atol=1e-5)
    np.testing.assert_allclose(found.log_probs[-1, :-1], found.corrupted_log_prob, atol=1e-5)
    np.testing.assert_allclose(found.restored[0, 4], 1.0, atol=1e-3)
    _, logits, _ = small.sown("language_modelling", "a cab")
    assert np.isclose(found.clean_log_prob, log_softmax(logits[0, 5, : model.tokenizers.target.size]).max(), atol=1e-5)
    assert "restored" not in found._repr_html_() and "<td" in found._repr_html_()


def recorded(name, text):
    """The sentence, and outputs of each layer's attention, feed-forward layer and heads in the model's own pass."""
    model = small.model(name)
    (sentence,) = sentences.read(model.predictor, [text])
    keep = lambda module, method: method == "__call__" or (method == "attend" and module.name == "attention")  # noqa: E731
    read = lambda variables: model.module.apply(variables, sentence.batch, capture_intermediates=keep)  # noqa: E731
    logits, found = jax.jit(read)(model.inference_variables())
    blocks = found["intermediates"]["encoder" if name == "classification" else "decoder"]["blocks"]
    (attention, _), mlp = blocks["attention"]["__call__"][0], blocks["ffn"]["__call__"][0]
    outputs = {"attention": attention, "mlp": mlp, "heads": blocks["attention"]["attend"][0]}
    return sentence, np.asarray(logits[0]), outputs


@pytest.mark.parametrize("name", ["language_modelling", "classification"])
def test_patching_a_part_is_adding_the_difference_of_its_outputs_by_hand(name):
    """The model's own pass over the whole stack, in which one layer's outputs are moved at one position."""
    model, side = small.model(name), "encoder" if name == "classification" else "decoder"
    _, logits, clean = recorded(name, "ab cd")
    sentence, _, corrupted = recorded(name, "ob cd")
    length, size = len(sentence.ids[sentence.last]), model.tokenizers.target.size
    answer = int((logits if side == "encoder" else logits[length - 1, :size]).argmax())
    change = {part: np.asarray(clean[part] - corrupted[part]) for part in clean}
    kernel = np.asarray(model.params[side]["blocks"]["attention"]["out"]["kernel"])  # [L, H, K, D]

    def forward(moved, layer, added):
        def move(function, args, kwargs, context):
            y, module = function(*args, **kwargs), context.module
            if context.method_name != "__call__" or module.path[:1] != (side,):
                return y
            if module.name == "attention":
                number[0] = kwargs["layer"]
                return y[0] + jnp.where((number[0] == layer) & (moved == 0), added, 0), y[1]
            return y + jnp.where((number[0] == layer) & (moved == 1), added, 0) if module.name == "ffn" else y

        number = [None]
        with nn.intercept_methods(move):
            return model.module.apply(model.inference_variables(), sentence.batch)

    forward = jax.jit(forward)
    for part in ("attention", "mlp", "heads"):
        found = model.patch("ab cd", "ob cd", part=part)
        assert found.log_probs.shape == (2, 4 if part == "heads" else length) and found.rows == ("layer 0", "layer 1")
        for layer, index in ((0, 1), (1, 3), (1, length - 1 if part != "heads" else 0)):
            added = np.zeros(change["mlp"][layer].shape, np.float32)
            if part == "heads":
                added += np.einsum("btk,kd->btd", change[part][layer][:, :, index], kernel[layer, index])
            else:
                added[:, index] = change[part][layer][:, index]
            moved = forward(int(part == "mlp"), layer, added)[0]
            expected = log_softmax(moved if side == "encoder" else moved[length - 1, :size])[answer]
            np.testing.assert_allclose(found.log_probs[layer, index], expected, atol=1e-5)
        assert np.abs(found.log_probs - found.corrupted_log_prob).max() > 1e-4
        assert len(found.columns) == found.log_probs.shape[1] and "<td" in found._repr_html_()


def test_parts_that_cannot_be_patched_are_one_line(monkeypatch):
    with pytest.raises(ConfigError, match="part: got 'mpl', expected one of residual, attention, mlp, heads") as error:
        small.model("language_modelling").patch("a cab", "a cob", part="mpl")
    assert "\n" not in str(error.value)
    bare = ModelConfig(decoder=dataclasses.replace(small.STACK, ffn=None))
    with pytest.raises(ConfigError, match="part: got 'mlp', expected one of residual, attention, heads"):
        patching.check_parts(Reader(build.build(bare), {}), ["mlp"])


def test_patching_an_encoder_decoder_changes_its_source():
    found = small.model("translation").patch("ab", "ob", target=TARGET)
    np.testing.assert_allclose(found.log_probs[0, 0], found.clean_log_prob, atol=1e-5)
    np.testing.assert_allclose(found.log_probs[0, 1:], found.corrupted_log_prob, atol=1e-5)
    assert len(found.answer.split()) == 4  # three tokens and what follows them
    with pytest.raises(ConfigError, match=r"patch: got sentences of 3 and 4 tokens \(a b </s> and a b c </s>\)"):
        small.model("translation").patch("ab", "abc")
