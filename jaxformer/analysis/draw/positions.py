"""Position encodings of a config: matrices of absolute ones, decay and buckets of relative ones.

All values come from the hooks of `nn/encodings`, with the settings and the order (causal or not) of each stack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.analysis.draw.panels import Curves, Heat, Panel, Picture
from jaxformer.config import Config, EncodingConfig, StackConfig
from jaxformer.errors import ConfigError
from jaxformer.models import build
from jaxformer.nn import encodings
from jaxformer.nn.attention import head_shape
from jaxformer.nn.encodings import deberta, t5
from jaxformer.nn.encodings.sinusoidal import sinusoids
from jaxformer.types import PyTree, Slots

MAX_POSITIONS = 128
"""Positions that are drawn unless a length is given."""
MAX_HEADS = 8
"""Heads that have a curve; of more, as many evenly spaced ones."""


@dataclasses.dataclass(frozen=True)
class Site:
    """A stack whose position encoding is drawn.

    Attributes:
      name: its path in the model, "encoder".
      stack: its config; `encoding.bidirectional` is resolved.
      length: positions that are drawn.
      params: parameters of the stack, or None without a run.
    """

    name: str
    stack: StackConfig
    length: int
    params: Mapping[str, PyTree] | None = None

    @property
    def encoding(self) -> EncodingConfig:
        return self.stack.encoding

    @property
    def slots(self) -> Slots:
        """Slots of one row without padding."""
        position = jnp.arange(self.length)[None]
        return Slots(position, jnp.ones_like(position))


def positions(config: Config, title: str, length: int | None = None, params: PyTree | None = None) -> Picture:
    """The position encoding of every stack.

    Args:
      title: name of the recipe or run.
      length: positions that are drawn; None: `data.length`, at most 128, and no more than learned positions have.
      params: parameters of a run, for encodings that are learned.

    Raises:
      ConfigError: no stack has positions, or they are learned and there are no parameters.
    """
    sites = _sites(config, length, params)
    if not sites:
        what = "a recurrent model" if config.model.parts else "a model without stacks"
        what = "stacks with encoding.kind none" if config.model.stacks else what
        raise ConfigError(f"draw positions: got {what}, expected a stack with a position encoding; draw something else")
    rows, summary = [], []
    drawable = [site for site in sites if site.encoding.kind != "learned" or site.params is not None]
    for site in sites:
        if drawable and site not in drawable:
            summary.append(f"{site.name}: {site.encoding.kind}, drawn of a run only; give --workdir=DIR")
            continue
        rows.append(PANELS.get(site.encoding.kind, _external)(site))
        summary.append(f"{site.name}: {site.encoding.kind}, {site.length} positions")
    return Picture(f"Positions of {title}", rows, summary)


def needs_run(config: Config) -> bool:
    """True if a run's parameters show more of the positions than its config does: learned vectors and biases."""
    kinds = {stack.encoding.kind for stack in config.model.stacks.values()}
    return bool(kinds - {"none", "sinusoidal", "rope", "alibi", "deberta", "transformer_xl"})


def _sites(config: Config, length: int | None, params: PyTree | None) -> list[Site]:
    """The stacks that have positions; without parameters, stacks that have the same ones are one."""
    sites: list[Site] = []
    for name, stack in config.model.stacks.items():
        encoding = stack.encoding
        if encoding.kind == "none" or (not stack.layers and encodings.get(encoding.kind).embed is None):
            continue
        if encoding.kind == "t5" and encoding.bidirectional is None:  # as nn/stack.py resolves it
            encoding = dataclasses.replace(encoding, bidirectional=not build.is_causal(stack, name))
        count = length or min(config.model.slots(name, config.data.length), MAX_POSITIONS)
        if encoding.kind == "learned" and length is None:
            count = min(count, encoding.max_length - encoding.offset)
        weights = params
        for part in name.split("."):
            weights = None if weights is None else weights[part]
        site = Site(name, dataclasses.replace(stack, encoding=encoding), count, weights)
        same = next((i for i, other in enumerate(sites) if params is None and _is_same(site, other)), None)
        if same is None:
            sites.append(site)
        else:
            sites[same] = dataclasses.replace(sites[same], name=f"{sites[same].name} and {name}")
    return sites


