"""Every attention mask of a config, by the predicate that the model uses (`nn/masks.py`) on slots as batches have them.

Examples of made-up lengths are put into rows by `data/packing.py`, as those of a run are: padded, or several in a row,
with a prefix or an order of prediction where the task has one.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxformer import tasks
from jaxformer.analysis.draw.panels import Heat, Panel, Picture
from jaxformer.config import Config, StackConfig
from jaxformer.data import packing
from jaxformer.errors import ConfigError
from jaxformer.models import build
from jaxformer.models.xlnet import hidden_by_order, stream_masks
from jaxformer.nn.series import cut_patches
from jaxformer.nn.stack import cross_mask, self_attention_mask
from jaxformer.tasks import permutation_lm
from jaxformer.types import Batch, Slots

SLOTS = 24
"""Slots that are drawn unless a length is given."""

MAX_SLOTS = 512
"""The most slots that are drawn unless a length is given."""

TEXTS = (0.75,)
"""Length of the text of a padded row, as a fraction of the row."""
PACKED_TEXTS = (0.42, 0.29, 0.17)
"""Lengths of the texts of a packed row."""
SOURCE_FRACTION = 0.8
"""Length of a source as a fraction of its target's, so that cross-attention is not square."""


def masks(config: Config, title: str, length: int | None = None) -> Picture:
    """The masks of all stacks: self-attention, of layers with and without a window, and cross-attention.

    Args:
      title: name of the recipe or run.
      length: slots of a row; None: 24, or twice the longest window, and at most `data.length`.

    Raises:
      ConfigError: the model has no attention over slots.
    """
    model = config.model
    stacks = {name: stack for name, stack in model.stacks.items() if stack.layers}
    if not stacks:
        what = "a recurrent model" if model.recurrent_encoder or model.recurrent_decoder else "no layers of attention"
        raise ConfigError(f"draw masks: got {what}, expected an encoder or decoder with layers; draw something else")
    length = length or _default_length(config)
    if length < 2:
        raise ConfigError(f"draw masks: got {length} slot, expected at least 2; give --length=N")
    rows: list[list[Panel]] = []
    for kind, batch in example_batches(config, length).items():
        panels: list[Panel] = []
        for name, stack in stacks.items():
            panels += _stack_panels(config, name, stack, batch, kind)
        if "decoder" in stacks and "encoder" in stacks:
            panels.append(_cross_panel(batch, kind))
        rows.append(panels)
    if all(len(row) == 1 for row in rows):  # beside each other: a figure is read from the left
        rows = [[panel for row in rows for panel in row]]
    heats = [panel for row in rows for panel in row if isinstance(panel, Heat)]
    summary = [f"{heat.title}: {heat.values.mean():.0%} visible" for heat in heats]
    return Picture(f"Attention masks of {title}", rows, summary)


def _default_length(config: Config) -> int:
    """Slots that are drawn: few enough to see each, but twice as many as the longest window, so that it shows."""
    stacks = {name: stack for name, stack in config.model.stacks.items() if stack.layers}
    windows = [stack.attention.window for stack in stacks.values() if stack.attention.window is not None]
    sparse = [stack.attention.sparse for stack in stacks.values() if stack.attention.sparse is not None]
    windows += [(3 + own.random) * own.size for own in sparse]
    longest = min(config.model.slots(name, config.data.length) for name in stacks)
    return min(max(SLOTS, *(2 * window for window in windows), 0), longest, MAX_SLOTS)


def example_batches(config: Config, length: int) -> dict[str, Batch]:
    """Batches of one row of `length` slots, by what is special about them: "padded", "packed", "running text".

    A run with packing has rows of the first kind too, for short texts and at the end of an epoch. Their slots are those
    of the encoder: patches of a series.
    """
    batches = {}
    if config.data.packing == "first_fit":
        batches["packed"] = _batch(config, length, PACKED_TEXTS)
    if config.data.packing == "concat":
        batches["running text"] = _batch(config, length, (1.0,))
    else:
        batches["padded"] = _batch(config, length, TEXTS)
    return batches


def _batch(config: Config, length: int, fractions: tuple[float, ...]) -> Batch:
    sizes = [max(round(length * fraction), 1) for fraction in fractions]
    series = config.model.series
    batch = packing.collate([[_features(config, size) for size in sizes]], length)
    if series is None or batch.source is None:
        return batch
    stride = series.stride or series.patch  # of a series the source has `stride` steps for each slot
    steps = [{"source": np.zeros((_source_size(config, size) * stride, 1), np.float32)} for size in sizes]
    read = packing.collate([steps], length * stride).side("source")
    return batch._replace(source=cut_patches(read, series.patch, stride))


