"""Plans: figures against the compiler's own and against sums by hand, and refusals in one line."""

from __future__ import annotations

import dataclasses
import math

import jax
import pytest
from flax import linen as nn

from jaxformer import cli
from jaxformer.config import ConfigError, DcnConfig, HeadConfig, MeshConfig, OptimizerConfig, StackConfig, overrides
from jaxformer.config.overrides import defaults, section
from jaxformer.models import build
from jaxformer.parallel import collectives
from jaxformer.plan import chips, estimate, flops, page, program, search, shapes, step_time
from jaxformer.plan.chips import GIB

RECIPE = '''
"""A recipe of a test."""
from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section

def get_config():
    config = defaults()
    config.data.length, config.data.batch, config.data.packing = 16, 16, "concat"
    config.data.tokenizer.vocab = 60
    config.task.name = "language_modelling"
    config.optimizer.name, config.optimizer.momentum = "sgd", 0.0
    without = dict(bias=False)
    config.model.decoder = section(StackConfig, layers=1, width=16, attention=dict(heads=4) | without, ffn=without,
                                   norm=dict(kind="rms"))
    return config
'''


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return str(path)


def config_of(side: str = "decoder", length: int = 16, batch: int = 16, **edits):
    config = defaults()
    config.data.length, config.data.batch = length, batch
    config.data.tokenizer.vocab = 64
    config.task.name = {"decoder": "language_modelling", "encoder": "masked_lm"}[side]
    config.model[side] = section(StackConfig, **({"layers": 2, "width": 16} | edits))
    return overrides.freeze(config)


def traced(config, count: int, **mesh):
    config = dataclasses.replace(config, mesh=MeshConfig(**({"data": 1} | mesh)))
    return program.trace(config, program.build_mesh(config, jax.devices()[:count]))


# --- floating-point operations ----------------------------------------------------------------------------------------


def test_the_formula_is_what_the_compiler_counts_for_a_dense_model():
    """An encoder sees all keys, so that the formula leaves nothing out; loops are unrolled, which XLA counts once.

    The width is BERT's: XLA also counts what is no product, the polynomials of erf twice above all, whose share falls
    with it (1.2 to 1.4 % here, 1.7 to 2.0 % at 512).
    """
    config = config_of("encoder", length=128, batch=32, width=768, unroll=2, attention={"heads": 12})
    made = traced(config, 1)
    found = estimate.estimate(made, compiled := program.compile(made), chips.parse_hardware("", "", 1))
    theirs = compiled.executable.cost_analysis()["flops"]
    assert found.flops_per_step == pytest.approx(theirs, rel=0.015)
    assert found.counted_flops == pytest.approx(theirs, rel=0.015)


def test_the_count_follows_loops_recomputation_and_masks():
    plain = traced(config_of(), 1).counted_flops
    whole = traced(config_of(remat="full"), 1).counted_flops
    tokens, width, vocab = 16 * 16, 16, 64
    layer = 2 * tokens * (4 * width**2 + 8 * width**2 + 2 * 16 * width)  # the masked half is computed too
    assert plain == 3 * (2 * layer + 2 * tokens * width * vocab)
    # The second product of the scores' backward needs no forward of the last one: a layer is not computed twice whole.
    assert plain < whole <= plain + 2 * layer
    split = dataclasses.replace(config_of(), train=dataclasses.replace(config_of().train, accumulation=4))
    assert traced(split, 1).counted_flops == plain


def test_the_count_of_what_runs_on_every_device_and_of_kernels():
    from jax.experimental import pallas as pl

    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec("a", "b")

    def multiply(x, o):
        o[...] = x[...] @ x[...].T

    @jax.jit
    def product(x):
        return jax.shard_map(lambda x: x @ x.T, in_specs=spec, out_specs=spec)(x)

    @jax.jit
    def kernel(x):
        blocks = pl.BlockSpec((8, 16), lambda i: (i, 0))
        out = jax.ShapeDtypeStruct((32, 8), x.dtype)
        return pl.pallas_call(multiply, grid=(4,), in_specs=[blocks], out_specs=pl.BlockSpec((8, 8), lambda i: (i, 0)),
                              out_shape=out)(x)  # fmt: skip

    x = jax.ShapeDtypeStruct((32, 16), "float32")
    with jax.set_mesh(mesh):
        assert flops.count_flops(product.trace(x).jaxpr.jaxpr) == 4 * 2 * 16 * 16 * 8
    assert flops.count_flops(kernel.trace(x).jaxpr.jaxpr) == 4 * 2 * 8 * 8 * 16


