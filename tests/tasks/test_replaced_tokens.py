"""Replaced-token detection against a slow reference: replacements, labels, losses, gradients; sharing by hand."""

import dataclasses
import functools
import re

import builders
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from task_toys import TEXT, config, encoded, words

from jaxformer import tasks
from jaxformer.config import (
    AttentionConfig,
    Config,
    ConfigError,
    EmbedConfig,
    GeneratorConfig,
    HeadConfig,
    MeshConfig,
    ModelConfig,
    NormConfig,
    OptimizerConfig,
    ScheduleConfig,
    StackConfig,
    TaskConfig,
    TrainConfig,
    overrides,
)
from jaxformer.models import build, electra
from jaxformer.nn.layers import Embed
from jaxformer.parallel import mesh as meshes
from jaxformer.train import step
from jaxformer.types import Batch

TASK = tasks.get("replaced_tokens")
VOCAB, REAL_VOCAB, MASK, LAMBDA = 16, 13, 15, 7.0
LENGTHS = [5, 2, 4, 3, 6, 1, 3, 4]


def stack(width: int) -> StackConfig:
    return builders.stack(
        layers=1,
        width=width,
        embed=EmbedConfig(vocab=VOCAB, width=8),
        attention=AttentionConfig(heads=2, bias=False),
        ffn=None,  # compiling takes time by the layer
        norm=NormConfig(kind="rms"),
    )


def model_of(sharing: str) -> ModelConfig:
    generator = GeneratorConfig(stack(4), HeadConfig(bias=True), sharing, REAL_VOCAB)
    return ModelConfig(encoder=stack(8), generator=generator, head=HeadConfig(kind="slots", classes=2))


def settings_of(sharing: str = "none", **train) -> Config:
    return Config(
        model=model_of(sharing),
        task=TaskConfig("replaced_tokens", detection_weight=LAMBDA),
        optimizer=OptimizerConfig(name="sgd"),
        schedule=ScheduleConfig(kind="constant", peak=0.1, warmup=0),
        train=TrainConfig(steps=10, **train),
    )


@functools.cache
def made(sharing: str = "none"):
    return builders.make(model_of(sharing))


def batch_of(lengths=LENGTHS, seed=0) -> Batch:
    """Rows of text in which at least one token is masked, and padding."""
    rng = np.random.default_rng(seed)
    source = builders.stream(rng, lengths)
    labels, real = source.tokens % (REAL_VOCAB - 1), source.slots.segment > 0
    weights = (rng.random(labels.shape) < 0.4) & real
    weights[:, 0] = True
    return Batch(source._replace(tokens=np.where(weights, MASK, labels)), None, labels, weights.astype(np.float32))


@functools.cache
def outputs(sharing: str = "none"):
    module, variables = made(sharing)
    train = jax.jit(lambda v, batch, key: module.apply(v, batch, rngs={"dropout": key}))
    evaluate = jax.jit(lambda v, batch: module.apply(v, batch))
    return train, evaluate, variables


@jax.jit
def measure(output, batch):
    """The metrics of outputs, and the loss."""
    return TASK.metrics(settings_of(), output, batch), TASK.loss(settings_of(), output, batch)


# What is masked and replaced


def test_every_chosen_token_is_masked_and_all_labels_are_the_original():
    tokenizer, ids = words().source, words().source.encode(TEXT)
    features = encoded(config("replaced_tokens", mask_rate=0.5), words(), text=TEXT)
    masked = features["weights"] > 0
    assert features["labels"].tolist() == [tokenizer.cls, *ids, tokenizer.sep]
    assert masked.sum() == round(len(ids) / 2) and not masked[0] and not masked[-1]
    np.testing.assert_array_equal(features["source"], np.where(masked, tokenizer.mask, features["labels"]))
    row = TASK.encode_row(config("replaced_tokens"), words(), np.array(ids, np.int32), np.random.default_rng(0))
    assert row["labels"].tolist() == ids and (row["source"] == tokenizer.mask).sum() == round(0.15 * len(ids))


