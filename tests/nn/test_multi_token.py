"""Multi-token prediction against numpy, and what reads a model that has it (`model.multi_token`)."""

from __future__ import annotations

import dataclasses

import builders
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxformer
from jaxformer import tasks
from jaxformer.analysis.draw import model as drawing
from jaxformer.config import (
    AdapterConfig,
    AttentionConfig,
    Config,
    ConfigError,
    DataConfig,
    DeltaConfig,
    DistillationConfig,
    EmbedConfig,
    EncodingConfig,
    HeadConfig,
    InitConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    MultiTokenConfig,
    NormConfig,
    OptimizerConfig,
    TaskConfig,
    TokenizerConfig,
    ValueResidualConfig,
    checks,
)
from jaxformer.config.checks import mesh as mesh_checks
from jaxformer.config.checks import size
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.hf import comparison
from jaxformer.models import build
from jaxformer.nn import moe as mixtures
from jaxformer.nn import multi_token
from jaxformer.nn.masks import slots_from_segments
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import rules
from jaxformer.plan import decoding, flops, shapes
from jaxformer.report import inspection
from jaxformer.train import step, warm_start
from jaxformer.types import Batch, Stream

TASK = tasks.get("language_modelling")
MODEL = dataclasses.replace(
    builders.decoder(layers=1, ffn=None, encoding=EncodingConfig("learned", max_length=16)),
    multi_token=MultiTokenConfig(depth=2, weight=0.6),
)
PLAIN = dataclasses.replace(MODEL, multi_token=None)


def config_of(model, **parts) -> Config:
    return Config(**{"model": model, "task": TaskConfig("language_modelling"), **parts})


def packed_batch(rows: int = 1) -> Batch:
    """Rows with a text of 5 tokens, one of 3 and one of 1, and padding; the label of one slot does not count."""
    rng = np.random.default_rng(3)
    segment = np.tile([1, 1, 1, 1, 1, 2, 2, 2, 3, 0], (rows, 1))
    tokens, labels = rng.integers(1, builders.VOCAB, (2, rows, 10)).astype(np.int32)
    weights = (segment > 0).astype(np.float32)
    weights[:, 2] = 0
    slots = jax.tree.map(np.asarray, slots_from_segments(jnp.asarray(segment, jnp.int32)))
    return Batch(None, Stream(tokens, slots), labels, weights)


@pytest.fixture(scope="module")
def made():
    return builders.make(MODEL)


# --- the modules ------------------------------------------------------------------------------------------------------


def rms(x, params):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + NormConfig().epsilon) * params["scale"]


def normed(x, params):
    centred = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + NormConfig().epsilon)
    return centred / deviation * params["scale"] + params["bias"]


def block(x, params):
    """One causal layer of attention in pre order, query by query, and the norm after it."""
    layer = jax.tree.map(lambda p: p[0], params["blocks"])
    read, own = normed(x, layer["attention_norm"]), layer["attention"]
    q, k, v = (np.einsum("td,dhk->thk", read, own[n]["kernel"]) + own[n]["bias"] for n in ("query", "key", "value"))
    y = x + own["out"]["bias"]
    for t in range(len(x)):
        for h in range(q.shape[1]):
            scores = np.array([q[t, h] @ k[s, h] for s in range(t + 1)]) / np.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            y[t] = y[t] + weights / weights.sum() @ v[: t + 1, h] @ own["out"]["kernel"][h]
    return normed(y, params["final_norm"])


