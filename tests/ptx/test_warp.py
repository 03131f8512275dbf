"""Warp-wide instructions against statements lane by lane."""

import numpy as np
import pytest

from evoattn.ptx import PtxError
from tests.ptx.golden.harness import evaluate, run_ptx

VALUES = np.random.default_rng(0).integers(0, 2**32, 96, np.uint32)


def shuffled(mode, values, b, c):
    """shfl.sync as the PTX ISA writes it, lane by lane."""
    out, valid = [], []
    for lane in range(len(values)):
        warp, j = lane // 32 * 32, lane % 32
        segment, clamp = c >> 8 & 31, c & 31
        highest, lowest = (j & segment) | (clamp & ~segment & 31), j & segment
        source = {"up": j - b, "down": j + b, "bfly": j ^ b, "idx": lowest | (b & ~segment & 31)}[mode]
        ok = source >= highest if mode == "up" else source <= highest
        out.append(int(values[warp + (source if ok else j)]))
        valid.append(int(ok))
    return out, valid


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("b, c", [(1, 0x1F), (2, 0x1F), (16, 0x1F), (3, 0x1C1F), (5, 0x1807), (0, 0)])
def test_shuffle(mode, b, c):
    if mode == "up":
        c &= ~0x1F
    statement = f"shfl.sync.{mode}.b32 %d|%p0, %x0, {b}, {c}, -1;"
    out, valid = shuffled(mode, VALUES, b, c)
    assert evaluate(statement, "u4", VALUES).tolist() == out
    assert evaluate(statement + "selp.u32 %d, 1, 0, %p0;", "u4", VALUES).tolist() == valid
    assert (
        evaluate(f"mov.u32 %r0, {b}; shfl.sync.{mode}.b32 %d, %x0, %r0, {c}, 0xffffffff;", "u4", VALUES).tolist() == out
    )


def test_votes():
    low = VALUES % 5
    by_warp = low.reshape(-1, 32)
    ballot = evaluate("setp.lt.u32 %p0, %x0, 2; vote.sync.ballot.b32 %d, %p0, -1;", "u4", low).reshape(-1, 32)
    assert (
        ballot[:, 0].tolist() == [sum(1 << i for i, v in enumerate(w) if v < 2) for w in by_warp]
        and (ballot == ballot[:, :1]).all()
    )
    for mode, holds in (("all", np.all), ("any", np.any)):
        for limit in (0, 3, 5):
            got = evaluate(
                f"setp.lt.u32 %p0, %x0, {limit}; vote.sync.{mode}.pred %p1, %p0, -1; selp.u32 %d, 1, 0, %p1;", "u4", low
            )
            assert got.reshape(-1, 32)[:, 0].tolist() == [int(holds(w < limit)) for w in by_warp]
    assert evaluate("setp.lt.u32 %p0, %x0, 2; vote.sync.ballot.b32 %d, !%p0, -1;", "u4", low)[0] == ~ballot[0, 0]


