"""The sections of a page, made from runs: results, curves, evaluations, samples, config and environment."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from jaxformer.config import Config, ModelConfig, RecurrentConfig, StackConfig, overrides
from jaxformer.report import curves, diagnosis, intervals, measures
from jaxformer.report.blocks import (
    ABSENT,
    Block,
    Card,
    Cards,
    CurveControls,
    Details,
    Figure,
    Figures,
    Heading,
    Paragraph,
    Preformatted,
    format_value,
    table,
)
from jaxformer.report.runs import Run, as_float, flatten, signatures
from jaxformer.runtime import units
from jaxformer.train import seeds

COSTS = ("steps", "model", "parameters", "training time", "tokens per second", "device", "started")
"""Rows of the results that follow the measures, in this order."""

SAME_CONFIG = "The runs have the same configuration."

MAX_SKIPPED = 200
"""Skipped steps that are listed."""

MAX_COLUMNS = 6
"""More runs are rows of a table and not columns, and have neither cards nor tables of their own."""

PARTS = ("model.encoder", "model.decoder", "model.recurrent_encoder", "model.recurrent_decoder")
"""Paths of the optional parts of a model; the results name those of a run."""


# --- notes ------------------------------------------------------------------------------------------------------------


def notes(runs: Sequence[Run]) -> list[str]:
    """A line for each missing file, unreadable file, or loss that was not finite."""
    names: dict[str, list[str]] = {}
    for run in runs:
        for note in [*run.notes, *not_finite(run), *_missing_headline(run)]:
            names.setdefault(note, []).append(run.name)
    if len(runs) == 1:
        return list(names)
    return [f"{_some(runs_of_note)}: {note}" for note, runs_of_note in names.items()]


def _some(names: Sequence[str]) -> str:
    """The names of runs; of many the first two and their number."""
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} runs ({', '.join(names[:2])}, …)"


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
    found = [run.result, *run.evaluations.values()]
    if not name or not any(found) or any(name in values for values in found):
        return []
    measured = sorted({measure for values in found for measure in values} - measures.NO_SCORES)
    return [f"evaluate.headline is {name!r}, which was not measured; there are {', '.join(measured)}"]


# --- results ----------------------------------------------------------------------------------------------------------


def results(runs: Sequence[Run]) -> list[Block]:
    """The main measure of each run, the scores of each, then its costs."""
    columns = [_scores(run) | _costs(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    order = sorted(names, key=lambda name: COSTS.index(name) + 1 if name in COSTS else 0)
    rows = [[name, *(column.get(name) for column in columns)] for name in order]
    if len(runs) > MAX_COLUMNS:
        order = [name for name in order if name != "model"]  # the table of differences has what differs
        rows = [[run.name, *map(column.get, order)] for run, column in zip(runs, columns, strict=True)]
        return [table(["run", *order], rows)]
    cards = tuple(filter(None, map(_card, runs)))
    return [*([Cards(cards)] if cards else []), table(_run_columns("", runs), rows)]


def _card(run: Run) -> Card | None:
    """The main measure of a run: of the split test if it was evaluated, else of another split, else of validation."""
    splits = sorted(run.evaluations, key=lambda split: split != "test")
    choices = [(split, run.evaluations[split], _evaluated_part) for split in splits]
    for split, values, part in choices:
        names = measures.headline(values, run.config)
        if names and not math.isnan(as_float(values[names[0]])):
            details = _card_details(run, split, names[0])
            return _make_card(run, f"{split}{part(values, names[0])}", names[0], values[names[0]], details)
    final = run.final()
    names = measures.headline(final, run.config)
    if not names or math.isnan(as_float(final[names[0]])):
        return None
    step = "" if run.result else f"at step {run.rows['validation'][-1]['step']:,}, while training"
    return _make_card(run, f"validation{_validated_part(run, names[0])}", names[0], final[names[0]], (step,))


def _card_details(run: Run, split: str, name: str) -> tuple[str, ...]:
    bounds = intervals.interval(run, split, name)
    words = f"95 %: {format_value(bounds.low)} to {format_value(bounds.high)} ({bounds.how})" if bounds else ""
    return words, signatures(run, split).get(name, "")


def _make_card(run: Run, split: str, name: str, value: float, details: tuple[str, ...]) -> Card:
    title = f"{split}: {measures.LABELS.get(name, name)}"
    title = f"{run.name}, {title}" if run.number else title
    return Card(title, format_value(value), tuple(filter(None, details)))


def _scores(run: Run) -> dict[str, Any]:
    scores: dict[str, Any] = {}
    for split, values in run.evaluations.items():
        for name in measures.headline(values, run.config):
            scores[f"{split}{_evaluated_part(values, name)}: {measures.LABELS.get(name, name)}"] = values[name]
    final = {name: value for name, value in run.result.items() if name not in ("step", "config")}
    if not final:
        final = {name: run.last("validation", name) for name in run.measures("validation")}
    for name in dict.fromkeys([*measures.headline(final, run.config), *(["loss"] if "loss" in final else [])]):
        scores[f"validation{_validated_part(run, name)}: {measures.LABELS.get(name, name)}"] = _finite(final[name])
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
    count = evaluate.decode_examples if name in measures.DECODED else evaluate.examples
    return f" (first {count:,})" if count else ""


def _evaluated_part(values: Mapping[str, Any], name: str) -> str:
    """The part of its split that an evaluation measured, if not all of it."""
    count = None if values.get("split_examples") is None else values.get("examples")
    count = values.get("decoded_examples", count) if name in measures.DECODED else count
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
    blocks: list[Block] = []
    for members in [group for group in curves.seed_groups(runs) if len(group) > 1]:
        splits = {"validation, at the end": {run.name: run.result for run in members}}
        for split in dict.fromkeys(split for run in members for split in run.evaluations):
            splits[split] = {run.name: run.evaluations.get(split, {}) for run in members}
        rows = []
        for split, values in splits.items():
            summary = seeds.summarise(values)
            for name, mean in summary["mean"].items():
                if name in measures.NO_SCORES:
                    continue
                deviation = summary["deviation"][name]
                both = None if mean is None or deviation is None else f"{mean:.5g} ± {deviation:.2g}"
                rows.append([split, name, both])
        if rows:
            head = f"mean ± deviation of {len(members)} seeds"
            blocks += [Paragraph(f"Runs: {', '.join(run.name for run in members)}.", is_soft=True)]
            blocks += [table(["split", "measure", head], rows)]
    return blocks


# --- curves and evaluations -------------------------------------------------------------------------------------------


def curve_blocks(runs: Sequence[Run]) -> list[Block]:
    """Charts of training and validation, the controls of their axes, and every validation as a table."""
    shown = curves.all_charts(runs)
    if not shown:
        return [Paragraph("Nothing has been measured yet.", is_soft=True)]
    blocks: list[Block] = [CurveControls()]
    if len({_label_settings(run) for run in runs}) > 1:
        text = "Their labels differ (data, tokenizer or task), so losses and perplexities per label do not compare."
        blocks.append(Paragraph(text))
    terms = _train_loss_terms(runs[0]) if len(runs) == 1 else ""
    if terms:
        blocks.append(Paragraph(f"The training loss includes {terms}; that of validation does not.", is_soft=True))
    blocks += [Figure(shown[0]), Figures(tuple(shown[1:]))]
    blocks += _skipped(runs)
    for run in runs if len(runs) <= MAX_COLUMNS else []:
        names = run.measures("validation")
        if names:
            rows = [[row["step"], *(_finite(row.get(name)) for name in names)] for row in run.rows["validation"]]
            of_run = f" of {run.name}" if len(runs) > 1 else ""
            summary = f"every validation during training{of_run}, as a table"
            blocks.append(Details(summary, table(["step", *names], rows)))
    return blocks


def _skipped(runs: Sequence[Run]) -> list[Block]:
    """The skipped steps as a table; a sentence if there were none."""
    rows = [[run.name, row["step"], row.get("spike")] for run in runs for row in run.rows.get("skipped", [])]
    if not rows:
        return [Paragraph("No step was skipped.", is_soft=True)] if any(run.rows.get("train") for run in runs) else []
    body = [[name, step, "spike" if spike else "not finite"] for name, step, spike in rows[:MAX_SKIPPED]]
    shown = f"the first {MAX_SKIPPED} of {len(rows):,}" if len(rows) > MAX_SKIPPED else f"{len(rows)}"
    return [Details(f"skipped steps: {shown}", table(["run", "step", "why"], body))]


def _train_loss_terms(run: Run) -> str:
    """Terms that only the training loss includes (label smoothing, dropout), and that make it higher."""
    if run.config is None:
        return ""
    smoothing = run.config.task.label_smoothing
    rates = [rate for name, rate in flatten(run.raw_config["model"]).items() if name.endswith("dropout")]
    words = [f"label smoothing {smoothing:g}"] if smoothing else []
    return " and ".join([*words, "dropout"] if any(rates) else words)


def _label_settings(run: Run) -> str:
    """The settings that determine the labels. Losses of runs in which they differ cannot be compared."""
    paths = ("data.source", "data.name", "data.tokenizer", "task.name")
    return json.dumps({path: value for path, value in flatten(run.raw_config).items() if path.startswith(paths)})


def evaluations(runs: Sequence[Run]) -> list[Block]:
    """A table for each split: measures down, runs across, and the exact definition of each measure."""
    blocks: list[Block] = []
    for split in dict.fromkeys(split for run in runs for split in run.evaluations):
        values = [run.evaluations.get(split, {}) for run in runs]
        names = dict.fromkeys(n for each in values for n in each if n.split("/")[0] not in measures.NO_MEASURES)
        definitions: dict[str, list[str]] = {}
        for run in runs:
            for name, signature in signatures(run, split).items() if split in run.evaluations else ():
                definitions.setdefault(name, []).append(signature)
        rows = []
        for name in names:
            definition = " / ".join(dict.fromkeys(definitions.get(name, [measures.LABELS.get(name, "")])))
            convert = _changes if name == "changed" else _finite
            rows.append([name, *(convert(each.get(name)) for each in values), definition])
        blocks += [Heading(split), table([*_run_columns("measure", runs, "value"), "what it is"], rows)]
        for run in runs if len(runs) <= MAX_COLUMNS else []:
            blocks += _by_length(run.evaluations.get(split, {}).get("by_length"), run.name if len(runs) > 1 else "")
            shown = tuple(figure.chart for figure in diagnosis.figures(run, split))
            if shown and run.number:
                blocks.append(Paragraph(f"{run.name}:", is_soft=True))
            blocks += [Figures(shown)] if shown else []
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


def differences(runs: Sequence[Run]) -> list[Block]:
    """The config fields in which the runs differ, and below them how their results differ from the first run's."""
    names = [run.name for run in runs]
    configs = [flatten(run.raw_config) for run in runs]
    fields = sorted({name for config in configs for name in config})
    differing = [name for name in fields if len({json.dumps(c.get(name, ABSENT)) for c in configs}) > 1]
    rows = [[name, *(format_value(c[name]) if name in c else ABSENT for c in configs)] for name in differing]
    results = _result_differences(runs)
    said = Paragraph(f"Results; in brackets the difference from {names[0]}.", is_soft=True)
    if len(runs) > MAX_COLUMNS:
        both = [["run", *names], *rows, *results]
        head, *body = [list(row) for row in zip(*both, strict=True)]
        return [said, table(head, body)]
    blocks: list[Block] = [table(["field", *names], rows)] if rows else [Paragraph(SAME_CONFIG)]
    return [*blocks, said, table(["measure", *names], results)] if results else blocks


