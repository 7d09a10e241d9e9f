"""Figures of runs, as PNG or as SVG that takes the colours of the page around it."""

from __future__ import annotations

import io
import math
import re
from typing import Any, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from jaxformer.report.runs import Run, flatten

PRINT_INK = "#22262c"
"""Text colour of a figure on white."""

PAGE_INK = "#010203"
"""Text colour of a figure in a page: a placeholder that `svg` replaces by the page's text colour."""

COLOURS = ("#2f81d8", "#e0761a", "#2aa15c", "#d8444f", "#9068d6", "#b08a1e", "#18a0a8", "#cf57a4")
"""Mid-tones, visible on white and on black."""

MAX_POINTS = 1200
"""Points of one line: more than a figure has pixel columns."""

MIN_SMOOTHED_POINTS = 40
"""From this many points on, a moving mean is drawn over a line."""

MIN_LOG_RATIO = 3.0
"""From this ratio of largest to smallest value on, an axis is logarithmic."""

LABELS = {
    "loss": "loss (nats per label)",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens per second, padding left out",
    "gradient_norm": "gradient norm, before clipping",
    "perplexity": "perplexity per token",
    "word_perplexity": "perplexity per word",
    "bits_per_byte": "bits per UTF-8 byte",
    "accuracy": "accuracy (share of labels)",
    "macro_f1": "F1, mean over the classes (0 to 1)",
    "f1": "F1 (0 to 1)",
    "precision": "precision (0 to 1)",
    "recall": "recall (0 to 1)",
    "word_accuracy": "words tagged right (share)",
    "cut_examples": "examples that were too long",
    "changed": "settings that differ from the run's",
    "split_examples": "examples of the whole split",
    "decoded_examples": "examples decoded and scored",
    "cut_tokens": "tokens that were cut off",
    "cut_words": "words without a token, tagged O",
    "exact_match": "exact matches (share)",
    "spearman": "Spearman's rank correlation (-1 to 1)",
    "pearson": "Pearson's correlation (-1 to 1)",
    "bleu": "BLEU (0 to 100)",
    "rouge1": "ROUGE-1 F1 (0 to 100)",
    "rouge2": "ROUGE-2 F1 (0 to 100)",
    "rouge_l": "ROUGE-L F1 (0 to 100)",
    "bleu_lc_tok": "BLEU, lower-cased and tokenised (0 to 100)",
    "chrf": "chrF (0 to 100)",
}
"""Description and unit of each measure; others are shown by their name."""

TRAINING_PANELS = ("learning_rate", "gradient_norm", "tokens_per_second")
"""Training measures that have a panel."""


def loss(runs: Sequence[Run], ink: str) -> Figure:
    """Training and validation loss against the step: one colour per split for one run, else one colour per run."""
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes = figure.subplots()
    single = len(runs) == 1
    for index, run in enumerate(runs):
        style = _style(index)
        _plot_train_loss(axes, run, style, single)
        steps, values = _finite(*run.series("validation", "loss"))
        if steps.size:
            style = _style(1) if single else style
            axes.plot(steps, values, marker="o", markersize=4, linewidth=1.4, label="validation", **style)
            _mark_best(axes, steps, values, style["color"], single)
    axes.set_ylabel(_format_axes(axes, "loss", ink), color=ink)
    axes.set_title("Loss of " + (escape_label(runs[0].name) if single else f"{len(runs)} runs"), color=ink)
    handles, names = axes.get_legend_handles_labels()
    if not single:
        names = [escape_label(run.name) for run in runs]
        handles = [Line2D([], [], **_style(index)) for index in range(len(runs))]
        handles.append(Line2D([], [], color=ink, alpha=0.45))
        handles.append(Line2D([], [], color=ink, marker="o", markersize=4))
        names += ["train", "validation"]
    if handles:
        axes.legend(handles, names, frameon=False, labelcolor=ink, fontsize=9)
    _mark_empty(axes, ink)
    return figure