def counts(config, length: int = 16) -> tuple[float, float, float]:
    """N, FLOPs a token over all keys, and over visible keys."""
    config = program.resolve(config)
    module = build.build(config.model)
    of = (config, nn.meta.unbox(build.shapes(module))["params"], build.logical_names(module))
    found = flops.flops_per_token(*of, length), flops.flops_per_token_visible(*of, length)
    return flops.matmul_parameters(*of), *found


DENSE = 4 * 16 * 16 + 2 * 16 * 64
"""Kernels of a layer of width 16: query, key, value, out; in, out."""
HEAD = 64 * 16


def test_palm_540b_has_its_published_parameters_and_utilisation():
    """Chowdhery et al. 2022: table 1, section 4.1 (238.3K tokens/s on 6,144 chips of 275 TFLOP/s), appendix B.

    46.2 % with self-attention, 45.7 % without.
    """
    config = config_of(
        length=2048, layers=118, width=18432, unroll=1, embed={"vocab": 256_000}, encoding={"kind": "rope"},
        attention={"heads": 48, "kv_heads": 1, "head_width": 256, "bias": False},
        ffn={"width": 4 * 18432, "gated": True, "activation": "silu", "bias": False},
    )  # fmt: skip
    parameters, per_token, visible = counts(config, 2048)
    assert parameters / 1e9 == pytest.approx(540.35, abs=0.005)
    of_peak = 238.3e3 / (6144 * 275e12)
    assert of_peak * per_token == pytest.approx(0.462, abs=0.0005)
    assert of_peak * 6 * parameters == pytest.approx(0.457, abs=0.0005)
    assert per_token - visible == 12 * 118 * 48 * 256 * (2048 - 2049 / 2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_by_hand(bias, tied):
    """Two layers, rows of 16: biases, norms and looked-up tables cost no product; the head does, tied or not."""
    config = config_of(attention={"heads": 4, "bias": bias}, ffn={"bias": bias})
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, head=HeadConfig(tied=tied)))
    n = 2 * DENSE + HEAD
    assert counts(config) == (n, 6 * n + 12 * 2 * 16 * 16, 6 * n + 12 * 2 * 16 * 8.5)


@pytest.mark.parametrize("shared", [True, False])
def test_an_encoder_and_a_decoder_by_hand(shared):
    """One and two layers; a layer of the decoder also attends to all of the source."""
    config = defaults()
    config.data.length, config.data.tokenizer.vocab = 16, 64
    config.task.name, config.model.share_embeddings = "translation", shared
    config.model.encoder = section(StackConfig, layers=1, width=16)
    config.model.decoder = section(StackConfig, layers=2, width=16)
    n = DENSE + 2 * (DENSE + 4 * 16 * 16) + HEAD
    keys, visible = 1 * 16 + 2 * (16 + 16), 1 * 16 + 2 * (8.5 + 16)
    assert counts(overrides.freeze(config)) == (n, 6 * n + 12 * 16 * keys, 6 * n + 12 * 16 * visible)


@pytest.mark.parametrize(
    ("side", "window", "visible"),
    [
        ("decoder", {}, 8.5),
        ("decoder", {"window": 4}, 4),
        ("decoder", {"window": 4, "window_every": 2}, 6.25),
        ("decoder", {"window": 4, "window_layers": (0,)}, 6.25),
        ("decoder", {"window": 99}, 8.5),
        ("encoder", {}, 16),
        ("encoder", {"window": 4}, 8),
    ],
)
def test_all_keys_count_whatever_the_mask_hides(side, window, visible):
    n = 2 * DENSE + HEAD
    config = config_of(side, attention={"heads": 4, **window})
    assert counts(config) == (n, 6 * n + 12 * 2 * 16 * 16, 6 * n + 12 * 2 * 16 * visible)


