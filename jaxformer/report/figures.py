"""The pictures: matplotlib figures, as PNG or as SVG that takes the colours of the page around it."""

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

from jaxformer.report.runs import Run, flat

PRINT = "#22262c"
"""Ink of a picture on white."""

PAGE = "#010203"
"""Ink of a picture that lies in a page: no real colour, but the mark that `svg` turns into the page's own."""

COLOURS = ("#2f81d8", "#e0761a", "#2aa15c", "#d8444f", "#9068d6", "#b08a1e", "#18a0a8", "#cf57a4")
"""Mid-tones, to be seen on white and on black."""

POINTS = 1200
"""Most points of one line: more than a picture has columns."""

SMOOTH_FROM = 40
"""Points from which a moving mean is drawn over a line."""

LOG_FROM = 3.0
"""Ratio of largest to smallest value from which an axis is logarithmic."""

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
"""What a measure is and its unit; others go by their name."""

TRAINING = ("learning_rate", "gradient_norm", "tokens_per_second")
"""Training measures with a panel of their own, beside the loss."""


def loss(runs: Sequence[Run], ink: str) -> Figure:
    """Training and validation loss against the step. One run: a colour each. Several: a colour a run."""
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes = figure.subplots()
    single = len(runs) == 1
    for index, run in enumerate(runs):
        style = _style(index)
        _train(axes, run, style, single)
        steps, values = _finite(*run.series("validation", "loss"))
        if steps.size:
            style = _style(1) if single else style
            axes.plot(steps, values, marker="o", markersize=4, linewidth=1.4, label="validation", **style)
            _mark_best(axes, steps, values, style["color"], single)
    axes.set_ylabel(_scale(axes, "loss", ink), color=ink)
    axes.set_title("Loss of " + (plain(runs[0].name) if single else f"{len(runs)} runs"), color=ink)
    handles, names = axes.get_legend_handles_labels()
    if not single:
        names = [plain(run.name) for run in runs]
        handles = [Line2D([], [], **_style(index)) for index in range(len(runs))]
        for style, name in (({"alpha": 0.45}, "train"), ({"marker": "o", "markersize": 4}, "validation")):
            handles.append(Line2D([], [], color=ink, **style))
            names.append(name)
    if handles:
        axes.legend(handles, names, frameon=False, labelcolor=ink, fontsize=9)
    _say_if_empty(axes, ink)
    return figure


