"""The plan of decoding on given devices: memory of parameters and caches, time a token, the largest batch that fits.

Nothing is compiled. Bytes of parameters are those of the arrays that decoding keeps, with `decode.weights`; bytes of
caches follow from the shapes of `nn/cache.py` (of recurrent models, from tracing their `start`), at the capacity that
`decode/cache_schedule.py` ends with. Rows are divided over the axes data, fsdp and expert, key heads over tensor where
it divides them. Seconds are those of `decode_time.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import AbstractMesh, AxisType

from jaxformer.config import AXES, Config, StackConfig
from jaxformer.decode import cache_schedule, int8
from jaxformer.decode.cache_schedule import CacheSchedule
from jaxformer.decode.compiled import SEARCHES
from jaxformer.decode.runner import max_positions
from jaxformer.errors import ConfigError
from jaxformer.models import build
from jaxformer.nn import moe
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import rules
from jaxformer.plan import decode_time, flops, program, shapes
from jaxformer.plan.chips import CHIPS, Chip, Hardware
from jaxformer.plan.decode_time import Decoded
from jaxformer.plan.step_time import RESIDUAL_CHANNELS, Layout
from jaxformer.types import Batch, PyTree, Slots, Stream

INT32 = 4
FLOAT32 = 4


@dataclass(frozen=True)
class Request:
    """The prompts and tokens to decode.

    Attributes:
      batch: prompts at a time, over all devices.
      prompt: tokens of a prompt; of the source, if there is an encoder, whose prompt in the target is one token.
      tokens: new tokens of each prompt.
    """

    batch: int
    prompt: int
    tokens: int


@dataclass(frozen=True)
class DecodePlan:
    """Memory and time of decoding. Bytes and seconds are those of one device unless a name says otherwise.

    Attributes:
      config: the config, with all sizes resolved.
      request: what is decoded.
      hardware: the devices of the plan.
      layout: the mesh.
      parameters: number of parameters.
      parameter_bytes: bytes of the parameters as decoding keeps them.
      read_bytes: bytes of the parameters that a decode step reads, those gathered over fsdp included.
      prompt_bytes: bytes of the caches of one prompt by part, over all devices.
      cache_bytes: bytes of all caches, on one device.
      growing_bytes: bytes of the smaller caches that lie beside them while they grow for the last time.
      working_bytes: bytes of logits and of one layer's activations.
      prefill: expected seconds of reading the prompts, by part.
      step: expected seconds of a decode step by part, on average over the steps.
      first_step, last_step: expected seconds of the first and of the last decode step.
      largest: chip -> the largest batch that fits the same number of devices, and expected seconds of its decode step;
        None: not even the parameters and one prompt a device fit.
    """

    config: Config
    request: Request
    hardware: Hardware
    layout: Layout
    parameters: int
    parameter_bytes: float
    read_bytes: float
    prompt_bytes: dict[str, float]
    cache_bytes: float
    growing_bytes: float
    working_bytes: float
    prefill: dict[str, float]
    step: dict[str, float]
    first_step: float
    last_step: float
    largest: dict[str, tuple[int, float] | None]

    @property
    def needed_bytes(self) -> float:
        """Bytes in total."""
        return self.parameter_bytes + self.cache_bytes + self.growing_bytes + self.working_bytes

    @property
    def fits(self) -> bool:
        """True if a device has as much memory."""
        return self.needed_bytes <= self.hardware.chip.memory

    @property
    def prefill_seconds(self) -> float:
        """Expected seconds of reading the prompts."""
        return sum(self.prefill.values())

    @property
    def step_seconds(self) -> float:
        """Expected seconds of a decode step, which gives a token to every prompt, on average over the steps."""
        return sum(self.step.values())

    def row(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return {
            "topology": self.hardware.topology,
            "chip": self.hardware.chip.kind,
            "devices": self.layout.devices,
            "mesh": {axis: self.layout.size(axis) for axis in AXES if self.layout.size(axis) > 1},
            **dataclasses.asdict(self.request),
            "parameters": self.parameters,
            "parameter_bytes": self.parameter_bytes,
            "prompt_bytes": self.prompt_bytes,
            "cache_bytes": self.cache_bytes,
            "growing_bytes": self.growing_bytes,
            "working_bytes": self.working_bytes,
            "need": self.needed_bytes,
            "capacity": self.hardware.chip.memory,
            "fits": self.fits,
            "prefill": self.prefill,
            "step": self.step,
            "step_seconds": [self.first_step, self.last_step],
            "largest": {name: found and found[0] for name, found in self.largest.items()},
        }


def plan(config: Config, hardware: Hardware, batch: int | None, prompt: int | None, tokens: int | None) -> DecodePlan:
    """The plan of decoding with `config`.

    Args:
      config: the config of the run.
      hardware: the devices to plan for.
      batch: prompts at a time; None: `config.decode.batch`.
      prompt: tokens of a prompt; None: `config.data.length`, and of a decoder alone less `tokens`.
      tokens: new tokens; None: `config.decode.max_length`.

    Raises:
      ConfigError: the model has no decoder, or the request does not fit its positions or the mesh.
    """
    config = program.with_scanned_layers(program.resolve(config))
    model = config.model
    sizes = meshes.axis_sizes(meshes.merge_slices(config.mesh), hardware.devices or config.mesh.devices)
    layout = shapes.layout(config, sizes, hardware.slices)
    new = tokens or config.decode.max_length
    default = config.data.length if model.is_seq2seq else max(config.data.length - new, 1)
    request = Request(batch or config.decode.batch, prompt or default, new)
    _check(config, layout, request)
    return _plan(config, hardware, layout, request)


def _check(config: Config, layout: Layout, request: Request) -> None:
    model = config.model
    if model.permutation is not None or model.series is not None:
        what = "a permutation language model" if model.permutation is not None else "a series"
        raise ConfigError(
            f"plan --decode: got a model of {what}, expected one of tokens; its caches are not known here"
        )
    if not model.has_decoder:
        raise ConfigError(
            "plan --decode: got a model without a decoder, expected one, since nothing is decoded; leave --decode out"
        )
    for axis in ("stage", "context"):
        if layout.size(axis) > 1:
            raise ConfigError(
                f"config.mesh.{axis}: got {layout.size(axis)}, expected 1 with --decode, which divides rows and heads; "
                "use data and tensor"
            )
    shards = decode_time.replicas(layout)
    if request.batch % shards:
        raise ConfigError(
            f"--batch: got {request.batch}, expected a multiple of {shards}, the devices of the mesh that rows are "
            "divided over; change --batch or the mesh"
        )
    for part, size in (
        ("encoder", request.prompt if model.is_seq2seq else 0),
        ("decoder", target_tokens(model, request)),
    ):
        limit = max_positions(getattr(model, part))
        if limit is not None and size > limit:
            name = "--prompt" if part == "encoder" else "--prompt and --tokens"
            raise ConfigError(f"{name}: got {size:,} positions, expected at most {limit:,}, those of the {part}")


def target_tokens(model: Any, request: Request) -> int:
    """Positions of the decoder: of the prompt and all new tokens but the last, which is not read."""
    return (1 if model.is_seq2seq else request.prompt) + request.tokens - 1


def _plan(config: Config, hardware: Hardware, layout: Layout, request: Request) -> DecodePlan:
    module = build.build(config.model)
    variables, names = nn.meta.unbox(build.shapes(module)), build.logical_names(module)
    held, read = _parameter_bytes(config, module, variables, names, layout, request)
    decoded = _decoded(config, variables["params"], names, read)
    schedule, outputs = _schedule(config, request)
    prompt_bytes = _cache_parts(config, module, request, schedule, schedule.capacities[-1])
    own = request.batch / decode_time.replicas(layout)

    def caches(capacity: int) -> float:
        """Bytes of the caches of one prompt on one device."""
        parts = _cache_parts(config, module, request, schedule, capacity)
        return sum(size / _shards(config, name, layout) for name, size in parts.items())

    def step(capacity: int, rows: float, chip: Chip) -> dict[str, float]:
        seen = rows / decode_time.replicas(layout) * caches(capacity)
        keys = schedule.total_slots(capacity) if schedule.slots_per_token else 0
        keys += request.prompt if config.model.is_seq2seq else 0
        return decode_time.decode_step_seconds(decoded, rows * outputs, keys, seen, layout, chip)

    def mean_step(rows: float, chip: Chip) -> dict[str, float]:
        total: dict[str, float] = {}
        previous = 0
        for capacity in schedule.capacities:
            share = (capacity - previous) / request.tokens
            previous = capacity
            for name, seconds in step(capacity, rows, chip).items():
                total[name] = total.get(name, 0.0) + share * seconds
        return total

    grown = caches(schedule.capacities[-2]) if len(schedule.capacities) > 1 else 0.0
    working = _working_bytes(config, request, outputs, layout)
    each = caches(schedule.capacities[-1]) + grown + working

    def largest(chip: Chip) -> tuple[int, float] | None:
        rows = int((chip.memory - held) // each) * decode_time.replicas(layout)
        return (rows, sum(mean_step(rows, chip).values())) if rows > 0 else None

    return DecodePlan(
        config=config,
        request=request,
        hardware=hardware,
        layout=layout,
        parameters=build.count_params(variables["params"]),
        parameter_bytes=held,
        read_bytes=read,
        prompt_bytes=prompt_bytes,
        cache_bytes=own * caches(schedule.capacities[-1]),
        growing_bytes=own * grown,
        working_bytes=own * working,
        prefill=_prefill(config, decoded, request, layout, hardware.chip),
        step=mean_step(request.batch, hardware.chip),
        first_step=sum(step(schedule.capacities[0], request.batch, hardware.chip).values()),
        last_step=sum(step(schedule.capacities[-1], request.batch, hardware.chip).values()),
        largest={name: largest(chip) for name, chip in CHIPS.items()},
    )


def _parameter_bytes(
    config: Config, module: nn.Module, variables: PyTree, names: PyTree, layout: Layout, request: Request
) -> tuple[float, float]:
    """Bytes of the parameters on one device, and those that a step reads there, gathered over fsdp."""
    kept = variables
    if config.decode.weights == "int8":
        kept = jax.eval_shape(functools.partial(int8.quantize, module), variables)
    mesh = AbstractMesh(tuple(layout.size(axis) for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    leaf_names = dict(_named(names, is_leaf=lambda x: isinstance(x, tuple)))
    held = read = 0.0
    for path, leaf in _named(kept["params"]):
        axes = leaf_names.get(path, (None,) * leaf.ndim)  # a scale of int8 lies on every device
        spec = rules.drop_uneven_axes(rules.spec(axes), leaf.shape, mesh)
        sharded = {axis: mesh.shape[axis] for entry in spec for axis in _axes(entry)}
        size = float(leaf.size * leaf.dtype.itemsize)
        held += size / math.prod(sharded.values())
        gathered = size / (sharded.get("tensor", 1) * sharded.get("expert", 1))
        read += gathered * _read_times(config, path, axes, request, layout)
    return held, read


def _named(tree: PyTree, is_leaf: Any = None) -> list[tuple[tuple[str, ...], Any]]:
    """Leaves of a tree of dicts with their paths."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    return [(tuple(str(getattr(key, "key", key)) for key in path), leaf) for path, leaf in leaves]


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