def _is_same(a: Site, b: Site) -> bool:
    """True if two stacks have the same positions."""
    return (a.encoding, a.stack.attention, a.stack.width, a.length) == (
        b.encoding,
        b.stack.attention,
        b.stack.width,
        b.length,
    )


# --- absolute positions -----------------------------------------------------------------------------------------------


def _absolute(site: Site) -> list[Panel]:
    """The matrix of codes `[T, D]`, and the dot products of all pairs of them `[T, T]`."""
    embed = encodings.get(site.encoding.kind).embed
    if embed is None:
        raise ValueError(f"encoding {site.encoding.kind}: got no embed, expected one")
    module = embed(site.encoding, site.stack.width)
    needed = jax.eval_shape(lambda: module.init(jax.random.key(0), site.slots))
    variables = {}
    if needed:
        if site.params is None:
            raise ConfigError(
                f"draw positions: got {site.encoding.kind} positions of the {site.name}, which a run learns, expected "
                "a trained run; give --workdir=DIR"
            )
        variables = {"params": site.params["position"]}
    codes = np.asarray(module.apply(variables, site.slots)[0], np.float32)
    products = codes @ codes.T
    kind = site.encoding.kind
    return [
        Heat(f"{site.name}: {kind} positions", codes, "position", "channel", "value"),
        Heat(f"{site.name}: dot products of positions", products, "position", "position", "dot product"),
    ]


# --- relative positions -----------------------------------------------------------------------------------------------


def _rope(site: Site) -> list[Panel]:
    """Angles of the channel pairs, and the score of equal queries and keys by distance, relative to distance 0."""
    encoding, attention = encodings.get("rope"), site.stack.attention
    latent = attention.latent
    width = head_shape(attention, site.stack.width)[2] if latent is None else latent.rope_width
    module, rotate = encoding.shared, encoding.rotate
    if module is None or rotate is None:
        raise ValueError("encoding rope: got no rotation, expected one")
    shared = module(site.encoding, attention, width).apply({}, site.slots)
    x = jnp.ones((1, site.length, 1, width))
    turned = np.asarray(rotate(site.encoding, x, shared)[0, :, 0], np.float64)
    scores = turned @ turned[0] / (turned[0] @ turned[0])
    cosines = np.asarray(shared[0][0])
    label = "q.k / q.k at distance 0, for q = k = 1"
    return [
        Heat(f"{site.name}: rope, cosine of each pair's angle", cosines, "position", "pair of channels", "cosine"),
        Curves(
            f"{site.name}: rope, score of equal vectors by distance",
            np.arange(site.length),
            {"": scores},
            "distance (positions)",
            label,
        ),
    ]


def _alibi(site: Site) -> list[Panel]:
    """The bias of each head by distance, and the factor on a weight before normalisation that it is."""
    bias = _bias(site, {})[:, -1, ::-1]
    names = [f"head {head + 1}" for head in range(len(bias))]
    shown = _evenly(len(bias))
    curves = {names[head]: bias[head] for head in shown}
    factors = {names[head]: np.exp(bias[head]) for head in shown}
    x = np.arange(site.length)
    return [
        Curves(f"{site.name}: ALiBi, bias of scores", x, curves, "distance (positions)", "added to the score"),
        Curves(f"{site.name}: ALiBi, decay of weights", x, factors, "distance (positions)", "factor exp(bias)"),
    ]


def _bias(site: Site, variables: Any) -> np.ndarray:
    """The bias `[H, T, T]` of an encoding whose bias depends on positions alone."""
    encoding, attention = encodings.get(site.encoding.kind), site.stack.attention
    heads, groups, width = head_shape(attention, site.stack.width)
    if encoding.shared is None:
        shared = None
    else:
        shared = encoding.shared(site.encoding, attention, width).apply(variables, site.slots)
    q, k = jnp.zeros((1, site.length, heads, width)), jnp.zeros((1, site.length, groups, width))
    position = site.slots.position
    return np.asarray(encoding.checked_bias(site.encoding, shared, q, k, position, position)[0], np.float32)


