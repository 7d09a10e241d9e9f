"""Adapters, frozen parameters and layer-wise decay of the rate: one step against slow references, and a whole run."""

import dataclasses
import json
import os
import signal

import builders
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import traverse_util
from test_loop import recipe

from jaxformer import checkpoint, tasks
from jaxformer.config import (
    AdapterConfig,
    Config,
    ConfigError,
    HeadConfig,
    MeshConfig,
    OptimizerConfig,
    ScheduleConfig,
    TaskConfig,
    TrainConfig,
    patterns,
)
from jaxformer.models import adapters, build
from jaxformer.nn.layers import Dense
from jaxformer.parallel import mesh as meshes
from jaxformer.train import freezing, loop, optim, results, step

ROWS = [5, 2, 4, 1, 3, 5, 2, 5]
TARGETS = ("attention", "ffn/in")


def adapted(**fields) -> Config:
    model = builders.decoder(layers=2)
    model = dataclasses.replace(model, adapter=AdapterConfig(rank=2, alpha=3.0, targets=TARGETS, **fields))
    return Config(
        model=model,
        task=TaskConfig(name="language_modelling", vocab=builders.VOCAB),
        optimizer=OptimizerConfig(name="sgd", momentum=0.0, clip=None, freeze=("key/lora_b",)),
        schedule=ScheduleConfig(kind="constant", peak=0.5, warmup=1),
        train=TrainConfig(steps=10, ema=0.5),
    )


def state_of(model):
    """The module and parameters off their start (B too), with the constants of the adapters as the config says."""
    module, variables = builders.make(model)
    flat = traverse_util.flatten_dict(variables["params"])
    shapes = {path: x.shape for path, x in flat.items()}
    maps = build.linear_maps(build.build(dataclasses.replace(model, adapter=None)))
    for path, (value, _) in adapters.leaves(model.adapter, shapes, maps, jax.random.key(0)).items():
        if path[-1] in adapters.CONSTANTS:
            flat[path] = value
    return module, jax.tree.map(np.asarray, traverse_util.unflatten_dict(flat))


def one_step(config, mesh):
    module, params = state_of(config.model)
    schedule = optim.schedule(config.schedule, 10, 8)
    with jax.set_mesh(mesh):
        shapes = nn.meta.unbox(build.shapes(module))["params"]
        trained = [freezing.trained(config, tree) for tree in (shapes, build.logical_names(module))]
        optimizer = optim.optimizer(config.optimizer, schedule, *trained)
        update = step.make_train_step(config, module, tasks.get(config.task.name), optimizer, schedule, mesh)
        own = freezing.trained(config, params)
        average = jax.tree.map(np.array, own)
        state = step.TrainState(np.int32(0), params, jax.jit(optimizer.init)(own), jax.random.key(1), {"ema": average})
        state = jax.device_put(state, step.state_shardings(config, module, optimizer, mesh))
        state, sums = update(state, step.shard_batch(builders.batch(config.model, ROWS), mesh))
        return params, jax.device_get(state), jax.device_get(sums)


def test_a_step_on_a_mesh_trains_the_adapters_alone_as_gradients_of_merged_kernels_say():
    config = dataclasses.replace(adapted(), mesh=MeshConfig(data=2, fsdp=2, tensor=2, zero1=True))
    mesh = meshes.make(config.mesh)
    before, state, sums = one_step(config, mesh)
    plain = build.build(dataclasses.replace(config.model, adapter=None))
    task, batch = tasks.get(config.task.name), builders.batch(config.model, ROWS)

    def loss(trained):  # the slow reference: kernels W + scale A B of a model without adapters
        flat = traverse_util.flatten_dict(before) | traverse_util.flatten_dict(trained)
        merged = adapters.merge(traverse_util.unflatten_dict(flat))
        total, weight = task.loss(config, plain.apply({"params": merged}, batch), batch)["loss"]
        return total / weight

    own = freezing.trained(config, before)
    # In numpy from here: each operation on each shape would be a program.
    own, grads = jax.device_get((own, jax.jit(jax.grad(loss))(own)))
    expected = jax.tree.map(lambda x, g: x - 0.5 * g, own, grads)
    after, frozen = freezing.split(config, state.params)
    chex.assert_trees_all_close(after, expected, rtol=2e-4, atol=1e-5)
    chex.assert_trees_all_equal(frozen, freezing.split(config, jax.device_get(before))[1])
    np.testing.assert_allclose(
        sums["gradient_norm"][0], np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads))), rtol=1e-4
    )
    average = jax.tree.map(lambda x, y: 0.5 * x + 0.5 * y, own, expected)
    chex.assert_trees_all_close(dict(state.variables["ema"]), average, rtol=2e-4, atol=1e-5)
    names = {"/".join(path) for path in traverse_util.flatten_dict(after)}
    assert names and all(name.endswith(("lora_a", "lora_b")) for name in names)
    assert not any(name.endswith("key/lora_b") for name in names)
    assert {path[-1] for path in traverse_util.flatten_dict(frozen)} > {"kernel", "lora_scale", "lora_b"}