ENCODER_PARTS = ("encoder", "memory_projection")
"""Parts of the tree of parameters that are applied once to a source, and not at each token."""


def _read_times(
    config: Config, path: tuple[str, ...], axes: tuple[str | None, ...], request: Request, layout: Layout
) -> float:
    """Number of times that a decode step reads a parameter whole: 0 for the encoder and tables of which it takes rows.

    Layers that share their parameters read them once each. Of experts it reads those that its tokens are routed to,
    k of E for each token, taken as independent.
    """
    words = [word.removesuffix("_scale") if word.endswith(("kernel_scale", "table_scale")) else word for word in path]
    is_table = "table" in words or "delta" in words
    if _is_not_decoded(words) or (is_table and not flops.is_head(config, words)):
        return 0.0
    if _reads_memory(tuple(words)):
        return 0.0  # the encoder's output is projected once
    stack = config.model.decoder
    if stack is None or not flops.is_of_layers(words):
        return 1.0
    times = float(stack.layers) if stack.share_layers else 1.0
    if stack.moe is not None and "experts" in axes and words[-1] != "router":
        tokens = request.batch / (layout.size("data") * layout.size("fsdp"))
        times *= 1 - (1 - stack.moe.top_k / stack.moe.experts) ** tokens
    return times


def _is_not_decoded(path: Sequence[str]) -> bool:
    """True for parameters that no decode step reads: of the encoder, and of modules that only training runs."""
    return path[0] in ENCODER_PARTS or path[0].startswith(moe.MULTI_TOKEN)