def _result_differences(runs: Sequence[Run]) -> list[list[str]]:
    """Rows of the measures that several runs have: values, and differences from the first run's."""
    columns = [{f"validation: {name}": value for name, value in run.final().items()} for run in runs]
    for column, run in zip(columns, runs, strict=True):
        for split, values in run.evaluations.items():
            column |= {f"{split}: {name}": value for name, value in values.items()}
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column):
        if name.split(": ")[1].split("/")[0] in measures.NO_SCORES:
            continue
        values = [as_float(column.get(name)) for column in columns]
        if sum(map(math.isfinite, values)) < 2:
            continue
        cells = [ABSENT if math.isnan(value) else format_value(value) for value in values]
        for index, value in enumerate(values[1:], 1):
            cells[index] += f" ({value - values[0]:+.4g})" if math.isfinite(value - values[0]) else ""
        rows.append([name, *cells])
    return rows


def configuration(run: Run) -> list[Details]:
    """The fields that differ from the defaults, and all of `config.json`."""
    if not run.raw_config:
        return []
    defaults = _default_fields()
    changed = {path: v for path, v in flatten(run.raw_config).items() if defaults.get(path, ABSENT) != v}
    rows = [[path, format_value(value)] for path, value in changed.items() if value is not None or path not in PARTS]
    return [
        Details("what differs from the defaults", table(["field", "value"], rows), is_open=not run.number),
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


def reproduction(run: Run) -> list[Block]:
    """The commands that train this run again, as far as its files say."""
    command = run.environment.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else shlex.split(str(command or ""))
    if not words:
        return []
    if words[0].endswith((".py", "jaxformer")):
        words = ["python", "-m", "jaxformer", *words[1:]]
    commit = str(run.environment.get("commit") or "")
    lines = [f"git checkout {shlex.quote(commit.removesuffix('-dirty'))}"] if commit else []
    notes = ["Give another --workdir: this one resumes."]
    notes += ["The code had changes that were not committed."] if commit.endswith("-dirty") else []
    notes += ["" if commit else "The commit of the code is not known."]
    return [Preformatted("\n".join([*lines, shlex.join(words)])), Paragraph(" ".join(notes).strip(), is_soft=True)]


def parameters(run: Run) -> list[Details]:
    """Every parameter with its shape."""
    if not run.parameters:
        return []
    count = f"{run.parameter_count:,} parameters" if run.parameter_count else "parameters"
    return [Details(f"{count}: every one with its shape", Preformatted(run.parameters))]
