"""The sections of a page, made from runs: results, curves, evaluations, samples, config and environment."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxformer.config import Config, ModelConfig, RecurrentConfig, StackConfig, overrides
from jaxformer.report import figures
from jaxformer.report.blocks import (
    ABSENT,
    Block,
    Details,
    Heading,
    Paragraph,
    Picture,
    Preformatted,
    format_value,
    table,
)
from jaxformer.report.runs import Run, as_float, flatten, signatures
from jaxformer.runtime import units
from jaxformer.train import seeds

MAX_SAMPLES = 25
"""Samples shown of one file; the page says how many there are."""

HEADLINES = (
    ("bleu", "bleu_lc_tok", "exact_match"),
    ("rouge1", "rouge2", "rouge_l"),
    ("spearman", "pearson"),
    ("f1", "exact_match", "precision", "recall"),
    ("word_accuracy",),
    ("word_perplexity", "bits_per_byte"),
    ("perplexity",),
    ("accuracy", "macro_f1"),
    ("loss",),
)
"""Measures by which results of tasks are known: the first row whose first name was measured."""

DECODED = (
    "bleu", "bleu_lc_tok", "chrf", "exact_match", "f1", "pearson", "precision", "recall", "rouge1", "rouge2", "rouge_l",
    "spearman", "squared_error", "word_accuracy",
)  # fmt: skip
"""Measures of decoded text (the scores of all tasks); training decodes only `evaluate.decode_examples` examples."""

COSTS = ("steps", "model", "parameters", "training time", "tokens per second", "device", "started")
"""Rows of the results that follow the measures, in this order."""

NO_MEASURES = ("split", "signatures", "checkpoint", "by_length")
"""Entries of `eval-<split>.json` that the table of measures leaves out."""

NO_SCORES = {
    "step", "config", "weights", "seconds", "examples", "cut_examples", "cut_tokens", "cut_words", "split_examples",
    "decoded_examples", "changed", "stopped_early", *NO_MEASURES,
}  # fmt: skip
"""Entries of results that cannot be a headline."""

PARTS = ("model.encoder", "model.decoder", "model.recurrent_encoder", "model.recurrent_decoder")
"""Paths of the optional parts of a model; the results name those of a run."""


# --- notes ------------------------------------------------------------------------------------------------------------


def notes(runs: Sequence[Run]) -> list[str]:
    """A line for each missing file, unreadable file, or loss that was not finite."""
    lines = [(run.name, note) for run in runs for note in [*run.notes, *not_finite(run), *_missing_headline(run)]]
    return [f"{name}: {note}" if len(runs) > 1 else note for name, note in lines]


def not_finite(run: Run) -> list[str]:
    """A note for each split whose loss was not finite in some report."""
    lines = []
    for split in ("train", "validation"):
        steps, values = run.series(split, "loss")
        wrong = steps[~(abs(values) < math.inf)]
        if wrong.size:
            count = f"{wrong.size:,} of {steps.size:,} reports"
            lines.append(f"{split} loss: not a finite number in {count}, first at step {wrong[0]:,.0f}")
    return lines


def _missing_headline(run: Run) -> list[str]:
    """A note if `evaluate.headline` names a measure that does not exist."""
    name = run.config.evaluate.headline if run.config else ""
    measures = [run.result, *run.evaluations.values()]
    if not name or not any(measures) or any(name in values for values in measures):
        return []
    measured = sorted({measure for values in measures for measure in values} - NO_SCORES)
    return [f"evaluate.headline is {name!r}, which was not measured; there are {', '.join(measured)}"]


# --- results ----------------------------------------------------------------------------------------------------------


def headline(values: Mapping[str, Any], config: Config | None = None) -> list[str]:
    """The measures by which a result is known, the main one first.

    The main one is `evaluate.headline`, else the measure by which checkpoints are chosen if it is not the loss, else
    the task's.
    """
    names = next((row for row in HEADLINES if row[0] in values), ())
    main = [] if config is None else [config.evaluate.headline or config.checkpoint.metric]
    return [name for name in dict.fromkeys([*(name for name in main if name != "loss"), *names]) if name in values]


def results(runs: Sequence[Run]) -> list[Block]:
    """The scores of each run, then its costs."""
    columns = [_scores(run) | _costs(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    order = sorted(names, key=lambda name: COSTS.index(name) + 1 if name in COSTS else 0)
    rows = [[name, *(column.get(name) for column in columns)] for name in order]
    return [table(_run_columns("", runs), rows)]


def _scores(run: Run) -> dict[str, Any]:
    scores: dict[str, Any] = {}
    for split, values in run.evaluations.items():
        for name in headline(values, run.config):
            scores[f"{split}{_evaluated_part(values, name)}: {figures.LABELS.get(name, name)}"] = values[name]
    final = {name: value for name, value in run.result.items() if name not in ("step", "config")}
    if not final:
        final = {name: run.last("validation", name) for name in run.measures("validation")}
    for name in dict.fromkeys([*headline(final, run.config), *(["loss"] if "loss" in final else [])]):
        scores[f"validation{_validated_part(run, name)}: {figures.LABELS.get(name, name)}"] = _finite(final[name])
    best = run.best()
    if best:
        scores[f"best validation {best[0]}"] = f"{best[1]:.4g} at step {best[2]:,}"
    if run.rows.get("train"):
        scores["train loss, last report"] = _finite(run.last("train", "loss"))
    return scores


def _costs(run: Run) -> dict[str, Any]:
    planned = run.config.train.steps if run.config else None
    costs: dict[str, Any] = {
        "steps": f"{run.step:,}"
        + (f" of {planned:,}" if planned else "")
        + (", stopped early" if run.result.get("stopped_early") is True else ""),
        "model": _model(run),
        "parameters": run.parameter_count,
    }
    if run.training_seconds:
        costs["training time"] = f"about {units.format_duration(run.training_seconds)}, evaluation left out"
    speeds = sorted(v for v in run.series("train", "tokens_per_second")[1] if math.isfinite(v))
    if speeds:
        costs["tokens per second"] = f"{speeds[len(speeds) // 2]:,.0f} (median of the reports)"
    if run.environment:
        devices = run.environment.get("devices", [])
        words = ", ".join(map(str, devices)) if isinstance(devices, list) else str(devices)
        costs["device"] = f"{run.environment.get('device_count', '?')} x {words}"
        costs["started"] = run.environment.get("started")
    return costs


def _validated_part(run: Run, name: str) -> str:
    """The part of the validation split that training measures, if not all of it."""
    if run.config is None:
        return ""
    evaluate = run.config.evaluate
    count = evaluate.decode_examples if name in DECODED else evaluate.examples
    return f" (first {count:,})" if count else ""


def _evaluated_part(values: Mapping[str, Any], name: str) -> str:
    """The part of its split that an evaluation measured, if not all of it."""
    count = None if values.get("split_examples") is None else values.get("examples")
    count = values.get("decoded_examples", count) if name in DECODED else count
    return f" (first {count:,})" if isinstance(count, int) else ""


def _model(run: Run) -> str | None:
    """The parts of the model and their sizes."""
    if run.config is None:
        return None
    words = []
    for name in (path.removeprefix("model.") for path in PARTS):
        part = getattr(run.config.model, name)
        if part is not None:
            cell = f", {part.cell}" if isinstance(part, RecurrentConfig) else f", heads {part.attention.heads}"
            words.append(f"{name.replace('_', ' ')}: layers {part.layers}, width {part.width}{cell}")
    return "; ".join(words)


def _finite(value: Any) -> Any:
    """`value` if it is text or a number, else None."""
    return value if isinstance(value, str) or not math.isnan(as_float(value)) else None


def _run_columns(first: str, runs: Sequence[Run], single: str = "") -> list[str]:
    """Head of a table with a column for each run; `single` is the name of the column of a single run."""
    return [first, *([run.name for run in runs] if len(runs) > 1 else [single])]


def seed_means(runs: Sequence[Run]) -> list[Block]:
    """Mean and sample deviation of the measures of runs that differ in their seed only."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        fields = {path: value for path, value in flatten(run.raw_config).items() if path != "train.seed"}
        groups.setdefault(json.dumps(fields, sort_keys=True), []).append(run)
    blocks: list[Block] = []
    for members in [group for group in groups.values() if len(group) > 1 and group[0].raw_config]:
        splits = {"validation, at the end": {run.name: run.result for run in members}}
        for split in dict.fromkeys(split for run in members for split in run.evaluations):
            splits[split] = {run.name: run.evaluations.get(split, {}) for run in members}
        rows = []
        for split, values in splits.items():
            summary = seeds.summarise(values)
            for name, mean in summary["mean"].items():
                deviation = summary["deviation"][name]
                both = None if mean is None or deviation is None else f"{mean:.5g} ± {deviation:.2g}"
                rows.append([split, name, both])
        if rows:
            head = f"mean ± deviation of {len(members)} seeds"
            blocks += [Paragraph(f"Runs: {', '.join(run.name for run in members)}.", is_soft=True)]
            blocks += [table(["split", "measure", head], rows)]
    return blocks


