"""Pictures as values: each against what the model itself computes, or against sums by hand; refusals in one line."""

from __future__ import annotations

import dataclasses

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxformer import registry
from jaxformer.analysis.draw import diagram, masks, model, positions, schedule
from jaxformer.analysis.draw.panels import Curves, Heat
from jaxformer.config import (
    AttentionConfig,
    Config,
    ConfigError,
    DataConfig,
    EmbedConfig,
    EncodingConfig,
    GeneratorConfig,
    HeadConfig,
    LatentConfig,
    LinearConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    PermutationConfig,
    RecurrentConfig,
    ScheduleConfig,
    SeriesConfig,
    TaskConfig,
    TrainConfig,
)
from jaxformer.models import build
from jaxformer.nn import encodings
from jaxformer.nn.attention import Attention
from jaxformer.nn.encodings.sinusoidal import sinusoids
from jaxformer.nn.masks import slots_from_segments
from jaxformer.plan import flops, pictures
from jaxformer.tasks import permutation_lm
from jaxformer.train import optim


def config_of(model_config: ModelConfig, task: str = "translation", **data) -> Config:
    return Config(model=model_config, task=TaskConfig(name=task), data=DataConfig(**({"length": 16} | data)))


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def windowed():
    """An encoder with a window in its second layer and a causal decoder, on a packed row, and what they attend to."""
    bare = {"ffn": None, "norm": NormConfig(kind="none")}  # compiling takes time by the parameter
    attention = AttentionConfig(heads=2, bias=False, kernel="dense")
    encoder = builders.stack(attention=dataclasses.replace(attention, window=3, window_every=2), **bare)
    decoder = builders.stack(attention=attention, layers=1, **bare)
    config = config_of(ModelConfig(encoder=encoder, decoder=decoder), packing="first_fit")
    batch = masks.example_batches(config, 12)["packed"]
    module, variables = builders.make(config.model)
    call = jax.jit(lambda variables, batch: module.apply(variables, batch, mutable=["intermediates"])[1])
    return config, batch, call(variables, batch)["intermediates"]


def visible(sown, *path) -> np.ndarray:
    """Which keys have a probability above 0 in every layer, `[L, T, S]`; all of them where padding sees nothing."""
    for name in path:
        sown = sown[name]
    return np.asarray(sown["probabilities"][0])[:, 0, 0] > 0


def test_masks_are_what_the_layers_attend_to(windowed):
    config, batch, sown = windowed
    picture = masks.masks(config, "toy", 12)
    assert [panel.title for panel in picture.rows[0]] == [
        "encoder, packed, all keys (layer 1)",
        "encoder, packed, window 3 (layer 2)",
        "decoder, packed, causal",
        "cross-attention, packed",
    ]
    every, window, causal, cross = (panel.values for panel in picture.rows[0])
    attended = visible(sown, "encoder", "blocks", "attention")
    real = np.asarray(batch.source.slots.segment)[0] > 0
    np.testing.assert_array_equal(every[real], attended[0][real])
    np.testing.assert_array_equal(window[real], attended[1][real])
    assert every.sum() > window.sum() > 0
    real = np.asarray(batch.target.slots.segment)[0] > 0
    np.testing.assert_array_equal(causal[real], visible(sown, "decoder", "blocks", "attention")[0][real])
    np.testing.assert_array_equal(cross[real], visible(sown, "decoder", "blocks", "cross")[0][real])
    assert not causal[~real].any()
    assert picture.rows[0][3].boundaries[0] != picture.rows[0][3].boundaries[1], "sources are shorter"
    assert picture.rows[1][0].title.startswith("encoder, padded")


def test_a_prefix_is_seen_by_all_and_running_text_has_no_padding():
    config = config_of(builders.decoder(), "prefix_lm", packing="concat")
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, prefix=0.5))
    (heat,) = masks.masks(config, "toy", 9).rows[0]
    expected = np.tril(np.ones((9, 9), bool))
    expected[:, :5] = True
    np.testing.assert_array_equal(heat.values, expected)
    assert heat.title == "decoder, running text, causal, prefix"


