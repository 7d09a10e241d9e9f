"""The maps of each family are those of the model's own forward pass; measures of heads by hand."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from flax import linen as nn

import jaxformer
from jaxformer.analysis import attention, sentences
from jaxformer.analysis.layers import Reader
from jaxformer.analysis.measures import HEAD_SCORES, PATTERNS, head_scores, relevance, rollout
from jaxformer.config import ConfigError, HeadConfig, ModelConfig, SeriesConfig
from jaxformer.hf.arguments import make_batch
from jaxformer.models import build
from jaxformer.nn.attention import Attention
from jaxformer.nn.kernels import dense
from jaxformer.nn.latent_attention import LatentAttention

GOLDENS = Path(__file__).resolve().parents[2].parent / "shared" / "hf_goldens"
TEXT, TARGET = "a cab", "dab"
PLACES = {
    "encoder": (("encoder",), "attention", 3, 1, 0),
    "decoder": (("decoder",), "attention", 0, 3, 1),
    "cross": (("decoder",), "cross", 1, 3, 2),
}
"""Where the attention of each kind is, and a head, a query and a key of it."""


@pytest.mark.parametrize(("name", "kinds"), [("language_modelling", ["decoder"]), ("classification", ["encoder"])])
def test_maps_are_the_models_own(name, kinds):
    (found,) = small.model(name).attention([TEXT])
    _, _, sown = small.sown(name, TEXT)
    assert list(found.maps) == kinds
    (kind,) = kinds
    length = len(found.queries(kind))
    own = np.stack(sown[kind]["blocks"]["attention"]["probabilities"][0])[:, 0, :, :length, :length]
    np.testing.assert_allclose(found[kind], own, atol=1e-5)
    np.testing.assert_allclose(found[kind].sum(-1), 1.0, atol=1e-5)
    assert found.layers[kind] == (0, 1) and found[kind].shape[1] == 4


def test_an_encoder_decoder_has_three_kinds_and_reads_the_target():
    (found,) = small.model("translation").attention([TEXT], [TARGET])
    _, _, sown = small.sown("translation", TEXT, TARGET)
    assert found.tokens["target"] == ("<s>", *TARGET) and "".join(found.keys("cross")).startswith("a▁cab"[0])
    for kind, side, part in (
        ("encoder",) * 2 + ("attention",),
        ("decoder",) * 2 + ("attention",),
        ("cross", "decoder", "cross"),
    ):
        queries, keys = len(found.queries(kind)), len(found.keys(kind))
        own = np.stack(sown[side]["blocks"][part]["probabilities"][0])[:, 0, :, :queries, :keys]
        np.testing.assert_allclose(found[kind], own, atol=1e-5)
    assert found["cross"].shape == (2, 4, 4, len(found.tokens["source"]))


def test_without_a_target_the_decoder_reads_the_models_own_output():
    model = small.model("translation")
    (found,) = model.attention([TEXT])
    (outputs,) = model.outputs([TEXT])
    end = set(model.predictor.runner.vocabulary.eos)
    written = [token for token in outputs[0].tokens.tolist() if token not in end]
    assert found.ids["target"].tolist()[1:] == written
    (last,) = end
    for tokens, expected in (([40, last], [1, 40]), ([40, 41], [1, 40, 41]), ([last], [1]), ([], [1])):
        prompts = sentences.with_targets(model.predictor, [{"target": [1]}], None, [np.asarray(tokens, np.int32)])
        assert prompts[0]["target"].tolist() == expected  # the end is no input of the decoder


def test_the_alignment_of_a_recurrent_decoder_is_its_own():
    (found,) = small.model("rnn").attention([TEXT], [TARGET])
    _, _, sown = small.sown("rnn", TEXT, TARGET)
    queries, keys = len(found.queries("alignment")), len(found.keys("alignment"))
    own = np.asarray(sown["decoder"]["layers_0"]["attention"][0])[0, :queries, :keys]
    np.testing.assert_allclose(found["alignment"][0, 0], own, atol=1e-5)
    assert {one.kind for one in found.heads()} == {"alignment"}
    with pytest.raises(ConfigError, match="rollout: got 'alignment'"):
        found.rollout()


@pytest.mark.parametrize("name", ["deberta_v2_conv", "xlnet_lm", "t5_v1_0"])
def test_hidden_states_of_imported_models_are_the_goldens(name):
    """And of one of them those and the probabilities that a call with names returns."""
    if not (GOLDENS / name / "expected.npz").exists():
        pytest.skip("no golden checkpoints beside the project")
    model = jaxformer.from_pretrained(GOLDENS / name)
    parts = model.config.model
    sides = {side: dataclasses.replace(stack, unroll=1) for side, stack in parts.stacks.items()}
    parts = dataclasses.replace(parts, **sides)
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, model=parts), module=build.build(parts))
    arrays = np.load(GOLDENS / name / "expected.npz")
    inputs = {key.removeprefix("pad/in/"): arrays[key] for key in arrays.files if key.startswith("pad/in/")}
    inputs.pop("labels", None)
    batch = make_batch(model.hf.convention, model.hf.settings, parts, model.hf.head, dict(inputs))
    reader = Reader(model.module, model.inference_variables())
    own = model(**inputs, output_attentions=True, output_hidden_states=True) if name == "t5_v1_0" else {}
    length = inputs.get("decoder_input_ids", inputs["input_ids"]).shape[1]
    seen = {"encoder": inputs["attention_mask"] > 0, "decoder": np.ones((3, length), bool)}
    for visit in reader.walk(batch, maps=lambda side, layer: True):
        prefix, mask = f"{visit.side}_" if parts.is_seq2seq else "", seen[visit.side]
        if visit.layer + 1 < reader.layers(visit.side):  # the last one is after the final norm
            states = np.asarray(visit.output.x)[mask]
            golden = arrays[f"pad/out/{prefix}hidden_states/{visit.layer + 1}"][mask]
            np.testing.assert_allclose(states, golden, atol=1e-4)
            for own_states in own.get(f"{prefix}hidden_states", ())[visit.layer + 1 : visit.layer + 2]:
                np.testing.assert_allclose(states, np.asarray(own_states)[mask], rtol=1e-5, atol=1e-5)
        if own and visit.layer >= 0:
            maps = [(f"{prefix}attentions", visit.output.attention), ("cross_attentions", visit.output.cross)]
            for field, probs in maps[: 1 + (visit.output.cross is not None)]:
                np.testing.assert_allclose(probs, own[field][visit.layer], atol=1e-5)
    if "pad/out/logits" in arrays.files:
        logits = np.asarray(reader.logits(visit.output.x, visit.inputs.slots))
        np.testing.assert_allclose(logits[seen[visit.side]], arrays["pad/out/logits"][seen[visit.side]], atol=1e-4)


def test_only_the_layers_that_are_asked_for_are_kept():
    model = small.model("language_modelling")
    (whole,), (last,) = model.attention([TEXT]), model.attention([TEXT], layers=[1])
    assert last.layers == {"decoder": (1,)} and last["decoder"].shape[0] == 1
    np.testing.assert_array_equal(last["decoder"][0], whole["decoder"][1])
    for wrong in ([2], [-1], []):
        with pytest.raises(ConfigError, match=r"layers: got .*expected some of 0 to 1"):
            model.attention([TEXT], layers=wrong)
    with pytest.raises(ConfigError, match="rollout: got 1 of 2 layers"):
        last.rollout()


def gradients_by_hand(model, batch, explained, places):
    """One backward pass through the whole model, of what is added to a probability.

    Args:
      places: name -> (begin of the module's path, its name, head, query, key); all layers of that path are changed.
    """

    def logit(amounts):
        def moved(function, args, kwargs, context):
            own = context.module
            if not isinstance(own, (Attention, LatentAttention)) or context.method_name != "apply_kernel":
                return function(*args, **kwargs)
            q, k, v, mask, *bias = args
            probs = dense.probabilities(q, k, mask, *(bias or [None]), None, own.config, getattr(own, "sink", None))
            for name, (path, kind, head, query, key) in places.items():
                if own.path[: len(path)] == path and own.name == kind:
                    probs = probs.at[0, head, query, key].add(amounts[name])
            return jnp.einsum("bhts,bshk->bthk", probs, jnp.repeat(v, q.shape[2] // v.shape[2], axis=2))

        with nn.intercept_methods(moved):
            out = model.module.apply(model.inference_variables(), batch)
        return out[0, explained.position, explained.index]

    return jax.jit(jax.grad(logit))(dict.fromkeys(places, 0.0))


def test_gradients_are_those_of_the_logit():
    model = small.model("translation")
    (found,) = model.attention([TEXT], [TARGET], gradient=True)
    sentence, logits, _ = small.sown("translation", TEXT, TARGET)
    explained = found.explained
    assert explained.position == 3 and explained.index == int(np.argmax(logits[0, 3]))
    assert explained.name == sentences.token_names(model.tokenizers.target, [explained.index])[0]
    expected = gradients_by_hand(model, sentence.batch, explained, PLACES)
    for kind, (*_, head, query, key) in PLACES.items():
        own = explained.gradients[kind][:, head, query, key].sum()
        assert abs(own) > 1e-4
        np.testing.assert_allclose(own, expected[kind], rtol=1e-3, atol=1e-6)


def test_gradients_of_latent_attention_in_layers_of_two_forms():
    model = small.model("latent")
    (found,) = model.attention([TEXT], gradient=True)
    sentence, _, sown = small.sown("latent", TEXT)
    groups = ("dense_blocks", "blocks")
    for layer, group in enumerate(groups):
        probs = sown["decoder"][group]["attention"]["probabilities"][0][0, 0]
        length = found["decoder"].shape[-1]
        np.testing.assert_allclose(found["decoder"][layer], probs[:, :length, :length], atol=1e-5)
    position = found.explained.position
    places = {group: (("decoder", group), "attention", 1, position, 1) for group in groups}
    expected = gradients_by_hand(model, sentence.batch, found.explained, places)
    for layer, group in enumerate(groups):
        own = found.explained.gradients["decoder"][layer, 1, position, 1]
        assert abs(own) > 1e-5
        np.testing.assert_allclose(own, expected[group], rtol=1e-3, atol=1e-6)


def test_relevance_by_hand():
    """One layer a side, so that Chefer et al.'s equations are four products."""
    rng = np.random.default_rng(0)
    maps = {kind: rng.dirichlet(np.ones(2), (1, 2, 2)) for kind in ("encoder", "decoder", "cross")}
    gradients = {kind: rng.uniform(-0.5, 1, (1, 2, 2, 2)) for kind in maps}
    found = relevance(maps, gradients, 1)
    grown = {kind: np.clip(maps[kind] * gradients[kind], 0, None).mean(1)[0] for kind in maps}
    ss, tt = np.eye(2) + grown["encoder"], np.eye(2) + grown["decoder"]
    bar = lambda r: np.eye(2) + (r - np.eye(2)) / (r - np.eye(2)).sum(-1, keepdims=True)  # noqa: E731
    np.testing.assert_allclose(found["target"], tt[1])
    np.testing.assert_allclose(found["source"], (bar(tt).T @ grown["cross"] @ bar(ss))[1])
    mean = relevance({"encoder": maps["encoder"]}, gradients, -1)
    np.testing.assert_allclose(mean["source"], ss.mean(0))


def test_scores_of_heads_by_hand():
    previous = np.array([[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]], float)
    uniform = np.full((4, 4), 0.25)
    scores = head_scores(np.stack([previous, uniform, np.eye(4)])[None], np.array([7, 8, 7, 9]))
    assert {name: values.shape for name, values in scores.items()} == dict.fromkeys(HEAD_SCORES, (1, 3))
    np.testing.assert_allclose(scores["entropy"][0], [0, math.log(4), 0])
    np.testing.assert_allclose(scores["distance"][0], [0.75, (6 + 4 + 4 + 6) / 16, 0])
    np.testing.assert_allclose(scores["previous"][0], [1, 0.25, 0])
    np.testing.assert_allclose(scores["first"][0], [1 / 3, 0.25, 0])
    np.testing.assert_allclose(scores["diagonal"][0], [0.25, 0.25, 1])
    # Token 7 recurs at query 2; what followed it is key 1, which the first head attends to.
    np.testing.assert_allclose(scores["induction"][0], [1, 0.25, 0])
    between = head_scores(np.array([[1, 0, 0], [0, 0, 1]], float)[None, None])  # the same relative position
    assert between["diagonal"][0, 0] == 1 and np.isnan(between["induction"]).all()
    assert np.isnan(head_scores(uniform[None, None], np.arange(4))["induction"]).all()  # nothing recurs


def test_rollout_by_hand():
    maps = np.array([[[[1, 0], [0.5, 0.5]], [[1, 0], [0.5, 0.5]]], [[[0, 1], [1, 0]], [[0, 1], [1, 0]]]])
    first = np.array([[1, 0], [0.25, 0.75]])
    np.testing.assert_allclose(rollout(maps), [first, np.full((2, 2), 0.5) @ first])


def test_a_head_is_named_by_the_rules_and_found_on_random_tokens():
    model = small.model("language_modelling")
    (found,) = model.attention(["aaaaa"])
    for one in found.heads():
        assert one.names == tuple(name for name in PATTERNS if one.scores[name] >= 0.5)
    scores = attention.induction_scores(model.predictor, length=24)  # the model has 16 positions
    assert scores["decoder"].shape == (2, 4) and np.isfinite(scores["decoder"]).all()
    with pytest.raises(ConfigError, match="expected a decoder alone"):
        attention.induction_scores(small.model("translation").predictor)


def test_an_induction_head_has_a_score_of_one():
    half = np.arange(6)
    ids, size = np.concatenate([half, half]), 12
    maps = np.zeros((1, 1, size, size))
    for query in range(size):
        maps[0, 0, query, query - 5 if query >= 6 else 0] = 1
    assert head_scores(maps, ids)["induction"][0, 0] == 1


@pytest.mark.parametrize(
    ("name", "call", "message"),
    [
        ("rnn_lm", lambda m: m.attention([TEXT]), "recurrent model without attention"),
        ("rnn", lambda m: m.attention([TEXT], layers=[0]), "got gradient or layers of a recurrent model"),
        ("language_modelling", lambda m: m.attention([TEXT], ["x"]), "targets: got some, expected none"),
        ("translation", lambda m: m.attention([TEXT], ["x", "y"]), "targets: got 2, expected as many as lines, 1"),
        ("language_modelling", lambda m: m.attention(["x" * 40]), "got 41 tokens, expected at most the model's 16"),
        ("language_modelling", lambda m: m.attention("x"), "expected a list of strings"),
        ("language_modelling", lambda m: m.attention([TEXT], gradient=True, position=9), "one of the text's 6 slots"),
        ("language_modelling", lambda m: m.attention([TEXT])[0]["cross"], "got 'cross', expected one of decoder"),
        (
            "language_modelling",
            lambda m: m.attention([TEXT])[0].show(0, 4),
            "expected a layer of 0, 1 and a head of 0 to 3",
        ),
        ("language_modelling", lambda m: m.attention([TEXT])[0].relevance(), "got no gradients"),
    ],
)
def test_what_cannot_be_is_one_line(name, call, message):
    with pytest.raises(ConfigError, match=message) as error:
        call(small.model(name))
    assert "\n" not in str(error.value)


def test_models_without_tokens_or_layers_or_logits_are_refused():
    with pytest.raises(ConfigError, match="without layers"):
        sentences.check(ModelConfig(encoder=dataclasses.replace(small.STACK, layers=0)), "lens")
    with pytest.raises(ConfigError, match="lens: got a model of series"):
        sentences.check(ModelConfig(encoder=small.STACK, series=SeriesConfig()), "lens")
    parts = dataclasses.replace(small.PARTS["classification"], head=HeadConfig(kind="pooled"))
    with pytest.raises(ConfigError, match="gradient: got a head of kind 'pooled'"):
        Reader(build.build(parts), {}).check_logits("gradient")


def test_a_notebook_shows_maps_and_escapes_text():
    (found,) = small.model("language_modelling").attention(["<b>&"])
    html = found._repr_html_()
    assert "<b>" not in html and "&lt;b&gt;&amp;" in html and html.count("data:image/png") == 8
    one = found.show(0, 1)._repr_html_()
    assert one.count("<td") == len(found.tokens["target"]) ** 2
    assert jax.tree.structure(small.model("language_modelling").params).num_leaves == len(
        small.model("language_modelling").parameters
    )
