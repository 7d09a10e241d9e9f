"""Collectives as read from HLO: their groups in each of HLO's spellings, loops, slices, and real programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxformer.parallel.collectives import Collective, collectives

P = PartitionSpec

PROGRAM = """
HloModule jit_f

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%cut (p: f32[16], i: s32[]) -> f32[4] {
  %p = f32[16]{0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %slice = f32[4]{0} dynamic-slice(%p, %i), dynamic_slice_sizes={4}
}

%body (t: (s32[], f32[16])) -> (s32[], f32[16]) {
  %t = (s32[], f32[16]{0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %x = f32[16]{0} get-tuple-element(%t), index=1
  %kept = f32[16]{0:T(256)} all-reduce(%x), replica_groups={{0,2},{1,3}}, to_apply=%add
  %mine = f32[16]{0} all-reduce(%kept), replica_groups=[1,4]<=[4], to_apply=%add
  %part = f32[4]{0} fusion(%mine, %n), kind=kLoop, calls=%cut
  %whole = f32[16]{0} all-gather(%part), replica_groups=GROUPS, dimensions={0}
  ROOT %out = (s32[], f32[16]{0}) tuple(%n, %whole)
}

%more (t: (s32[], f32[16])) -> pred[] {
  %t = (s32[], f32[16]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %five = s32[]{:T(128)} constant(5)
  ROOT %less = pred[] compare(%i, %five), direction=LT
}

ENTRY %main (x: f32[16], y: bf16[8,2]) -> f32[16] {
  %x = f32[16]{0} parameter(0)
  %y = bf16[8,2]{1,0} parameter(1)
  %start = (bf16[8,2]{1,0}, bf16[8,2]{1,0}) collective-permute-start(%y), source_target_pairs={{0,0},{1,3},{3,1}}
  %done = bf16[8,2]{1,0} collective-permute-done(%start)
  %zero = s32[] constant(0)
  %pair = (s32[], f32[16]{0}) tuple(%zero, %x)
  %loop = (s32[], f32[16]{0}) while(%pair), condition=%more, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %end = f32[16]{0} get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,1,2,3}}", (0, 1, 2, 3)),
        ("[1,4]<=[4]", (0, 1, 2, 3)),
        ("[2,4]<=[4,2]T(1,0)", (0, 2, 4, 6)),
        ("mesh['x'=2,'y'=4] {'y'}", (0, 1, 2, 3)),
        ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}", (0, 2, 4, 6)),
        ("mesh['x'=2,'y'=8] {'x','y':(2)2}", (0, 2, 8, 10)),
    ],
)
def test_groups_loops_and_slices_are_read(groups, expected):
    found = {c.name: c for c in collectives(PROGRAM.replace("GROUPS", groups))}
    gather = found["whole"]
    assert (gather.kind, gather.payload, gather.group, gather.executions) == ("all-gather", 64, expected, 5)
    assert gather.bytes == 5 * 64 * 3 / 4
    assert (found["kept"].kind, found["kept"].group, found["kept"].bytes) == ("all-reduce", (0, 2), 5 * 64)
    assert (found["mine"].kind, found["mine"].bytes) == ("reduce-scatter", 5 * 64 * 3 / 4)
    moved = found["start"]
    assert (moved.kind, moved.group, moved.bytes, moved.is_count_known) == ("collective-permute", (1, 3), 32, True)
    assert gather.axes({"a": 2, "b": 1, "c": 8}) == (("a", "c") if 8 in expected else ("c",))


def test_trip_counts_come_from_the_condition_or_are_said_to_be_unknown():
    program = PROGRAM.replace("known_trip", "unknown").replace("GROUPS", "[1,4]<=[4]")
    found = {c.name: c for c in collectives(program)}
    assert (found["whole"].executions, found["whole"].is_count_known) == (5, True)
    found = {c.name: c for c in collectives(program.replace("direction=LT", "direction=NE"))}
    assert (found["whole"].executions, found["whole"].is_count_known, found["start"].is_count_known) == (1, False, True)


def test_the_parts_of_a_collective_that_is_cut_into_fusions_count_once():
    whole = "%part = f32[4]{0} fusion(%mine, %n), kind=kLoop, calls=%cut"
    again = whole.replace("%part", "%again").replace("calls=%cut", "calls=%begin")
    begin = "%begin (p: f32[16], i: s32[]) -> f32[16] {\n  %p = f32[16]{0} parameter(0)\n  %i = s32[] parameter(1)\n"
    begin += "  ROOT %a = f32[16]{0} all-gather(%p), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}\n}\n\n"
    program = PROGRAM.replace("GROUPS", "[1,4]<=[4]").replace(
        "%body", begin + begin.replace("begin", "end") + "%body", 1
    )
    program = program.replace(whole, f"{whole}\n  {again}\n  {again.replace('again', 'more').replace('begin', 'end')}")
    found = [c for c in collectives(program) if c.name == "a"]
    assert [(c.kind, c.executions, c.payload) for c in found] == [("all-gather", 5, 256)]