def test_merged_adapters_compute_the_same():
    model = builders.seq2seq()
    config = AdapterConfig(rank=2, targets=("cross", "ffn"), layers=(1,), ranks=("ffn/out=3",), alphas=("cross=5",))
    module, params = state_of(dataclasses.replace(model, adapter=config))
    cross, ffn = (params["decoder"]["blocks"][part] for part in ("cross", "ffn"))
    assert ffn["out"]["lora_a"].shape == (2, 16, 3) and cross["out"]["lora_a"].shape == (2, 2, 4, 2)
    np.testing.assert_allclose(cross["out"]["lora_scale"], [0.0, 5 / 2])
    np.testing.assert_allclose(ffn["out"]["lora_scale"], [0.0, 16 / 3])
    batch, merged = builders.batch(model), adapters.merge(params)
    ours = builders.apply(module)({"params": params}, batch)
    theirs = builders.apply(build.build(model))({"params": merged}, batch)
    np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-5)
    before, after = (traverse_util.flatten_dict(tree) for tree in (adapters.without(params), merged))
    assert before.keys() == after.keys()
    for path, x in after.items():
        if "blocks" in path:  # layer 0 has no adapter
            np.testing.assert_array_equal(x[0], before[path][0])
            assert (x[1] != before[path][1]).any() == (path[-1] == "kernel" and path[2] in ("cross", "ffn"))


def test_b_starts_at_zero_and_a_within_its_bound():
    maps = build.linear_maps(build.build(builders.decoder()))
    shapes = {(*path, "kernel"): (2, *dense.shape) for path, dense in maps.items()}
    start = adapters.leaves(AdapterConfig(targets=("blocks",), dropout=0.5), shapes, maps, jax.random.key(0))
    for path, (x, names) in start.items():
        assert len(names) == x.ndim and names[0] == "layers"
        bound = shapes[*path[:-1], "kernel"][1] ** -0.5 if path[-2] != "out" or "ffn" in path else 8**-0.5
        assert {"lora_a": 0.5 * bound < np.abs(x).max() <= bound, "lora_b": not x.any()}.get(path[-1], True), path
    query, key = (start["decoder", "blocks", "attention", part, "lora_a"][0] for part in ("query", "key"))
    assert (query != key).any() and (query[0] != query[1]).any()


def test_dropout_is_of_the_adapters_input():
    eye, x = jnp.eye(64), jnp.ones(64)
    dense = Dense((64, 64), ("embed", None), bias=False)
    sums = eye + jnp.roll(eye, 1, axis=1)  # of two neighbours: one, both or none of them is dropped
    params = {"kernel": 1000.0 * eye, "lora_a": sums, "lora_b": eye, "lora_scale": jnp.float32(3.0)}
    params["lora_dropout"] = jnp.float32(0.25)
    added = np.asarray(dense.apply({"params": params}, x, rngs={"dropout": jax.random.key(0)})) - 1000.0
    counts = added / (3.0 / 0.75)
    np.testing.assert_allclose(counts, counts.round(), atol=1e-3)
    assert set(counts.round()) == {0.0, 1.0, 2.0} and 0.5 < counts.mean() / 2 < 0.95
    np.testing.assert_allclose(dense.apply({"params": params}, x), 1006.0, rtol=1e-6)