def losses_by_loops(params, hidden, batch):
    """Sum of losses and of weights at each depth, text by text and token by token; depth 0 is the next token."""
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    table, sums = params["target_embed"]["table"], np.zeros((3, 2))
    for row, text in np.ndindex(len(hidden), 3):
        inside = batch.target.slots.segment[row] == text + 1
        tokens, labels, weights = (x[row][inside] for x in (batch.target.tokens, batch.labels, batch.weights))
        h = np.asarray(hidden[row][inside], np.float64)
        for depth in range(3):
            if depth:
                own = params[f"multi_token_{depth - 1}"]
                ahead = [rms(table[tokens[t + depth]], own["embedding_norm"]) for t in range(len(tokens) - depth)]
                if not ahead:
                    break
                joined = [np.concatenate([rms(h[t], own["hidden_norm"]), e]) for t, e in enumerate(ahead)]
                h = block(np.array(joined) @ own["projection"]["kernel"], own["stack"])
            for t in range(len(h)):
                logits = h[t] @ table.T
                loss = np.log(np.exp(logits).sum()) - logits[labels[t + depth]]
                sums[depth] += weights[t + depth] * np.array([loss, 1.0])
    return sums


def test_losses_of_packed_texts_are_those_of_loops_on_one_device_and_on_eight(made):
    module, variables = made
    batch, config = packed_batch(4), config_of(MODEL)
    chunked = build.build(dataclasses.replace(MODEL, head=HeadConfig(chunk=4)))

    @jax.jit
    def run(variables):
        logits = chunked.apply(variables, batch, full_logits=False)
        hidden = module.apply(variables, batch, method=module.hidden)
        return TASK.loss(config, logits, batch), TASK.metrics(config, logits, batch), hidden

    loss, measured, hidden = run(variables)
    expected = losses_by_loops(variables["params"], hidden, batch)
    np.testing.assert_array_equal(expected[:, 1], [4 * 8, 4 * 5, 4 * 3])  # of 5 + 3 + 1 tokens, one without weight
    mesh = meshes.make(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices()[:8])
    with jax.set_mesh(mesh):
        placed = jax.tree.map(jax.device_put, variables, rules.shardings(build.shapes(module), mesh))
        logits = lambda v, batch: module.apply(v, batch, full_logits=False)  # noqa: E731
        run = jax.jit(lambda v, batch: TASK.loss(config, logits(v, batch), batch))
        sharded = jax.device_get(run(placed, step.shard_batch(batch, mesh)))
    for sums in (loss, measured, sharded):
        for depth in (1, 2):
            np.testing.assert_allclose(sums[f"further_loss_{depth}"], expected[depth], rtol=1e-5)
    np.testing.assert_allclose(measured["loss"], expected[0], rtol=1e-5)
    total = expected[0, 0] + 0.6 / 2 * (expected[1, 0] + expected[2, 0])
    for sums in (loss, sharded):
        np.testing.assert_allclose(sums["next_token_loss"], expected[0], rtol=1e-5)
        np.testing.assert_allclose(sums["loss"], [total, 4 * 8], rtol=1e-5)
    assert set(measured) == {"loss", "accuracy", "further_loss_1", "further_loss_2"}


def test_what_lies_ahead_ends_with_the_row():
    x = jnp.asarray([[1, 1, 2, 2, 2, 0]])
    np.testing.assert_array_equal(multi_token.shift_left(x, 2), [[2, 2, 2, 0, 0, 0]])
    np.testing.assert_array_equal(multi_token.slots_ahead(x, 1), [[1, 0, 2, 2, 0, 0]])
    np.testing.assert_array_equal(multi_token.slots_ahead(x, 2), [[0, 0, 2, 0, 0, 0]])
    assert not np.any(multi_token.slots_ahead(x[:, :2], 3)) and multi_token.shift_left(x[:, :1], 3).shape == (1, 1)


def test_decoding_and_logits_are_those_without_the_modules(made):
    module, variables = made
    kept = {"params": {k: v for k, v in variables["params"].items() if not k.startswith("multi_token")}}
    plain, batch = build.build(PLAIN), packed_batch()._replace(labels=None, weights=None)

    def decode(module):  # beams step, speculation extends
        def run(variables):
            _, state = module.apply(variables, batch, 14, method=module.start)
            more, state = module.apply(variables, batch.target.tokens[:, :2], state, method=module.extend)
            return more, module.apply(variables, batch.target.tokens[:, :2], state.branch(2), method=module.step)

        return run

    assert str(jax.make_jaxpr(decode(module))(kept)) == str(jax.make_jaxpr(decode(plain))(kept))
    assert str(jax.make_jaxpr(module.apply)(kept, batch)) == str(jax.make_jaxpr(plain.apply)(kept, batch))
    assert module.unstack(variables)["params"].keys() == variables["params"].keys()


