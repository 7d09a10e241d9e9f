"""Preference runs: the reference is the model that a run starts from, kept in the cache, whatever becomes of it."""

import dataclasses
import itertools
import json
import shutil

import builders
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from jaxformer import checkpoint
from jaxformer.config import AdapterConfig, ConfigError, StackConfig, TaskConfig, overrides
from jaxformer.data import packing, sources
from jaxformer.evaluation import evaluate
from jaxformer.parallel import mesh as meshes
from jaxformer.tasks import dialogue
from jaxformer.train import loop, reference, setup, step, warm_start
from jaxformer.train.preemption import PreemptionListener

TURNS = ("a", "b c", "d", "c b a")


def recipe(tmp_path, layers):
    config = overrides.defaults()
    config.task.name, config.task.beta = "preference", 0.5
    config.data.source, config.data.dir = "preferences", str(tmp_path)
    config.data.splits = {"train": ("all.jsonl",), "validation": ("all.jsonl[:3]",)}
    config.data.tokenizer.kind, config.data.cache = "byte", str(tmp_path / "cache")
    config.data.batch, config.data.length, config.evaluate.batch = 2, 80, 4
    config.model.decoder = overrides.section(
        StackConfig,
        **dict(
            layers=layers, width=8, encoding=dict(kind="rope" if layers else "none"), unroll=1, norm=dict(kind="rms")
        ),
        **dict(attention=dict(heads=1, bias=False), ffn=dict(width=8, bias=False)),
    )
    config.schedule.kind, config.schedule.peak, config.schedule.warmup = "constant", 0.05, 0
    config.train.steps, config.train.log_every, config.train.trackers = 2, 1, ()
    config.init.directory = str(tmp_path / "start")
    return overrides.freeze(config)


@pytest.fixture
def start(request, tmp_path, monkeypatch):
    """The config of a run that starts from a directory, which is there, and the pieces of its start.

    The parameter is the number of layers. Without one, tracing takes a fifth of the time.
    """
    builders.one_device(monkeypatch)
    builders.drawn_parameters(monkeypatch)
    lines = [{"prompt": TURNS[i % 4], "chosen": "yes " * (1 + i % 2), "rejected": "no"} for i in range(5)]
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = recipe(tmp_path, request.param)
    dataset = sources.build(config.data)
    tokenizers = setup.build_or_load_tokenizers(config, dataset, tmp_path / "none")
    tokenizers = setup.with_chat_template(config, tokenizers, tmp_path / "none")
    resolved = setup.resolve_config(config, dataset, tokenizers)
    module, variables = builders.make(resolved.model, seed=4)
    builders.saved_run(tmp_path / "start", resolved, variables["params"], tokenizers)
    return config, resolved, dataset, tokenizers, module, variables["params"]


def kept(tmp_path):
    return sorted((tmp_path / "cache" / "reference").glob("*.json"))


def attached(start, known=None, **edits):
    _, resolved, dataset, tokenizers, *_ = start
    config = dataclasses.replace(resolved, **edits)
    mesh = meshes.make(config.mesh)
    with jax.set_mesh(mesh):
        return reference.attach(config, dataset, {"train": None}, tokenizers, mesh, warm_start.RUN_FORMAT, known)