# --- curves and evaluations -------------------------------------------------------------------------------------------


def curves(runs: Sequence[Run]) -> list[Block]:
    """Pictures of the training, and its validations as tables."""
    title = "training and validation loss against the step"
    blocks: list[Block] = [Picture(figures.svg(figures.loss(runs, figures.PAGE_INK), "loss", title))]
    if len({_label_settings(run) for run in runs}) > 1:
        text = "Their labels differ (data, tokenizer or task), so losses and perplexities per label do not compare."
        blocks.append(Paragraph(text))
    panels = figures.panels(runs, figures.PAGE_INK)
    if panels is not None:
        if len(runs) > 1:
            blocks.append(Paragraph("Below, the same colour is the same run.", is_soft=True))
        title = "learning rate, gradient norm, speed and validation measures against the step"
        blocks.append(Picture(figures.svg(panels, "panels", title)))
    for run in runs:
        names = run.measures("validation")
        if names:
            rows = [[row["step"], *(_finite(row.get(name)) for name in names)] for row in run.rows["validation"]]
            of_run = f" of {run.name}" if len(runs) > 1 else ""
            summary = f"every validation during training{of_run}, as a table"
            blocks.append(Details(summary, table(["step", *names], rows)))
    return blocks


def _label_settings(run: Run) -> str:
    """The settings that determine the labels. Losses of runs in which they differ cannot be compared."""
    paths = ("data.source", "data.name", "data.tokenizer", "task.name")
    return json.dumps({path: value for path, value in flatten(run.raw_config).items() if path.startswith(paths)})


