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


def test_training_a_run_that_starts_from_nothing_reads_no_foreign_format():
    """`train` names `hf` only behind a check of the directories that it may read."""
    text = (ROOT / "jaxformer" / "cli" / "train.py").read_text(encoding="utf-8")
    before = text[: text.index("from jaxformer.hf import")].rstrip().splitlines()[-1]
    assert before.strip() == "if config.init.directory or config.distillation is not None:"