def test_sampled_tokens_replace_the_masked_ones_and_no_other():
    train, _, variables = outputs()
    batch = batch_of()
    masked = batch.weights > 0
    drawn = [np.asarray(train(variables, batch, jax.random.key(seed)).tokens) for seed in range(40)]
    for tokens in drawn:
        np.testing.assert_array_equal(tokens[~masked], batch.source.tokens[~masked])
        assert (tokens[masked] < REAL_VOCAB).all(), "rows that pad the vocabulary are never drawn"
    # Frequencies against the softmax over the real vocabulary: a chi-squared sum has mean V - 1 per slot.
    logits = np.asarray(train(variables, batch, jax.random.key(0)).generated, np.float64)[..., :REAL_VOCAB]
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    counts = np.stack([(np.array(drawn) == v).sum(0) for v in range(REAL_VOCAB)], axis=-1)
    squares = ((counts - 40 * probs) ** 2 / (40 * probs)).sum(-1)[masked]
    deviation = np.sqrt(2 * (REAL_VOCAB - 1) / masked.sum())
    assert abs(squares.mean() - (REAL_VOCAB - 1)) < 6 * deviation


def test_a_draw_is_the_first_id_whose_cumulative_probability_exceeds_the_number():
    probs = np.array([0.25, 0.0, 0.5, 0.25, 0.0], np.float32)
    uniform = np.array([0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9999], np.float32)
    assert jax.jit(electra.draw)(np.tile(probs, (6, 1)), uniform).tolist() == [0, 0, 2, 2, 3, 3]


def test_losses_and_metrics_are_the_slow_ones():
    train, _, variables = outputs()
    batch = batch_of()
    output = jax.tree.map(np.asarray, train(variables, batch, jax.random.key(3)))
    # A masked token that the generator guessed, wherever the draws fell: its label is "original".
    tokens = output.tokens.copy()
    tokens[0, 0] = batch.labels[0, 0]
    output = output.replace(tokens=tokens)
    total, generator, detection, count, real_count, right, hits = 0.0, 0.0, 0.0, 0, 0, 0, []
    for row in range(len(LENGTHS)):
        n, m, rows = LENGTHS[row], int(batch.weights[row].sum()), 0.0
        for slot in range(n):
            two = output.detected[row, slot].astype(np.float64)
            is_replaced = int(tokens[row, slot] != batch.labels[row, slot])
            rows += np.logaddexp(0.0, -(two[1] - two[0]) * (1 if is_replaced else -1))  # binary, of the difference
            right += (two[1] > two[0]) == is_replaced
            hits.append((is_replaced, two[1] > two[0]))
            if batch.weights[row, slot]:
                logits = output.generated[row, slot].astype(np.float64)
                generator += np.log(np.exp(logits).sum()) - logits[batch.labels[row, slot]]
        detection, count, real_count = detection + rows, count + m, real_count + n
        total += LAMBDA * m * rows / n
    sums, loss = measure(output, batch)
    expected = {
        "loss": (generator + total, count),
        "generator_loss": (generator, count),
        "detection_loss": (detection, real_count),
        "detection_accuracy": (right, real_count),
        "replaced": (sum(a for a, _ in hits), real_count),
        "recall": (sum(a and b for a, b in hits), sum(a for a, _ in hits)),
        "precision": (sum(a and b for a, b in hits), sum(b for _, b in hits)),
    }
    for name, pair in expected.items():
        np.testing.assert_allclose(sums[name], pair, rtol=2e-5, err_msg=name)
    guessed = output.generated.argmax(-1) == batch.labels
    np.testing.assert_allclose(sums["generator_accuracy"], [(guessed * batch.weights).sum(), count])
    np.testing.assert_allclose(loss["loss"], sums["loss"], rtol=1e-6)


def test_equal_rows_have_the_sum_of_both_means():
    train, _, variables = outputs()
    batch = batch_of([6] * 8)
    weights = np.zeros((8, 6), np.float32)
    weights[:, 1:3] = 1
    source = batch.source._replace(tokens=np.where(weights > 0, MASK, batch.labels))
    batch = batch._replace(source=source, weights=weights)
    _, sums = measure(train(variables, batch, jax.random.key(0)), batch)
    means = {name: float(pair[0] / pair[1]) for name, pair in sums.items()}
    assert means["loss"] == pytest.approx(means["generator_loss"] + LAMBDA * means["detection_loss"], rel=1e-5)