SLICES = """
HloModule jit_f, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[16], y: bf16[8]) -> f32[16] {
  %x = f32[16]{0} parameter(0)
  %y = bf16[8]{0} parameter(1)
  %token = token[] after-all()
  %inside = f32[16]{0} all-reduce(%x), replica_groups={{0,2},{1,3}}, to_apply=%add
  %send = (f32[16]{0}, u32[], token[]) send(%inside, %token), is_host_transfer=true, frontend_attributes={TARGET}
  %recv = (f32[16]{0}, u32[], token[]) recv(%token), is_host_transfer=true, frontend_attributes={TARGET}
  %host = (bf16[8]{0}, u32[], token[]) send(%y, %token), is_host_transfer=true
  ROOT %end = f32[16]{0} get-tuple-element(%recv), index=0
}
"""


@pytest.mark.parametrize(
    ("kind", "target", "group", "bytes_"),
    [
        ("ALL_REDUCE", '"{1,2}x{0:3}"', (0, 2), 64),
        ("ALL_GATHER", '"{1,2}x{0:3}"', (0, 2), 64),
        ("REDUCE_SCATTER", '"{1,2}x{0:3}"', (0, 2), 32),
        ("ALL_TO_ALL", "{{100001,200001},{100000,200000}}", (1, 3), 32),
        ("ONE_TO_ONE", "{{100000->200001},{200000->100001}}", (0, 3), 64),
    ],
)
def test_what_a_slice_hands_to_others_is_read_from_its_program(kind, target, group, bytes_):
    target = f'_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"'
    devices = [100_000, 100_001, 200_000, 200_001, 100_002, 100_003, 200_002, 200_003]  # fsdp 4 lies in two slices
    found = {c.name: c for c in collectives(SLICES.replace("TARGET", target), devices, [0, 0, 1, 1] * 2)}
    assert set(found) == {"inside", "send"}
    assert (found["inside"].group, found["inside"].slices, found["inside"].cross_slice_bytes) == ((0, 4), 1, 0)
    assert (found["send"].group, found["send"].slices) == (group, 2)
    assert found["send"].bytes == found["send"].cross_slice_bytes == bytes_


def test_what_leaves_a_slice_is_sent_by_those_who_meet_there():
    def of(kind, group=tuple(range(8))):
        return Collective(kind, 64.0, group, 3, True, "a", slices=2)

    sums = {"all-reduce": 2 * 64 / 4 / 2, "all-gather": 64 / 4 / 2, "reduce-scatter": 64 / 4 / 2, "all-to-all": 64 / 2}
    assert {kind: of(kind).cross_slice_bytes for kind in sums} == {kind: 3 * size for kind, size in sums.items()}
    assert of("collective-permute", (3, 4)).cross_slice_bytes == 3 * 64
    # One device of each slice: all of it leaves. One slice: none.
    assert all(of(kind, (0, 4)).cross_slice_bytes == of(kind, (0, 4)).bytes for kind in (*sums, "collective-permute"))
    assert not Collective("collective-permute", 64.0, (0, 1), 1, True, "a").cross_slice_bytes


def test_of_a_permutation_the_pair_that_leaves_its_slice_counts():
    program = PROGRAM.replace("GROUPS", "[1,4]<=[4]").replace("{{0,0},{1,3},{3,1}}", "{{0,1},{1,2},{2,3},{3,0}}")
    (moved,) = (c for c in collectives(program, range(4), [0, 0, 1, 1]) if c.name == "start")
    assert (moved.group, moved.slices, moved.cross_slice_bytes) == ((1, 2), 2, moved.bytes)


def test_a_compiled_loop_over_sharded_layers_gathers_each_once_a_direction():
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)

    def loss(weights, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
        return jnp.sum(x**2)

    def abstract(shape, *axes):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*axes)))

    arguments = abstract((6, 16, 16), None, "fsdp"), abstract((64, 16), ("data", "fsdp"))
    gradient = jax.jit(jax.grad(loss), out_shardings=NamedSharding(mesh, P(None, "fsdp")))
    found = collectives(gradient.lower(*arguments).compile().as_text())
    weights = 6 * 16 * 16 * 4
    moved = {(c.kind, c.axes(mesh.shape)): 0.0 for c in found}
    for c in found:
        moved[c.kind, c.axes(mesh.shape)] += c.bytes
    assert moved["all-gather", ("fsdp",)] == 2 * weights * 3 / 4
    assert moved["reduce-scatter", ("fsdp",)] == weights * 3 / 4
    assert moved["all-reduce", ("data",)] == 2 * weights / 4 / 2
    assert len(moved) == 3
