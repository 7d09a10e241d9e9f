"""A first layer without a norm of its attention (`first_norm`), and heads of classes with a transform."""

import dataclasses
import math

import builders
import jax
import numpy as np
import pytest

from jaxformer import tasks
from jaxformer.analysis.draw import model as drawing
from jaxformer.config import (
    AttentionConfig,
    Config,
    ConfigError,
    EmbedConfig,
    EncodingConfig,
    HeadConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    OptimizerConfig,
    ScheduleConfig,
    StackConfig,
    TaskConfig,
)
from jaxformer.config.checks import mesh as mesh_checks
from jaxformer.config.checks.model import check_model
from jaxformer.config.checks.stack import check_stack
from jaxformer.config.layer_groups import LayerGroup, layer_groups
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.train import optim, step

STACK = StackConfig(
    layers=3, width=8, first_norm=False, embed=EmbedConfig(vocab=11), encoding=EncodingConfig("rope"),
    attention=AttentionConfig(heads=2, window=2, window_layers=(1, 2)), unroll=1,
)  # fmt: skip
MODEL = ModelConfig(
    encoder=STACK,
    head=HeadConfig("classes", False, classes=3, transform=True, transform_bias=False, transform_norm_bias=False),
)


def test_the_first_layer_alone_goes_without():
    first, others = (group.stack for group in layer_groups(STACK))
    assert (first.layers, first.first_norm, others.layers, others.first_norm) == (1, False, 2, True)
    alone = dataclasses.replace(STACK, layers=1)
    assert layer_groups(alone) == (LayerGroup("blocks", 0, alone),)
    assert (STACK.first_layers, alone.first_layers, dataclasses.replace(STACK, first_norm=True).first_layers) == (
        1,
        0,
        0,
    )


def test_only_the_norm_of_attention_is_missing():
    encoder = build.shapes(build.build(MODEL))["params"]["encoder"]
    assert {name for name in encoder["dense_blocks"] if "norm" in name} == {"ffn_norm"}
    assert {name for name in encoder["blocks"] if "norm" in name} == {"attention_norm", "ffn_norm"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": NormConfig(order="post")}, "norm.order: got 'post', expected pre where first_norm is False"),
        ({"residual_after_norm": True}, "residual_after_norm: got True, expected False where first_norm"),
        ({"share_layers": True}, "share_layers: got True, expected False where first_norm"),
        ({"sublayers": "parallel"}, "sublayers: got 'parallel', expected sequential where first_norm"),
        ({"moe": MoEConfig()}, "moe: got 'a section', expected None where first_norm"),
    ],
)
def test_what_has_no_such_layer_is_refused(changes, message):
    stack = dataclasses.replace(STACK, **changes)
    with pytest.raises(ConfigError, match=message):
        check_stack(stack, "config.model.encoder", Config(model=MODEL))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (
            HeadConfig(kind="none", tied=False, transform=True),
            "head.transform: got True, expected False with head.kind",
        ),
        (dataclasses.replace(MODEL.head, width=8), "head.transform: got True, expected False with another layer"),
        (HeadConfig(transform_bias=False), "head.transform_bias: got False, expected True where head.transform is"),
        (HeadConfig(transform_norm_bias=False), "head.transform_norm_bias: got False, expected True where"),
    ],
)
def test_a_transform_that_would_not_act_is_refused(head, message):
    with pytest.raises(ConfigError, match=message):
        check_model(dataclasses.replace(MODEL, head=head))


def test_parts_that_need_layers_of_one_form_refuse_others():
    config = Config(model=MODEL)
    check_model(MODEL)
    sizes = {"data": 1, "fsdp": 1, "tensor": 1, "context": 1, "expert": 1, "stage": 3}
    with pytest.raises(ConfigError, match=r"mesh.stage: got 3, expected 1 for encoder.first_norm"):
        mesh_checks.check_divisibility(config, sizes)


def test_the_diagram_shows_each_layer_with_its_norms_and_windows():
    (column,) = drawing.diagram(MODEL, "toy").columns
    first, others = column.layers
    assert (first.count, others.count) == (1, 2)
    assert [block.name for block in first.groups[0].blocks] == ["self-attention"]
    assert [block.name for block in others.groups[0].blocks] == ["layer norm", "self-attention"]
    words = [layer.groups[0].blocks[-1].detail[0] for layer in column.layers]
    assert ["window" in each for each in words] == [False, True]


def one_step(mesh):
    """Parameters before and after a step of gradient descent on a mesh."""
    task = TaskConfig(name="classification")
    config = Config(model=MODEL, task=task, optimizer=OptimizerConfig(name="sgd", momentum=0.0, clip=None), mesh=mesh)
    config = dataclasses.replace(config, schedule=ScheduleConfig(kind="constant", peak=0.5, warmup=1))
    made = meshes.make(mesh, jax.devices()[: math.prod((mesh.data, mesh.fsdp, mesh.tensor))])
    module, variables = builders.make(MODEL)
    schedule = optim.schedule(config.schedule, 10, 8)
    with jax.set_mesh(made):
        names = build.logical_names(module)
        params = variables["params"]
        optimizer = optim.optimizer(config.optimizer, schedule, params, names)
        update = step.make_train_step(config, module, tasks.get("classification"), optimizer, schedule, made)
        state = step.TrainState(np.int32(0), params, jax.jit(optimizer.init)(params), jax.random.key(1), {})
        state = jax.device_put(state, step.state_shardings(config, module, optimizer, made))
        before = jax.device_get(params)
        state, _ = update(state, step.shard_batch(builders.batch(MODEL, [5, 3, 4, 2, 1, 5, 3, 4]), made))
        return before, jax.device_get(state.params)


def test_eight_devices_train_the_parameters_as_one_does():
    before, after = one_step(MeshConfig(data=2, fsdp=2, tensor=2))
    assert {name for name in before["encoder"]["dense_blocks"] if "norm" in name} == {"ffn_norm"}
    assert before["encoder"]["blocks"]["attention_norm"]["scale"].shape == (2, 8)
    assert set(before["head"]["transform"]) == {"kernel"}
    assert set(before["head"]["transform_norm"]) == {"scale"}
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), before, after)
    assert all(jax.tree.leaves(moved["encoder"]["dense_blocks"]["ffn"] | moved["head"]))
    _, alone = one_step(MeshConfig(data=1))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), after, alone)