def test_both_streams_of_a_permutation_see_by_the_order():
    encoder = builders.stack(encoding=EncodingConfig("transformer_xl"), norm=NormConfig(order="post"))
    permuted = ModelConfig(encoder=encoder, permutation=PermutationConfig())
    config = config_of(permuted, permutation_lm.NAME, packing="concat")
    content, query = masks.masks(config, "toy", 12).rows[0]
    features = permutation_lm.permuted(config, np.ones(12, np.int32), np.arange(12), np.random.default_rng(0))
    order, targets = features["order"], [slot for slot in features["targets"] if slot >= 0]
    sees = (order[None, :] == 0) | (order[None, :] < order[:, None])
    np.testing.assert_array_equal(content.values, sees | np.eye(12, dtype=bool))
    np.testing.assert_array_equal(query.values, sees[targets])
    assert len(targets) == 2


def test_windows_show_and_a_series_has_its_patches_as_slots():
    far = builders.decoder(attention=AttentionConfig(heads=2, window=40))
    assert masks.masks(config_of(far, "language_modelling", length=500), "toy").rows[0][0].values.shape == (80, 80)
    series = ModelConfig(
        encoder=builders.stack(), series=SeriesConfig(channels=2, patch=4, stride=2), head=HeadConfig("forecast")
    )
    heat = masks.masks(config_of(series, "forecasting", length=16, horizon=4), "toy").rows[0][0]
    assert heat.values.shape == (8, 8)
    assert heat.values[:6, :6].all()
    assert heat.values.sum() == 36


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ModelConfig(recurrent_encoder=RecurrentConfig()), "got a recurrent model, expected an encoder or decoder"),
        (builders.encoder(layers=0), "got no layers of attention"),
        (ModelConfig(), "got no layers of attention"),
    ],
)
def test_models_without_attention_have_no_masks(config, words):
    with pytest.raises(ConfigError, match=words):
        masks.masks(config_of(config), "toy")


# --- positions --------------------------------------------------------------------------------------------------------


def positions_of(kind: str, side: str = "decoder", length: int = 12, params=None, **edits):
    stack = builders.stack(encoding=EncodingConfig(kind, **edits), attention=AttentionConfig(heads=4))
    config = config_of(ModelConfig(**{side: stack}))
    return stack, positions.positions(config, "toy", length, params).rows[0]


def test_sinusoids_and_their_products_are_the_codes_that_are_added():
    stack, (codes, products) = positions_of("sinusoidal", base=100.0)
    expected = np.asarray(sinusoids(jnp.arange(12), stack.width, 100.0))
    np.testing.assert_allclose(codes.values, expected, rtol=1e-6)
    np.testing.assert_allclose(products.values, expected @ expected.T, rtol=1e-5, atol=1e-6)


def test_two_stacks_with_the_same_positions_are_drawn_once():
    both = ModelConfig(encoder=builders.stack(), decoder=builders.stack())
    picture = positions.positions(config_of(both), "toy")
    assert len(picture.rows) == 1
    assert picture.summary == ["encoder and decoder: rope, 16 positions"]
    t5 = builders.stack(encoding=EncodingConfig("t5"))
    assert len(positions.positions(config_of(ModelConfig(encoder=t5, decoder=t5)), "toy").rows) == 2, "one is causal"


def scores_by_distance(stack, length: int) -> np.ndarray:
    """The scores of the last query with each key in the model's own attention, for equal queries and keys."""
    attention = Attention(stack.attention, stack.encoding, stack.width)
    encoding = encodings.get(stack.encoding.kind)
    width = stack.width // stack.attention.heads

    @jax.jit
    def scores(segments):
        slots = slots_from_segments(segments)
        shared = encoding.shared(stack.encoding, stack.attention, width).apply({}, slots)
        q = k = jnp.ones((1, length, stack.attention.heads, width))
        if encoding.rotate is not None:
            q, k = encoding.rotate(stack.encoding, q, shared), encoding.rotate(stack.encoding, k, shared)
        scores = jnp.einsum("bthk,bshk->bhts", q, k) * attention.config.scale
        if encoding.bias is not None:
            scores += encoding.bias(stack.encoding, shared, q, k, slots.position, slots.position)
        return scores

    return np.asarray(scores(np.ones((1, length), np.int32)))[0, :, -1, ::-1]


