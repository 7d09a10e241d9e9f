"""A first layer without a norm of its attention (`first_norm`), and heads of classes with a transform."""

import dataclasses

import pytest

from jaxformer.analysis.draw import model as drawing
from jaxformer.config import (
    AdapterConfig,
    AttentionConfig,
    Config,
    ConfigError,
    EmbedConfig,
    EncodingConfig,
    HeadConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    OptimizerConfig,
    StackConfig,
)
from jaxformer.config.checks import mesh as mesh_checks
from jaxformer.config.checks.model import check_model, check_stack
from jaxformer.config.checks.sections import check_train
from jaxformer.nn.stack import split_layers

STACK = StackConfig(
    layers=3, width=8, first_norm=False, embed=EmbedConfig(vocab=11), encoding=EncodingConfig("rope"),
    attention=AttentionConfig(heads=2, window=2, window_layers=(1, 2)), unroll=1,
)  # fmt: skip
MODEL = ModelConfig(
    encoder=STACK,
    head=HeadConfig("classes", False, classes=3, transform=True, transform_bias=False, transform_norm_bias=False),
)


def test_the_first_layer_alone_goes_without():
    first, others = split_layers(STACK)
    assert (first.layers, first.first_norm, others.layers, others.first_norm) == (1, False, 2, True)
    alone = dataclasses.replace(STACK, layers=1)
    assert split_layers(alone) == (None, alone)
    assert (STACK.first_layers, alone.first_layers, dataclasses.replace(STACK, first_norm=True).first_layers) == (
        1,
        0,
        0,
    )



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
        (HeadConfig(kind="none", tied=False, transform=True), "head.transform: got True, expected False with head.kind"),
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
    with pytest.raises(ConfigError, match=r"first_norm: got False, expected True with adapter.layers"):
        check_model(dataclasses.replace(MODEL, adapter=AdapterConfig(layers=(1,))))
    with pytest.raises(ConfigError, match=r"layer_decay: got 0.5, expected 1 for encoder.first_norm"):
        check_train(dataclasses.replace(config, optimizer=OptimizerConfig(layer_decay=0.5)))


def test_the_diagram_shows_each_layer_with_its_norms_and_windows():
    (column,) = drawing.diagram(MODEL, "toy").columns
    first, others = column.layers
    assert (first.count, others.count) == (1, 2)
    assert [block.name for block in first.groups[0].blocks] == ["self-attention"]
    assert [block.name for block in others.groups[0].blocks] == ["layer norm", "self-attention"]
    words = [layer.groups[0].blocks[-1].detail[0] for layer in column.layers]
    assert ["window" in each for each in words] == [False, True]


def test_parameters_and_gradients_are_the_same_on_eight_devices():
    module, variables = builders.make(MODEL)
    params = variables["params"]
    assert "attention_norm" not in params["encoder"]["dense_blocks"]
    assert params["encoder"]["blocks"]["attention_norm"]["scale"].shape == (2, 8)
    assert set(params["head"]["transform"]) == {"kernel"} and set(params["head"]["transform_norm"]) == {"scale"}