def _reads_memory(path: tuple[str, ...]) -> bool:
    """True for kernels that only the encoder's output is multiplied with: cross-attention's and copying's."""
    return ("cross" in path or path[0] == "copying") and path[-2] in ("key", "value")


def _decoded(config: Config, params: PyTree, names: PyTree, read: float) -> Decoded:
    """The model as `decode_time.py` sees it."""
    decoding = dataclasses.replace(config, model=dataclasses.replace(config.model, multi_token=None))
    multiplied = flops.multiplied_by_path(decoding, params, names)
    own = sum(size for path, size in multiplied.items() if not _is_not_decoded(path) and not _reads_memory(path))
    head = sum(size for path, size in multiplied.items() if path[0] == "head" or "table" in path)
    stack = config.model.decoder
    if stack is None:  # recurrent: one cell after the other, and nothing to reduce between devices
        width, size = build.model_width(config.model), shapes.BYTES[config.model.dtype]
        return Decoded(0, width, size, read, own, scores=0.0, reductions=0, channels=0.0, head=head)
    each = shapes.stack_layers(config, "decoder", config.data.length)
    own_latent, queries = stack.attention.latent, stack.attention.heads * flops.score_width(stack)
    absorbed = queries if own_latent is None else stack.attention.heads * (own_latent.rank + own_latent.rope_width / 2)
    crossed = config.model.encoder is not None
    with_keys = stack.layers - len(stack.delta_layers)
    if stack.delta is not None:  # a step reads and writes the states by three products
        delta = stack.delta
        own += len(stack.delta_layers) * 3 * delta.heads * delta.key_width * delta.value_width
    return Decoded(
        layers=stack.layers,
        width=stack.width,
        bytes=shapes.BYTES[config.model.dtype],
        read_bytes=read,
        multiplied=own,
        scores=float(with_keys * absorbed),
        prompt_scores=float(with_keys * queries),
        reductions=(1 if each.joined else 2) + crossed,
        channels=each.channels,
        routed=each.routed,
        head=head,
    )