def test_rope_and_alibi_decay_as_scores_do():
    stack, (angles, decay) = positions_of("rope")
    scores = scores_by_distance(stack, 12)
    np.testing.assert_allclose(decay.curves[""], scores[0] / scores[0, 0], atol=1e-5)
    assert angles.values.shape == (12, 1)
    stack, (bias, factor) = positions_of("alibi", "encoder")
    scores = scores_by_distance(stack, 12)
    for head in range(4):
        np.testing.assert_allclose(bias.curves[f"head {head + 1}"], scores[head] - scores[head, 0], atol=1e-5)
        np.testing.assert_allclose(factor.curves[f"head {head + 1}"], np.exp(scores[head] - scores[head, 0]), rtol=1e-4)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_t5_buckets_are_the_rows_that_the_bias_reads(side):
    """A table whose row r is r makes the model's bias the bucket itself."""
    stack, (heat, curve) = positions_of("t5", side, buckets=8, max_distance=6)
    table = np.tile(np.arange(8.0, dtype=np.float32)[:, None], (1, 4))
    config = dataclasses.replace(stack.encoding, bidirectional=side == "encoder")
    place = np.arange(12, dtype=np.int32)[None]
    x = np.zeros((1, 12, 4, 2), np.float32)
    bias = jax.jit(lambda *shared: encodings.get("t5").bias(config, *shared, x, x, place, place))(table)
    np.testing.assert_array_equal(heat.values, np.asarray(bias)[0, 0])
    np.testing.assert_array_equal(curve.curves[""], [*heat.values[-1], *heat.values[0, 1:]])
    assert curve.x.tolist() == list(range(-11, 12))
    learned = positions_of("t5", side, params={side: {"shared": {"table": table}}}, buckets=8, max_distance=6)[1][2]
    np.testing.assert_array_equal(learned.curves["head 3"], curve.curves[""])


def test_deberta_rows_are_those_that_scores_gather():
    """Keys of one channel whose projected table holds the row's number: the score is the row."""
    stack, (heat, curve) = positions_of("deberta", buckets=4, max_distance=10, position_to_content=False)
    rows = np.arange(8, dtype=np.float32)[:, None, None]
    ones = np.ones((1, 12, 1, 1), np.float32)

    @jax.jit
    def gathered(rows, place):
        projected = encodings.deberta.Projected(rows, None)
        return encodings.get("deberta").bias(stack.encoding, projected, ones, ones, place, place)

    bias = gathered(rows, np.arange(12, dtype=np.int32)[None])
    np.testing.assert_array_equal(heat.values, np.asarray(bias)[0, 0])
    np.testing.assert_array_equal(curve.curves[""], [*heat.values[0, ::-1], *heat.values[1:, 0]])


def test_transformer_xl_codes_stop_at_the_clamp():
    stack, (heat, products) = positions_of("transformer_xl", "encoder", clamp=3)
    assert heat.values.shape == (23, stack.width)
    assert heat.first_row == -11
    expected = np.asarray(sinusoids(jnp.arange(-3, 4), stack.width, 10000.0, concatenated=True))
    np.testing.assert_allclose(heat.values[8:15], expected, rtol=1e-6)
    np.testing.assert_array_equal(heat.values[0], heat.values[8])
    np.testing.assert_allclose(products.curves[""], heat.values @ heat.values[11], rtol=1e-5)


def test_learned_positions_need_a_run_and_are_its_table():
    with pytest.raises(ConfigError, match=r"learned positions of the decoder, .* give --workdir=DIR"):
        positions_of("learned")
    table = np.random.default_rng(0).normal(size=(512, 8)).astype(np.float32)
    _, (codes, products) = positions_of("learned", params={"decoder": {"position": {"table": table}}})
    np.testing.assert_array_equal(codes.values, table[:12])
    np.testing.assert_allclose(products.values, table[:12] @ table[:12].T, rtol=1e-5)


def test_beside_positions_that_can_be_drawn_learned_ones_are_left_out():
    both = ModelConfig(encoder=builders.stack(encoding=EncodingConfig("learned")), decoder=builders.stack())
    picture = positions.positions(config_of(both), "toy")
    assert len(picture.rows) == 1
    assert picture.summary[0] == "encoder: learned, drawn of a run only; give --workdir=DIR"


