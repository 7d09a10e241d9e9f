"""Sizes that no device serves: refused by arithmetic, before anything is traced, read or written."""

from __future__ import annotations

import dataclasses
import time

import builders
import jax
import pytest
import recipes
from flax import linen as nn

from jaxformer import cli, preflight
from jaxformer.config import (
    AttentionConfig,
    Config,
    ConfigError,
    ConvConfig,
    EmbedConfig,
    EncodingConfig,
    HeadConfig,
    MoEConfig,
    RecurrentConfig,
    overrides,
)
from jaxformer.config.checks import size
from jaxformer.data import vocabulary_learning
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.plan import estimate, program
from jaxformer.plan.program import resolve

ROOT = recipes.CONFIGS.parent
ONE = dict.fromkeys(("stage", "data", "fsdp", "expert", "context", "tensor"), 1)
QUICKSTART = f"--config={recipes.CONFIGS}/quickstart.py"


def refusal(*edits: str, recipe: str = QUICKSTART) -> str:
    with pytest.raises(ConfigError) as caught:
        overrides.parse([recipe, *edits])
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- absurd everywhere ------------------------------------------------------------------------------------------------

ABSURD = [
    (
        "config.model.encoder.layers=1000000000",
        "config.model.encoder.layers: got 1000000000, expected at least 0 and at",
    ),
    ("config.model.encoder.width=1000000000", "parameters, expected at most 1e+14"),
    (
        "config.model.decoder.ffn.width=100000000000000",
        "ffn.width: got 100000000000000, expected at least 1 and at most",
    ),
    ("config.data.tokenizer.multiple=10000000000", "multiple: got 10000000000, expected"),
    ("config.model.encoder.embed.vocab=4294967296", "embed.vocab: got 4294967296, expected"),
    (
        "config.data.length=1000000000 --config.data.batch=128",
        "config.data.batch: got 128 rows of 1,000,000,000 tokens, expected at most 1e+11",
    ),
    ("config.data.length=1073741825", "config.data.length: got 1073741825, expected at least 2 and at most 1073741824"),
    ("config.train.steps=1000000000000", "config.train.steps: got 1000000000000, expected"),
    ("config.train.seed=4294967296", "config.train.seed: got 4294967296, expected at least 0 and at most 4294967295"),
    ("config.decode.beams=1000000000", "config.decode.beams: got 1000000000, expected"),
]


@pytest.mark.parametrize(("edit", "words"), ABSURD, ids=lambda row: row.partition("=")[0])
def test_absurd_sizes_are_refused_without_jax(edit, words):
    begun = time.monotonic()
    edits = [edit.replace("encoder", side) for side in ("encoder", "decoder")] if "encoder.width" in edit else [edit]
    assert words in refusal(*(word for each in edits for word in f"--{each}".split()))
    assert time.monotonic() - begun < 1


def test_too_many_experts_are_refused():
    message = refusal("--config.model.decoder.moe.experts=1000000000", recipe=f"--config={recipes.CONFIGS}/moe_tiny.py")
    assert "parameters, expected at most 1e+14; look at layers, width, vocab and experts" in message


def test_a_model_of_ten_trillion_parameters_may_be_planned():
    edits = ("layers=128", "width=65536", "attention.heads=512", "ffn.width=524288")
    config = overrides.parse([
        f"--config={recipes.CONFIGS}/gpt3.py:175b", *(f"--config.model.decoder.{edit}" for edit in edits),
    ])  # fmt: skip
    assert size.min_parameters(config) == pytest.approx(1.1e13, rel=0.1)


@pytest.mark.parametrize("command", ["train", "plan", "doctor"])
def test_commands_refuse_absurd_sizes_in_one_line(command, tmp_path, capsys):
    argv = [command, QUICKSTART, "--config.model.encoder.layers=1000000000"]
    if command == "train":
        argv.append(f"--workdir={tmp_path}/run")
    assert cli.main(argv) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "run").exists()


# --- the arithmetic ---------------------------------------------------------------------------------------------------


def counted(config: Config) -> int:
    return build.count_params(nn.meta.unbox(build.shapes(build.build(config.model)))["params"])


STARTING = ("finetune", "order_preferences", "/chat.py")
"""In the names of recipes that take the model of a directory."""