def _schedule(config: Config, request: Request) -> tuple[CacheSchedule, int]:
    """The capacities of the caches, and the sequences that are extended for each prompt."""
    options = dataclasses.replace(config.decode, max_length=request.tokens)
    search = SEARCHES[options.method](options, (), 0)
    slots = 1 if config.model.is_seq2seq else request.prompt
    if config.model.decoder is None:
        return CacheSchedule(slots, (request.tokens,), 0), search.outputs_per_prompt
    branches = search.branches if config.model.decoder.delta is None else 0
    schedule = cache_schedule.growing_schedule(slots, request.tokens, max(branches, 1), search.lookahead)
    return schedule, search.outputs_per_prompt


def _cache_parts(
    config: Config, module: nn.Module, request: Request, schedule: CacheSchedule, capacity: int
) -> dict[str, float]:
    """Bytes of one prompt's caches by part, over all devices."""
    options = config.decode
    rows = options.hypotheses if options.method == "sample" else 1
    if config.model.decoder is None:
        rows *= options.beams if options.method == "beam" else 1
        states = recurrent_state_bytes(module, request.prompt)  # ty: ignore[invalid-argument-type]  # frozen dataclasses
        return {"states": rows * states}
    slots, branches = schedule.total_slots(capacity), options.beams if options.method == "beam" else 0
    if config.model.decoder.delta is not None:  # each beam has a row
        rows, branches = rows * max(branches, 1), 0
    source = request.prompt if config.model.is_seq2seq else 0
    parts = transformer_state_bytes(config.model.decoder, config.model.dtype, slots, source, branches)
    return {name: rows * size for name, size in parts.items()}


