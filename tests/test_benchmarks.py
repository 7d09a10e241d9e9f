"""The benchmark scripts run, at toy size, and write what they print."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kernels_are_measured_side_by_side(tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    script("kernels").main(["--lengths=8,16", "--rounds=2", f"--output={output}"])
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    names = ("blockwise", "dense")  # the others need devices or a mesh that are not here
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


def test_a_mesh_of_pipeline_fsdp_and_tensor_trains_and_decodes_as_one_device(tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    arguments = ["--family=decoder", "--mesh=pipeline2_fsdp2_tensor2", "--steps=2", f"--output={output}"]
    assert script("meshes").main(arguments) == 0, capsys.readouterr().out
    (row,) = (json.loads(line) for line in output.read_text().splitlines())
    assert row["holds"] and row["difference"] < 2e-5 and row["decoding"] and row["initial"]
    assert row["share"]["params"] < 0.25 and not row["rematerialised"]