def test_a_run_goes_on_with_its_modules_and_other_tasks_leave_them_out(made, tmp_path):
    tokenizers = Tokenizers.build(DataConfig(tokenizer=TokenizerConfig("byte")), [], ("text",))
    data, params = DataConfig(length=16, tokenizer=TokenizerConfig("byte")), made[1]["params"]
    builders.saved_run(tmp_path / "run", config_of(MODEL, data=data), params, tokenizers)
    again = jaxformer.load(tmp_path / "run")
    chex.assert_trees_all_equal(jax.device_get(again.params), jax.device_get(params))

    init = InitConfig(directory=str(tmp_path / "run"))
    start = config_of(ModelConfig(), init=init, data=data)
    same, _ = warm_start.adopt_model(start, tmp_path / "new", warm_start.RUN_FORMAT)
    assert same.model.multi_token == MODEL.multi_token
    model, _ = warm_start.RUN_FORMAT.read_model(dataclasses.replace(start, task=TaskConfig("dialogue")))
    assert model.multi_token is None and model.decoder == MODEL.decoder
    kept = {name: part for name, part in params.items() if not name.startswith("multi_token")}
    read = warm_start.RUN_FORMAT.read_params(dataclasses.replace(start, model=model), kept)
    chex.assert_trees_all_equal(jax.device_get(read), jax.device_get(kept))
    asked = dataclasses.replace(start, model=ModelConfig(multi_token=MultiTokenConfig(depth=3)))
    with pytest.raises(ConfigError, match="config.model.multi_token: got a section, expected None for the model of"):
        warm_start.adopt_model(asked, tmp_path / "new", warm_start.RUN_FORMAT)


# --- the layer of a module --------------------------------------------------------------------------------------------


def test_a_module_is_like_the_last_layer():
    own = AttentionConfig(heads=2, window=3, window_layers=(0,), value_residual=ValueResidualConfig())
    rope = EncodingConfig("rope", window_base=10.0)
    moe = MoEConfig(4, 2, dense_layers=1, dense_width=5)
    stack = builders.stack(attention=own, moe=moe, encoding=rope, embed=EmbedConfig(vocab=13, norm=True, dropout=0.1))
    found = ModelConfig(decoder=stack).multi_token_stack
    assert (found.layers, found.attention.window, found.attention.value_residual) == (1, None, None)
    assert found.encoding.window_base is None and not found.embed.norm and found.first_layers == 0
    last = dataclasses.replace(stack, attention=dataclasses.replace(own, window_layers=(1,)))
    found = ModelConfig(decoder=last).multi_token_stack
    assert found.windowed_layers == (0,) and found.encoding.window_base == 10.0
    assert MODEL.multi_token_stack.encoding.kind == "none"


def test_biases_of_experts_move_at_the_rate_of_the_decoder():
    tree = lambda x: {"multi_token_0": {"stack": {"blocks": {"correction_bias": jnp.asarray(x)}}}}  # noqa: E731
    moved = mixtures.update_corrections(tree([1.0, 1.0]), tree([3.0, -2.0]), {"decoder": 0.25})
    np.testing.assert_allclose(jax.tree.leaves(moved)[0], [0.75, 1.25])


# --- what else reads a model ------------------------------------------------------------------------------------------