def panels(runs: Sequence[Run], ink: str) -> Figure | None:
    """Learning rate, gradient norm, speed, and every validation measure but the loss; None if there is none.

    Counts of truncated text (`cut_*`) are left out: they are the same at every step.
    """
    shown = [("train", name) for name in TRAINING_PANELS if any(name in run.measures("train") for run in runs)]
    measures = dict.fromkeys(name for run in runs for name in run.measures("validation"))
    shown += [("validation", name) for name in measures if name != "loss" and not name.startswith("cut_")]
    if not shown:
        return None
    columns = min(3, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(3.6 * columns, 2.7 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (split, name) in zip(grid, shown, strict=False):
        for index, run in enumerate(runs):
            steps, values = downsample(*_finite(*run.series(split, name)))
            marker = "o" if split == "validation" or len(steps) < 2 else ""
            style = _style(index if split == "train" or len(runs) > 1 else 1)
            axes.plot(steps, values, marker=marker, markersize=3, linewidth=1.2, **style)
        label = _format_axes(axes, name, ink)
        axes.set_title(label if split == "train" else f"{split}: {label}", color=ink, fontsize=9)
        _mark_empty(axes, ink)
    for axes in grid[len(shown) :]:
        axes.set_axis_off()
    return figure


def escape_label(name: str) -> str:
    """A directory's name for matplotlib, which reads dollars as formulas and hides labels that begin with "_"."""
    name = name.encode("utf-8", "replace").decode().replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name


def moving_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Centred moving mean over up to `width` values; windows at the ends are narrower."""
    half = np.minimum(np.minimum(np.arange(len(values)), np.arange(len(values))[::-1]), width // 2)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    return (sums[index + half + 1] - sums[index - half]) / (2 * half + 1)


def downsample(steps: np.ndarray, values: np.ndarray, limit: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most `limit` points: means of groups of neighbours, if there are more."""
    size = max(1, math.ceil(len(steps) / limit))
    if size == 1:
        return steps, values
    starts = np.arange(0, len(steps), size)
    counts = np.diff(starts, append=len(steps))
    return np.add.reduceat(steps, starts) / counts, np.add.reduceat(values, starts) / counts


def _plot_train_loss(axes: Axes, run: Run, style: dict[str, Any], has_labels: bool) -> None:
    """Plots every report, and a moving mean over it if there are many; labels name both."""
    steps, values = downsample(*_finite(*run.series("train", "loss")))
    is_smoothed = len(steps) >= MIN_SMOOTHED_POINTS
    width = 2 * (len(steps) // 40) + 1
    label = mean = None
    if has_labels and steps.size:
        # A report is the mean of the steps since the one before it.
        spacing = round(float(np.median(np.diff(steps)))) if len(steps) > 1 else 1
        label = f"train, {'every step' if spacing == 1 else f'means of {spacing:,} steps'}{_train_loss_terms(run)}"
        mean = f"train, moving mean of {spacing * width:,} steps"
    faint = {"alpha": 0.35, "linewidth": 0.8} if is_smoothed or not has_labels else {"linewidth": 1.4}
    marker = "o" if len(steps) < 10 and has_labels else ""
    axes.plot(steps, values, marker=marker, markersize=3, label=label, **style, **faint)
    if is_smoothed:
        strength = {"linewidth": 1.6} if has_labels else {"linewidth": 1.0, "alpha": 0.7}
        axes.plot(steps, moving_mean(values, width), label=mean, **style, **strength)


def _train_loss_terms(run: Run) -> str:
    """Terms that only the training loss includes (label smoothing, dropout), and that make it higher."""
    if run.config is None:
        return ""
    smoothing = run.config.task.label_smoothing
    rates = [rate for name, rate in flatten(run.raw_config["model"]).items() if name.endswith("dropout")]
    words = [f"label smoothing {smoothing:g}"] if smoothing else []
    words += ["dropout"] if any(rates) else []
    return f" (with {' and '.join(words)})" if words else ""


def _mark_best(axes: Axes, steps: np.ndarray, values: np.ndarray, colour: str, has_text: bool) -> None:
    """Marks the lowest value with a ring, and with its value as text."""
    best = int(np.argmin(values))
    axes.plot(steps[best], values[best], "o", color=colour, markersize=8, markerfacecolor="none")
    if has_text:
        side = "right" if steps[best] > axes.dataLim.x1 / 2 else "left"
        text, point = f"{values[best]:.4g} at step {steps[best]:,.0f}", (steps[best], values[best])
        axes.annotate(text, point, (0, 9), textcoords="offset points", ha=side, color=colour, fontsize=9)


def _style(index: int) -> dict[str, Any]:
    """Colour and dashes of a run; repeated colours have other dashes."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": ("-", "--", ":")[index // len(COLOURS) % 3]}


def _finite(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return steps[np.isfinite(values)], values[np.isfinite(values)]


def _format_axes(axes: Axes, name: str, ink: str) -> str:
    """Sets scales, ticks and colours of the axes. Returns the label of the vertical axis, with its unit."""
    drawn = [np.asarray(line.get_ydata(), float) for line in axes.lines]
    values = np.concatenate([np.zeros(0), *drawn])
    label = LABELS.get(name, name.replace("_", " "))
    is_wide = values.size and values.min() > 0 and values.max() / values.min() >= MIN_LOG_RATIO
    if is_wide and name not in ("learning_rate", "tokens_per_second"):
        axes.set_yscale("log")
        is_narrow = values.max() / values.min() < 30
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if is_narrow else (1, 3)))
        axes.yaxis.set_minor_locator(NullLocator())
        label += ", log scale"
    elif name == "tokens_per_second" and values.size:
        axes.set_ylim(0, values.max() * 1.08)
    if axes.get_yscale() == "linear":
        axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(_tick))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    axes.set_xlim(left=0)
    axes.set_xlabel("step", color=ink)
    axes.tick_params(colors=ink, labelsize=9)
    axes.grid(True, color=ink, alpha=0.15, linewidth=0.7)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(ink)
    return label


def _tick(value: float, position: int) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _mark_empty(axes: Axes, ink: str) -> None:
    if not any(np.size(line.get_xdata()) for line in axes.lines):
        axes.text(0.5, 0.5, "nothing measured yet", transform=axes.transAxes, ha="center", color=ink)


def png(figure: Figure) -> bytes:
    """The figure as PNG on white."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=130, facecolor="white")
    return out.getvalue()


def svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an SVG element: transparent, in the page's text colour, with ids that start with `name`.

    Args:
      description: for readers who cannot see the figure.
    """
    out = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = re.sub(r"<metadata>.*?</metadata>", "", out.getvalue(), flags=re.DOTALL)
    text = text[text.index("<svg") :].replace(PAGE_INK, "currentColor")
    text = re.sub(r"font-family: [^;\"]+", "font-family: 'DejaVu Sans', Verdana, sans-serif", text)
    text = text.replace("*{stroke", "svg *{stroke")
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{name}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{description}" ', 1)
