"""What a compiled program sends between devices, read from its HLO text (`jax.stages.Compiled.as_text()`).

Nothing is run: loops are multiplied out by the trip counts that the compiler found. Remote copies that a Pallas kernel
makes itself are not in the HLO and so not here. A TPU's program for several slices is that of one slice: what goes to
the others is handed to the host, by a `send` with the collective's kind and members among its attributes.
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
"""Of the element types whose name does not say how many bits they have."""
TRANSPARENT = ("bitcast", "copy", "reshape", "transpose", "convert", "get-tuple-element")
"""Instructions through which a value is still the same value."""
BETWEEN = "_xla_megascale_transfer_type"
"""Attribute of a `send` to other slices: which collective it is part of."""
SLICE = 100_000
"""A device of a program of several slices has the number SLICE x (slice + 1) + its number within, in libtpu's texts."""
CALLED = r"(?:calls|body|to_apply|(?:true|false)_computation)=%?([\w.\-]+)"


@dataclass(frozen=True)
class Collective:
    """One collective of a program, as each device takes part in it.

    Attributes:
      kind: one of `KINDS`. An all-reduce of which each device keeps only its own slice is a reduce-scatter, whether the
        compiler has already made it one (GPU), hides it in a fusion (TPU) or never does (CPU).
      payload: bytes of the whole array: what an all-gather returns, what the others are given.
      group: ids of the devices of one group (of a permutation: one pair), as places in the mesh's flattened devices.
      times: how often one run of the program executes it.
      bounded: whether `times` is known; False inside a loop whose trip count is not, which then counts once.
      name: of the instruction.
      slices: in how many slices the group lies.
    """

    kind: str
    payload: float
    group: tuple[int, ...]
    times: int
    bounded: bool
    name: str
    slices: int = 1

    @property
    def size(self) -> int:
        """Devices in a group."""
        return len(self.group)

    @property
    def bytes(self) -> float:
        """Bytes that one device sends in one run of the program, by the algorithms that send the least.

        On n devices and a payload of p bytes: all-gather, reduce-scatter and all-to-all p (n - 1) / n; all-reduce twice
        that (a reduce-scatter and an all-gather); a permutation or a broadcast p.
        """
        share = (self.size - 1) / self.size
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0, "collective-broadcast": 1.0}
        return self.times * self.payload * factor.get(self.kind, share)

    @property
    def between(self) -> float:
        """Those of `bytes` that leave their slice.

        The k members in each of s slices reduce among themselves before, and gather after, they meet the other slices:
        then a device exchanges p / k of the payload p with s - 1 others. In an all-to-all it sends to all but k.
        """
        own = self.size / self.slices
        ways = (self.slices - 1) / self.slices
        factor = {"all-reduce": 2 * ways / own, "all-to-all": ways, "ragged-all-to-all": ways}
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.bytes if self.slices > 1 else 0.0
        return self.times * self.payload * factor.get(self.kind, ways / own)

    def axes(self, shape: dict[str, int]) -> tuple[str, ...]:
        """The axes of a mesh of this `shape` along which it sends (`mesh.shape` of the program's mesh)."""
        places = np.unravel_index(np.asarray(self.group), tuple(shape.values()))
        return tuple(axis for axis, place in zip(shape, places, strict=True) if np.ptp(place))


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
    """All collectives of a program, those in loops, branches and fusions included, in the order of the text.

    Both branches of a conditional count. Groups of a single device send nothing and are left out. A program for several
    slices needs to know of each of the mesh's flattened devices its number (`device.id`) and its slice.
    """
    program, entry = parse(hlo)
    where = _Where(hlo, devices, slices)
    fused = {name for body in program.values() for i in body.values() if i.opcode == "fusion" for name in _called(i)}
    found, parts = [], set()
    for computation, times, bounded in _reached(program, entry):
        for instruction in program[computation].values():
            kind = instruction.opcode.removesuffix("-start")
            if kind == "send" and BETWEEN in instruction.attributes:
                found.append(_between(program[computation], instruction, times, bounded, where))
            if kind not in KINDS:
                continue
            channel = re.search(r"channel_id=\d+", instruction.attributes)
            if computation in fused and channel:
                # The TPU compiler cuts a collective into fusions, its start, its end and what runs meanwhile; each of
                # them holds the whole instruction, under the one channel.
                if channel[0] in parts:
                    continue
                parts.add(channel[0])
            found += _records(program, computation, instruction, kind, times, bounded, where)
    return found