def evaluations(runs: Sequence[Run]) -> list[Block]:
    """A table for each split: measures down, runs across, and the exact definition of each measure."""
    blocks: list[Block] = []
    for split in dict.fromkeys(split for run in runs for split in run.evaluations):
        values = [run.evaluations.get(split, {}) for run in runs]
        names = dict.fromkeys(name for each in values for name in each if name not in NO_MEASURES)
        definitions: dict[str, list[str]] = {}
        for run in runs:
            for name, signature in signatures(run, split).items() if split in run.evaluations else ():
                definitions.setdefault(name, []).append(signature)
        rows = []
        for name in names:
            definition = " / ".join(dict.fromkeys(definitions.get(name, [figures.LABELS.get(name, "")])))
            convert = _changes if name == "changed" else _finite
            rows.append([name, *(convert(each.get(name)) for each in values), definition])
        blocks += [Heading(split), table([*_run_columns("measure", runs, "value"), "what it is"], rows)]
        for run in runs:
            blocks += _by_length(run.evaluations.get(split, {}).get("by_length"), run.name if len(runs) > 1 else "")
    return blocks


def _by_length(rows: Any, name: str) -> list[Block]:
    """The measures of a split by the length of the source, of one run."""
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        return []
    names = list(dict.fromkeys(key for row in rows for key in row))
    body = [[row.get(key) if key == "tokens" else _finite(row.get(key)) for key in names] for row in rows]
    return [Details(f"by source length{f' of {name}' if name else ''}", table(names, body), is_open=True)]


