"""The benchmark scripts run, at toy size, and write what they print."""

import dataclasses
import gzip
import importlib.util
import itertools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxformer import registry, tasks
from jaxformer.config import NormConfig, OptimizerConfig, overrides
from jaxformer.data import ngrams, sources
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.hf import workdirs
from jaxformer.parallel import mesh as meshes
from jaxformer.plan import program

ROOT = Path(__file__).resolve().parents[1]


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


def test_kernels_are_measured_side_by_side(tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    script("attention").main(["--lengths=8,16", "--rounds=2", f"--output={output}"])
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    names = ("blockwise", "dense", "rowwise")  # the others need devices or a mesh that are not here
    assert [(row["kernel"], row["length"]) for row in rows] == [(n, length) for length in (8, 16) for n in names]
    assert all(row["ratio"] == 1.0 for row in rows if row["kernel"] == "dense")
    assert all(row["milliseconds"] > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


def test_memory_grows_with_the_length_and_no_faster(tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    script("memory").main(["--lengths=1024,2048", "--limit=0", "--devices=2", f"--output={output}"])
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert {row["name"] for row in rows} == {"blockwise", "ring", "ulysses", "chunked"}
    sizes = {(row["name"], row["length"]): row["bytes"] for row in rows}
    assert all(sizes[name, 2048] < 2.5 * sizes[name, 1024] for name, _ in sizes)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


def lean(stack):
    """The stack with fewer parameters: compiling takes time by their number."""
    attention, ffn = dataclasses.replace(stack.attention, bias=False), dataclasses.replace(stack.ffn, bias=False)
    return dataclasses.replace(stack, norm=NormConfig(kind="rms"), attention=attention, ffn=ffn)


def test_a_mesh_of_pipeline_fsdp_and_tensor_trains_and_decodes_as_one_device(tmp_path, monkeypatch, capsys):
    output, benchmark = tmp_path / "rows.jsonl", script("meshes")
    stack = benchmark.stack
    monkeypatch.setattr(benchmark, "stack", lambda **edits: lean(stack(**edits)))
    arguments = ["--family=decoder", "--mesh=pipeline2_fsdp2_tensor2", "--steps=2", f"--output={output}"]
    assert benchmark.main(arguments) == 0, capsys.readouterr().out
    (row,) = (json.loads(line) for line in output.read_text().splitlines())
    assert row["holds"] and row["difference"] < 2e-5 and row["decoding"] and row["initial"]
    assert row["share"]["params"] < 0.25 and not row["rematerialised"]


@pytest.mark.parametrize("name", ["data 8", "fsdp 8", "tensor 8", "ring 8", "ulysses 8"])
def test_a_step_sends_little_more_than_the_textbook(name, tmp_path, monkeypatch, capsys):
    output, benchmark = tmp_path / "rows.jsonl", script("collectives")
    config_of = benchmark.config_of

    def small(*given):
        """Without moments, which are not sent."""
        config = config_of(*given)
        model = dataclasses.replace(config.model, decoder=lean(config.model.decoder))
        return dataclasses.replace(config, model=model, optimizer=OptimizerConfig(name="sgd", momentum=0.0))

    monkeypatch.setattr(benchmark, "config_of", small)
    benchmark.main([f"--mesh={name}", "--layers=2", f"--output={output}"])
    row = json.loads(output.read_text())
    assert row["mesh"] == name and row["sent"] == sum(row["kinds"].values())
    assert 0.5 < row["ratio"] < 1.25
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_gpu_is_measured_by_one_command(tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    assert script("gpu").main(["--toy", f"--output={output}"]) == 0, capsys.readouterr().out
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    ours = [row for row in rows if row["system"] == "jaxformer"]
    assert all(row["device"] == "cpu" and row["versions"]["jax"] and row["date"] for row in ours)
    refused, *others = ours
    assert refused["skipped"] == "not available: needs an NVIDIA GPU"
    assert {row["part"] for row in others} == set(script("gpu").TOYS)
    for row in others:
        measured = {"correct": "check", "attention": "step_ms"}.get(row["part"], "tokens_per_second")
        assert row[measured] and "failed" not in row and "skipped" not in row
        assert "flops_token" not in row or row["flops_token"] > row["flops_token_visible"]
    (peer,) = (row for row in rows if row["system"] == "torch")
    assert "skipped" in peer or peer["ratio"] > 0  # torch need not be there


def test_a_gpu_part_of_two_sides_gets_the_batches_that_its_step_takes():
    gpu = script("gpu")
    import gpu_jax

    (part,) = (gpu.toy(part) for part in gpu.PARTS if part.name == "seq2seq-no-dropout")
    config = overrides.parse([*part.arguments])
    mesh = meshes.make(config.mesh, jax.devices()[:1])
    with jax.set_mesh(mesh):
        traced = program.trace(config, mesh)
    made = gpu_jax.batch(traced, 0)
    form = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert form(made) == form(traced.batch) and made.source is not None
    assert not np.array_equal(made.source.tokens, made.target.tokens)


def test_the_parts_of_the_gpu_benchmark_are_the_models_they_are_named_after():
    sizes = {}
    for part in script("gpu").PARTS:
        if part.arguments:
            config = program.resolve(overrides.parse(list(part.arguments)))
            stack = config.model.decoder
            heads = stack.attention.heads * (stack.attention.head_width or stack.width // stack.attention.heads)
            matrices = 4 * stack.width * heads + 2 * stack.width * (stack.ffn.width or 4 * stack.width)
            sizes[part.name] = (stack.layers * matrices + stack.embed.vocab * stack.width, config.data.length)
    assert sizes["124M@1k"] == (pytest.approx(124e6, rel=0.01), 1024)
    assert sizes["350M@4k"] == (pytest.approx(355e6, rel=0.01), 4096)
    assert sizes["1.3B@1k"] == (pytest.approx(1.31e9, rel=0.01), 1024)


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        ([3.0, 2.0, 1.0, 1.5], None),
        ([3.0, float("nan"), 1.0, 1.0], "not finite"),
        ([2.0, 1.0, 2.0, 1.0], "did not fall"),
    ],
)
def test_a_gpu_run_that_does_not_learn_has_no_figures(losses, reason):
    script("gpu")
    import gpu_shared

    found = gpu_shared.wrong(losses, 2)
    assert found is None if reason is None else reason in found


def test_what_does_not_fit_the_minutes_is_named(tmp_path, capsys):
    gpu = script("gpu")
    assert gpu.main(["--minutes=0", "--only=1.3B@1k,decode", f"--output={tmp_path / 'rows.jsonl'}"]) == 0
    assert "skipped: 1.3B@1k (jaxformer: no time left); " in capsys.readouterr().out
    assert gpu.main(["--train", "--only=multi30k_tiny-2", "--output="]) == 0
    assert "skipped: multi30k_tiny-2 (jaxformer: needs --multi30k=DIR)" in capsys.readouterr().out
    assert gpu.child([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], 1)[0::2] == (
        "1\n",
        gpu.LATE,
    )


def test_training_steps_are_timed(tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    arguments = ["--smoke", "--models=gpt", "--dtypes=bfloat16", "--rounds=2", "--warm=1", f"--output={output}"]
    assert script("training").main(arguments) == 0
    (row,) = (json.loads(line) for line in output.read_text().splitlines())
    assert (
        len(row["windows"]["jaxformer"]) == 2
        and 0 < row["overhead_seconds"] < row["first_step_seconds"]["jaxformer"][0]
    )
    *_, shares = capsys.readouterr().out.splitlines()
    assert 0 <= row["kernel_share"]["jaxformer"] < 1
    assert shares == f"the kernel's share of the processor time: jaxformer {row['kernel_share']['jaxformer']:.1%}"


def test_free_pages_go_back_while_a_timed_step_runs(monkeypatch):
    """What a step holds must stay: fetching a page again from a virtual machine's host takes long."""
    timed, order = script("training_jax"), []
    training = object.__new__(timed.Training)
    training.mesh, training.turn, training.state = jax.make_mesh((1,), ("data",)), itertools.repeat(None), None
    monkeypatch.setattr(timed.steps, "shard_batch", lambda batch, mesh: batch)
    training.step = lambda state, batch: order.append("started") or (state, {"loss": (6.0, 2.0)})
    training.heap = SimpleNamespace(after_step=lambda: order.append("pages went back"))
    monkeypatch.setattr(timed.jax, "device_get", lambda sums: order.append("ended") or sums)
    assert training.run() == 3.0 and order == ["started", "pages went back", "ended"]


def test_bare_products_are_all_done(monkeypatch):
    """One program of them all would leave out those that are equal: the gradients of kernels of one shape."""
    timed, done = script("training_jax"), []
    shape = dataclasses.replace(timed.shared.TOYS["gpt"], layers=2)
    monkeypatch.setattr(timed.jax, "block_until_ready", done.append)
    timed.bare(shape, "float32")()
    shapes = [(y.shape, *(each.shape for each in gradients)) for y, gradients in done]
    assert shapes == [((n, o), (n, m), (m, o)) for n, m, o in timed.shared.products(shape)]


def test_a_fall_beyond_the_spreads_is_an_error():
    training = script("training")
    before = {"ratio": [0.9, 1.0, 1.1]}
    assert training.fell({"ratio": [0.7, 0.75, 0.8]}, {"ratio": [0.98, 1.0, 1.02]})
    assert not training.fell({"ratio": [0.7, 0.75, 0.8]}, before) and not training.fell({"ratio": [1, 2, 3]}, None)
    windows = lambda *seconds: [(each, 0.0) for each in seconds]  # noqa: E731
    taken = {"jaxformer": windows(1, 2, 1), "eager": windows(2, 3, 2), "compiled": [*windows(3, 3, 3), (0.1, 1.0)]}
    found = training.judged(taken | {"plain": [(4.0, 1.0)] * 5})
    assert found["best_peer"] == "eager" and found["ratio"][1] == 2.0
    assert "over_plain" not in found  # other processes disturbed it: it says nothing


PROGRAM = """
import sys, time, turns
given = turns.task()
if given["fails"]:
    sys.exit("no such library")
turns.serve(lambda: time.sleep(given["seconds"]) or given["seconds"])
"""


def test_programs_are_timed_by_turns_and_one_that_fails_says_why():
    turns = script("turns")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}
    tasks = {"quick": (0.01, False), "slow": (0.05, False), "broken": (0.0, True)}
    programs = {
        name: turns.Program([sys.executable, "-c", PROGRAM], {"seconds": seconds, "fails": fails})
        for name, (seconds, fails) in tasks.items()
    }
    found = turns.take(programs, 3, environment)
    assert found["slow"]["result"] == 0.05
    assert len(found["quick"]["rounds"]) == 3
    assert turns.ratio(found["quick"], found["slow"]) > 1.5
    assert found["broken"] == {"failed": "no such library\n"}


def test_decoding_is_compared_with_the_peers_of_its_precision():
    decoding = script("decoding")
    names = {"jaxformer": 1.0, "generate": 2.0, "generate, compiled": 1.6, "CTranslate2 int8, 1 x 2 threads": 0.5}
    rows = {name: {"rate": 10.0, "spread": 0.1, "times": times, "bytes": 15e8} for name, times in names.items()}
    told = {"date": "2026-01-01", "python": "3.11", "jax": "0.10", "hardware": "2 cores", "rounds": 3}
    row = {"case": "beam", "unit": "tokens/s", "rows": rows} | told
    assert decoding.speedup(row) == 1.6
    faster = row | {"rows": rows | {"generate": rows["generate"] | {"times": 1.2}}}
    assert decoding.is_slower(faster, [row])
    assert not decoding.is_slower(faster, [row, faster])
    assert not decoding.is_slower(faster, [])
    lines = decoding.table([row, faster])
    assert len(lines) == 2 + len(names) + 2
    assert "| beam | generate | 10 tokens/s | 10% | 1.20 x |  | 1.5 GB |" in lines


def test_the_decoding_benchmark_makes_as_many_tokens_as_asked_for():
    programs = script("decoding_jax")
    task = dict(layers=1, width=64, vocab=11, prompt=3, tokens=6, batch=2, dtype="float32", method="greedy")
    assert [len(row) for row in programs.continuation(task)()] == [6, 6]


def test_a_table_takes_the_place_of_the_last_one(tmp_path):
    pages, page = script("pages"), tmp_path / "page.md"
    page.write_text("above\n<!-- speed: begin -->\nold\n<!-- speed: end -->\nbelow\n")
    for number in ("1", "2"):
        pages.put(page, "speed", pages.table(("what",), [(number,)]))
    marks = ("<!-- speed: begin -->", "<!-- speed: end -->")
    assert page.read_text() == f"above\n{marks[0]}\n\n| what |\n| --- |\n| 2 |\n\n{marks[1]}\nbelow\n"


def test_builds_are_measured_beside_the_library_and_an_index_is_multiplied(tmp_path, monkeypatch, capsys):
    benchmark = script("data_build")
    monkeypatch.setattr(benchmark, "VOCABULARY", 300)
    (tmp_path / "text-0").mkdir()
    texts = [f"document {number} " + "of some words\n" * number for number in range(1, 9)]
    (tmp_path / "text-0" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    vocabulary = benchmark.learn(tmp_path / "text-0", tmp_path)
    built = tmp_path / "built"
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "text-0"), str(vocabulary), str(built)])
    exec(benchmark.BUILD.replace("PEAK", benchmark.PEAK), {})
    row = json.loads(capsys.readouterr().out)
    assert row["tokens"] == benchmark.library(texts, vocabulary, False) + len(texts), "an end token a document"
    assert row["tokens"] == benchmark.library(texts, vocabulary, True) + len(texts)
    assert row["megabytes"] > 10 and row["tokens_per_processor_second"] > 0
    target = benchmark.multiplied(built, tmp_path / "many", 100, "documents")
    fields = {"source": "shards", "dir": str(target), "packing": "first_fit", "length": 64}
    monkeypatch.setattr(sys, "argv", ["", json.dumps(fields), "1", "1", str(vocabulary)])
    exec(benchmark.READ.replace("PEAK", benchmark.PEAK).replace("ROWS", "2").replace("LENGTH", "64"), {})
    row = json.loads(capsys.readouterr().out)
    assert row["tokens_per_second"] > 0 and len(list(target.glob("*.array_record"))) == 13


ON_PAGES = ("training", "starts", "decoding", "pipeline", "growth", "scaling", "meshes", "collectives")


@pytest.mark.parametrize("name", ON_PAGES)
def test_the_page_says_what_the_rows_say(name, tmp_path, monkeypatch):
    benchmark = script(name)
    written, copy = benchmark.PAGE.read_text(), tmp_path / "page.md"
    copy.write_text(written)
    monkeypatch.setattr(benchmark, "PAGE", copy)
    monkeypatch.setattr(sys, "argv", [name, "--page"])
    assert benchmark.main() == 0
    assert copy.read_text() == written


def test_the_rows_of_large_recipes_hold_todays_count_of_model_flops(monkeypatch):
    scaling = script("scaling")
    monkeypatch.chdir(ROOT)
    newest = {row["model"]: row for row in scaling.rows().values()}
    assert len(newest) > 5
    for row in newest.values():
        assert scaling.recount(row) == row, "run benchmarks/scaling.py --recount"


def test_recounting_touches_model_flops_only_and_all_rows_or_none(tmp_path, monkeypatch):
    scaling, results = script("scaling"), tmp_path / "rows.jsonl"
    row = scaling.rows()["llama_1b@v5e-16"]
    refused = scaling.rows()["moe_8x7b@v5e-16"]  # does not fit, so it has no MFU
    old = {key: row[key] for key in row if key != "flops_token_visible"} | {
        "flops_token": 1,
        "flops_step": 1,
        "mfu": [1, 1],
    }
    monkeypatch.setattr(scaling, "RESULTS", results)
    monkeypatch.setattr(scaling, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(sys, "argv", ["scaling", "--recount"])
    monkeypatch.chdir(tmp_path)
    results.write_text("".join(json.dumps(each) + "\n" for each in (old, refused)))
    assert scaling.main() == 0
    assert results.read_text() == "".join(json.dumps(each) + "\n" for each in (row, refused))
    assert f"| {row['flops_token']:.2e} | {row['flops_token_visible']:.2e} |" in scaling.PAGE.read_text()
    written = json.dumps(old) + "\n" + json.dumps(old | {"parameters": 1}) + "\n"
    results.write_text(written)
    with pytest.raises(SystemExit):
        scaling.main()
    assert results.read_text() == written


def test_the_formula_of_dense_models_is_what_the_program_counts():
    growth = script("growth")
    rows = [row for row in map(json.loads, growth.RESULTS.read_text().splitlines()) if "family" in row][-3:]
    assert [row["family"] for row in rows] == list(growth.COUNTED)
    for row in rows:
        assert growth.recount(row) == row, "run benchmarks/growth.py --recount"
        assert row["formula"] == row["counted"] >= row["formula_visible"]
    assert growth.recount({"axis": "width"}) == {"axis": "width"}


def test_pipelines_are_timed_beside_their_models(tmp_path, monkeypatch, capsys):
    pipeline = script("pipeline")
    (tmp_path / "input.txt").write_text("Not all those who wander are lost.\n" * 200)
    found = pipeline.cold({"recipe": "shakespeare_char", "folder": str(tmp_path), "batches": 3})
    assert found["tokens"] > 0 and set(found["seconds"]) == {"data", "tokenizer", "pipeline", "first batch"}
    assert 0 < found["seconds"]["first batch"] <= found["epoch"]

    def taken(programs, rounds, environment):
        assert set(programs) == {"cold", "later", "model"}
        seconds = {"cold": found["epoch"] + 1.0, "later": 0.5, "model": 2.0}
        results = {"cold": found, "later": {"tokens": 600}, "model": {"tokens": 100}}
        return {name: {"rounds": [seconds[name]] * rounds, "result": results[name]} for name in programs}

    monkeypatch.setattr(pipeline.turns, "take", taken)
    monkeypatch.setattr(pipeline, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text("<!-- pipeline: begin --><!-- pipeline: end -->")
    flags = ["--recipes=multi30k_tiny", f"--data={tmp_path}", f"--results={tmp_path / 'rows.jsonl'}"]
    assert pipeline.main(flags) == 0  # 1,200 tokens a second are 24 times 50
    (row,) = (json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines())
    assert row["times"] == 24.0 and row["later"] == 1200.0 and row["model"] == 50.0
    assert row["build_total"] == pytest.approx(1.0 + found["seconds"]["first batch"])
    assert pipeline.main([*flags, "--page"]) == 0
    assert "| multi30k_tiny |" in (tmp_path / "page.md").read_text()
    monkeypatch.setattr(pipeline, "TIMES", 25.0)
    assert pipeline.main([*flags, "--page"]) == 1


def test_starts_are_timed_with_and_without_kept_programs(tmp_path, monkeypatch, capsys):
    starts, calls = script("starts"), []

    def start(arguments, cache, kept):
        calls.append((arguments[1], kept))
        return 9.0 if len(calls) == 1 else 4.0 if kept else 8.0

    monkeypatch.setattr(starts, "start", start)
    results = tmp_path / "rows.jsonl"
    assert starts.main([f"--data={tmp_path}", "--jobs=gpt", "--rounds=2", f"--results={results}"]) == 0
    (row,) = map(json.loads, results.read_text().splitlines())
    assert (row["first"], row["again"], row["without"], row["times"]) == (9.0, [4.0, 4.0], [8.0, 8.0], 2.0)
    assert [kept for _, kept in calls] == [True, False, True, False, True]
    assert len({workdir for workdir, _ in calls}) == len(calls), "a workdir was used twice"
    lines = tmp_path / "lines.txt"
    lines.write_text("a\nb\n")
    monkeypatch.setattr(starts, "start", lambda arguments, cache, kept: 2.0)
    flags = [f"--workdir={tmp_path / 'run'}", f"--input={lines}", "--rounds=1", f"--results={results}"]
    assert starts.main(flags) == 1, "kept programs that gain nothing should count as a failure"
    assert "decode, 2 lines by run" in capsys.readouterr().out


def test_a_start_ends_with_the_first_step_or_says_why_not(tmp_path, monkeypatch):
    starts, program = script("starts"), tmp_path / "program"
    monkeypatch.setattr(starts.sys, "executable", str(program))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    said = tmp_path / "said"
    seen = f'echo "$@ $JAXFORMER_CACHE $JAX_ENABLE_COMPILATION_CACHE $JAX_COMPILATION_CACHE_DIR" >> {said}'

    def stand_in(lines):
        program.write_text(f"#!/bin/sh\n{seen}\n{lines}\n")
        program.chmod(0o755)

    stand_in("echo started; echo 'step 1/9  loss 1'; exec sleep 60")
    assert starts.start(["train", "--x"], "cache", kept=True) < 30
    assert starts.start(["train", "--x"], "cache", kept=False) < 30
    line = "-u -m jaxformer train --x cache"
    assert said.read_text() == f"{line}  \n{line} 0 \n"
    stand_in("sleep 0.2")
    assert 0.2 < starts.start(["decode"], "cache", kept=True) < 30
    stand_in("echo 'error: config.data.nam: got an unknown key'; exit 2")
    for command in ("train", "decode"):
        with pytest.raises(RuntimeError, match="ended with code 2: error: config.data.nam: got an unknown key"):
            starts.start([command], "cache", kept=True)
    stand_in("exit 0")
    with pytest.raises(RuntimeError, match="train: ended with code 0"):
        starts.start(["train"], "cache", kept=True)
    stand_in("exec sleep 60")
    monkeypatch.setattr(starts, "LIMIT", 0.2)
    with pytest.raises(RuntimeError, match="ended with code -9"):
        starts.start(["decode"], "cache", kept=True)


def test_costs_are_measured_as_work_grows(tmp_path, monkeypatch):
    growth = script("growth")
    assert growth.slope((1, 2, 4), [3.0, 12.0, 48.0]) == pytest.approx(2.0)
    results = tmp_path / "rows.jsonl"
    assert growth.main(["--smoke", "--axes=rows", "--rounds=1", f"--results={results}"]) == 0
    (trained,) = (json.loads(line) for line in results.read_text().splitlines())
    one, two = trained["counted"]  # a token's operations do not depend on the rows
    assert one == pytest.approx(two)
    decoded = {"axis": "beams", "sizes": [1, 2], "microseconds": [3.0, 5.0]}
    decoded |= {"exponent": 0.7, "last": 0.7, "spread": 0.1}
    with results.open("a") as file:
        file.write(json.dumps(decoded) + "\n")
        file.write(
            json.dumps({"family": "encoder", "formula": 1.0e9, "formula_visible": 5e8, "counted": 2.0e9, "xla": 2.5e9})
            + "\n"
        )
    monkeypatch.setattr(growth, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text("<!-- growth: begin --><!-- growth: end -->")
    assert growth.main(["--page", f"--results={results}"]) == 0
    text = (tmp_path / "page.md").read_text()
    assert "| training | rows" in text and "| decoding | beams 1, 2 | 3, 5 | 0.70, 0.70 |  | 10% |" in text
    assert "| encoder | 1.0 | 0.5 | 2.0 | 2.5 | 0.800 | 0.400 |" in text


def test_baselines_of_questions_know_what_stands_beside_their_words(tmp_path, capsys):
    baselines, context = script("squad_baselines"), "in may the red fox ate nine old hens while it rained"
    example = {"question": "How many hens ate the red fox?", "context": context}
    assert [baselines.beside(example, n, lambda word: 1.0) for n in (1, 2)] == ["nine", "nine old"]
    weight = baselines.weights({"the cat", "a dog, cat"})
    assert (weight("cat"), weight("dog")) == (0.0, pytest.approx(np.log(3 / 2)))
    qas = [{"id": "1", "question": "what?", "answers": [{"text": context, "answer_start": 0}]}]
    data = [{"title": "A", "paragraphs": [{"context": context, "qas": qas}]}]
    (tmp_path / "a.json").write_text(json.dumps({"data": data}))
    edits = [f"--config.data.splits.{split}=a.json" for split in ("train", "validation", "test")]
    folders = [f"--config.data.dir={tmp_path}", f"--config.data.cache={tmp_path / 'cache'}"]
    assert baselines.main([f"--config={ROOT / 'configs' / 'squad.py'}", *edits, *folders]) == 0
    header, _, first, *rows = capsys.readouterr().out.splitlines()
    assert header == "test: 1 questions"
    assert first.split() == ["random", "100.0", "100.0"]  # as many words as the answer has: all
    assert [row.split()[1] for row in rows] == ["1", "2", "3", "5", "8"]


def test_the_first_words_of_texts_are_judged(tmp_path, capsys):
    for split in ("train", "dev", "test"):
        with gzip.open(tmp_path / f"{split}.jsonl.gz", "wt") as file:
            file.write(json.dumps({"email": "one two\nthree four five six seven eight", "subject": "One, two!"}) + "\n")
    folders = [f"--config.data.dir={tmp_path}", f"--config.data.cache={tmp_path / 'cache'}"]
    assert script("lead_baseline").main([f"--config={ROOT / 'configs' / 'aeslc.py'}", *folders]) == 0
    header, _, four, eight, *_ = capsys.readouterr().out.splitlines()
    assert header == "test: 1 texts"
    # Words shared: 2 of 4 (or 8) and of 2; pairs: 1 of 3 (or 7) and of 1.
    assert four.split() == ["lead", "4", "66.7", "50.0", "66.7"]
    assert eight.split() == ["lead", "8", "40.0", "25.0", "40.0"]


@pytest.mark.parametrize(("packing", "length"), [("concat", 4), ("none", 4), ("first_fit", 64)])
def test_an_n_gram_model_reads_the_windows_of_the_run(packing, length, tmp_path, monkeypatch, capsys):
    """Each token of the split is predicted once, from the tokens before it in its window; as by hand for bigrams."""
    baseline = script("ngram_baseline")
    (tmp_path / "train.txt").write_text("abab\nabba\nbbab\n")
    (tmp_path / "valid.txt").write_text("abbbabab\nba\n")
    config = overrides.parse(
        [f"--config={ROOT / 'configs' / 'wikitext2.py'}", "--config.data.tokenizer.kind=character",
         "--config.data.splits.train=train.txt", "--config.data.splits.validation=valid.txt",
         f"--config.data.dir={tmp_path}", f"--config.data.cache={tmp_path / 'cache'}", "--config.data.splits.test=",
         f"--config.data.packing={packing}", f"--config.data.length={length}"]
    )  # fmt: skip
    dataset = sources.build(config.data, ("text",))
    tokenizers = Tokenizers.build(config.data, dataset.splits["train"], ("text",))
    monkeypatch.setattr(baseline.workdirs, "load", lambda *_: SimpleNamespace(config=config, tokenizers=tokenizers))
    (tmp_path / "eval-validation.json").write_text('{"loss": 1.25}')
    assert baseline.main([f"--workdir={tmp_path}", "--order=2"]) == 0
    header, loss, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["validation", "2-gram", "the", "run"] and loss.split()[2] == "1.2500"
    ids = lambda text: [tokenizers.target.bos, *tokenizers.target.encode(text), tokenizers.target.eos]  # noqa: E731
    train, valid = [ids(text) for text in ("abab", "abba", "bbab")], [ids("abbbabab"), ids("ba")]
    if packing == "concat":
        train, valid = ([[texts[0][0], *itertools.chain(*(text[1:] for text in texts))]] for texts in (train, valid))
    model = ngrams.fit(list(map(np.array, train)), 2, tokenizers.target.size)
    expected = -np.mean(model.log_probs(list(map(np.array, valid))))  # a bigram needs no token from before a window
    assert float(loss.split()[1]) == pytest.approx(expected, abs=1e-4)
    assert baseline.measure(tmp_path, "validation", 5)["loss"] != pytest.approx(expected, abs=1e-3)
    with pytest.raises(ConfigError, match="--order: got 0, expected at least 1"):
        baseline.main([f"--workdir={tmp_path}", "--order=0"])


def test_linear_baselines_choose_on_validation_and_count_words(tmp_path, capsys):
    """The baseline reads words, not the order of examples: a bigram decides here, and each unigram says nothing."""
    pytest.importorskip("sklearn")
    baseline = script("bag_of_words")
    pairs = [("not good", 0), ("not bad", 1), ("so good", 1), ("so bad", 0)]
    for split, repeats in (("train", 8), ("dev", 2), ("test", 1)):
        rows = ["sentence\tlabel", *(f"{text}\t{label}" for text, label in pairs * repeats)]
        (tmp_path / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    names = {"train": "train", "validation": "dev", "test": "test"}
    edits = [f"--config.data.splits.{split}={name}.tsv" for split, name in names.items()]
    folders = [f"--config.data.dir={tmp_path}", f"--config.data.cache={tmp_path / 'cache'}"]
    arguments = [f"--config={ROOT / 'configs' / 'sst2.py'}", *edits, *folders]
    assert baseline.main(arguments) == 0
    header, features, _, validation, accuracy, f1, _ = capsys.readouterr().out.splitlines()
    assert header == "test" and features.split() == ["features", "counts"]
    assert [line.split()[-2] for line in (validation, accuracy, f1)] == ["100.0"] * 3
    # Labels of the test split turned around: what is printed is of the test split, what is chosen is not.
    turned = ["sentence\tlabel", *(f"{text}\t{1 - label}" for text, label in pairs)]
    (tmp_path / "turned.tsv").write_text("\n".join(turned) + "\n")
    assert baseline.main([*arguments, "--config.data.splits.turned=turned.tsv", "--split=turned"]) == 0
    assert [line.split()[-2] for line in capsys.readouterr().out.splitlines()[3:6]] == ["100.0", "0.0", "0.0"]
    with pytest.raises(ConfigError, match="got a recipe of translation without classes"):
        baseline.main([f"--config={ROOT / 'configs' / 'quickstart.py'}"])


def test_the_most_frequent_tag_of_a_word_is_a_baseline(tmp_path):
    baseline = script("bag_of_words")
    train = "Ann\tB-PER\nsaw\tO\nAnn\tB-PER\n\nAnn\tO\nMay\tB-PER\nMay\tO\nMay\tO\n"
    (tmp_path / "train.conll").write_text(train)
    (tmp_path / "test.conll").write_text("Ann\tB-PER\nmet\tB-PER\nMay\tO\nsaw\tO\n")
    config = overrides.parse(
        [f"--config={ROOT / 'configs' / 'btc_ner.py'}", "--config.data.splits.train=train.conll",
         "--config.data.splits.validation=test.conll", "--config.data.splits.test=test.conll",
         f"--config.data.dir={tmp_path}", f"--config.data.cache={tmp_path / 'cache'}"]
    )  # fmt: skip
    (found,) = baseline.measure(config, "test").values()
    # Ann is a person, May and the unknown "met" are nothing: one entity of two, and three words of four.
    assert found == pytest.approx({"word_accuracy": 0.75, "precision": 1.0, "recall": 0.5, "f1": 2 / 3})


def test_the_explorer_is_measured_on_a_run_with_random_parameters(tmp_path, monkeypatch, capsys):
    benchmark, output = script("explorer"), tmp_path / "rows.jsonl"
    (tmp_path / "recipe.py").write_text(
        "from jaxformer.config import StackConfig\n"
        "from jaxformer.config.overrides import defaults, section\n"
        "def get_config(variant):\n"
        "    config = defaults()\n"
        "    config.task.name = 'language_modelling'\n"
        "    config.data.tokenizer.vocab = 300\n"
        "    parts = dict(attention=dict(heads=2), ffn=dict(width=8))\n"
        "    config.model.decoder = section(StackConfig, layers=2, width=8, **parts)\n"
        "    return config\n"
    )

    def measured(folder, sentences, page):
        assert len(set(map(len, sentences.read_text().splitlines()))) == 1  # or nothing is patched
        page.write_text("x" * 10**6)
        assert workdirs.load(folder).params["target_embed"]["table"].shape == (300, 8)
        return {"seconds": 1.0, "cpu_seconds": 2.0, "peak_gib": 3.0}

    monkeypatch.setattr(benchmark, "measure", measured)
    assert benchmark.main([f"--recipe={tmp_path}/recipe.py", f"--output={output}"]) == 0
    row = json.loads(output.read_text())
    assert row["page_mb"] == 1.0 and row["parameters"] > 300 * 8 and "3.00 GiB" in capsys.readouterr().out


def test_every_task_has_a_run_that_the_drill_can_train(tmp_path):
    recipes = script("task_recipes")
    recipes.files(tmp_path)
    for name in registry.names("jaxformer.tasks"):
        recipe = recipes.get_config(name)
        recipe.data.dir = str(tmp_path)
        config = overrides.freeze(recipe)
        assert config.task.name == name
        if config.data.source == "digits":
            continue  # of a package that may be missing
        dataset = sources.build(config.data, tasks.get(name).roles)
        assert len(dataset.splits["train"]) >= 60 and len(dataset.splits["validation"]) >= 20


def test_hypotheses_of_equal_scores_alone_may_have_another_order():
    script("hugging_face_calls")  # the other imports it
    compare = script("hugging_face_searches").same_hypotheses
    texts, scores = np.asarray([[3, 4], [3, 5], [6, 2], [7, 2]]), np.asarray([-1.0, -1.0, -2.0, -3.0])

    def same(order, other=scores, alike=()):
        return compare((texts, scores, 2), (texts[order], other, 2), alike)

    assert same([0, 1, 2, 3]) and same([1, 0, 2, 3])
    assert not same([0, 1, 3, 2]), "the texts of a row have each other's scores"
    assert not same([2, 1, 0, 3]), "a text of another row"
    assert not same([0, 1, 2, 3], scores + np.asarray([0, 0, 0, 1e-3]))
    gone = np.asarray([-1.0, -1.0, -2.0, -np.inf])
    assert not same([0, 1, 2, 3], gone) and not compare((texts, gone, 2), (texts, scores, 2))
    filled = (np.asarray([[3, 4], [3, 5], [6, 2], [0, 0]]), np.asarray([-1.0, -1.0, -2.0, -1e9]), 2)
    assert compare((texts, gone, 2), filled)
    other_end = (np.asarray([[3, 9], [3, 5], [6, 2], [7, 2]]), scores, 2)
    assert compare((texts, scores, 2), other_end, (4, 9)) and not compare((texts, scores, 2), other_end)