@pytest.mark.parametrize(
    "recipe",
    [recipe for *_, recipe in recipes.each() if not any(s in recipe for s in STARTING)],
    ids=lambda recipe: recipe.rpartition("/")[2],
)
def test_the_bound_is_just_below_the_parameters_of_every_recipe(recipe):
    config = overrides.parse([f"--config={recipe}"])
    stack = config.model.decoder or config.model.encoder
    vocab = 512 if config.model.head.projection or stack is None else stack.width  # hidden states are the logits
    tokenizer = dataclasses.replace(config.data.tokenizer, kind="bpe", vocab=vocab)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=tokenizer))
    head = dataclasses.replace(config.model.head, classes=config.model.head.classes or 2)
    model = dataclasses.replace(config.model, head=head)
    config = resolve(dataclasses.replace(config, model=model, distillation=None))
    true = counted(config)
    least = 0.6 if config.model.recurrent_decoder else 0.95  # what attends in a recurrent decoder is left out
    assert least * true <= size.min_parameters(config) <= true


PARTS = {
    "grouped": builders.decoder(attention=AttentionConfig(heads=4, kv_heads=1, head_width=8)),
    "no output": builders.decoder(attention=AttentionConfig(heads=2, output=False)),
    "experts": builders.decoder(moe=MoEConfig(experts=16, shared=2)),
    "learned": builders.decoder(encoding=EncodingConfig(kind="learned", max_length=900)),
    "t5": builders.decoder(encoding=EncodingConfig(kind="t5", buckets=500, max_distance=900)),
    "deberta": builders.encoder(encoding=EncodingConfig(kind="deberta", buckets=100, max_distance=300, absolute=True)),
    "convolution": builders.encoder(conv=ConvConfig(kernel=41, groups=2)),
    "factorised": builders.decoder(embed=EmbedConfig(vocab=500, width=2)),
    "kinds": builders.encoder(embed=EmbedConfig(vocab=13, kinds=400)),
    "matches": builders.encoder(embed=EmbedConfig(vocab=13, kinds=2, matches=True)),
    "untied": dataclasses.replace(
        builders.decoder(embed=EmbedConfig(vocab=400)), head=HeadConfig(tied=False)
    ),
    "classes": dataclasses.replace(builders.encoder(), head=HeadConfig(kind="classes", classes=300, width=50)),
    "last projection": dataclasses.replace(
        builders.decoder(output_width=400), head=HeadConfig(kind="classes", classes=2, tied=False)
    ),
    "pair": dataclasses.replace(builders.encoder(), head=HeadConfig(kind="pair", width=400)),
    "copying": dataclasses.replace(builders.seq2seq(layers=1), head=HeadConfig(copy=True)),
    "seq2seq": builders.seq2seq(embed=EmbedConfig(vocab=400)),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_the_bound_counts_each_part(name):
    config = dataclasses.replace(Config(), model=PARTS[name])
    assert 0.6 * counted(config) <= size.min_parameters(config) <= counted(config)


@pytest.mark.parametrize("cell", size.GATES)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_bound_counts_cells(cell, bidirectional):
    part = RecurrentConfig(cell=cell, layers=2, width=32, embed=EmbedConfig(vocab=8), bidirectional=bidirectional)
    model = dataclasses.replace(builders.encoder(), encoder=None, recurrent_encoder=part)
    config = dataclasses.replace(Config(), model=model)
    assert 0.8 * counted(config) <= size.min_parameters(config) <= counted(config)


# --- what a mesh can hold ---------------------------------------------------------------------------------------------


STATES = [
    *((name, []) for name in ("adamw", "adafactor", "lion", "muon", "sgd")),
    ("adamw", ["--config.mesh.fsdp=2", "--config.train.ema=0.9"]),
    ("adamw", ["--config.mesh.zero1=true"]),
]


@pytest.mark.parametrize(("name", "edits"), STATES)
def test_the_bound_on_memory_is_below_what_the_state_takes(name, edits):
    """Bytes at which a run begins to be refused: never more than its state and batch take."""
    argv = [f"--config={recipes.CONFIGS}/wikitext2.py:transformer", "--config.mesh.data=2", "--config.data.batch=32"]
    argv += [f"--config.optimizer.name={name}", "--config.model.decoder.layers=2", *edits]
    config = overrides.parse(argv)
    mesh = meshes.make(config.mesh, jax.devices()[: config.mesh.devices])
    taken = sum(estimate.state_bytes(program.trace(config, mesh)).values())
    size.check_memory(resolve(config), mesh.shape, int(taken))
    with pytest.raises(ConfigError, match="parameters, which take"):
        size.check_memory(resolve(config), mesh.shape, int(taken / 2.2))


def test_what_the_mesh_cannot_hold_is_refused_and_says_how_much():
    config = overrides.parse([QUICKSTART, "--config.data.tokenizer.multiple=1000000000"])
    with pytest.raises(ConfigError) as caught:
        size.check_memory(config, ONE, 2**34)
    assert str(caught.value) == (
        "config.model: got at least 1.28e+11 parameters, which take 1,430.5 GiB a device with adamw, expected at most "
        "the 16.0 GiB that it has; make the model smaller, or divide it by config.mesh.fsdp or tensor"
    )
    size.check_memory(config, ONE | {"fsdp": 128}, 2**34)  # a pod has room
    size.check_memory(config, ONE, None)  # nobody knows
    with pytest.raises(ConfigError, match="parameters, which take"):
        size.check_memory(config, ONE | {"data": 128}, 2**34)  # copies do not help


@pytest.mark.parametrize("field", ["data", "evaluate"])
def test_batches_that_the_mesh_cannot_hold_are_refused(field):
    config = overrides.parse([QUICKSTART, f"--config.{field}.batch=1000000000"])
    with pytest.raises(ConfigError, match=rf"^config.{field}.batch: got 1,000,000,000 rows of 40 tokens, which take"):
        size.check_memory(config, ONE, 2**34)
    size.check_memory(config, ONE | {"data": 4096}, 2**34)


def test_microbatches_and_token_budgets_make_batches_smaller():
    edits = ["--config.data.batch=1048576", "--config.data.length=1024", "--config.evaluate.batch=1"]
    whole = overrides.parse([QUICKSTART, *edits])
    for less in ("--config.train.accumulation=1048576", "--config.data.tokens=65536"):
        size.check_memory(overrides.parse([QUICKSTART, *edits, less]), ONE, 2**35)
    with pytest.raises(ConfigError, match="config.data.batch"):
        size.check_memory(whole, ONE, 2**35)


def test_a_run_that_does_not_fit_ends_before_its_data_is_read(tmp_path, capsys, monkeypatch):
    builders.one_device(monkeypatch)
    monkeypatch.setattr("jaxformer.data.sources.build", lambda *given: pytest.fail("read the data"))
    argv = ["train", QUICKSTART, f"--workdir={tmp_path}/run", "--config.data.batch=1000000000"]
    assert cli.main(argv) == 2
    assert "config.data.batch: got 1,000,000,000 rows" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_doctor_says_what_the_mesh_cannot_hold(monkeypatch):
    monkeypatch.setattr(preflight, "data_share", lambda config: {"error": "not read"})
    config = overrides.parse([QUICKSTART, "--config.data.batch=1000000000"])
    found = {finding.message: finding for finding in preflight.compare_processes(config, None, 1.0)}
    (words,) = (words for words in found if words.startswith("config.data.batch: got 1,000,000,000 rows of 40 tokens"))
    assert (found[words].level, found[words].code) == ("FAIL", 2), "as train ends of it"


def test_memory_of_cpu_devices_is_the_hosts_divided_among_them(monkeypatch):
    total = meshes.host_memory()
    assert 2**28 < total < 2**50
    config = Config().mesh
    assert meshes.device_memory(meshes.make(config)) == total // 8
    assert meshes.device_memory(meshes.make(config, jax.devices()[:1])) == total
    monkeypatch.setattr(meshes, "host_memory", lambda: None)
    assert meshes.device_memory(meshes.make(config)) is None


# --- tokenizers -------------------------------------------------------------------------------------------------------


def test_bpe_reserves_no_memory_for_rows_that_it_cannot_learn(monkeypatch):
    texts = ["low lower lowest", "new newer newest"] * 3
    plain = vocabulary_learning.bpe(texts, 2**20, False).to_str()
    reserved = []
    trainer = vocabulary_learning.trainers.BpeTrainer
    monkeypatch.setattr(
        vocabulary_learning.trainers,
        "BpeTrainer",
        lambda **given: reserved.append(given["vocab_size"]) or trainer(**given),
    )
    assert vocabulary_learning.bpe(texts, 10**9, False).to_str() == plain
    assert reserved[0] < 400
    monkeypatch.setattr(vocabulary_learning, "MAX_PREALLOCATED_ROWS", 1)  # the bound itself takes nothing away
    assert (
        vocabulary_learning.bpe(iter(texts), 300, False).to_str() == vocabulary_learning.bpe(texts, 300, False).to_str()
    )
    assert vocabulary_learning.bpe(texts, 2**20, False).to_str() == plain