def test_match_and_reduce():
    low = VALUES % 5
    match = evaluate("match.any.sync.b32 %d, %x0, -1;", "u4", low)
    assert match.tolist() == [sum(1 << j for j in range(32) if low[i // 32 * 32 + j] == low[i]) for i in range(96)]
    signed = VALUES.view(np.int32)
    for action, reduce in (
        ("add", lambda w: int(w.sum()) & 0xFFFFFFFF),
        ("min", lambda w: int(w.min())),
        ("max", lambda w: int(w.max())),
    ):
        got = evaluate(f"redux.sync.{action}.s32 %d, %x0, -1;", "i4", signed)
        expected = [reduce(w.astype(np.int64)) for w in signed.reshape(-1, 32)]
        assert (got[::32].astype(np.int64) - expected).tolist() in (
            [0] * 3,
            [-(2**32) * (e > 2**31 - 1) for e in expected],
        )
    by_warp = np.bitwise_xor.reduce(VALUES.reshape(-1, 32), axis=1)
    assert evaluate("redux.sync.xor.b32 %d, %x0, -1;", "u4", VALUES)[::32].tolist() == by_warp.tolist()
    assert evaluate("elect.sync %d|%p0, -1; selp.u32 %d, 1, 0, %p0;", "u4", VALUES).tolist() == [
        int(i % 32 == 0) for i in range(96)
    ]


def test_special_registers():
    lanes = np.arange(96) % 32
    assert evaluate("mov.u32 %d, %laneid;", "u4", VALUES).tolist() == lanes.tolist()
    assert evaluate("mov.u32 %d, %lanemask_lt;", "u4", VALUES).tolist() == [(1 << i) - 1 for i in lanes]
    assert evaluate("mov.u32 %d, %warpid;", "u4", VALUES).tolist() == (np.arange(96) // 32).tolist()


def test_half_a_warp_can_exchange_by_its_own_mask():
    body = """
setp.lt.u32 %p0, %tid, 16; @!%p0 bra SECOND;
shfl.sync.bfly.b32 %r0, %tid, 1, 31, 0x0000ffff; bra DONE;
SECOND: shfl.sync.bfly.b32 %r0, %tid, 2, 31, 0xffff0000;
DONE: mul.wide.u32 %q0, %tid, 4; add.s64 %q0, %q0, %a0; st.global.u32 [%q0], %r0;"""
    out = np.zeros(32, np.uint32)
    assert not run_ptx(body, out).faults
    assert out.tolist() == [i ^ 1 if i < 16 else i ^ 2 for i in range(32)]


def test_lanes_that_come_later_are_waited_for():
    """Half the warp is one iteration behind, at a lower pc; the shuffle waits for it."""
    body = """
mov.u32 %r1, 0; setp.lt.u32 %p0, %tid, 16; @%p0 bra MEET;
add.u32 %r1, %r1, 100;
MEET: shfl.sync.idx.b32 %r0, %r1, 31, 31, -1;
mul.wide.u32 %q0, %tid, 4; add.s64 %q0, %q0, %a0; st.global.u32 [%q0], %r0;"""
    out = np.zeros(32, np.uint32)
    assert not run_ptx(body, out).faults
    assert (out == 100).all()


def test_a_shuffle_that_a_part_of_the_warp_never_reaches_is_a_fault():
    body = "setp.lt.u32 %p0, %tid, 7; @%p0 bra OTHER; "
    body += "shfl.sync.bfly.b32 %r0, %tid, 1, 31, -1; bra END; OTHER: bar.sync 0; END:"
    [fault] = run_ptx(body).faults
    assert "shfl.sync" in fault and "never reaches" in fault


@pytest.mark.parametrize(
    "ins",
    ["shfl.sync.bfly.b32 %r0, %tid, 1, 31, 0xffff", "vote.sync.any.pred %p0, %p1, 0xffff", "bar.warp.sync 0xffff"],
)
def test_a_thread_that_its_own_mask_does_not_name_is_a_fault(ins):
    [fault] = run_ptx(f"setp.eq.u32 %p1, %tid, 0; {ins};").faults
    assert "member mask of thread (16, 0, 0)" in fault and "does not name" in fault
    assert not run_ptx(f"setp.gt.u32 %p0, %tid, 15; @%p0 bra END; setp.eq.u32 %p1, %tid, 0; {ins}; END:").faults


def test_whole_warps_go_on_while_an_incomplete_one_waits():
    """Lane 0 of warp 1 comes last to the shuffle, after a barrier that needs warp 0, which has passed its own shuffle
    by then.
    """
    body = """
setp.eq.u32 %p0, %tid, 32; @%p0 bra LATE;
shfl.sync.idx.b32 %r0, %tid, 1, 31, %r9;
LATE: mul.wide.u32 %q0, %tid, 4; add.s64 %q0, %q0, %a0; st.global.u32 [%q0], %r0;"""
    out = np.zeros(64, np.uint32)
    execution = run_ptx(
        "mov.u32 %r0, 0; mov.u32 %r9, -1; setp.eq.u32 %p1, %warpid, 1; @%p1 mov.u32 %r9, 0xfffffffe;" + body,
        out,
        threads=64,
    )
    assert not execution.faults
    assert out.tolist() == [1] * 32 + [0] + [33] * 31


def test_unknown_instructions_are_refused_before_running():
    out = np.zeros(32, np.uint32)
    for text in (
        "shfl.sync.bfly.b64 %q0, %q1, 1, 31, -1;",
        "add.rz.f32 %f0, %f1, %f2;",
        "mov.u32 %r0, %clock;",
        "mov.u64 %q0, somewhere;",
        "tex.1d.v4.f32.s32 {%f0,%f1,%f2,%f3}, [%q0, {%r0}];",
        "mov.u32 %r0, %nothing;",
        "add.u64 %r0, %q0, %q1;",
        "cp.async.wait_group -1;",
    ):
        with pytest.raises(PtxError, match=r"whitelist|understood|hold|no count"):
            run_ptx("st.global.u32 [%a0], 1;" + text, out)
        assert not out.any()


def test_groups_of_a_warp_vote_and_reduce_apart_by_one_instruction():
    groups = "and.b32 %r1, %tid, 24; mov.u32 %r2, 0xff; shl.b32 %r2, %r2, %r1; "
    low = VALUES % 9
    octets = low.reshape(-1, 8)
    ballot = evaluate(groups + "setp.lt.u32 %p0, %x0, 4; vote.sync.ballot.b32 %d, %p0, %r2;", "u4", low)
    assert ballot.tolist() == [
        sum(1 << i % 32 // 8 * 8 + j for j, v in enumerate(octets[i // 8]) if v < 4) for i in range(96)
    ]
    assert (
        evaluate(groups + "redux.sync.max.u32 %d, %x0, %r2;", "u4", low).tolist()
        == np.repeat(octets.max(1), 8).tolist()
    )
    alone = evaluate(groups + "elect.sync %d|%p0, %r2;", "u4", low)
    assert alone.tolist() == [i % 32 // 8 * 8 for i in range(96)]


def test_a_register_that_nobody_wrote_is_no_zero():
    out = np.zeros(32, np.float32)
    body = "mul.wide.u32 %q0, %tid, 4; add.s64 %q0, %q0, %a0; add.f32 %f0, %f1, %f1; st.global.f32 [%q0], %f0;"
    assert not run_ptx(body, out).faults and np.isnan(out).all()


def test_what_is_decided_by_a_register_that_nobody_wrote_is_a_fault():
    [fault] = run_ptx("setp.eq.u32 %p0, %r9, 0; @%p0 exit;").faults
    assert "%r9, which no instruction writes, is compared" in fault
    assert not run_ptx("mov.u32 %r9, 0; setp.eq.u32 %p0, %r9, 0; @%p0 exit;").faults


def test_an_aligned_instruction_misses_threads_that_have_exited():
    """Of their own warp alone: the second warp has them all."""
    product = (
        "mov.f32 %f0, 0f00000000; mov.u32 %r0, 0; "
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0,%f0,%f0,%f0}, {%r0,%r0,%r0,%r0}, {%r0,%r0}, "
        "{%f0,%f0,%f0,%f0};"
    )
    for gone, right in (("setp.eq.u32 %p0, %tid, 5;", False), ("setp.lt.u32 %p0, %tid, 32;", True)):
        faults = run_ptx(gone + "@%p0 exit; " + product, threads=64).faults
        assert not faults if right else "never reaches" in faults[0]