def test_a_mixture_of_experts_by_hand():
    """A token passes the router, 2 of 8 experts and the shared one."""
    config = config_of(moe={"experts": 8, "top_k": 2, "shared": 1})
    n = 2 * (4 * 16 * 16 + 16 * 8 + (2 + 1) * 2 * 16 * 64) + HEAD
    assert counts(config)[:2] == (n, 6 * n + 12 * 2 * 16 * 16)


@pytest.mark.parametrize("kind", ["learned", "transformer_xl", "deberta", "t5"])
def test_what_acts_on_positions_only_does_not_count(kind):
    config = config_of("encoder", encoding={"kind": kind}, embed={"kinds": 2})
    assert counts(config)[0] == 2 * DENSE + HEAD


def test_a_head_tied_to_the_only_embedding_counts_though_it_may_be_shared():
    config = config_of()
    model = dataclasses.replace(config.model, share_embeddings=True)
    assert counts(dataclasses.replace(config, model=model))[0] == 2 * DENSE + HEAD


def test_a_factorised_embedding_counts_on_the_way_in_and_in_the_head():
    assert counts(config_of(embed={"width": 8}))[0] == 2 * DENSE + 2 * 8 * 16 + 64 * 8
    config = defaults()
    config.task.name, config.data.tokenizer.vocab, config.model.share_embeddings = "translation", 64, True
    for side in ("encoder", "decoder"):
        config.model[side] = section(StackConfig, layers=1, width=16, embed={"width": 8})
    sides = 2 * DENSE + 4 * 16 * 16
    assert counts(overrides.freeze(config))[0] == sides + 3 * 8 * 16 + 64 * 8


# --- memory, traffic, time --------------------------------------------------------------------------------------------


def test_parts_of_memory_are_those_of_the_shards():
    made = traced(config_of(), 8, fsdp=4, tensor=2)
    state = estimate.state_bytes(made)
    blocks = 2 * (4 * 16 * 16 + 2 * 16 * 64)
    whole = 2 * 4 * 16 + 2 * 16  # norms lie on every device
    biases = 2 * (3 * 16 + 64) / 2 + 2 * 2 * 16 / 4
    assert state["parameters"] == 4 * ((blocks + 64 * 16) / 8 + whole + biases)
    assert state["optimizer"] == pytest.approx(2 * state["parameters"], rel=0.01)
    assert estimate.logits_bytes(made) == 4 * 16 * 16 * 64 / 8
    found = estimate.estimate(made, program.compile(made), chips.parse_hardware("", "", 8))
    assert found.fits
    assert found.needed_bytes == sum(found.memory.values())
    assert sum(found.memory[name] for name in state) == sum(state.values())
    assert {"all-gather", "all-reduce"} <= {kind for kind, _ in found.collectives}
    text = page.format_page("title", made, found)
    assert "16/fsdp x 4/tensor x 4" in text
    assert "fits: 0.00 of 74.51 GiB" in text
    words = [" ".join(line.split()) for line in text.splitlines()]
    assert "tokens in 1,000 steps 256,000 train.steps times that" in words
    n = 2 * DENSE + HEAD
    palm, visible = 6 * n + 12 * 2 * 16 * 16, 6 * n + 12 * 2 * 16 * 8.5
    assert f"FLOPs a token {palm:.3e} {flops.FORMULA}" in words
    assert f"over visible keys {visible:.3e} {flops.FORMULA_VISIBLE}" in words
    counted = "that times the tokens; MFU counts these, causal attention counts whole"
    assert f"FLOPs a step {palm * 16 * 16:.3e} {counted}" in words
    expected = step_time.step_seconds(
        shapes.training_shapes(made.config, made.state.params, made.names, found.parameters, 16),
        step_time.Layout({"fsdp": 4, "tensor": 2}), 16 * 16, found.hardware.chip,
    )  # fmt: skip
    assert found.expected == pytest.approx(expected)
    step = next(line for line in words[words.index("expected time of a step") :] if line.startswith("step "))
    assert f"{16 * 16 / found.expected_seconds:,.0f} tokens/s, MFU {found.mfu(found.expected_seconds):.1%};" in step
    row = found.row()
    assert row["expected"] == found.expected
    assert (row["flops_token"], row["flops_token_visible"], row["flops_step"]) == (palm, visible, palm * 16 * 16)
    assert row["mfu"][1] == palm * 16 * 16 / (found.min_seconds * 8 * found.hardware.chip.flops)


