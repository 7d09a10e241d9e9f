"""The old Flax classes' own outputs and generated ids: ours are the same to rounding.

`goldens/flax` holds a few classes in configurations where the old rules are odd (see `goldens/write_flax.py`). Beside
the project may lie a folder of all classes (`../shared/flax_goldens`); with `GOLDENS=all` they are all compared.
"""

import os
import sys
from pathlib import Path

import pytest

from jaxformer.hf import flax

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import flax_classes  # noqa: E402

KEPT = Path(__file__).with_name("goldens") / "flax"
BESIDE = ROOT.parent / "shared" / "flax_goldens"
ALL = os.environ.get("GOLDENS") == "all"
DIRECTORIES = [path.parent for path in sorted((BESIDE if ALL else KEPT).glob("*/expected.npz"))]


@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda path: path.name)
def test_outputs_and_generated_ids(directory):
    line, good = flax_classes.compare(directory)
    assert good, line
    assert not line.startswith("refused")


def test_the_comparison_notices_a_difference(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(flax_classes, "MAX_ERROR", 1e-12)
    for path in (KEPT / "FlaxElectraForPreTraining").iterdir():
        (tmp_path / "FlaxElectraForPreTraining-1").mkdir(exist_ok=True)
        (tmp_path / "FlaxElectraForPreTraining-1" / path.name).write_bytes(path.read_bytes())
    assert flax_classes.main([str(tmp_path)]) == 1
    assert "DIFFERS\n1 classes, 1 of them differ" in capsys.readouterr().out
    assert flax_classes.main([str(tmp_path), "FlaxBert"]) == 0
    assert flax_classes.main([]) == 2


@pytest.mark.skipif(not BESIDE.exists(), reason="no folder of all classes beside the project")
def test_all_classes_of_the_old_library_are_here():
    assert {path.name for path in BESIDE.glob("Flax*")} <= set(flax.__all__)