OUTSIDE = """
import jax.numpy as jnp
from jaxformer.nn.encodings import Encoding

def bias(config, shared, q, k, query_position, key_position):
    same = query_position[:, None, :, None] == key_position[:, None, None, :]
    return jnp.tile(jnp.where(same, 2.5, 0.0), (1, q.shape[2], 1, 1)).astype(jnp.float32)

ENCODING = Encoding(bias=bias)
"""


def test_an_encoding_from_outside_shows_its_bias(tmp_path, monkeypatch):
    (tmp_path / "drawn_outside.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    _, panels = positions_of("drawn_outside")
    assert [panel.title for panel in panels] == [f"decoder: bias of head {head}" for head in (1, 2, 3)]
    np.testing.assert_array_equal(panels[0].values, 2.5 * np.eye(12))


@pytest.mark.parametrize(
    "config",
    [
        builders.decoder(encoding=EncodingConfig("none")),
        ModelConfig(),
        ModelConfig(recurrent_decoder=RecurrentConfig()),
    ],
)
def test_models_without_positions_are_refused(config):
    with pytest.raises(ConfigError, match=r"^draw positions: got .*expected a stack with a position encoding"):
        positions.positions(config_of(config), "toy")


# --- schedule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", optim.SCHEDULES)
def test_the_schedule_is_the_rate_of_each_update(kind):
    settings = ScheduleConfig(kind=kind, warmup=7, peak=0.5, floor=0.1)
    config = dataclasses.replace(config_of(builders.decoder()), schedule=settings, train=TrainConfig(steps=30))
    (curve,) = schedule.schedule(config, "toy").rows[0]
    rate = optim.schedule(settings, 30, 8)
    assert curve.x.tolist() == list(range(1, 31))
    np.testing.assert_allclose(curve.curves[""][[0, 6, 7, 29]], [float(rate(n)) for n in (0, 6, 7, 29)], rtol=1e-6)
    assert curve.marks == ((7.0, "end of the warm-up"),)


def test_a_long_schedule_keeps_its_corners():
    settings = ScheduleConfig(kind="linear", warmup=123_457)
    config = dataclasses.replace(config_of(builders.decoder()), schedule=settings, train=TrainConfig(steps=10**6))
    (curve,) = schedule.schedule(config, "toy").rows[0]
    assert len(curve.x) <= schedule.MAX_POINTS + 1
    assert {1, 123_457, 10**6} <= set(curve.x.tolist())


def test_what_is_never_trained_has_no_schedule():
    with pytest.raises(ConfigError, match="got task.name none"):
        schedule.schedule(config_of(builders.decoder(), "none"), "toy")
    noam = dataclasses.replace(config_of(ModelConfig()), schedule=ScheduleConfig(kind="noam"))
    with pytest.raises(ConfigError, match="noam without a model"):
        schedule.schedule(noam, "toy")


# --- the model and its FLOPs ------------------------------------------------------------------------------------------

POST = NormConfig(order="post")
FAMILIES = {
    "encoder": builders.encoder(encoding=EncodingConfig("learned", max_length=9)),
    "decoder": builders.decoder(norm=NormConfig(kind="rms", order="sandwich"), encoding=EncodingConfig("t5")),
    "seq2seq": builders.seq2seq(norm=POST),
    "norms on outputs": builders.decoder(
        norm=NormConfig(kind="rms", order="res_post"),
        attention=AttentionConfig(heads=2, norm=NormConfig("rms"), norm_over="heads"),
    ),
    "experts": builders.decoder(moe=MoEConfig(experts=3, shared=1)),
    "dense layers first": builders.decoder(
        layers=3,
        moe=MoEConfig(experts=3, shared=1, dense_layers=1, dense_width=24),
        attention=AttentionConfig(heads=2, latent=LatentConfig(4, content_width=4, rope_width=2)),
    ),
    "copying": dataclasses.replace(builders.seq2seq(), head=HeadConfig(copy=True)),
    "unlike widths": dataclasses.replace(builders.seq2seq(), encoder=builders.stack(width=12), share_embeddings=False),
    "rnn": ModelConfig(
        recurrent_encoder=RecurrentConfig(width=8, bidirectional=True, layers=2, embed=builders.stack().embed),
        recurrent_decoder=RecurrentConfig(width=8, attention="additive", embed=builders.stack().embed),
    ),
    "xlnet": ModelConfig(
        encoder=builders.stack(encoding=EncodingConfig("transformer_xl"), norm=POST), permutation=PermutationConfig()
    ),
    "electra": ModelConfig(
        encoder=builders.stack(),
        generator=GeneratorConfig(encoder=builders.stack(), head=HeadConfig(transform=True)),
        head=HeadConfig("slots", classes=2),
    ),
    "narrow table": builders.decoder(embed=EmbedConfig(vocab=builders.VOCAB, width=4), output_width=4),
    "parallel": builders.decoder(sublayers="parallel_one_norm"),
    "series": ModelConfig(
        encoder=builders.stack(norm=NormConfig(kind="batch")),
        series=SeriesConfig(channels=2, patch=4, normalise="instance", affine=True),
        head=HeadConfig("forecast", look_back=16, horizon=4),
    ),
    "linear": ModelConfig(
        linear=LinearConfig(trend=3),
        series=SeriesConfig(channels=2),
        head=HeadConfig("forecast", look_back=16, horizon=4),
    ),
    "words": builders.encoder(layers=0, encoding=EncodingConfig("none"), norm=NormConfig(kind="none")),
    "deberta": builders.encoder(encoding=EncodingConfig("deberta"), norm=POST),
}


def shapes_of(config: ModelConfig):
    module = build.build(config)
    return nn.meta.unbox(build.shapes(module))["params"], build.logical_names(module)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_counts_of_a_diagram_are_those_of_the_model(family):
    config = FAMILIES[family]
    params, names = shapes_of(config)
    drawn = model.diagram(config, family)
    assert drawn.parameters == build.count_params(params) > 0
    text = diagram.to_text(drawn, 80)
    assert text.splitlines()[-1].split()[-1] == f"{drawn.parameters:,}"
    assert max(map(len, text.splitlines())) <= 80
    full = dataclasses.replace(config_of(config), model=config)
    blocks = flops.by_block(full, params, names, 16)
    assert sum(blocks.values()) == pytest.approx(flops.flops_per_token(full, params, names, 16))
    assert "position" not in " ".join(blocks)


def test_blocks_stand_in_the_order_of_computation_with_their_own_counts():
    width, ffn, vocab = 8, 16, builders.VOCAB
    drawn = model.diagram(builders.decoder(), "toy")
    (column,) = drawn.columns
    assert [block.name for block in column.before] == ["embedding"]
    groups = [([block.name for block in group.blocks], group.residual) for group in column.layers[0].groups]
    assert groups == [(["layer norm", "self-attention"], True), (["layer norm", "feed-forward"], True)]
    attention, feed_forward = column.layers[0].groups[0].blocks[1], column.layers[0].groups[1].blocks[1]
    assert attention.parameters == 4 * width * width + 4 * width
    assert feed_forward.parameters == 2 * width * ffn + ffn + width
    assert attention.detail[0] == "2 heads, rope"
    assert "query  D x H x K = 8 x 2 x 4" in attention.detail
    assert column.layers[0].count == 2
    assert column.before[0].parameters == vocab * width
    assert [block.name for block in column.after] == ["layer norm", "head"]
    (column,) = model.diagram(builders.encoder(norm=POST, residual_ffn=False), "toy").columns
    groups = [([block.name for block in group.blocks], group.residual) for group in column.layers[0].groups]
    expected = [(["self-attention"], True), (["layer norm"], False), (["feed-forward"], False), (["layer norm"], False)]
    assert groups == expected
    (column,) = model.diagram(FAMILIES["decoder"], "toy").columns
    assert [block.name for block in column.layers[0].groups[0].blocks] == ["rms norm", "self-attention", "rms norm"]
    (column,) = model.diagram(FAMILIES["norms on outputs"], "toy").columns
    assert [block.name for block in column.layers[0].groups[0].blocks] == ["self-attention", "rms norm"]


def test_parallel_sublayers_windows_of_some_layers_and_a_last_projection_are_named():
    (column,) = model.diagram(FAMILIES["parallel"], "toy").columns
    assert [[block.name for block in group.blocks] for group in column.layers[0].groups] == [
        ["layer norm", "self-attention"],
        ["feed-forward"],
    ]
    assert column.layers[0].groups[1].blocks[0].detail[1] == "beside attention: reads what it reads"
    attention = AttentionConfig(heads=2, window=3, window_layers=(1,))
    config = builders.decoder(attention=attention, residual_after_norm=True)
    detail = model.diagram(config, "toy").columns[0].layers[0].groups[0].blocks[1].detail
    assert detail[:2] == ("2 heads, rope, window 3 in layer 2", "the residual starts after the norm")
    (column,) = model.diagram(FAMILIES["narrow table"], "toy").columns
    assert [block.name for block in column.after] == ["layer norm", "last projection", "head"]


def test_dense_layers_before_experts_copying_and_the_projection_between_unlike_widths_have_their_places():
    (column,) = model.diagram(FAMILIES["dense layers first"], "toy").columns
    dense, experts = column.layers
    assert (dense.count, experts.count) == (1, 2)
    assert [each.groups[-1].blocks[-1].name for each in column.layers] == ["feed-forward", "mixture of experts"]
    assert "in  D x F = 8 x 24" in dense.groups[-1].blocks[-1].detail
    assert "keys and values from 4 latent channels" in dense.groups[0].blocks[-1].detail[0]
    drawn = model.diagram(FAMILIES["copying"], "toy")
    assert [block.name for block in drawn.columns[-1].after[-2:]] == ["head", "copying"]
    encoder, _ = model.diagram(FAMILIES["unlike widths"], "toy").columns
    projection = encoder.after[-1]
    assert (projection.name, projection.parameters) == ("projection to the decoder's width", 12 * 8 + 8)


def test_columns_and_the_arrow_between_them():
    drawn = model.diagram(FAMILIES["seq2seq"], "toy")
    assert [column.title for column in drawn.columns] == ["encoder", "decoder"]
    assert drawn.arrow == "memory"
    assert drawn.columns[1].before[0].detail == ("the encoder's table",)
    assert [group.blocks[0].kind for group in drawn.columns[1].layers[0].groups[::2]] == ["attention", "cross", "ffn"]
    drawn = model.diagram(FAMILIES["electra"], "toy")
    assert ([column.title for column in drawn.columns], drawn.arrow) == (["generator", "encoder"], "tokens")
    drawn = model.diagram(FAMILIES["rnn"], "toy")
    assert [block.is_aside for block in drawn.columns[1].after] == [True, True, False, False]
    assert [block.name for block in drawn.columns[0].after] == ["lstm layer 1", "lstm layer 2"]


def test_flops_by_block_of_a_small_decoder_by_hand():
    config = config_of(builders.decoder(), "language_modelling")
    bars, curves = (row[0] for row in pictures.flops(config, "toy").rows)
    layers, width, ffn = 2, 8, 16
    assert bars.values == {
        "decoder attention": 6 * layers * 4 * width * width,
        "decoder ffn": 6 * layers * 2 * width * ffn,
        "head (tied to the embedding)": 6 * builders.VOCAB * width,
        "decoder attention scores": 12 * layers * width * 16,
    }
    assert list(bars.values.values()) == sorted(bars.values.values(), reverse=True)
    crossing = np.interp(16, curves.x, curves.curves["attention scores"])
    assert crossing == pytest.approx(bars.values["decoder attention scores"], rel=0.05)


def test_every_encoding_of_the_project_has_panels_that_figures_can_draw():
    assert set(positions.PANELS) | {"none"} == set(registry.names("jaxformer.nn.encodings"))
    for kind in set(positions.PANELS) - {"learned"}:
        for panel in positions_of(kind, "encoder")[1]:
            if isinstance(panel, Heat):
                assert panel.values.ndim == 2
            elif isinstance(panel, Curves):
                assert all(values.shape == panel.x.shape for values in panel.curves.values())