def test_traffic_adds_up_by_kind_and_axis():
    found = [
        collectives.Collective("all-reduce", 100.0, (0, 1), 3, True, "a"),
        collectives.Collective("all-reduce", 50.0, (2, 3), 1, True, "b"),
        collectives.Collective("all-gather", 80.0, (0, 2), 1, True, "c"),
    ]
    mesh = {"data": 2, "tensor": 2}
    assert estimate.traffic(found, mesh) == {
        ("all-reduce", "tensor"): (4, 3 * 100.0 + 50.0),
        ("all-gather", "data"): (1, 40.0),
    }


def test_between_slices_go_the_gradients_alone():
    """2 (s - 1) / s x 4 bytes of the parameters that a device keeps within its slice of s (Rajbhandari et al. 2020)."""
    config = config_of(layers=1, width=128, attention={"bias": False}, ffn={"bias": False}, norm={"kind": "rms"})
    config = dataclasses.replace(config, optimizer=OptimizerConfig(name="sgd", momentum=0.0))
    for slices in (2, 4):
        found = traced(config, 8, fsdp=8 // slices, dcn=DcnConfig(data=slices))
        place = chips.parse_hardware("", "h100", 8, slices)
        result = estimate.estimate(found, program.compile(found), place)
        assert result.mesh == {"data": slices, "fsdp": 8 // slices}
        least = 2 * (1 - 1 / slices) * 4 * result.parameters / (8 // slices)
        assert least <= result.cross_slice_bytes <= 1.05 * least
        assert result.seconds["between slices"] == result.cross_slice_bytes / 50e9
        sent = sum(size for _, size in result.collectives.values())
        assert result.seconds["network"] == pytest.approx((sent - result.cross_slice_bytes) / 450e9)


def estimated(place: chips.Hardware, **changes) -> estimate.Estimate:
    values = dict(
        mesh={}, shape=program.Shape(8, 1024), parameters=1, flops_per_token=1e9, flops_per_token_visible=0.9e9,
        flops_per_step=8e12, counted_flops=1e13,
        memory={"parameters": 8 * GIB, "logits": 4 * GIB, "activations": 10 * GIB}, state={"parameters": 8 * GIB},
        needed_bytes=22 * GIB, collectives={}, cross_slice_bytes=0.0, unknown_loops=0,
        seconds={"compute": 0.03, "memory": 0.01, "network": 0.02},
        compile_seconds=1.0, hardware=place, devices=4,
    )  # fmt: skip
    return estimate.Estimate(**(values | changes))


def test_the_roofline():
    found = estimated(chips.parse_hardware("", "h100", 4))
    assert (found.min_seconds, found.max_seconds) == (0.03, pytest.approx(0.06))
    assert found.mfu(found.min_seconds) == pytest.approx(8e12 / (0.03 * 4 * 989e12))
    v5e = chips.CHIPS["v5e"]
    assert v5e.network((16, 16)) == 2 * v5e.network((4, 4)) == 2 * 50e9  # only a side of 16 closes the ring
    assert chips.CHIPS["v5p"].network((4, 4, 8)) == 200e9


def test_what_does_not_fit_says_what_to_change():
    place, config = chips.parse_hardware("v5e:2x2", "", None), config_of()
    advice = lambda **changes: estimate._with_advice(estimated(place, **changes), config).advice  # noqa: E731
    assert not estimated(place).fits
    assert "remat=full" in advice()
    assert "logits" in advice(memory={"parameters": 0, "logits": 9 * GIB, "activations": GIB}, state={"parameters": 0})
    assert "fsdp" in advice(state={"parameters": 14 * GIB})
    full = config_of(remat="full")
    assert "accumulation" in estimate._with_advice(estimated(place), full).advice
    few = estimate._with_advice(estimated(place, shape=program.Shape(4, 1024)), full).advice
    assert "one row a device" in few


def test_a_compiler_that_refuses_for_memory():
    words = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm. Exceeded by 4.75G."
    assert program.parse_needed_bytes(words) == 20.5 * GIB
    words = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (319.72G) exceeds "
    )
    assert program.parse_needed_bytes(words + "available HBM (95.74G).") == 319.72 * GIB
    assert program.parse_needed_bytes("RESOURCE_EXHAUSTED") is None
    refused = estimated(chips.parse_hardware("v5e:2x2", "", None), memory={}, seconds={}, needed_bytes=None)
    assert not refused.fits
    assert refused.row()["mfu"] is None
    assert page.verdict(refused).startswith("does not fit in 15.75 GiB")


# --- meshes -----------------------------------------------------------------------------------------------------------


def test_meshes_of_a_search_divide_the_devices():
    found = search.candidate_meshes(config_of(), 16)
    assert all(math.prod((each.data, each.fsdp, each.tensor)) == 16 for each in found)
    assert len(found) == len(set(found))
    assert MeshConfig(data=2, fsdp=8) in found
    assert MeshConfig(data=1, fsdp=2, tensor=8) in found
    fixed = dataclasses.replace(config_of(), mesh=MeshConfig(context=3))
    with pytest.raises(ConfigError, match="expected a divisor of 16"):
        search.candidate_meshes(fixed, 16)


def test_those_that_fit_come_first_by_their_time():
    place = chips.parse_hardware("v5e:2x2", "", None)
    slow = estimated(place, needed_bytes=GIB, mesh={"data": 2}, seconds={"compute": 2.0})
    fast = estimated(place, needed_bytes=GIB, mesh={"data": 4}, seconds={"compute": 1.0})
    large = estimated(place, needed_bytes=99 * GIB, mesh={"fsdp": 4}, seconds={"compute": 0.1})
    assert page.ranked([large, slow, fast]) == [fast, slow, large]
    assert page.ranking([large, slow, fast]).splitlines()[1].split()[:2] == ["data", "4"]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command(recipe, capsys):
    edits = ["--config.mesh.data=1", "--config.mesh.fsdp=2"]
    assert cli.main(["plan", f"--config={recipe}", *edits]) == 0
    out = capsys.readouterr().out
    assert "mesh fsdp 2" in out
    assert "tokens a step" in out
    assert "verdict\n  fits" in out


def test_several_slices(recipe, capsys, monkeypatch):
    edits = ["--config.mesh.fsdp=2", "--config.mesh.dcn.data=2", "--devices=4"]
    assert cli.main(["plan", f"--config={recipe}", *edits]) == 0
    out = capsys.readouterr().out
    assert "2 slices: 4 x H100" in out
    assert "50 GB/s to other slices" in out
    assert "mesh data 2 x fsdp 2" in out
    assert "of it between slices" in out
    monkeypatch.setattr(search, "TENSOR_SIZES", (2,))
    assert cli.main(["plan", f"--config={recipe}", *edits, "--search"]) == 0
    assert [line.split()[:5] for line in capsys.readouterr().out.splitlines() if line.endswith("fits")] == [
        ["data", "2", "x", "tensor", "2"]
    ]


def test_a_search(recipe, capsys, monkeypatch):
    monkeypatch.setattr(search, "TENSOR_SIZES", (2, 8))  # 2 devices cannot be 8
    assert cli.main(["plan", f"--config={recipe}", "--devices=2", "--chip=a100", "--search"]) == 0
    out = capsys.readouterr().out
    assert "2 x A100" in out
    assert [line.split()[:2] for line in out.splitlines() if line.endswith("fits")] == [["tensor", "2"]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--topology=v9:2x2"], "expected NAME:SIDES"),
        (["--topology=v5e:2xtwo"], "expected NAME:SIDES"),
        (["--topology=h100:2x2"], "expected NAME:SIDES"),
        (["--topology=v5e:4x4", "--devices=8"], "expected 16"),
        (
            ["--topology=v5e:4x4", "--devices=16", "--config.mesh.dcn.data=2"],
            "expected 32, those of --topology=v5e:4x4, 2",
        ),
        (["--topology=v5e:4x4", "--chip=v5p"], "expected v5e"),
        (["--chip=h10"], "did you mean"),
        (["--devices=none"], "expected a whole number"),
        (["--devices=9"], "simulated devices, expected 9"),
        (["--search=yes"], "expected --search alone"),
        (["--devices=4", "--config.mesh.fsdp=8"], "expected a product of 4 devices"),
        (["--config.data.tokenizer.kind=character"], "set --config.model.decoder.embed.vocab=N"),
    ],
)
def test_refusals_are_one_line(arguments, words, recipe, capsys):
    assert cli.main(["plan", f"--config={recipe}", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
