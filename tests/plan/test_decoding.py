"""Plans of decoding: bytes of caches and parameters equal those of the arrays, times by hand, refusals in one line."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from jaxformer import cli
from jaxformer.config import DecodeConfig, PermutationConfig, RecurrentConfig, StackConfig, overrides
from jaxformer.config.overrides import defaults, section
from jaxformer.decode import cache_schedule, int8
from jaxformer.decode.compiled import SEARCHES, BoundModel
from jaxformer.errors import ConfigError
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.plan import chips, decode_page, decode_time, decoding, shapes
from jaxformer.plan.assumptions import TUNED
from jaxformer.plan.step_time import Layout
from jaxformer.types import Batch, Slots, Stream

PLAIN = {"attention": {"heads": 4, "kernel": "dense"}}


def config_of(
    kind: str = "decoder", decode: dict | None = None, dtype: str = "float32", mesh: dict | None = None, **edits
):
    config = defaults()
    config.data.length, config.data.tokenizer.vocab, config.model.dtype = 32, 64, dtype
    config.task.name = "language_modelling" if kind == "decoder" else "translation"
    sizes = {"layers": 2, "width": 16} | PLAIN
    if kind == "recurrent":
        config.model.recurrent_encoder = section(RecurrentConfig, width=16)
        config.model.recurrent_decoder = section(RecurrentConfig, width=16, layers=2, attention="additive")
    else:
        config.model.decoder = section(StackConfig, **(sizes | edits))
    if kind == "translation":
        config.model.encoder = section(StackConfig, **sizes)
    config.decode = section(DecodeConfig, **(decode or {}))
    config.mesh.data = 1
    for axis, size in (mesh or {}).items():
        config.mesh[axis] = size
    return overrides.freeze(config)


def planned(config, batch=4, prompt=5, tokens=100, chip="h100", devices=None, slices=1):
    return decoding.plan(config, chips.parse_hardware("", chip, devices, slices), batch, prompt, tokens)


def state_bytes(config, request) -> int:
    """Bytes of the state that decoding ends with, from its own functions."""
    ids = lambda length: jax.ShapeDtypeStruct((request.batch, length), jnp.int32)  # noqa: E731
    stream = lambda length: Stream(ids(length), Slots(ids(length), ids(length)))  # noqa: E731
    seq2seq = config.model.is_seq2seq
    batch = Batch(stream(request.prompt) if seq2seq else None, stream(1 if seq2seq else request.prompt))
    search = SEARCHES[config.decode.method](dataclasses.replace(config.decode, max_length=request.tokens), (), 0)
    module = build.build(config.model)

    def run(variables, batch):
        _, state = cache_schedule.prefill(BoundModel(module, variables), batch, request.tokens, search)
        prompt = cache_schedule.prompt_stream(batch).tokens.shape[1]
        schedule = cache_schedule.schedule_for(state, prompt, request.tokens, search)
        return schedule.grow(state, schedule.capacities[-1])

    state = jax.eval_shape(run, nn.meta.unbox(build.shapes(module)), batch)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize(
    ("kind", "decode", "edits"),
    [
        ("decoder", {"method": "beam", "beams": 3}, {"attention": PLAIN["attention"] | {"kv_heads": 2}}),
        ("decoder", {"method": "sample", "hypotheses": 2}, {"attention": PLAIN["attention"] | {"window": 4}}),
        ("translation", {"method": "beam", "beams": 2}, {}),
        ("recurrent", {"method": "beam", "beams": 2}, {}),
    ],
)
def test_caches_have_the_bytes_of_the_arrays_that_decoding_ends_with(kind, decode, edits):
    plan = planned(config_of(kind, decode, **edits))
    scalar = 0 if kind == "recurrent" else 4  # the next free slot, which all rows share
    assert plan.request.batch * sum(plan.prompt_bytes.values()) == state_bytes(plan.config, plan.request) - scalar
    assert plan.cache_bytes == 4 * sum(plan.prompt_bytes.values())  # on one device
    assert plan.step["products"] > 0


def test_an_accelerator_keeps_keys_and_values_in_the_compute_precision(monkeypatch):
    plan = planned(config_of(dtype="bfloat16", attention=PLAIN["attention"] | {"kv_heads": 1}))
    monkeypatch.setattr(meshes, "platform", lambda: "gpu")
    assert 4 * sum(plan.prompt_bytes.values()) + 4 == state_bytes(plan.config, plan.request)
    assert plan.prompt_bytes["keys and values"] == 2 * 2 * 4 * 105 * 2  # two, layers, width of the head, slots, bytes


@pytest.mark.parametrize("weights", ["float", "int8"])
def test_parameters_have_the_bytes_that_decoding_keeps(weights):
    plan = planned(config_of("translation", {"weights": weights}))
    module = build.build(plan.config.model)
    kept = nn.meta.unbox(build.shapes(module))
    if weights == "int8":
        kept = jax.eval_shape(lambda variables: int8.quantize(module, variables), kept)
    sizes = {path: leaf.size * leaf.dtype.itemsize for path, leaf in jax.tree.leaves_with_path(kept["params"])}
    assert plan.parameter_bytes == sum(sizes.values())
    keys = {path: [key.key for key in path] for path in sizes}
    unread = [path for path, words in keys.items() if words[0] in ("encoder", "source_embed")]
    unread += [path for path, words in keys.items() if "cross" in words and words[-2] in ("key", "value")]
    assert plan.read_bytes == sum(sizes.values()) - sum(
        sizes[path] for path in unread
    )  # the target's table is the head


def test_what_a_step_reads_of_experts_shared_layers_and_positions():
    moe = planned(config_of(moe={"experts": 8, "top_k": 2}), batch=1)
    dense = planned(config_of(ffn=None), batch=1)
    experts, router = 2 * 8 * (2 * 16 * 64 + 64 + 16), 2 * (16 * 8 + 2 * 16)  # and the norm before them
    assert moe.read_bytes - dense.read_bytes == 4 * (experts / 4 + router)
    many = planned(config_of(moe={"experts": 8, "top_k": 2}), batch=64)
    assert 0.999 * many.parameter_bytes < many.read_bytes <= many.parameter_bytes
    divided = planned(config_of(moe={"experts": 8, "top_k": 2}, mesh={"expert": 4}), batch=64, devices=4)
    assert many.read_bytes - divided.read_bytes == pytest.approx(0.75 * 4 * experts)  # and the rest as before
    own = planned(config_of())
    assert planned(config_of(share_layers=True)).read_bytes == own.read_bytes
    learned = config_of(encoding={"kind": "learned", "max_length": 104})
    assert planned(learned).read_bytes == own.read_bytes  # a row of the table is nothing


def test_a_mesh_divides_rows_heads_and_parameters():
    one = planned(config_of(attention=PLAIN["attention"] | {"kv_heads": 2}))
    grouped = {"attention": PLAIN["attention"] | {"kv_heads": 2}}
    plan = planned(config_of(mesh={"data": 2, "tensor": 2}, **grouped), devices=4)
    slots = one.prompt_bytes["slots"]
    keys = one.prompt_bytes["keys and values"]
    assert plan.cache_bytes == 2 * (keys / 2 + slots)
    wide = planned(config_of(mesh={"tensor": 4}, **grouped), devices=4)  # 2 key heads are not divided by 4
    assert wide.cache_bytes == one.cache_bytes
    assert one.parameter_bytes / 2 < plan.parameter_bytes < 0.6 * one.parameter_bytes  # norms lie on every device
    sharded = planned(config_of(mesh={"fsdp": 4}, **grouped), devices=4)
    assert sharded.parameter_bytes < 0.35 * one.parameter_bytes
    assert sharded.step["gathering"] == pytest.approx(0.75 * one.read_bytes / 450e9)
    slices = dataclasses.replace(config_of(mesh={"tensor": 2}, **grouped))
    slices = dataclasses.replace(
        slices, mesh=dataclasses.replace(slices.mesh, dcn=dataclasses.replace(slices.mesh.dcn, data=2))
    )
    assert planned(slices, devices=4, slices=2).cache_bytes == plan.cache_bytes


def test_the_largest_batch_fits_and_the_next_does_not():
    config = config_of(layers=8, width=512, dtype="bfloat16")
    largest, seconds = planned(config, batch=1, tokens=2000).largest["v5e"]
    assert planned(config, batch=largest, tokens=2000, chip="v5e").fits
    assert not planned(config, batch=largest + 1, tokens=2000, chip="v5e").fits
    assert planned(config, batch=largest, tokens=2000, chip="v5e").step_seconds == pytest.approx(seconds)
    growing = planned(config, batch=1, tokens=2000)
    assert growing.growing_bytes / growing.cache_bytes == pytest.approx((5 + 1024) / 2005, rel=1e-3)
    assert growing.first_step < growing.step_seconds < growing.last_step
    huge = planned(config_of(layers=50, width=16384, norm={"kind": "rms"}), batch=1)
    assert huge.largest["v5e"] is None
    assert "the parameters take it" in decode_page.verdict(huge)


# --- times ------------------------------------------------------------------------------------------------------------

MODEL = decode_time.Decoded(
    layers=10, width=100, bytes=2, read_bytes=3350e6, multiplied=1e9, scores=1e3, reductions=2, channels=500, head=1e8
)
IDEAL = dataclasses.replace(
    TUNED, products=dict.fromkeys(TUNED.products, 1.0), scores=dict.fromkeys(TUNED.scores, 0.5), decode_memory=0.5,
    decode_latency=dict.fromkeys(TUNED.decode_latency, 1e-5), activations=dict.fromkeys(TUNED.activations, 0.5),
)  # fmt: skip
H100 = chips.CHIPS["h100"]


def test_a_decode_step_by_hand():
    few = decode_time.decode_step_seconds(MODEL, 1, 100, 3350e3, Layout(), H100, IDEAL)
    products = (2e9 + 4 * 1e3 * 100) / 989e12
    assert few == pytest.approx(
        {"parameters": 2e-3 - products, "caches": 2e-6, "products": products, "collectives": 0, "gathering": 0}
    )
    many = decode_time.decode_step_seconds(MODEL, 4096, 100, 0, Layout(), H100, IDEAL)
    assert (many["parameters"], many["products"]) == (0, pytest.approx(4096 * products))
    split = decode_time.decode_step_seconds(MODEL, 8, 100, 0, Layout({"data": 2, "tensor": 4}), H100, IDEAL)
    assert split["parameters"] + split["products"] == pytest.approx(2e-3)
    assert split["products"] == pytest.approx(8 / 2 / 4 * products)
    sent = 2 * 3 / 4 * 10 * 2 * 4 * 100 * 2 / 450e9
    assert split["collectives"] == pytest.approx(10 * 2 * 1e-5 + sent)
    across = decode_time.decode_step_seconds(MODEL, 8, 100, 0, Layout({"tensor": 2}, {"tensor": 2}), H100, IDEAL)
    sent = 10 * 2 * 8 * 100 * 2 * (2 * 1 / 2 / 450e9 + 2 * 1 / 2 / 2 / 50e9)
    assert across["collectives"] == pytest.approx(10 * 2 * 1e-5 + sent)
    experts = dataclasses.replace(MODEL, routed=3)
    found = decode_time.decode_step_seconds(experts, 8, 100, 0, Layout({"expert": 4}), H100, IDEAL)
    sent = 2 * 10 * 3 * 2 * 100 * 2 * 3 / 4 / 450e9
    assert found["collectives"] == pytest.approx(10 * 2 * 1e-5 + sent)


def test_reading_prompts_by_hand():
    found = decode_time.prefill_seconds(MODEL, 4, 1000, Layout({"data": 2}), H100, IDEAL)
    products = 2 * (1e9 - 1e8 * 0.999) * 2000 / 989e12
    assert found["products"] == pytest.approx(products)
    assert found["parameters"] == 0
    assert found["scores"] == pytest.approx(4 * 1e3 * 500.5 * 2000 / 989e12 / 0.5)
    assert found["elementwise"] == pytest.approx(IDEAL.passes / 3 * 10 * (4 * 100 + 500) * 2000 * 2 / 3350e9)
    short = decode_time.prefill_seconds(MODEL, 1, 1, Layout(), H100, IDEAL)
    assert short["parameters"] + short["products"] == pytest.approx(2e-3)
    assert short["products"] == pytest.approx(2e9 / 989e12)  # the head reads the last token


def test_an_encoder_reads_the_source_and_sees_all_of_it():
    plan = planned(config_of("translation", dtype="bfloat16"), prompt=9)
    each = shapes.stack_layers(plan.config, "encoder", 9)
    assert plan.prefill["products"] == pytest.approx(2 * each.multiplied * 36 / (TUNED.products["h100"] * 989e12))
    speed = TUNED.products["h100"] * TUNED.scores["h100"] * 989e12
    assert plan.prefill["scores"] == pytest.approx(4 * 2 * 16 * 9 * 36 / speed)


# --- the command ------------------------------------------------------------------------------------------------------

RECIPE = '''
"""A recipe of a test."""
from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section

def get_config():
    config = defaults()
    config.data.length, config.data.tokenizer.vocab = 128, 60
    config.task.name, config.decode.batch = "language_modelling", 8
    config.model.decoder = section(StackConfig, layers=1, width=16, attention=dict(heads=4),
                                   encoding=dict(kind="learned", max_length=256))
    config.mesh.data = 1
    return config
'''
ENCODER = RECIPE.replace("config.model.decoder", "config.model.encoder").replace("language_modelling", "masked_lm")


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "recipe.py").write_text(RECIPE)
    (tmp_path / "encoder.py").write_text(ENCODER)
    return str(tmp_path / "recipe.py")


def test_the_command_prints_what_the_plan_holds(recipe, capsys):
    assert cli.main(["plan", f"--config={recipe}", "--decode", "--chip=a100", "--tokens=100", "--batch=16"]) == 0
    words = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "16 prompts at a time, 28 tokens in a prompt, 100 new ones; greedy, float weights" in words
    assert "keys and values 16.0 KiB" in words  # 2 x 16 numbers of 4 bytes in each of 128 slots
    assert any(word.startswith("fits: ") and word.endswith("of 74.5 GiB") for word in words)
    assert any(word.startswith("h200 131.3 GiB ") for word in words)
    assert any(word.startswith("shorter than any published step") for word in words)
    plan = planned(overrides.parse([f"--config={recipe}"]), None, None, 100)
    assert (plan.request.batch, plan.request.prompt) == (8, 28)
    row = json.loads(json.dumps(plan.row()))
    assert (
        row["need"]
        == plan.needed_bytes
        == sum(row[name] for name in ("parameter_bytes", "cache_bytes", "growing_bytes", "working_bytes"))
    )
    assert sum(row["step"].values()) == pytest.approx(plan.step_seconds)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens=100"], "--tokens: got it without --decode"),
        (["--batch=100"], "--batch: got it without --decode"),
        (["--decode", "--search"], "--search: got it with --decode"),
        (["--decode", "--prompt=200", "--tokens=58"], "got 257 positions, expected at most 256"),
        (["--decode", "--devices=3", "--batch=4", "--config.mesh.data=3"], "expected a multiple of 3"),
        (
            ["--decode", "--devices=2", "--config.mesh.context=2"],
            "config.mesh.context: got 2, expected 1 with --decode",
        ),
        (["--decode", "--devices=2", "--config.mesh.tensor=4"], "expected a product of 2 devices"),
        (["--decode", "--batch=0"], "--batch"),
        (["--decode", "--config.data.tokenizer.kind=character"], "set --config.model.decoder.embed.vocab=N"),
        (["--decode=yes"], "expected --decode alone"),
    ],
)
def test_refusals_are_one_line(arguments, words, recipe, capsys):
    assert cli.main(["plan", f"--config={recipe}", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_models_that_decode_nothing_or_with_unknown_caches_are_refused(recipe, capsys):
    assert cli.main(["plan", f"--config={recipe.replace('recipe.py', 'encoder.py')}", "--decode"]) == 2
    assert "got a model without a decoder" in capsys.readouterr().err
    config = config_of()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, permutation=PermutationConfig()))
    with pytest.raises(ConfigError, match="got a model of a permutation language model"):
        planned(config)