def _changes(changed: Any) -> str | None:
    """The settings of an evaluation that differ from its run's, as text."""
    if not isinstance(changed, dict):
        return None
    pairs = [(path, values) for path, values in changed.items() if isinstance(values, dict)]
    return "; ".join(f"{path}: {format_value(v.get('here'))} (run: {format_value(v.get('run'))})" for path, v in pairs)


# --- samples, config, environment -------------------------------------------------------------------------------------


def samples(run: Run) -> list[Details]:
    """Decoded examples: final splits and the newest step open, older steps folded."""
    blocks: list[Details] = []
    has_step = False
    for name, records in run.samples.items():
        keys = [key for key in ("input", "output", "reference") if any(key in record for record in records)]
        rows = [[i + 1, *(str(record.get(key, "")) for key in keys)] for i, record in enumerate(records[:MAX_SAMPLES])]
        if not rows:
            continue
        is_step = name.startswith("step ")
        count = f"{len(rows)} of {len(records):,}" if len(rows) < len(records) else f"{len(rows)}"
        blocks.append(Details(f"{name}: {count} decoded", table(["", *keys], rows), not (is_step and has_step)))
        has_step |= is_step
    return blocks


def differences(runs: Sequence[Run]) -> list[Block]:
    """The config fields in which the runs differ."""
    configs = [flatten(run.raw_config) for run in runs]
    names = sorted({name for config in configs for name in config})
    differing = [name for name in names if len({json.dumps(c.get(name, ABSENT)) for c in configs}) > 1]
    if not differing:
        return [Paragraph("The runs have the same configuration.")]
    rows = [
        [name, *(format_value(config[name]) if name in config else ABSENT for config in configs)] for name in differing
    ]
    return [table(["field", *(run.name for run in runs)], rows)]


def configuration(run: Run) -> list[Details]:
    """The fields that differ from the defaults, and all of `config.json`."""
    if not run.raw_config:
        return []
    defaults = _default_fields()
    changed = {path: v for path, v in flatten(run.raw_config).items() if defaults.get(path, ABSENT) != v}
    rows = [[path, format_value(value)] for path, value in changed.items() if value is not None or path not in PARTS]
    return [
        Details("what differs from the defaults", table(["field", "value"], rows), is_open=True),
        Details("all of config.json", Preformatted(json.dumps(run.raw_config, indent=1, ensure_ascii=False))),
    ]


def _default_fields() -> dict[str, Any]:
    """Default values by dotted path, including those of every optional part of a model."""
    model = ModelConfig(StackConfig(), StackConfig(), RecurrentConfig(), RecurrentConfig())
    return flatten(json.loads(overrides.to_json(dataclasses.replace(Config(), model=model))))


def environment(runs: Sequence[Run]) -> list[Block]:
    """Versions, devices and command of each run."""
    columns = [flatten(run.environment) for run in runs]
    if not any(columns):
        return []
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name) for column in columns]
        words = [" ".join(map(str, v)) if isinstance(v, list) else None if v is None else str(v) for v in values]
        rows.append([name.removeprefix("versions."), *words])
    return [table(_run_columns("", runs), rows)]


def parameters(run: Run) -> list[Details]:
    """Every parameter with its shape."""
    if not run.parameters:
        return []
    count = f"{run.parameter_count:,} parameters" if run.parameter_count else "parameters"
    return [Details(f"{count}: every one with its shape", Preformatted(run.parameters))]
