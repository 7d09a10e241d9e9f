"""The page: tables and pictures in one HTML file that loads nothing from anywhere."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import time
from typing import Any, Iterable, Sequence

from jaxformer import overrides
from jaxformer.config import Config, ModelConfig, RecurrentConfig, StackConfig
from jaxformer.report import figures
from jaxformer.report.runs import Run, flat, number, signatures

STYLE = """
:root { color-scheme: light dark; --ink: #1c2127; --paper: #ffffff; --soft: #5c6670; --line: #d9dee3; --band: #f3f5f7;
  --warn: #8a4b00; }
@media (prefers-color-scheme: dark) { :root { --ink: #dfe4ea; --paper: #14181d; --soft: #98a3ae; --line: #323a43;
  --band: #1c2229; --warn: #f0b060; } }
body { color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 66rem; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p.soft, summary { color: var(--soft); } ul.notes { color: var(--warn); margin: .6rem 0; padding-left: 1.2rem; }
table { border-collapse: collapse; margin: .3rem 0 1rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere; }
thead th { color: var(--soft); font-weight: 500; } tbody th { font-weight: 500; overflow-wrap: normal; }
td.number, thead th.number { text-align: right; white-space: nowrap; } .wide { overflow-x: auto; }
svg { max-width: 100%; height: auto; display: block; margin: .5rem 0; }
pre { background: var(--band); padding: .8rem; overflow-x: auto; font-size: 13px; line-height: 1.4; }
nav a { color: inherit; margin-right: 1rem; }
"""

FORBID = "default-src 'none'; style-src 'unsafe-inline'"
"""Content-Security-Policy: decoded text is foreign, and should any of it be taken for markup, it can do nothing."""

RECORDS, LETTERS = 25, 1500
"""Most samples of one file, and most letters of one cell; the page says where it cuts."""

ABSENT = "-"


def render(runs: Sequence[Run]) -> str:
    """The page of one run, or of several compared."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    sections = {
        "Results": _results(runs),
        "Curves": _curves(runs),
        "Evaluation": _evaluations(runs),
        "Samples": _each(runs, _samples),
        "Differences": _differences(runs) if len(runs) > 1 else "",
        "Configuration": _each(runs, _configuration),
        "Environment": _environment(runs),
        "Parameters": _each(runs, _parameters),
    }
    shown = {name: body for name, body in sections.items() if body}
    links = "".join(f'<a href="#{name.lower()}">{name}</a>' for name in shown)
    body = "".join(f'<section id="{name.lower()}"><h2>{name}</h2>{body}</section>\n' for name, body in shown.items())
    written = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{FORBID}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style></head>\n<body>\n"
        f'<h1>{text(title)}</h1>\n<p class="soft">jaxformer report, written {written}</p>\n{_notes(runs)}'
        f"<nav>{links}</nav>\n{body}</body></html>\n"
    )


# --- pieces -----------------------------------------------------------------------------------------------------------


def text(value: Any) -> str:
    """Any value as text that is text in HTML too, in attributes as well."""
    # Surrogates, which JSON can carry, cannot be written as UTF-8.
    return html.escape(str(value), quote=True).encode("utf-8", "replace").decode()


def shown(value: Any) -> str:
    """A number for people: four digits, thousands grouped. Other JSON values as JSON, text as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e5 <= abs(value) < 1e15 else f"{value:.4g}"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table whose first column names the row. Columns of numbers stand to the right; everything is escaped."""
    rows = [list(row) for row in rows]
    right = [all(_numeric(value) for value in column) for column in zip(*rows, strict=True)] or [False] * len(head)
    lines = ["".join(_cell("th", name, side) for name, side in zip(head, right, strict=True))]
    for row in rows:
        values = [ABSENT if value is None else shown(value) for value in row]
        cells = [_cell("td", value, side) for value, side in zip(values[1:], right[1:], strict=True)]
        lines.append(f'<th scope="row">{text(cut(values[0]))}</th>{"".join(cells)}')
    top, *rest = (f"<tr>{line}</tr>" for line in lines)
    body = "\n".join(rest)
    return f'<div class="wide"><table><thead>{top}</thead><tbody>\n{body}\n</tbody></table></div>\n'


def _cell(tag: str, value: str, right: bool) -> str:
    return f"<{tag}{' class=number' if right else ''}>{text(cut(value))}</{tag}>"


def _numeric(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def cut(value: str) -> str:
    """`value`, its end left out where it is long."""
    return value if len(value) <= LETTERS else f"{value[:LETTERS]} […{len(value) - LETTERS:,} more letters]"


def details(summary: str, body: str, opened: bool = False) -> str:
    return f"<details{' open' if opened else ''}><summary>{text(summary)}</summary>{body}</details>\n"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


def _notes(runs: Sequence[Run]) -> str:
    """What is missing, and what went wrong."""
    lines = [(run.name, note) for run in runs for note in [*run.notes, *_not_finite(run), *_no_headline(run)]]
    if not lines:
        return ""
    prefix = (lambda name: f"{name}: ") if len(runs) > 1 else (lambda name: "")
    items = "".join(f"<li>{text(prefix(name) + note)}</li>" for name, note in lines)
    return f'<ul class="notes">{items}</ul>\n'


def _not_finite(run: Run) -> list[str]:
    found = []
    for split in ("train", "validation"):
        steps, values = run.series(split, "loss")
        wrong = steps[~(abs(values) < math.inf)]
        if wrong.size:
            share = f"{wrong.size:,} of {steps.size:,} reports"
            found.append(f"{split} loss: not a finite number in {share}, first at step {wrong[0]:,.0f}")
    return found


def _no_headline(run: Run) -> list[str]:
    """Whether the measure that the recipe wants to be named first is there at all."""
    name = run.typed.evaluate.headline if run.typed else ""
    held = [run.result, *run.evaluations.values()]
    if not name or not any(held) or any(name in values for values in held):
        return []
    others = {
        "step",
        "config",
        "weights",
        "seconds",
        "examples",
        "cut_examples",
        "cut_tokens",
        "cut_words",
        "split_examples",
        "decoded_examples",
        "changed",
        *NO_MEASURES,
    }
    measured = sorted({each for values in held for each in values} - others)
    return [f"evaluate.headline is {name!r}, which was not measured; there are {', '.join(measured)}"]


def _each(runs: Sequence[Run], make: Any) -> str:
    """`make` of every run, under its name where there are several."""
    bodies = [(run.name, make(run)) for run in runs]
    return "".join(f"<h3>{text(name)}</h3>{body}" if len(runs) > 1 else body for name, body in bodies if body)


# --- sections ---------------------------------------------------------------------------------------------------------


KNOWN = (
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
"""What results of the tasks are known by: the first row of which the first name was measured."""


def headline(values: dict[str, Any], config: Config | None = None) -> list[str]:
    """The measures that a result is known by, the main one first: what the recipe names (`evaluate.headline`), else
    what it chooses checkpoints by, if that is not the loss, else the task's."""
    names = next((row for row in KNOWN if row[0] in values), ())
    wanted = [] if config is None else [config.evaluate.headline or config.checkpoint.metric]
    main = [name for name in wanted if name != "loss"]
    return [name for name in dict.fromkeys([*main, *names]) if name in values]


def _results(runs: Sequence[Run]) -> str:
    """What a run is known by: its scores first, then what they cost."""
    columns = [_facts(run) for run in runs]
    names = dict.fromkeys(name for facts in columns for name in facts)
    order = sorted(names, key=lambda name: (name in COSTS, COSTS.index(name) if name in COSTS else 0))
    rows = [[name, *(facts.get(name) for facts in columns)] for name in order]
    return table(["", *(run.name for run in runs)] if len(runs) > 1 else ["", ""], rows)


COSTS = ("steps", "model", "parameters", "training time", "tokens per second", "device", "started")


def _facts(run: Run) -> dict[str, Any]:
    """What there is to say of one run, by name; None where it is not known."""
    facts: dict[str, Any] = {}
    for split, values in run.evaluations.items():
        for name in headline(values, run.typed):
            facts[f"{split}{_measured_part(values, name)}: {figures.LABELS.get(name, name)}"] = values[name]
    final = {name: value for name, value in run.result.items() if name not in ("step", "config")}
    if not final:
        final = {name: run.last("validation", name) for name in run.measures("validation")}
    for name in dict.fromkeys([*headline(final, run.typed), *(["loss"] if "loss" in final else [])]):
        facts[f"validation{_part(run, name)}: {figures.LABELS.get(name, name)}"] = _value(final[name])
    best = run.best()
    if best:
        facts[f"best validation {best[0]}"] = f"{best[1]:.4g} at step {best[2]:,}"
    if run.rows.get("train"):
        facts["train loss, last report"] = _value(run.last("train", "loss"))
    return facts | _costs(run)


def _costs(run: Run) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    planned = run.typed.train.steps if run.typed else None
    facts["steps"] = f"{run.step:,}" + (f" of {planned:,}" if planned else "")
    facts["model"] = _model(run)
    facts["parameters"] = run.parameter_count
    if run.training_seconds:
        facts["training time"] = f"about {duration(run.training_seconds)}, evaluation left out"
    speeds = sorted(v for v in run.series("train", "tokens_per_second")[1] if math.isfinite(v))
    if speeds:
        facts["tokens per second"] = f"{speeds[len(speeds) // 2]:,.0f} (median of the reports)"
    if run.environment:
        devices = run.environment.get("devices", [])
        words = ", ".join(map(str, devices)) if isinstance(devices, list) else str(devices)
        facts["device"] = f"{run.environment.get('device_count', '?')} x {words}"
        facts["started"] = run.environment.get("started")
    return facts


def _part(run: Run, name: str) -> str:
    """Which part of the validation split was measured during training, where it is not all of it."""
    if run.typed is None:
        return ""
    config = run.typed.evaluate
    count = config.decode_examples if name in DECODED else config.examples
    return f" (first {count:,})" if count else ""


def _measured_part(values: dict[str, Any], name: str) -> str:
    """Which part of its split an evaluation measured, where it was asked for a part."""
    whole = values.get("split_examples") is None
    count = None if whole else values.get("examples")
    count = values.get("decoded_examples", count) if name in DECODED else count
    return f" (first {count:,})" if isinstance(count, int) else ""


DECODED = (
    "bleu", "bleu_lc_tok", "chrf", "exact_match", "f1", "pearson", "precision", "recall", "rouge1", "rouge2", "rouge_l",
    "spearman", "word_accuracy",
)  # fmt: skip
"""Measures of decoded text (every task's `scores`), of which training decodes only so much."""


def _model(run: Run) -> str | None:
    """The parts of the model and their sizes."""
    if run.typed is None:
        return None
    parts = []
    for name in (path.removeprefix("model.") for path in PARTS):
        part = getattr(run.typed.model, name)
        if part is not None:
            cell = f", {part.cell}" if isinstance(part, RecurrentConfig) else f", heads {part.attention.heads}"
            parts.append(f"{name.replace('_', ' ')}: layers {part.layers}, width {part.width}{cell}")
    return "; ".join(parts)


def _curves(runs: Sequence[Run]) -> str:
    words = "training and validation loss against the step"
    body = figures.svg(figures.loss(runs, figures.PAGE), "loss", words)
    if len({_labels(run) for run in runs}) > 1:
        body += (
            "<p>Their labels differ (data, tokenizer or task), so losses and perplexities per label do not compare.</p>"
        )
    panels = figures.panels(runs, figures.PAGE)
    if panels is not None:
        if len(runs) > 1:
            body += '<p class="soft">Below, the same colour is the same run.</p>'
        body += figures.svg(
            panels, "panels", "learning rate, gradient norm, speed and validation measures against the step"
        )
    for run in runs:
        names = run.measures("validation")
        if names:
            rows = [[row["step"], *(_value(row.get(name)) for name in names)] for row in run.rows["validation"]]
            of = f" of {run.name}" if len(runs) > 1 else ""
            body += details(f"every validation during training{of}, as a table", table(["step", *names], rows))
    return body


def _labels(run: Run) -> str:
    """What decides what one label is."""
    names = ("data.source", "data.name", "data.tokenizer", "task.name")
    return json.dumps({name: value for name, value in flat(run.config).items() if name.startswith(names)})


def _value(value: Any) -> Any:
    return value if isinstance(value, str) or not math.isnan(number(value)) else None


NO_MEASURES = ("split", "signatures", "checkpoint")


def _evaluations(runs: Sequence[Run]) -> str:
    """A table a split: measures down, runs across, and what exactly each measure is."""
    body = ""
    for split in dict.fromkeys(split for run in runs for split in run.evaluations):
        held = [run.evaluations.get(split, {}) for run in runs]
        names = dict.fromkeys(name for values in held for name in values if name not in NO_MEASURES)
        exact: dict[str, list[str]] = {}
        for run in runs:
            if split in run.evaluations:
                for name, signature in signatures(run, split).items():
                    exact.setdefault(name, []).append(signature)
        rows = []
        for name in names:
            what = " / ".join(dict.fromkeys(exact.get(name, [figures.LABELS.get(name, "")])))
            value = _changes if name == "changed" else _value
            rows.append([name, *(value(values.get(name)) for values in held), what])
        columns = [run.name for run in runs] if len(runs) > 1 else ["value"]
        body += f"<h3>{text(split)}</h3>{table(['measure', *columns, 'what it is'], rows)}"
    return body


def _changes(changed: Any) -> str | None:
    """The settings that an evaluation did not take from its run, as text."""
    if not isinstance(changed, dict):
        return None
    pairs = ((path, each) for path, each in changed.items() if isinstance(each, dict))
    return "; ".join(f"{path}: {shown(each.get('here'))} (run: {shown(each.get('run'))})" for path, each in pairs)


def _samples(run: Run) -> str:
    body, first_step = "", True
    for name, records in run.samples.items():
        keys = [key for key in ("input", "output", "reference") if any(key in record for record in records)]
        rows = [[i + 1, *(str(record.get(key, "")) for key in keys)] for i, record in enumerate(records[:RECORDS])]
        if not rows:
            continue
        is_step = name.startswith("step ")
        count = f"{len(rows)} of {len(records):,}" if len(rows) < len(records) else f"{len(rows)}"
        # The final splits and the newest step are open, older steps folded.
        body += details(f"{name}: {count} decoded", table(["", *keys], rows), opened=not is_step or first_step)
        first_step = first_step and not is_step
    return body


def _differences(runs: Sequence[Run]) -> str:
    """The config fields in which the runs differ."""
    configs = [flat(run.config) for run in runs]
    names = sorted({name for config in configs for name in config})
    differing = [name for name in names if len({json.dumps(c.get(name, ABSENT)) for c in configs}) > 1]
    if not differing:
        return "<p>The runs have the same configuration.</p>"
    rows = [[name, *(shown(config[name]) if name in config else ABSENT for config in configs)] for name in differing]
    return table(["field", *(run.name for run in runs)], rows)


def _configuration(run: Run) -> str:
    if not run.config:
        return ""
    default = _default()
    mine = flat(run.config)
    rows = [[name, value] for name, value in mine.items() if default.get(name, ABSENT) != value]
    rows = [[name, shown(value)] for name, value in rows if not (value is None and name in PARTS)]
    folded = details("all of config.json", f"<pre>{text(json.dumps(run.config, indent=1, ensure_ascii=False))}</pre>")
    return details("what differs from the defaults", table(["field", "value"], rows), opened=True) + folded


PARTS = {
    "model.encoder": StackConfig,
    "model.decoder": StackConfig,
    "model.recurrent_encoder": RecurrentConfig,
    "model.recurrent_decoder": RecurrentConfig,
}
"""The parts that a model may have; which it has is among the results."""


def _default() -> dict[str, Any]:
    """The defaults by dotted paths, those of every part that a model may have too."""
    parts = {name.removeprefix("model."): kind() for name, kind in PARTS.items()}
    config = dataclasses.replace(Config(), model=ModelConfig(**parts))
    return flat(json.loads(overrides.to_json(config)))


def _environment(runs: Sequence[Run]) -> str:
    held = [flat(run.environment) for run in runs]
    if not any(held):
        return ""
    rows = []
    for name in dict.fromkeys(name for values in held for name in values):
        values = [each.get(name) for each in held]
        words = [" ".join(map(str, v)) if isinstance(v, list) else None if v is None else str(v) for v in values]
        rows.append([name.removeprefix("versions."), *words])
    return table(["", *(run.name for run in runs)] if len(runs) > 1 else ["", ""], rows)


def _parameters(run: Run) -> str:
    if not run.parameters:
        return ""
    count = f"{run.parameter_count:,} parameters" if run.parameter_count else "parameters"
    return details(f"{count}: every one with its shape", f"<pre>{text(run.parameters)}</pre>")
