"""Collectives of a compiled program, read from its HLO text (`jax.stages.Compiled.as_text()`) without running it.

A collective in a loop counts as often as the loop's trip count, which the compiler annotates. Remote copies inside
Pallas kernels are not in the HLO and not counted. A TPU's program for several slices is the program of one slice: data
for other slices goes through the host, by a `send` whose attributes name the collective's kind and members.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
"""Bits of the element types whose names do not contain them."""
PASS_THROUGH = ("bitcast", "copy", "reshape", "transpose", "convert", "get-tuple-element")
"""Instructions that pass their operand's value on."""
TRANSFER_ATTRIBUTE = "_xla_megascale_transfer_type"
"""Attribute of a `send` to other slices that names its collective."""
SLICE_ID_STRIDE = 100_000
"""libtpu numbers a device of several slices as this stride x (slice + 1) + its number within the slice."""
CALLED_COMPUTATION = r"(?:calls|body|to_apply|(?:true|false)_computation)=%?([\w.\-]+)"


@dataclass(frozen=True)
class Collective:
    """One collective of a program, as each device takes part in it.

    Attributes:
      kind: one of `KINDS`. An all-reduce of which each device uses only its own part counts as a reduce-scatter. The
        GPU compiler rewrites it to one, the TPU's hides it in a fusion, and the CPU's does neither.
      payload: bytes of the complete array: the result of an all-gather, the operand of the others.
      group: devices of one group (of a permutation: one pair), as indices into the mesh's flattened devices.
      executions: number of executions in one run of the program.
      is_count_known: False inside a loop of unknown trip count, which then counts as one iteration.
      name: name of the instruction.
      slices: number of slices that the group spans.
    """

    kind: str
    payload: float
    group: tuple[int, ...]
    executions: int
    is_count_known: bool
    name: str
    slices: int = 1

    @property
    def size(self) -> int:
        """Number of devices in a group."""
        return len(self.group)

    @property
    def bytes(self) -> float:
        """Bytes that one device sends in one run of the program, with bandwidth-optimal algorithms.

        For n devices and a payload of p bytes: p (n - 1) / n for all-gather, reduce-scatter and all-to-all; twice that
        for all-reduce (a reduce-scatter and an all-gather); p for a permutation or a broadcast.
        """
        share = (self.size - 1) / self.size
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0, "collective-broadcast": 1.0}
        return self.executions * self.payload * factor.get(self.kind, share)

    @property
    def cross_slice_bytes(self) -> float:
        """The part of `bytes` that leaves its slice.

        With k members in each of s slices, the members of a slice reduce among themselves first and gather last. In
        between, a device exchanges p / k of the payload p with s - 1 others. In an all-to-all it sends to all but k.
        """
        own = self.size / self.slices
        ways = (self.slices - 1) / self.slices
        factor = {"all-reduce": 2 * ways / own, "all-to-all": ways, "ragged-all-to-all": ways}
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.bytes if self.slices > 1 else 0.0
        return self.executions * self.payload * factor.get(self.kind, ways / own)

    def axes(self, shape: dict[str, int]) -> tuple[str, ...]:
        """Mesh axes along which it sends, for `shape` = `mesh.shape` of the program's mesh."""
        indices = np.unravel_index(np.asarray(self.group), tuple(shape.values()))
        return tuple(axis for axis, index in zip(shape, indices, strict=True) if np.ptp(index))


@dataclass(frozen=True)
class Instruction:
    """A line of HLO: `name = type opcode(operands), attributes`."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    root: bool


def collectives(hlo: str, devices: Sequence[int] = (), slices: Sequence[int] = ()) -> list[Collective]:
    """All collectives of a program, also those in loops, branches and fusions.

    Both branches of a conditional count. Groups of a single device send nothing and are left out.

    Args:
      hlo: text of the compiled program.
      devices: `device.id` of the mesh's flattened devices; needed for several slices.
      slices: slice number of each of these devices.
    """
    program, entry = parse_hlo(hlo)
    where = _DeviceNumbering(hlo, devices, slices)
    fused = {
        name
        for body in program.values()
        for i in body.values()
        if i.opcode == "fusion"
        for name in _called_computations(i)
    }
    found, parts = [], set()
    for computation, times, bounded in _executed_computations(program, entry):
        for instruction in program[computation].values():
            kind = instruction.opcode.removesuffix("-start")
            if kind == "send" and TRANSFER_ATTRIBUTE in instruction.attributes:
                found.append(_cross_slice_collective(program[computation], instruction, times, bounded, where))
            if kind not in KINDS:
                continue
            channel = re.search(r"channel_id=\d+", instruction.attributes)
            if computation in fused and channel:
                # The TPU compiler splits a collective into several fusions. Each contains the complete instruction,
                # with the same channel.
                if channel[0] in parts:
                    continue
                parts.add(channel[0])
            found += _collectives_of(program, computation, instruction, kind, times, bounded, where)
    return found


class _DeviceNumbering:
    """Maps device numbers in a program to indices into the mesh's flattened devices."""

    def __init__(self, hlo: str, devices: Sequence[int], slices: Sequence[int]):
        self.index_of = {device: index for index, device in enumerate(devices)}
        self.slices = slices
        partitions = re.search(r"num_partitions=(\d+)", hlo.partition("\n\n")[0])
        is_of_one_slice = bool(slices) and partitions is not None and int(partitions[1]) < len(slices)
        own_slice = [i for i, number in enumerate(slices) if number == slices[0]]
        self.slice_indices = own_slice if is_of_one_slice else None

    def indices(self, partitions: Sequence[int]) -> tuple[int, ...]:
        """Device indices of these partitions of the program, which may be the program of the first slice only."""
        return tuple(partitions) if self.slice_indices is None else tuple(self.slice_indices[i] for i in partitions)

    def slice_count(self, indices: Sequence[int]) -> int:
        """Number of slices that these devices span."""
        return len({self.slices[index] for index in indices}) if self.slices else 1