PARAMS = {
    "source_embed": {"table": jnp.ones((6, 4))},
    "encoder": {
        "position": {"table": jnp.ones((5, 4))},
        "blocks": {"ffn": {"kernel": jnp.ones((3, 4, 4)), "bias": jnp.ones((3, 4))}},
        "final_norm": {"scale": jnp.ones((4,))},
    },
    "head": {"decision": {"kernel": jnp.ones((4, 2))}},
}
NAMES = {
    "source_embed": {"table": ("vocab", "table")},
    "encoder": {
        "position": {"table": (None, "table")},
        "blocks": {"ffn": {"kernel": ("layers", "embed", "ffn"), "bias": ("layers", "ffn")}},
        "final_norm": {"scale": (None,)},
    },
    "head": {"decision": {"kernel": ("embed", None)}},
}


def frozen(*freeze, **model):
    config = Config(optimizer=OptimizerConfig(freeze=freeze))
    return freezing.frozen_paths(dataclasses.replace(config, **model), PARAMS)


def test_patterns_freeze_by_names_in_a_row_and_the_last_one_counts():
    blocks = {"encoder/blocks/ffn/kernel", "encoder/blocks/ffn/bias"}
    assert frozen("blocks") == frozen("encoder/blocks") == frozen("b*s") == blocks
    assert frozen("blocks", "!bias") == {"encoder/blocks/ffn/kernel"}
    assert frozen("*", "!head") == frozen("encoder", "source_embed")
    assert patterns.select(["a/b/c", "b/c", "a/c"], ("a/?",), "x") == {"a/b/c", "a/c"}
    with pytest.raises(ConfigError, match=r"optimizer.freeze: got 'blocks/fn', which matches no path.*'blocks/ffn'"):
        frozen("blocks/fn")
    with pytest.raises(ConfigError, match="freezes every parameter"):
        frozen("*")


def test_an_adapter_trains_the_head_unless_it_is_over_the_vocabulary():
    def trained(kind, train=None):
        model = dataclasses.replace(builders.encoder(), adapter=AdapterConfig(train=train), head=HeadConfig(kind=kind))
        paths = ["head/decision/kernel", "encoder/blocks/ffn/kernel", "encoder/blocks/ffn/lora_a"]
        return adapters.also_trained(model, paths)

    assert trained("classes") == {"head/decision/kernel"}
    assert trained("tokens") == trained("classes", ()) == set()
    assert trained("tokens", ("blocks",)) == {"encoder/blocks/ffn/kernel"}
    with pytest.raises(ConfigError, match=r"adapter.train: got 'hed', which matches no path.*'head'"):
        trained("tokens", ("hed",))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("targets", ("attention/qery",), r"adapter.targets: got 'attention/qery'.*'attention/query'"),
        ("targets", ("*", "!*"), "leaves no linear map"),
        ("ranks", ("ffn=2",), r"adapter.ranks: got 'ffn', which matches no path"),
        ("layers", (2,), "adapter.layers: got 2, expected numbers from 0 to 1"),
    ],
)
def test_targets_that_a_model_lacks_are_refused(field, value, message):
    model = dataclasses.replace(builders.decoder(), adapter=AdapterConfig(**{field: value}))
    with pytest.raises(ConfigError, match=message):
        build.shapes(build.build(model))


def test_rates_decay_from_the_head_to_the_embeddings():
    factors = traverse_util.flatten_dict(optim.rate_factors(PARAMS, 0.5, NAMES), sep="/")
    assert {name: x.reshape(-1).tolist() for name, x in factors.items()} == {
        "source_embed/table": [0.0625],
        "encoder/position/table": [0.0625],
        "encoder/blocks/ffn/kernel": [0.125, 0.25, 0.5],
        "encoder/blocks/ffn/bias": [0.125, 0.25, 0.5],
        "encoder/final_norm/scale": [1.0],
        "head/decision/kernel": [1.0],
    }
    updates = {}
    for decay in (1.0, 0.5):
        config = OptimizerConfig(weight_decay=0.1, layer_decay=decay)
        rule = optim.optimizer(config, lambda n: jnp.float32(0.1), PARAMS, NAMES)
        state = rule.init(PARAMS)
        updates[decay], state = rule.update(PARAMS, state, PARAMS, norm=jnp.float32(1.0))
        assert int(optim.update_count(state)) == 1
    expected = jax.tree.map(lambda x, factor: x * factor, updates[1.0], optim.rate_factors(PARAMS, 0.5, NAMES))
    chex.assert_trees_all_close(updates[0.5], expected, rtol=1e-6)