def _features(config: Config, size: int) -> dict[str, Any]:
    """Features of an example of `size` tokens that decide its slots; the tokens are all 1."""
    model, task = config.model, tasks.get(config.task.name)
    features: dict[str, Any] = {}
    if model.permutation is not None and config.task.name == permutation_lm.NAME:
        rng = np.random.default_rng(config.train.seed)
        return dict(permutation_lm.permuted(config, np.ones(size, np.int32), np.arange(size), rng))
    if model.has_encoder:
        features["source"] = np.ones(_source_size(config, size), np.int32)
    if model.has_decoder:
        features["target"] = np.ones(size, np.int32)
    if task.has_prefix:
        fraction = 0.5 if config.task.prefix is None else config.task.prefix
        features["prefix"] = np.asarray(1 + round(fraction * (size - 1)), np.int32)
    return features


def _source_size(config: Config, size: int) -> int:
    return max(round(SOURCE_FRACTION * size), 1) if config.model.has_decoder else size


def _stack_panels(config: Config, name: str, stack: StackConfig, batch: Batch, kind: str) -> list[Panel]:
    """Self-attention of one stack."""
    stream = batch.side("target" if name == "decoder" else "source")
    if config.model.permutation is not None and batch.permutation is not None:
        hidden = hidden_by_order(jnp.asarray(batch.permutation.order))
        both = stream_masks(stack, stream, hidden, jnp.zeros((1, 1, stream.tokens.shape[1])), None)
        targets = np.asarray(batch.permutation.targets)[0]
        content, query = both.content.dense()[0], np.asarray(both.query.dense()[0])[targets[targets >= 0]]
        columns = ((), _boundaries(stream.slots))
        return [
            _panel(f"{name}, {kind}: content stream", content, stream.slots, stream.slots),
            Heat(
                f"{name}, {kind}: query stream of the predicted slots",
                query,
                "predicted slot, in the order of prediction",
                "key slot",
                "visible",
                "mask",
                boundaries=columns,
            ),
        ]
    causal, attention = build.is_causal(stack, name), stack.attention
    words = [kind, "causal" if causal else ""]
    words += ["prefix" if causal and stream.slots.prefix is not None else ""]
    title = ", ".join([name, *filter(None, words)])
    panels, mask = [], self_attention_mask(stack, causal, stream.slots)
    if mask.blocks is not None:
        title = f"{title}, blocks of {mask.blocks.size}"
    for window, layers in _windows(stack):
        see = mask.replace(window=window).dense()[0]
        text = title if attention.window is None else f"{title}, {'all keys' if window is None else f'window {window}'}"
        text += "" if attention.summary is None else f" beside summaries of {attention.summary} slots"
        panels.append(_panel(text + layers, see, stream.slots, stream.slots))
    return panels


def _windows(stack: StackConfig) -> list[tuple[int | None, str]]:
    """Windows of the layers, and which layers have them, in the words of a title; as nn/block.py chooses them."""
    attention, every = stack.attention, stack.attention.window_every
    if attention.window is None or every == 1:
        return [(attention.window, "")]
    banded = [layer + 1 for layer in range(stack.layers) if layer % every == every - 1]
    others = [layer + 1 for layer in range(stack.layers) if layer % every != every - 1]
    named = [(None, others), (attention.window, banded)]
    return [(window, f" (layer{'s' * (len(layers) > 1)} {_listed(layers)})") for window, layers in named if layers]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")


def _cross_panel(batch: Batch, kind: str) -> Panel:
    target, source = batch.side("target").slots, batch.side("source").slots
    return _panel(f"cross-attention, {kind}", cross_mask(target, source).dense()[0], target, source, "source")


def _panel(title: str, mask: Any, query: Slots, key: Slots, memory: str = "key") -> Heat:
    values = np.asarray(mask, bool)
    boundaries = (_boundaries(query), _boundaries(key))
    return Heat(title, values, "query slot", f"{memory} slot", "visible", "mask", boundaries=boundaries)


def _boundaries(slots: Slots) -> tuple[int, ...]:
    """Slots at which another segment, or the padding, begins."""
    segment = np.asarray(slots.segment)[0]
    return tuple((np.flatnonzero(np.diff(segment)) + 1).tolist())