def parse_hlo(hlo: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """The computations of a module (name -> instructions by name), and the name of the entry computation."""
    program: dict[str, dict[str, Instruction]] = {}
    current, entry = {}, ""
    for line in hlo.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head and not line[0].isspace() and "->" in line:
            current = program[head[2]] = {}
            entry = head[2] if head[1] else entry
            continue
        body = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
        if body:
            type_, rest = _split(line[body.end() :])
            opcode, _, rest = rest.partition("(")
            operands, attributes = _split("(" + rest)
            names = tuple(re.findall(r"%([\w.\-]+)", operands)) or (operands[1:-1],)  # a parameter has its number
            current[body[2]] = Instruction(body[2], type_, opcode.strip(), names, attributes, bool(body[1]))
    return program, entry


def _split(text: str) -> tuple[str, str]:
    """The first word of `text`, with its parentheses and braces, and the rest."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter in "({") - (letter in ")}")
        if depth == 0 and (letter == " " or (letter == ")" and text[0] == "(")):
            return text[: i + (letter == ")")], text[i + 1 :].lstrip(" ,")
    return text, ""


def _bytes(type_: str) -> float:
    """Bytes of an HLO type; the sum for a tuple."""
    total = 0.0
    for element, shape in re.findall(r"(\w+)\[([\d,<=]*)\]", type_):
        digits = re.search(r"\d+", element)
        bits = BITS[element] if element in BITS else int(digits[0]) if digits else 0
        total += bits / 8 * math.prod(int(size) for size in re.findall(r"\d+", shape))
    return total


def _executed_computations(program: dict, entry: str) -> Iterator[tuple[str, int, bool]]:
    """(name, executions, is_count_known) of every computation that runs, once for each caller."""
    stack = [(entry, 1, True)]
    while stack:
        name, times, bounded = stack.pop()
        yield name, times, bounded
        for instruction in program[name].values():
            opcode = instruction.opcode
            if opcode.removesuffix("-start") in KINDS or opcode in ("async-update", "async-done"):
                continue  # the computation of a reduction sends nothing, and a start is counted already
            trips = _trip_count(program, instruction) if opcode == "while" else 1
            each = (times * (trips or 1), bounded and trips is not None)
            stack += [(other, *each) for other in _called_computations(instruction) if other in program]


def _called_computations(instruction: Instruction) -> list[str]:
    """Computations that an instruction calls: a loop's body, branches, the body of a fusion or asynchronous call."""
    branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
    names = re.findall(r"%?([\w.\-]+)", branches[1]) if branches else []
    return re.findall(CALLED_COMPUTATION, instruction.attributes) + names


def _trip_count(program: dict, loop: Instruction) -> int | None:
    """Iterations of a loop: as annotated, or N if it runs while a counter from 0 is below the constant N; else None."""
    known = re.search(r"known_trip_count\D*(\d+)", loop.attributes)
    if known:
        return int(known[1])
    condition = program[_required(r"condition=%?([\w.\-]+)", loop.attributes)]
    for test in condition.values():
        if test.root and test.opcode == "compare" and "direction=LT" in test.attributes:
            bound = condition.get(test.operands[-1])
            if bound is not None and bound.opcode == "constant":
                return int(bound.operands[0])
    return None


def _collectives_of(
    program: dict,
    computation: str,
    instruction: Instruction,
    kind: str,
    times: int,
    bounded: bool,
    where: _DeviceNumbering,
) -> list[Collective]:
    instructions = program[computation]
    # Of a permutation's pairs, one that spans slices if there is any: the slowest pair decides.
    group = max(
        (where.indices(each) for each in _groups(instruction.attributes, kind)), key=where.slice_count, default=()
    )
    if len(group) < 2:
        return []
    sizes = {kind: 0.0, "reduce-scatter": 0.0}
    for index, operand in enumerate(instruction.operands):
        own = index if len(instruction.operands) > 1 else None
        size = _bytes(instructions[operand].type) if operand in instructions else 0.0
        sliced = kind == "all-reduce" and _is_only_sliced(
            program, computation, instruction.name, own, size / len(group)
        )
        sizes["reduce-scatter" if sliced else kind] += size * (len(group) if kind == "all-gather" else 1)
    last = (group, times, bounded, instruction.name, where.slice_count(group))
    return [Collective(k, size, *last) for k, size in sizes.items() if size]


def _cross_slice_collective(
    instructions: dict, send: Instruction, times: int, bounded: bool, where: _DeviceNumbering
) -> Collective:
    """The collective of a `send` to other slices, with targets `{1,2}x{0:7}` (slices x devices) or device lists."""
    kind = _required(rf'{TRANSFER_ATTRIBUTE}="(\w+)"', send.attributes).lower().replace("_", "-")
    kind = "collective-permute" if kind == "one-to-one" else kind
    target = send.attributes.partition("_xla_megascale_target=")[2]
    product = re.match(r'"\{([\d,]+)\}x\{(\d+)', target)
    if product:
        numbers = [SLICE_ID_STRIDE * i + int(product[2]) for i in _numbers(product[1])]
    else:
        numbers = _numbers(_required(r"\A\{+([\d,>-]+)\}", target))
    group = tuple(where.index_of[number] for number in numbers)
    payload = _bytes(instructions[send.operands[0]].type) * (len(group) if kind == "all-gather" else 1)
    return Collective(kind, payload, group, times, bounded, send.name, where.slice_count(group))


def _is_only_sliced(program: dict, computation: str, name: str, index: int | None, share: float) -> bool:
    """True if every user of a value (of a tuple's element `index`) reads only a slice of at most `share` bytes."""
    instructions = program[computation]
    users = [user for user in instructions.values() if name in user.operands]
    if index is not None:
        done = "all-reduce-done"
        users = [user for user in users if user.opcode == done or re.search(rf"index={index}\b", user.attributes)]
    if not users or instructions[name].root:
        return False
    for user in users:
        called = re.search(r"calls=%?([\w.\-]+)", user.attributes)
        if user.opcode == "dynamic-slice":
            good = user.operands[0] == name and _bytes(user.type) <= share
        elif user.opcode == "all-reduce-done":
            good = _is_only_sliced(program, computation, user.name, index, share)
        elif user.opcode in PASS_THROUGH:
            good = _is_only_sliced(program, computation, user.name, None, share)
        elif user.opcode == "fusion" and called:
            inner = program[called[1]]
            indices = {str(i) for i, operand in enumerate(user.operands) if operand == name}
            arguments = [i.name for i in inner.values() if i.opcode == "parameter" and i.operands[0] in indices]
            good = all(_is_only_sliced(program, called[1], argument, None, share) for argument in arguments)
        else:
            good = False
        if not good:
            return False
    return True


def _groups(attributes: str, kind: str) -> list[tuple[int, ...]]:
    """The pairs of a permutation, else the first replica group of an instruction, in any of HLO's three notations."""
    if kind == "collective-permute":
        pairs = re.findall(r"\{(\d+),(\d+)\}", attributes.partition("source_target_pairs=")[2].partition("}}")[0] + "}")
        return [(int(a), int(b)) for a, b in pairs if a != b]
    text = attributes.partition("replica_groups=")[2]
    if text.startswith("{{"):
        return [_numbers(text[: text.index("}")])]
    listed = re.match(r"\[([\d,]+)\]<=(\S+?)(?:, |$)", text)
    if listed:
        return [tuple(_iota(listed[2]).reshape(_numbers(listed[1]))[0].tolist())]
    named = re.match(r"mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", text)
    return [_mesh_group(named[1], named[2], named[3])] if named else []


def _mesh_group(axes: str, order: str | None, chosen: str) -> tuple[int, ...]:
    """First group of `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}`; `'b':(2)2` is the inner 2 of axis b's 4."""
    shape = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    devices = np.arange(math.prod(shape.values())) if order is None else _iota(order)
    split: list[int] = []
    varying: list[int] = []
    parts = {name: (before, size) for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen)}
    for name, size in shape.items():
        before, inner = (int(x) for x in parts[name]) if name in parts and parts[name][0] else (1, size)
        varying += [len(split) + 1] if name in parts else []
        split += [before, inner, size // (before * inner)]
    cube = devices.reshape(split)
    group = tuple(slice(None) if axis in varying else 0 for axis in range(len(split)))
    return tuple(cube[group].reshape(-1).tolist())


def _iota(text: str) -> np.ndarray:
    """The flat array that `[2,4]T(1,0)` denotes: the numbers from 0 in that shape, transposed."""
    shape, _, order = text.partition("T")
    array = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return (array.transpose(_numbers(order)) if order else array).reshape(-1)


def _required(pattern: str, text: str) -> str:
    """The first group of a match that valid HLO always has."""
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"HLO: got {text[:80]!r}, expected {pattern}")
    return match[1]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(i) for i in re.findall(r"\d+", text))