def _t5(site: Site) -> list[Panel]:
    """The bucket of each key position - query position; with parameters, the learned bias of each head too."""
    config, reach = site.encoding, site.length - 1
    offset = np.arange(-reach, reach + 1)
    clipped = np.clip(offset, -config.max_distance, config.max_distance) + config.max_distance  # as t5.bias does
    bucket = t5.bucket_of_offset(config)[clipped]
    matrix = bucket[np.arange(site.length)[None] - np.arange(site.length)[:, None] + reach]
    x_label = "key position - query position"
    panels: list[Panel] = [
        Heat(f"{site.name}: T5 buckets", matrix, "query position", "key position", "bucket", "bucket"),
        Curves(f"{site.name}: T5 bucket of each offset", offset, {"": bucket}, x_label, "bucket", steps=True),
    ]
    if site.params is not None:
        bias = _bias(site, {"params": site.params["shared"]})
        by_offset = np.concatenate([bias[:, -1, :], bias[:, 0, 1:]], axis=1)
        curves = {f"head {head + 1}": by_offset[head] for head in _evenly(len(bias))}
        panels.append(Curves(f"{site.name}: T5 learned bias", offset, curves, x_label, "added to the score"))
    return panels


def _deberta(site: Site) -> list[Panel]:
    """The table row of each query position - key position."""
    config, reach = site.encoding, site.length - 1
    distance = np.arange(-reach, reach + 1)
    clipped = np.clip(distance, -config.max_distance, config.max_distance) + config.max_distance  # as deberta.bias does
    row = deberta.row_of_distance(config)[clipped]
    matrix = row[np.arange(site.length)[:, None] - np.arange(site.length)[None] + reach]
    label = "query position - key position"
    return [
        Heat(f"{site.name}: DeBERTa distances", matrix, "query position", "key position", "row", "bucket"),
        Curves(f"{site.name}: DeBERTa row of each distance", distance, {"": row}, label, "table row", steps=True),
    ]


def _transformer_xl(site: Site) -> list[Panel]:
    """The codes of distances `[2 T - 1, D]`, and their dot products with the code of distance 0."""
    config, reach = site.encoding, site.length - 1
    distance = np.arange(-reach, reach + 1)
    clipped = distance if config.clamp is None else np.clip(distance, -config.clamp, config.clamp)
    codes = np.asarray(sinusoids(jnp.asarray(clipped), site.stack.width, config.base, concatenated=True))
    products = codes @ codes[reach]
    label = "query position - key position"
    return [
        Heat(f"{site.name}: Transformer-XL codes", codes, label, "channel", "value", first_row=-reach),
        Curves(
            f"{site.name}: dot product with distance 0", distance, {"": products}, label, "dot product of the codes"
        ),
    ]


def _external(site: Site) -> list[Panel]:
    """An encoding of the user's own: its codes, or its bias by distance, as far as they need no parameters."""
    encoding = encodings.get(site.encoding.kind)
    if encoding.embed is not None:
        return _absolute(site)
    if encoding.bias is None or encoding.layer is not None:
        raise ConfigError(
            f"draw positions: got encoding.kind {site.encoding.kind}, expected one with embed or bias and without "
            "parameters, or one of the project's"
        )
    try:
        bias = _bias(site, {"params": site.params["shared"]} if site.params and "shared" in site.params else {})
    except Exception as error:  # flax's, for parameters that are missing
        raise ConfigError(
            f"draw positions: got encoding.kind {site.encoding.kind}, whose bias cannot be computed without a run "
            f"({type(error).__name__}), expected a trained run; give --workdir=DIR"
        ) from None
    return [
        Heat(f"{site.name}: bias of head {head + 1}", bias[head], "query position", "key position", "bias")
        for head in _evenly(len(bias))[:3]
    ]


def _evenly(count: int) -> list[int]:
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, MAX_HEADS))})


PANELS: dict[str, Callable[[Site], list[Panel]]] = {
    "sinusoidal": _absolute,
    "learned": _absolute,
    "rope": _rope,
    "alibi": _alibi,
    "t5": _t5,
    "deberta": _deberta,
    "transformer_xl": _transformer_xl,
}
"""Panels of each of the project's encodings."""