def transformer_state_bytes(
    stack: StackConfig, dtype: str, slots: int, source: int = 0, branches: int = 0
) -> dict[str, float]:
    """Bytes of one row of a `TransformerState` (`nn/cache.py`) by part, without its one scalar.

    Grouped heads have keys and values of `kv_heads` heads, latent attention one vector and one rotated key. A window
    hides keys, but their slots are kept. Layers with the gated delta rule have a state of one size.

    Args:
      stack: the decoder.
      dtype: compute precision, in which an accelerator keeps keys and values.
      slots: slots of prompt and new tokens.
      source: slots of the encoder's output; 0: there is none.
      branches: beams that share the row; 0: none.
    """
    own = stack.attention
    head_width = own.head_width or stack.width // own.heads
    layer = 2 * (own.kv_heads or own.heads) * head_width
    crossing = stack.layers * layer * shapes.BYTES[dtype]
    with_keys = stack.layers - len(stack.delta_layers)
    slot = with_keys * (layer if own.latent is None else own.latent.cache_width) * shapes.BYTES[dtype]
    numbers = 2 * INT32 * (slots + source) + INT32 + branches * slots  # positions, segments, the next position, beams
    parts = {"keys and values": slot * slots, "keys and values of the source": crossing * source, "slots": numbers}
    if stack.delta is not None:
        delta = stack.delta
        matrices = delta.heads * delta.key_width * delta.value_width * FLOAT32
        inputs = (delta.conv_kernel - 1) * delta.channels * shapes.BYTES[dtype]
        parts["states"] = len(stack.delta_layers) * (matrices + inputs)
    return {name: float(size) for name, size in parts.items() if size}


@functools.lru_cache(maxsize=8)
def recurrent_state_bytes(module: nn.Module, source: int) -> float:
    """Bytes of one row of a recurrent model's state, with its source's keys and values; from tracing `start`."""
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    target = Stream(ids, Slots(ids, ids))  # ty: ignore[invalid-argument-type]  # a stream of shapes
    source_ids = jax.ShapeDtypeStruct((1, source), jnp.int32)
    stream = Stream(source_ids, Slots(source_ids, source_ids)) if module.config.has_encoder else None  # ty: ignore
    batch = Batch(source=stream, target=target)

    def start(variables: PyTree, batch: Batch) -> PyTree:
        return module.apply(variables, batch, 1, method="start")[1]

    state = jax.eval_shape(start, nn.meta.unbox(build.shapes(module)), batch)
    return float(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)))


def _shards(config: Config, part: str, layout: Layout) -> int:
    """Devices that a part of a row's caches is divided over: key heads over tensor, where it divides them."""
    stack, tensor = config.model.decoder, layout.size("tensor")
    if stack is not None and stack.delta is not None and part == "states":
        return tensor if stack.delta.key_heads % tensor == 0 else 1
    if stack is None or not part.startswith("keys"):
        return 1
    if stack.attention.latent is not None and part == "keys and values":
        return 1  # all heads read the latents
    return tensor if (stack.attention.kv_heads or stack.attention.heads) % tensor == 0 else 1


def _working_bytes(config: Config, request: Request, outputs: int, layout: Layout) -> float:
    """Bytes of one prompt on one device while it is read: float32 logits twice, and one layer's activations."""
    part = config.model.decoder_part
    vocab = (part.embed.vocab or 0) if part is not None else 0
    logits = 2 * FLOAT32 * outputs * vocab / layout.size("tensor")
    channels = 0.0
    for name in config.model.stacks:
        each = shapes.stack_layers(config, name, request.prompt)
        channels = max(channels, RESIDUAL_CHANNELS * each.width + each.channels / layout.size("tensor"))
    return logits + request.prompt * channels * shapes.BYTES[config.model.dtype]


def _prefill(config: Config, decoded: Decoded, request: Request, layout: Layout, chip: Chip) -> dict[str, float]:
    """Expected seconds of reading the prompts: by the encoder if there is one, else by the decoder."""
    encoder = config.model.encoder
    if encoder is not None:
        each = shapes.stack_layers(config, "encoder", request.prompt)
        decoded = Decoded(
            layers=each.count,
            width=each.width,
            bytes=decoded.bytes,
            read_bytes=each.multiplied * (1 if config.decode.weights == "int8" else FLOAT32) / layout.size("tensor"),
            multiplied=each.multiplied,
            scores=each.count * each.scores / ((request.prompt + 1) / 2),  # as many keys as an encoder's query sees
            reductions=2,
            channels=each.channels,
        )
    return decode_time.prefill_seconds(decoded, request.batch, request.prompt, layout, chip)