def panels(runs: Sequence[Run], ink: str) -> Figure | None:
    """Learning rate, gradient norm, speed, and every validation measure but the loss; None where there is none.

    How much was cut off is no measure and the same at every step.
    """
    shown = [("train", name) for name in TRAINING if any(name in run.measures("train") for run in runs)]
    others = dict.fromkeys(name for run in runs for name in run.measures("validation") if name != "loss")
    others = [name for name in others if not name.startswith("cut_")]
    shown += [("validation", name) for name in others]
    if not shown:
        return None
    columns = min(3, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(3.6 * columns, 2.7 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (split, name) in zip(grid, shown, strict=False):
        for index, run in enumerate(runs):
            steps, values = thin(*_finite(*run.series(split, name)))
            marker = "o" if split == "validation" or len(steps) < 2 else ""
            style = _style(index if split == "train" or len(runs) > 1 else 1)
            axes.plot(steps, values, marker=marker, markersize=3, linewidth=1.2, **style)
        label = _scale(axes, name, ink)
        axes.set_title(label if split == "train" else f"{split}: {label}", color=ink, fontsize=9)
        _say_if_empty(axes, ink)
    for axes in grid[len(shown) :]:
        axes.set_axis_off()
    return figure


def plain(name: str) -> str:
    """A folder's name as matplotlib shows it: no formula between dollars, not hidden by an underscore in front."""
    name = name.encode("utf-8", "replace").decode().replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """The mean of up to `width` neighbours, as many on either side: no lag, and no look past an end."""
    half = np.minimum(np.minimum(np.arange(len(values)), np.arange(len(values))[::-1]), width // 2)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    return (sums[at + half + 1] - sums[at - half]) / (2 * half + 1)


def thin(steps: np.ndarray, values: np.ndarray, limit: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most `limit` points, where there are more the means of as many neighbours as it takes."""
    size = max(1, math.ceil(len(steps) / limit))
    if size == 1:
        return steps, values
    starts = np.arange(0, len(steps), size)
    counts = np.diff(starts, append=len(steps))
    return np.add.reduceat(steps, starts) / counts, np.add.reduceat(values, starts) / counts


def _train(axes: Axes, run: Run, style: dict[str, Any], worded: bool) -> None:
    """Every report as it is, and over it a moving mean where there are many; the legend says which is which."""
    steps, values = thin(*_finite(*run.series("train", "loss")))
    many = len(steps) >= SMOOTH_FROM
    width = 2 * (len(steps) // 40) + 1
    label = mean = None
    if worded and steps.size:
        # A report is the mean of the steps since the one before it.
        spacing = round(float(np.median(np.diff(steps)))) if len(steps) > 1 else 1
        label = f"train, {'every step' if spacing == 1 else f'means of {spacing:,} steps'}{_burden(run)}"
        mean = f"train, moving mean of {spacing * width:,} steps"
    faint = {"alpha": 0.35, "linewidth": 0.8} if many or not worded else {"linewidth": 1.4}
    marker = "o" if len(steps) < 10 and worded else ""
    axes.plot(steps, values, marker=marker, markersize=3, label=label, **style, **faint)
    if many:
        strength = {"linewidth": 1.6} if worded else {"linewidth": 1.0, "alpha": 0.7}
        axes.plot(steps, smooth(values, width), label=mean, **style, **strength)


def _burden(run: Run) -> str:
    """What the training loss bears and the validation loss does not, so that nobody wonders which is lower."""
    if run.typed is None:
        return ""
    smoothing = run.typed.task.label_smoothing
    rates = [rate for name, rate in flat(run.config["model"]).items() if name.rpartition(".")[2].endswith("dropout")]
    words = [f"label smoothing {smoothing:g}"] if smoothing else []
    words += ["dropout"] if any(rates) else []
    return f" (with {' and '.join(words)})" if words else ""


def _mark_best(axes: Axes, steps: np.ndarray, values: np.ndarray, colour: str, worded: bool) -> None:
    """A ring around the lowest value, and the value."""
    best = int(np.argmin(values))
    axes.plot(steps[best], values[best], "o", color=colour, markersize=8, markerfacecolor="none")
    if worded:
        side = "right" if steps[best] > axes.dataLim.x1 / 2 else "left"
        place = {"textcoords": "offset points", "xytext": (0, 9), "ha": side, "color": colour, "fontsize": 9}
        axes.annotate(f"{values[best]:.4g} at step {steps[best]:,.0f}", (steps[best], values[best]), **place)


def _style(index: int) -> dict[str, Any]:
    """Colour and dashes of a run: the colours come again with other dashes."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": ("-", "--", ":")[index // len(COLOURS) % 3]}


def _finite(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return steps[np.isfinite(values)], values[np.isfinite(values)]


def _scale(axes: Axes, name: str, ink: str) -> str:
    """Scales the axes, with a logarithm where values span one. Returns what the vertical axis shows, with its unit."""
    drawn = [np.asarray(line.get_ydata(), float) for line in axes.lines]
    values = np.concatenate([np.zeros(0), *drawn])
    label = LABELS.get(name, name.replace("_", " "))
    wide = values.size and values.min() > 0 and values.max() / values.min() >= LOG_FROM
    if wide and name not in ("learning_rate", "tokens_per_second"):
        axes.set_yscale("log")
        tight = values.max() / values.min() < 30
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if tight else (1, 3)))
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


def _say_if_empty(axes: Axes, ink: str) -> None:
    if not any(len(line.get_xdata()) for line in axes.lines):
        axes.text(0.5, 0.5, "nothing measured yet", transform=axes.transAxes, ha="center", color=ink)


def png(figure: Figure) -> bytes:
    """The figure on white."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=130, facecolor="white")
    return out.getvalue()


def svg(figure: Figure, name: str, words: str) -> str:
    """The figure as an element of a page: transparent, ink of the page's text, ids that start with `name`.

    Args:
      words: what the picture shows, for those who cannot see it.
    """
    out = io.StringIO()
    settings: dict[str, Any] = {"svg.fonttype": "none", "svg.hashsalt": name}
    with mpl.rc_context(settings):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = re.sub(r"<metadata>.*?</metadata>", "", out.getvalue(), flags=re.DOTALL)
    text = text[text.index("<svg") :].replace(PAGE, "currentColor")
    text = re.sub(r"font-family: [^;\"]+", "font-family: 'DejaVu Sans', Verdana, sans-serif", text)
    text = text.replace("*{stroke", "svg *{stroke")
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{name}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{words}" ', 1)
