"""A checkpoint is read by Orbax alone, in the layout that docs/bridges.md describes."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxformer import checkpoint

ROOT = Path(__file__).resolve().parents[2]
STEP = ROOT / "tests" / "goldens" / "checkpoint-2" / "checkpoints" / "last" / "2"


def test_orbax_reads_the_arrays_that_a_run_loads():
    state = ocp.PyTreeCheckpointer().restore(STEP / "state")
    loaded = checkpoint.load_run(STEP)
    average = state["variables"]["ema"]  # which a run with one is used with
    assert jax.tree.structure(average) == jax.tree.structure(dict(loaded.params)) == jax.tree.structure(state["params"])
    jax.tree.map(np.testing.assert_array_equal, average, loaded.params)
    assert int(state["step"]) == 2
    stack = loaded.config.model.decoder
    shape = (stack.layers, stack.width, stack.attention.heads, stack.width // stack.attention.heads)
    assert state["params"]["decoder"]["blocks"]["attention"]["query"]["kernel"].shape == shape


def test_the_page_names_the_parts_that_there_are():
    page = (ROOT / "docs" / "bridges.md").read_text(encoding="utf-8").split("## Checkpoints without this package")[1]
    parts = re.findall(r"^\| `([\w./]+)` \|", page, re.MULTILINE)
    assert sorted(part.split("/")[0] for part in parts) == sorted(path.name for path in STEP.iterdir())
    about = json.loads((STEP / "about" / "metadata").read_text(encoding="utf-8"))
    (line,) = (line for line in page.splitlines() if line.startswith("| `about/metadata`"))
    assert set(about) <= set(re.findall(r"`(\w+)`", line)), about.keys()
    kept = ocp.PyTreeCheckpointer().metadata(STEP / "state").item_metadata.tree
    (line,) = (line for line in page.splitlines() if line.startswith("| `state/`"))
    assert set(kept) <= set(re.findall(r"`(\w+)`", line)), kept.keys()