@pytest.mark.parametrize("start", [1], indirect=True)
def test_the_reference_is_the_starting_model_and_reads_each_reply_by_itself(start, tmp_path, monkeypatch):
    """Beside the likelihood of each conversation in a row of its own; of buckets and adapters the same."""
    _, resolved, dataset, tokenizers, module, params = start
    config, rows = dataclasses.replace(resolved, task=TaskConfig(name="dialogue", replies="last")), []
    for example, side in itertools.product(map(dataset.splits["train"].__getitem__, range(5)), ("chosen", "rejected")):
        messages = [*example["messages"], {"role": "assistant", "content": example[side]}]
        rows.append(dialogue.encode(config, tokenizers, {"messages": messages}, None))
    logits = np.asarray(jax.jit(module.apply)({"params": params}, packing.collate([[row] for row in rows], 80)))
    expected = []
    for row, x in zip(rows, logits.astype(np.float64), strict=True):
        x = x[: len(row["labels"])]
        log_probs = x - np.log(np.exp(x).sum(-1, keepdims=True))
        expected.append((log_probs[np.arange(len(x)), row["labels"]] * row["weights"]).sum())
    lengths = sorted(len(a["labels"]) + len(b["labels"]) for a, b in zip(rows[::2], rows[1::2], strict=True))
    assert lengths[2] < lengths[3], "two buckets, which change the order of the examples"
    found, digested = attached(start, data=dataclasses.replace(resolved.data, buckets=(lengths[2],)))
    values = [found.splits["train"][index]["reference"] for index in range(5)]
    np.testing.assert_allclose(values, np.reshape(expected, (5, 2)), rtol=1e-5)
    assert np.ptp(values) > 1 and len(kept(tmp_path)) == 1

    # New adapters change nothing, so that they share the entry; so do other settings of the loss.
    adapted, mesh = dataclasses.replace(resolved.model, adapter=AdapterConfig(rank=2)), meshes.make(resolved.mesh)
    drawn = step.initial_variables

    def unchanged(*given):
        flat = traverse_util.flatten_dict(drawn(*given))
        flat |= {path: jnp.zeros_like(x) for path, x in flat.items() if path[-1] == "lora_b"}
        return traverse_util.unflatten_dict(flat)

    other = reference._Reference(dataclasses.replace(resolved, model=adapted), tokenizers, mesh, warm_start.RUN_FORMAT)
    assert other.digest() != digested, "adapters that are not new are part of the reference"
    monkeypatch.setattr(step, "initial_variables", unchanged)
    again, same = attached(start, model=adapted, task=dataclasses.replace(resolved.task, beta=2.0))
    assert same == digested and len(kept(tmp_path)) == 1
    np.testing.assert_array_equal([example["reference"] for example in again.splits["train"]], values)
    # Examples that are cut are others, and so are other templates.
    keys = [
        reference._key(one, words, dataset.splits["train"], 5, digested)
        for one, words in (
            (resolved, tokenizers),
            (dataclasses.replace(resolved, data=dataclasses.replace(resolved.data, length=60)), tokenizers),
            (resolved, dataclasses.replace(tokenizers, chat_template="{{ messages }}")),
        )
    ]
    assert keys[1] != keys[0] != keys[2]


@pytest.mark.parametrize("start", [0], indirect=True)
def test_a_resumed_run_is_the_uninterrupted_one_although_its_start_is_gone(
    start, tmp_path, monkeypatch, shared_programs, capsys
):
    config = start[0]
    assert loop.train(config, tmp_path / "whole") == 0
    computed = kept(tmp_path)
    assert len(computed) == 2
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["loss"] == pytest.approx(np.log(2), rel=1e-4) and abs(rows[0]["margin"]) < 1e-3
    assert rows[-1]["accuracy"] == 1.0 and rows[-1]["margin"] > 0.1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreemptionListener, "should_stop", lambda self, number: number == 1)
        assert loop.train(config, tmp_path / "parts") == loop.EXIT_PREEMPTED
    shutil.move(tmp_path / "start", tmp_path / "moved")
    assert loop.train(config, tmp_path / "parts") == 0
    assert kept(tmp_path) == computed
    mine, theirs = (checkpoint.load_run(tmp_path / name) for name in ("parts", "whole"))
    chex.assert_trees_all_equal(jax.device_get(mine.params), jax.device_get(theirs.params))

    # An evaluation, too, compares with the start; without either it says what is missing.
    result = evaluate(tmp_path / "parts", "validation")
    assert {name: result[name] for name in ("loss", "margin")} == pytest.approx(
        {name: rows[-1][name] for name in ("loss", "margin")}, rel=1e-4
    )
    shutil.rmtree(tmp_path / "cache" / "reference")
    with pytest.raises(ConfigError, match="start: got nothing there"):
        evaluate(tmp_path / "parts", "validation")
    _, resolved, _, tokenizers, *_ = start
    builders.saved_run(tmp_path / "start", resolved, builders.make(resolved.model, seed=5)[1]["params"], tokenizers)
    with pytest.raises(ConfigError, match="no longer those that the run started from, expected the same"):
        evaluate(tmp_path / "parts", "validation")