def test_rates_and_adapters_of_a_first_layer_of_another_form_count_on_in_the_rest():
    blocks = PARAMS["encoder"]["blocks"]
    params = {**PARAMS, "encoder": {"dense_blocks": jax.tree.map(lambda x: x[:1], blocks), "blocks": blocks}}
    names = {**NAMES, "encoder": {"dense_blocks": NAMES["encoder"]["blocks"], "blocks": NAMES["encoder"]["blocks"]}}
    factors = optim.rate_factors(params, 0.5, names)
    assert factors["encoder"]["dense_blocks"]["ffn"]["bias"].reshape(-1).tolist() == [0.0625]
    assert factors["encoder"]["blocks"]["ffn"]["bias"].reshape(-1).tolist() == [0.125, 0.25, 0.5]
    assert factors["source_embed"]["table"] == 0.03125

    dense = build.linear_maps(build.build(builders.decoder()))["decoder", "blocks", "ffn", "in"]
    maps = {("decoder", group, "ffn", "in"): dense for group in ("dense_blocks", "blocks")}
    shapes = {(*path, "kernel"): (1 + 2 * (path[1] == "blocks"), *dense.shape) for path in maps}
    found = adapters.leaves(AdapterConfig(targets=("ffn",), rank=2, layers=(0, 2)), shapes, maps, jax.random.key(0))
    scales = {path[1]: x.tolist() for path, (x, _) in found.items() if path[-1] == "lora_scale"}
    assert scales == {"dense_blocks": [8.0], "blocks": [0.0, 8.0, 0.0]}


def test_the_table_of_parameters_says_what_is_trained_and_how_fast():
    config = OptimizerConfig(weight_decay=0.1, layer_decay=0.5)
    lines = optim.parameter_table(PARAMS, config, NAMES, {"source_embed/table"}).splitlines()
    cells = {line.split()[0]: line.split()[-2:] for line in lines[1:-2]}
    assert cells["source_embed/table"] == ["-", "frozen"]
    assert cells["encoder/blocks/ffn/kernel"] == ["0.1", "0.125-0.5"]
    assert cells["head/decision/kernel"] == ["0.1", "1"]
    assert lines[-2:] == ["92 of 116 entries are trained", "76 of 116 entries decay"]


def test_a_run_with_adapters_resumes_bit_for_bit_and_stops_early_for_good(
    tmp_path, monkeypatch, capsys, shared_programs
):
    builders.one_device(monkeypatch)
    edits = {"model__adapter__rank": 2, "model__adapter__dropout": 0.1, "train__patience": 1}
    edits |= {"checkpoint__mode": "max", "train__evaluate_every": 2, "train__checkpoint_every": 2}
    edits |= {"evaluate__decode_examples": 0, "mesh__fsdp": 1}
    config = recipe(**edits)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert loop.train(config, whole) == 0
    result = json.loads((whole / "result.json").read_text())
    assert (result["step"], result["stopped_early"]) == (4, True)  # the loss at step 4 is lower, so no better here
    assert results.finished_result(whole, config) == result
    without = dataclasses.replace(config, train=dataclasses.replace(config.train, patience=None))
    assert results.finished_result(whole, without) is None

    save = checkpoint.Checkpoints.save

    def save_and_stop(self, state, *rest):
        done = save(self, state, *rest)
        if int(state.step) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return done

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.Checkpoints, "save", save_and_stop)
        assert loop.train(config, parts) == loop.EXIT_PREEMPTED
    assert loop.train(config, parts) == 0
    rows = (parts / "metrics.jsonl").read_text()
    assert loop.train(config, parts) == 0
    assert (parts / "metrics.jsonl").read_text() == rows
    assert "the run is finished; raise config.train.patience to continue" in capsys.readouterr().err
    assert json.loads((parts / "result.json").read_text()) == result
    mine, theirs = checkpoint.load_run(parts, "4"), checkpoint.load_run(whole, "4")
    chex.assert_trees_all_equal(jax.device_get(mine.params), jax.device_get(theirs.params))
    assert "lora_b" in mine.params["encoder"]["blocks"]["attention"]["query"]
    metadata = checkpoint.reading.array_metadata(whole / "checkpoints" / "last" / "4")
    moments = {"/".join(path) for path in metadata if path[0] in ("opt_state", "variables") and path[-1] == "kernel"}
    assert not moments