class _Where:
    """Which place of the mesh a program means by a number."""

    def __init__(self, hlo: str, devices: Sequence[int], slices: Sequence[int]):
        self.of = {device: place for place, device in enumerate(devices)}
        self.slices = slices
        partitions = re.search(r"num_partitions=(\d+)", hlo.partition("\n\n")[0])
        alone = bool(slices) and partitions is not None and int(partitions[1]) < len(slices)
        self.own = [place for place, each in enumerate(slices) if each == slices[0]] if alone else None

    def places(self, partitions: Sequence[int]) -> tuple[int, ...]:
        """Places of devices that are numbered as they are in the program: of a slice, if it is that of one."""
        return tuple(partitions) if self.own is None else tuple(self.own[i] for i in partitions)

    def count(self, places: Sequence[int]) -> int:
        """In how many slices they lie."""
        return len({self.slices[place] for place in places}) if self.slices else 1


def parse(hlo: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """The computations of a module, name -> instructions by name, and the entry computation's name."""
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
    """The first word of `text` (with all of its parentheses and braces) and the rest."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter in "({") - (letter in ")}")
        if depth == 0 and (letter == " " or (letter == ")" and text[0] == "(")):
            return text[: i + (letter == ")")], text[i + 1 :].lstrip(" ,")
    return text, ""


def _bytes(type_: str) -> float:
    """Size of a type; of a tuple, the sum."""
    total = 0.0
    for element, shape in re.findall(r"(\w+)\[([\d,<=]*)\]", type_):
        digits = re.search(r"\d+", element)
        bits = BITS[element] if element in BITS else int(digits[0]) if digits else 0
        total += bits / 8 * math.prod(int(size) for size in re.findall(r"\d+", shape))
    return total


def _reached(program: dict, entry: str) -> Iterator[tuple[str, int, bool]]:
    """Computations that run, with how often and whether that is known. One called from two places comes twice."""
    stack = [(entry, 1, True)]
    while stack:
        name, times, bounded = stack.pop()
        yield name, times, bounded
        for instruction in program[name].values():
            opcode = instruction.opcode
            if opcode.removesuffix("-start") in KINDS or opcode in ("async-update", "async-done"):
                continue  # a reduction that is applied sends nothing, and a start has already been counted
            trips = _trips(program, instruction) if opcode == "while" else 1
            each = (times * (trips or 1), bounded and trips is not None)
            stack += [(other, *each) for other in _called(instruction) if other in program]


def _called(instruction: Instruction) -> list[str]:
    """Computations that an instruction runs: a loop's body, branches, the inside of a fusion or asynchronous call."""
    branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
    names = re.findall(r"%?([\w.\-]+)", branches[1]) if branches else []
    return re.findall(CALLED, instruction.attributes) + names


def _trips(program: dict, loop: Instruction) -> int | None:
    """Iterations of a loop: as annotated, or N where it runs while a counter (that JAX starts at 0) is below N."""
    known = re.search(r"known_trip_count\D*(\d+)", loop.attributes)
    if known:
        return int(known[1])
    condition = program[re.search(r"condition=%?([\w.\-]+)", loop.attributes)[1]]
    for test in condition.values():
        if test.root and test.opcode == "compare" and "direction=LT" in test.attributes:
            bound = condition.get(test.operands[-1])
            if bound is not None and bound.opcode == "constant":
                return int(bound.operands[0])
    return None


def _records(
    program: dict, computation: str, instruction: Instruction, kind: str, times: int, bounded: bool, where: _Where
) -> list[Collective]:
    instructions = program[computation]
    # Of a permutation's pairs one that leaves its slice, if any does: the slowest decides.
    group = max((where.places(each) for each in _groups(instruction.attributes, kind)), key=where.count, default=())
    if len(group) < 2:
        return []
    sizes = {"kept": 0.0, "sliced": 0.0}
    for index, operand in enumerate(instruction.operands):
        own = index if len(instruction.operands) > 1 else None
        size = _bytes(instructions[operand].type) if operand in instructions else 0.0
        sliced = kind == "all-reduce" and _only_sliced(program, computation, instruction.name, own, size / len(group))
        sizes["sliced" if sliced else "kept"] += size * (len(group) if kind == "all-gather" else 1)
    kinds = {"kept": kind, "sliced": "reduce-scatter"}
    last = (group, times, bounded, instruction.name, where.count(group))
    return [Collective(kinds[k], size, *last) for k, size in sizes.items() if size]


def _between(instructions: dict, send: Instruction, times: int, bounded: bool, where: _Where) -> Collective:
    """What a `send` gives to other slices: `{1,2}x{0:7}`, device by device of these slices, or lists of devices."""
    kind = re.search(rf'{BETWEEN}="(\w+)"', send.attributes)[1].lower().replace("_", "-")
    kind = "collective-permute" if kind == "one-to-one" else kind
    target = send.attributes.partition("_xla_megascale_target=")[2]
    product = re.match(r'"\{([\d,]+)\}x\{(\d+)', target)
    first = re.match(r"\{+([\d,>-]+)\}", target)
    numbers = [SLICE * i + int(product[2]) for i in _numbers(product[1])] if product else _numbers(first[1])
    group = tuple(where.of[number] for number in numbers)
    payload = _bytes(instructions[send.operands[0]].type) * (len(group) if kind == "all-gather" else 1)
    return Collective(kind, payload, group, times, bounded, send.name, where.count(group))


def _only_sliced(program: dict, computation: str, name: str, index: int | None, share: float) -> bool:
    """Whether all that is read of a value (of a tuple's element `index`) are slices of `share` bytes."""
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
            good = _only_sliced(program, computation, user.name, index, share)
        elif user.opcode in TRANSPARENT:
            good = _only_sliced(program, computation, user.name, None, share)
        elif user.opcode == "fusion" and called:
            inner = program[called[1]]
            places = {str(i) for i, operand in enumerate(user.operands) if operand == name}
            arguments = [i.name for i in inner.values() if i.opcode == "parameter" and i.operands[0] in places]
            good = all(_only_sliced(program, called[1], argument, None, share) for argument in arguments)
        else:
            good = False
        if not good:
            return False
    return True


def _groups(attributes: str, kind: str) -> list[tuple[int, ...]]:
    """A permutation's pairs, else the first group that an instruction names, in any of the three ways HLO has."""
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
    return [_of_mesh(named[1], named[2], named[3])] if named else []


def _of_mesh(axes: str, order: str | None, chosen: str) -> tuple[int, ...]:
    """`mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}`; `'b':(2)2` is the part of b that is its inner 2 of 4."""
    shape = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    devices = np.arange(math.prod(shape.values())) if order is None else _iota(order)
    split: list[int] = []
    kept: list[int] = []
    parts = {name: (before, size) for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen)}
    for name, size in shape.items():
        before, inner = (int(x) for x in parts[name]) if name in parts and parts[name][0] else (1, size)
        kept += [len(split) + 1] if name in parts else []
        split += [before, inner, size // (before * inner)]
    cube = devices.reshape(split)
    whole = tuple(slice(None) if axis in kept else 0 for axis in range(len(split)))
    return tuple(cube[whole].reshape(-1).tolist())


def _iota(text: str) -> np.ndarray:
    """`[2,4]T(1,0)`: the numbers from 0 laid out in that shape, then transposed, flat."""
    shape, _, order = text.partition("T")
    array = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return (array.transpose(_numbers(order)) if order else array).reshape(-1)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(i) for i in re.findall(r"\d+", text))
