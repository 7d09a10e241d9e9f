"""What commands import before they need it, in one fresh process: each step names what must not have come in yet."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEPS = (
    # The program restarts itself here: what it has imported, it imports again.
    ("from jaxformer import __main__", ("jaxformer.cli", "jaxformer.config", "ml_collections", "numpy")),
    # What has run by then, and the packages that it must not have imported.
    ("from jaxformer import cli", ("jax", "flax", "optax", "orbax", "grain", "jinja2", "tokenizers", "sentencepiece")),
    (
        "from jaxformer import tasks; tasks.get('translation'); tasks.get('dialogue')",
        ("optax", "orbax", "grain", "jinja2", "safetensors", "sacrebleu", "rouge_score", "scipy"),
    ),
    ("from jaxformer import checkpoint", ("optax", "orbax", "grain", "jinja2", "safetensors")),
    (
        "from jaxformer.hf import workdirs",  # all that `decode` and `evaluate` import before they read a run
        ("optax", "orbax", "grain", "jinja2", "sacrebleu", "rouge_score", "matplotlib"),
    ),
    (
        "from jaxformer.train import loop, seeds",  # grain brings orbax
        ("jinja2", "jaxformer.report", "matplotlib", "sacrebleu", "rouge_score"),
    ),
)


def test_commands_import_only_what_they_need():
    code = "import json, sys\nfound = []\n"
    for words, names in STEPS:
        code += f"{words}\nfound.append([name for name in {names!r} if name in sys.modules])\n"
    code += "from jaxformer.data import chat_templates\n"
    code += "found.append(chat_templates.render('{{ 1 + 1 }}', {}))\n"  # what is put off is there when it is used
    code += "print(json.dumps(found))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    *found, rendered = json.loads(done.stdout.splitlines()[-1])
    assert found == [[]] * len(STEPS), dict(zip((words for words, _ in STEPS), found, strict=True))
    assert rendered == "2"


def test_reading_a_run_imports_no_orbax(tmp_path):
    """Nor does a program of each shape put its arrays on the device."""
    code = f"""
import pathlib, sys
import jax, numpy as np
from jaxformer.checkpoint import reading
from jaxformer.checkpoint.weights import average_weights
compiled = []
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
folder = pathlib.Path({str(tmp_path)!r}, "checkpoints", "last", "3")
if sys.argv[1] == "write":
    from jaxformer.checkpoint import Checkpoints
    from jaxformer.config import CheckpointConfig
    from jaxformer.types import TrainState
    shapes = {{"a": (2, 3), "b": (4,), "c": (5, 1, 2)}}
    params = {{name: jax.numpy.ones(shape) for name, shape in shapes.items()}}
    checkpoints = Checkpoints(folder.parents[2], CheckpointConfig())
    checkpoints.save(TrainState(jax.numpy.int32(3), params, (), jax.random.key(0), {{}}), {{}}, {{}})
    checkpoints.close()
else:
    params, _ = average_weights([folder], 1)
    assert sorted(params) == ["a", "b", "c"] and isinstance(params["a"], jax.Array), params
    assert "orbax" not in sys.modules, "orbax"
    assert not [event for event in compiled if "compile" in event], compiled
"""
    for which in ("write", "read"):
        done = subprocess.run(
            [sys.executable, "-c", code, which],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_training_a_run_that_starts_from_nothing_reads_no_foreign_format():
    """`train` names `hf` only behind a check of the directories that it may read."""
    text = (ROOT / "jaxformer" / "cli" / "train.py").read_text(encoding="utf-8")
    before = text[: text.index("from jaxformer.hf import")].rstrip().splitlines()[-1]
    assert before.strip() == "if config.init.directory or config.distillation is not None:"
