"""Variants of DeBERTa that no golden checkpoint has: each config reads back, and rows fill every parameter."""

import re

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxformer.config import ConfigError
from jaxformer.hf.families import deberta, deberta_v2
from jaxformer.hf.outputs import compute_loss
from jaxformer.hf.table import Settings
from jaxformer.models import build

SIZES = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
}
RELATIVE = {**SIZES, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
VARIANTS = [
    (deberta, "masked_lm", {**RELATIVE, "position_biased_input": True, "type_vocab_size": 2, "legacy": False}),
    (deberta, "sequence", {**RELATIVE, "pos_att_type": "c2p", "embedding_size": 6, "max_relative_positions": 5}),
    (deberta, "qa", SIZES),
    (deberta_v2, "model", {**RELATIVE, "conv_kernel_size": 5, "conv_groups": 2}),
    (deberta_v2, "masked_lm", {**RELATIVE, "pos_att_type": "p2c", "share_att_key": True, "norm_rel_ebd": "layer_norm"}),
    (deberta_v2, "token", {**RELATIVE, "position_buckets": 6, "pos_att_type": ["p2c"], "id2label": {"0": "A"}}),
]


@pytest.mark.parametrize(("family", "head", "values"), VARIANTS)
def test_configs_read_back_and_rows_fill_every_parameter(family, head, values):
    family = family.FAMILY
    model = family.read_config(Settings(values), head)
    written = {**family.write_config(model, head), "id2label": values.get("id2label")}
    assert family.read_config(Settings(written), head) == model
    module = build.build(model)
    shapes = nn.meta.unbox(jax.eval_shape(lambda key: build.init_variables(module, key), jax.random.key(0)))["params"]
    paths = [path for row in family.rows(model, head) for path in row.param_paths]
    assert sorted(paths) == sorted(flax.traverse_util.flatten_dict(shapes, sep="/"))


def test_settings_become_the_fields_that_compute_them():
    model = deberta_v2.read_config(Settings({**RELATIVE, "position_buckets": 6, "conv_kernel_size": 3}), "model")
    stack = model.encoder
    assert (stack.conv.kernel, stack.conv.groups, stack.conv.activation) == (3, 1, "tanh")
    assert (stack.encoding.buckets, stack.encoding.max_distance, stack.encoding.norm) == (6, 16, None)
    assert stack.encoding.content_to_position and stack.encoding.position_to_content
    assert not stack.encoding.share_projections and not stack.encoding.absolute
    assert deberta.read_config(Settings(RELATIVE), "model").encoder.attention.key_bias is False
    encoding = lambda values: deberta.read_config(Settings(values), "model").encoder.encoding  # noqa: E731
    assert encoding({**RELATIVE, "max_relative_positions": 5}).max_distance == 5
    assert encoding(SIZES).kind == "learned"
    assert encoding({**SIZES, "position_biased_input": False}).kind == "none"


@pytest.mark.parametrize(
    ("head", "values", "message"),
    [
        ("model", {**RELATIVE, "pos_att_type": ["p2p"]}, r"pos_att_type \['p2p'\]"),
        ("model", {**RELATIVE, "relative_attention": False}, "with relative_attention False"),
        ("model", {**RELATIVE, "pos_att_type": None}, "with relative_attention True"),
        ("model", {**RELATIVE, "embedding_size": 6, "type_vocab_size": 2}, "embedding_size 6 with"),
        ("masked_lm", {**RELATIVE, "embedding_size": 6}, "embedding_size 6 with a masked"),
        ("sequence", {**RELATIVE, "pooler_hidden_size": 6}, "pooler_hidden_size 6"),
        ("model", {**RELATIVE, "attention_head_size": 6}, "attention_head_size 6"),
    ],
)
def test_variants_that_are_not_computed_are_refused(head, values, message):
    for family in (deberta, deberta_v2):
        with pytest.raises(ConfigError, match=message):
            family.read_config(Settings(values), head)


def test_labels_without_a_problem_type_are_classes_or_shares_of_them():
    """The loss of the library's classes; negative classes are left out."""
    logits = jnp.array([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0]])
    logs, settings = np.asarray(jax.nn.log_softmax(logits)), Settings({})
    shares = np.array([[0.5, 0.5, 0.0], [1.0, 1.0, 0.0]], np.float32)
    labels = {
        -(logs * shares).sum(1).mean(): shares, -logs[1, 2]: [-1, 2], -(logs[0, 1] + logs[1, 0]) / 2: [[1.0], [0.0]],
        0.0: [-1, -100],
    }  # fmt: skip
    for expected, given in labels.items():
        given = {"labels": np.asarray(given)}
        for family in (deberta, deberta_v2):
            shared = family.FAMILY.convention.labels_are_shares
            np.testing.assert_allclose(compute_loss("sequence", settings, logits, given, shared), expected, rtol=1e-6)
    single = Settings({"problem_type": "single_label_classification"})
    given = {"labels": np.array([1, 0])}
    np.testing.assert_allclose(
        compute_loss("sequence", single, logits, given, True), -(logs[0, 1] + logs[1, 0]) / 2, 1e-6
    )
    with pytest.raises(ConfigError, match=r"labels of shape \[3\], expected \[3, 3\]: a number for each output"):
        compute_loss("sequence", Settings({}), jnp.zeros((3, 3)), {"labels": np.zeros(3, np.float32)})


def test_the_newer_head_has_the_older_names():
    name = "lm_predictions.lm_head.LayerNorm.weight"
    for old, new in deberta.FAMILY.renamed_tensors:
        name = re.sub(old, new, name)
    assert name == "cls.predictions.transform.LayerNorm.weight"