def test_evaluation_draws_the_same_for_a_text_in_any_batch_and_at_any_padding():
    _, evaluate, variables = outputs()
    batch = batch_of()
    turned = jax.tree.map(lambda x: np.roll(x, 3, axis=0), batch)
    wide = jax.tree.map(lambda x: np.pad(x, ((0, 0), (0, 2))), batch)
    wide = wide._replace(source=wide.source._replace(tokens=np.pad(batch.source.tokens, ((0, 0), (0, 2)), "edge")))
    tokens, others, padded = (np.asarray(evaluate(variables, each).tokens) for each in (batch, turned, wide))
    np.testing.assert_array_equal(others, np.roll(tokens, 3, axis=0))
    np.testing.assert_array_equal(padded[:, :6], tokens)
    rows = ([1, 2], [2, 1], [1, 2, 3], [0, 1, 2])
    assert len(set(map(int, jax.jit(lambda: [electra.checksum(jnp.array(row)) for row in rows])()))) == 4


# Gradients

PARTS = ("loss", "generator_loss", "detection_loss")


@functools.cache
def gradient_function(sharing: str):
    """The compiled function from parameters to the gradients of the parts of the loss, by name."""
    module, batch = build.build(model_of(sharing)), batch_of()

    def parts(params):
        output = module.apply({"params": params}, batch, rngs={"dropout": jax.random.key(0)})
        sums = TASK.loss(settings_of(sharing), output, batch)
        return {name: sums[name][0] for name in PARTS}

    return jax.jit(jax.jacrev(parts))


def test_no_gradient_of_the_detection_reaches_the_generator():
    found = jax.device_get(gradient_function("none")(made()[1]["params"]))
    assert all((x == 0).all() for x in jax.tree.leaves(found["detection_loss"]["generator"]))
    assert all((x != 0).any() for x in jax.tree.leaves(found["detection_loss"]["encoder"]))
    others = {name: part for name, part in found["generator_loss"].items() if name != "generator"}
    assert all((x == 0).all() for x in jax.tree.leaves(others))


def with_table(embed, table):
    """Parameters of an embedding with this table of its own, or with none."""
    own = {name: x for name, x in embed.items() if name not in ("table", "delta")}
    return own if table is None else {**own, "table": table}


def test_shared_tables_get_the_gradients_by_hand():
    """As two tables of the same values: E_G gets the generator's, Delta the discriminator's; a tied one the sum."""
    shared = made("disentangled")[1]["params"]
    generator, embed = shared["generator"], shared["source_embed"]
    table = generator["source_embed"]["table"] + embed["delta"]

    def grads(sharing, discriminators, generators):
        inner = {**generator, "source_embed": with_table(generator["source_embed"], generators)}
        params = {**shared, "generator": inner, "source_embed": with_table(embed, discriminators)}
        if sharing == "disentangled":
            params["source_embed"]["delta"] = embed["delta"]
        found = jax.device_get(gradient_function(sharing)(params))["loss"]
        return found["source_embed"], found["generator"]["source_embed"]

    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    own, generators = grads("disentangled", None, generator["source_embed"]["table"])
    apart = grads("none", table, generator["source_embed"]["table"])
    close(own["delta"], apart[0]["table"])
    close(generators["table"], apart[1]["table"])
    tied, _ = grads("tied", table, None)
    apart = grads("none", table, table)
    close(tied["table"], apart[0]["table"] + apart[1]["table"])


def test_tables_are_where_sharing_puts_them_and_the_discriminator_alone_computes_the_same():
    for sharing in ("none", "tied", "disentangled"):
        shapes = nn.meta.unbox(build.shapes(build.build(model_of(sharing))))["params"]
        assert ("table" in shapes["generator"]["source_embed"]) == (sharing != "tied")
        assert ("delta" in shapes["source_embed"]) == (sharing == "disentangled")
    model, (module, variables) = model_of("disentangled"), made("disentangled")
    params = electra.discriminator_params(model, variables["params"])
    alone = build.build(dataclasses.replace(model, generator=None))
    inputs = Batch(batch_of().source, None)
    both = jax.jit(lambda variables, params: (module.apply(variables, inputs), alone.apply({"params": params}, inputs)))
    expected, found = both(variables, params)
    chex.assert_trees_all_close(found, expected, rtol=1e-6, atol=1e-6)