def test_parameters_and_products_are_counted():
    config = config_of(MODEL, data=DataConfig(length=16))
    module = build.build(MODEL)
    tree, names = nn.meta.unbox(build.shapes(module))["params"], build.logical_names(module)
    layer, table, projection = 4 * 8 * 8, builders.VOCAB * 8, 2 * 8 * 8
    assert size.min_parameters(config) == 3 * layer + table + 2 * projection + 16 * 8
    assert flops.matmul_parameters(config, tree, names) == 3 * layer + 3 * table + 2 * projection
    assert flops.attention_flops(config, 16) == 3 * 12 * 8 * 16
    blocks, total = flops.by_block(config, tree, names, 16), flops.flops_per_token(config, tree, names, 16)
    assert sum(blocks.values()) == pytest.approx(total)
    assert shapes.unsupported(config) == "no published time is of a model with multi-token prediction"
    assert decoding._is_not_decoded(("multi_token_1", "stack")) and not decoding._is_not_decoded(("decoder", "blocks"))
    untied = dataclasses.replace(MODEL, head=HeadConfig(tied=False))
    module = build.build(untied)
    tree, names = nn.meta.unbox(build.shapes(module))["params"], build.logical_names(module)
    assert flops.matmul_parameters(config_of(untied), tree, names) == 3 * layer + 3 * table + 2 * projection


def test_pictures_and_exports_name_it():
    assert "multi token 1" in repr(drawing.diagram(MODEL, ""))
    assert ("multi-token", "2 modules for tokens after the next, in training alone") in inspection._model(
        config_of(MODEL)
    )
    (line,) = comparison.config_differences(MODEL, PLAIN)  # the reason that an export gives
    assert line.startswith("model.multi_token MultiTokenConfig(depth=2, weight=0.6) (expected None)")


ONE = MultiTokenConfig()
REFUSED = {
    "encoder": (dataclasses.replace(builders.encoder(), multi_token=ONE), {}, "unless the model is a"),
    "both": (dataclasses.replace(builders.seq2seq(), multi_token=ONE), {}, "unless the model is a transformer decoder"),
    "head": (dataclasses.replace(MODEL, head=HeadConfig("classes", pooling="last")), {}, "with head.kind classes"),
    "layers": (dataclasses.replace(builders.decoder(layers=0, encoding=EncodingConfig("none")), multi_token=ONE), {},
               "where decoder.layers is 0"),
    "batch norm": (dataclasses.replace(builders.decoder(norm=NormConfig("batch")), multi_token=ONE), {},
                   "with decoder.norm.kind batch"),
    "delta": (dataclasses.replace(builders.decoder(layers=4, delta=DeltaConfig()), multi_token=ONE), {},
              "with decoder.delta"),
    "adapter": (dataclasses.replace(MODEL, adapter=AdapterConfig(targets=("query",))), {}, "with model.adapter"),
    "task": (MODEL, {"task": TaskConfig("prefix_lm")}, "for the task prefix_lm"),
    "teacher": (MODEL, {"distillation": DistillationConfig(directory="x")}, "with config.distillation"),
    "rates": (MODEL, {"optimizer": OptimizerConfig(layer_decay=0.9)}, "with optimizer.layer_decay"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_further_tokens_is_refused_in_one_line(name):
    model, parts, message = REFUSED[name]
    with pytest.raises(ConfigError, match=f"config.model.multi_token: got 'a section', expected None {message}"):
        checks.check(config_of(model, **{"data": DataConfig(length=16, packing="none"), **parts}))


def test_a_model_with_it_is_accepted_and_meshes_that_divide_slots_or_layers_are_refused():
    config = config_of(MODEL, data=DataConfig(length=16))
    checks.check(config)
    with pytest.raises(ConfigError, match=r"mesh.context: got 2, expected 1 with multi-token prediction \(model.multi"):
        mesh_checks.check_context(config, 2)
    sizes = {"stage": 2, "data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}
    with pytest.raises(ConfigError, match=r"mesh.stage: got 2, expected 1 for model.multi_token"):
        mesh_checks.check_divisibility(config, sizes)
