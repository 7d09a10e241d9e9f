"""`push_to_hub`: a model as a repository of the hub, with a card that holds its recipe and its measured scores."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxformer import __version__
from jaxformer.config import Config, overrides
from jaxformer.errors import ConfigError
from jaxformer.hf.origin import HuggingFaceOrigin
from jaxformer.model import Model
from jaxformer.runtime import files, hub, secrets

CARD = "README.md"

PIPELINES = {
    "causal_lm": "text-generation",
    "masked_lm": "fill-mask",
    "pretraining": "fill-mask",
    "seq2seq": "translation",
    "sequence": "text-classification",
    "token": "token-classification",
    "qa": "question-answering",
}
"""Head -> the hub's name of what such models do; the others give features."""

TASK_PIPELINES = {
    "summarisation": "summarization",
    "text_to_text": "text2text-generation",
    "similarity": "sentence-similarity",
}
"""Task -> the hub's name, where it is not that of the head."""

NOT_MEASURES = (
    "step",
    "seconds",
    "examples",
    "split_examples",
    "decoded_examples",
    "cut_examples",
    "cut_tokens",
    "cut_words",
)
"""Numbers beside the measures in the files of a run."""


def push(
    model: Model,
    origin: HuggingFaceOrigin,
    name: str,
    write: Callable[[Path], None],
    *,
    token: str | bool | None = None,
    revision: str | None = None,
    private: bool | None = None,
    message: str = "",
) -> str:
    """Uploads what `write` writes into a directory, and the card; returns the address of the commit.

    Args:
      name: "org/name" of the repository, which is made if there is none.
      token: a token of the hub that may write; None: `HF_TOKEN`, or that of a login.
      revision: branch; None: the main branch.
      private: of a new repository; None: as the account says.
      message: of the commit.

    Raises:
      ConfigError: the model cannot be written, huggingface_hub is not installed, or the hub refuses.
    """
    hub.check_upload(name, revision)
    with tempfile.TemporaryDirectory(prefix="jaxformer-push-") as folder:
        directory = Path(folder) / "model"
        write(directory)
        files.write_atomic(directory / CARD, card(model, origin, name))
        message = message or f"Upload by jaxformer {__version__}"
        return hub.upload(directory, name, token=token, revision=revision, private=private, message=message)


def card(model: Model, origin: HuggingFaceOrigin, name: str) -> str:
    """The model card: metadata of the hub, how to load the model, its measured scores, and its recipe.

    Secrets in the recipe are redacted.
    """
    scores = measured(origin.workdir)
    start = model.config.init.directory
    pipeline = TASK_PIPELINES.get(model.config.task.name, PIPELINES.get(origin.head, "feature-extraction"))
    metadata: dict[str, Any] = {
        "library_name": "jaxformer",
        "pipeline_tag": pipeline,
        "tags": ["jax", "jaxformer", model.config.task.name],
    }
    if start and hub.is_name(start):
        metadata["base_model"] = start.partition("@")[0]
    data = model.config.data.source
    if scores:
        results = [
            {
                "task": {"type": pipeline},
                "dataset": {"type": data, "name": data, "split": split},
                "metrics": [{"type": measure, "value": value} for measure, value in values.items()],
            }
            for split, values in scores.items()
        ]
        metadata["model-index"] = [{"name": name.rpartition("/")[2], "results": results}]
    # JSON is YAML, so no value needs quotes of another kind
    head = "".join(f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in metadata.items())
    return f"---\n{head}---\n\n# {name}\n\n" + "\n\n".join(
        [_use(model, name), _measures(model, scores), _recipe(model, origin)]
    )


def _use(model: Model, name: str) -> str:
    what = f"A model for {model.config.task.name}" if model.config.task.name != "none" else "A model"
    return (
        f"{what}, written by jaxformer {__version__}.\n\n## Use\n\n"
        f'```python\nimport jaxformer\n\nmodel = jaxformer.from_pretrained("{name}")\n```'
    )


def _measures(model: Model, scores: Mapping[str, Mapping[str, float]]) -> str:
    if not scores:
        return "## Measured\n\nNothing was measured on this copy: there is no run beside it."
    weights = "" if model.weights is None else f" Weights: {model.weights.describe()}."
    rows = [f"| {split} | {name} | {value:.6g} |" for split, values in scores.items() for name, value in values.items()]
    return "\n".join([f"## Measured\n\nData: {model.config.data.source}.{weights}\n", "| split | measure | value |",
                      "|---|---|---|", *rows])  # fmt: skip


def _recipe(model: Model, origin: HuggingFaceOrigin) -> str:
    values = secrets.redact_json(json.loads(overrides.to_json(model.config)))
    title = "## Recipe\n\nThe whole config of the run"
    if origin.workdir is None:
        title = "## Recipe\n\nThe model was not trained by jaxformer; this is the config that it is computed with"
    changed = secrets.redact_json({path: value for path, (value, _) in overrides.diff(model.config, Config()).items()})
    edits = [f"--config.{path}={json.dumps(value, default=str, ensure_ascii=False)}" for path, value in changed.items()
             if isinstance(value, str | int | float | bool)]  # fmt: skip
    return (
        f"{title} (`jaxformer.config.overrides.from_json` reads it):\n\n```json\n"
        f"{json.dumps(values, indent=1, ensure_ascii=False)}\n```\n\n"
        "What differs from the defaults:\n\n```text\n" + "\n".join(edits) + "\n```\n"
    )


def measured(workdir: Path | None) -> dict[str, dict[str, float]]:
    """Split -> measure -> value of a run: of `eval-<split>.json`, and of `result.json` as "validation".

    Files that cannot be read count as absent; so do numbers that are not finite.
    """
    found: dict[str, dict[str, float]] = {}
    if workdir is None:
        return found
    for path in [workdir / "result.json", *sorted(workdir.glob("eval-*.json"))]:
        try:
            content = files.read_json(path)
        except (OSError, ConfigError):
            continue
        values = {
            name: float(value)
            for name, value in content.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            and name not in NOT_MEASURES
        }  # fmt: skip
        if values:
            found["validation" if path.name == "result.json" else str(content.get("split", path.stem))] = values
    return found