def test_the_residual_table_starts_at_zero():
    embed = Embed(EmbedConfig(vocab=3), 2, base=Embed(EmbedConfig(vocab=3), 2), residual=True)
    init = jax.jit(lambda key: nn.meta.unbox(embed.init(key, builders.stream(np.random.default_rng(0), [1]))["params"]))
    params = jax.device_get(init(jax.random.key(0)))
    assert (params["delta"] == 0).all() and (params["base"]["table"] != 0).all()


# Steps


def certain(params):
    """`params` with a generator that draws token 3 with certainty: samples then do not depend on keys."""
    bias = np.zeros(VOCAB, np.float32)
    bias[3] = 1e4
    head = {**params["generator"]["head"], "bias": bias}
    return {**params, "generator": {**params["generator"], "head": head}}


def test_microbatches_on_a_mesh_equal_one_batch_where_samples_do():
    """Samples are drawn for each microbatch, as dropout masks are: here the draws are certain."""

    def gradients(sizes: MeshConfig, devices: int, parts: int):
        settings = dataclasses.replace(settings_of("disentangled", accumulation=parts), mesh=sizes)
        module, mesh = build.build(settings.model), meshes.make(sizes, jax.devices()[:devices])
        params = certain(made("disentangled")[1]["params"])

        @jax.jit
        def run(params, batch):
            return step.batch_gradients(settings, module, TASK, params, {}, batch, jax.random.key(0))

        with jax.set_mesh(mesh):
            grads, _, sums = run(params, step.shard_batch(batch_of(), mesh))
        return jax.device_get((grads, sums))

    whole, sums = gradients(MeshConfig(), 1, 1)
    split, other = gradients(MeshConfig(data=2, fsdp=2, tensor=2), 8, 2)
    for name, pair in sums.items():
        np.testing.assert_allclose(other[name], pair, rtol=1e-4, err_msg=name)
    assert sums["generator_loss"][0] > 1e4
    for tree in (whole, split):
        tree["generator"]["head"].pop("bias")
    chex.assert_trees_all_close(split, whole, rtol=2e-3, atol=2e-4)


# Configs


def recipe(**edits):
    made = overrides.defaults()
    made.task.name, made.model.head.kind = "replaced_tokens", "slots"
    made.model.encoder = overrides.section(StackConfig, width=32)
    made.model.generator = overrides.section(GeneratorConfig, encoder=dict(width=16, embed=dict(width=32)))
    for path, value in edits.items():
        overrides.override(made, path.replace("__", "."), str(value))
    return made


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"data__packing": "first_fit"}, "data.packing: got 'first_fit', expected none or concat for the task"),
        ({"task__label_smoothing": 0.1}, "task.label_smoothing: got 0.1, expected 0 for the task replaced_tokens"),
        ({"task__name": "tagging"}, "model.generator: got 'a section', expected None for the task tagging"),
        ({"model__generator__head__kind": "slots"}, "generator.head.kind: got 'slots', expected tokens"),
        ({"model__adapter__rank": 4}, "model.adapter: got 'a section', expected None beside config.model.generator"),
        ({"model__generator__head__chunk": 8}, "generator.head.chunk: got 8, expected None"),
        ({"model__generator__encoder__embed__width": 8}, "encoder.embed.width: got 8, expected 32, the width of the"),
        ({"model__generator__encoder__embed__vocab": 9}, "encoder.embed.vocab: got 9, expected None, as config.model"),
        ({"model__generator__encoder__attention__heads": 3}, "generator.encoder.width: got 16, expected a multiple of"),
        (
            {"mesh__tensor": 4, "model__generator__encoder__attention__heads": 2},
            "generator.encoder.attention.heads: got 2",
        ),
    ],
)
def test_what_does_not_fit_is_refused(edits, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        overrides.freeze(recipe(**edits))


def test_it_needs_a_generator():
    made = recipe()
    overrides.freeze(made)
    made.model.generator = None
    with pytest.raises(ConfigError, match=re.escape("model.generator: got None, expected a section for the task")):
        overrides.freeze(made)
