"""Counts that the cost model rests on, for accesses whose conflicts and sectors can be worked out by hand."""

import numpy as np
import pytest

from evoattn.ptx import Counters
from tests.ptx.golden.harness import run_ptx

TILE = ".shared .align 16 .b8 tile[16384];"


def shared_passes(instruction, stride, threads=32):
    """(passes, passes without conflicts) of one shared access by each thread, at `stride` bytes apart."""
    address = f"mul.lo.u32 %r0, %tid, {stride}; mov.u32 %r1, tile; add.u32 %r0, %r0, %r1; "
    execution = run_ptx(address + instruction, declarations=TILE, threads=threads)
    assert not execution.faults
    return execution.counters.shared_wavefronts, execution.counters.shared_wavefronts_ideal


@pytest.mark.parametrize("stride, passes", [(0, 1), (4, 1), (8, 2), (12, 1), (16, 4), (64, 16), (128, 32), (132, 1)])
def test_four_byte_accesses(stride, passes):
    """A stride of s words meets each bank gcd(s, 32) times."""
    assert shared_passes("ld.shared.u32 %r2, [%r0];", stride) == (passes, 1)
    assert shared_passes("st.shared.u32 [%r0], %r2;", max(stride, 4), threads=64) == (2 * max(passes, 1), 2)


@pytest.mark.parametrize("stride, passes", [(16, 4), (32, 8), (128, 32), (144, 4), (64, 16)])
def test_sixteen_byte_accesses_and_matrices(stride, passes):
    """Eight threads a pass: rows of 128 bytes all start at bank 0, of 144 (128 + padding) at different ones."""
    assert shared_passes("ld.shared.v4.u32 {%r2,%r3,%r4,%r5}, [%r0];", stride) == (passes, 4)
    assert shared_passes("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r2,%r3,%r4,%r5}, [%r0];", stride) == (passes, 4)


def test_two_byte_accesses_share_words():
    assert shared_passes("ld.shared.u16 %h0, [%r0];", 2) == (1, 1)


def test_swizzled_rows_have_no_conflicts():
    """16-byte chunks of 128-byte rows, chunk number exclusive-or row number."""
    body = """
shr.u32 %r2, %tid, 3; and.b32 %r3, %tid, 7; and.b32 %r4, %r3, 7; xor.b32 %r4, %r4, %r2; shl.b32 %r3, %r3, 7;
  shl.b32 %r4, %r4, 4;
mov.u32 %r1, tile; add.u32 %r3, %r3, %r4; add.u32 %r3, %r3, %r1;
  ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5,%r6,%r7,%r8}, [%r3];"""
    counters = run_ptx(body, declarations=TILE).counters
    assert (counters.shared_wavefronts, counters.shared_wavefronts_ideal) == (4, 4)


@pytest.mark.parametrize("stride, sectors", [(4, 4), (8, 8), (32, 32), (0, 1)])
def test_global_sectors(stride, sectors):
    body = f"mul.wide.u32 %q0, %tid, {stride}; add.s64 %q0, %q0, %a0; ld.global.u32 %r0, [%q0];"
    counters = run_ptx(body, np.zeros(2048, np.uint8)).counters
    assert (counters.global_sectors, counters.global_bytes) == (sectors, 128)


def test_instructions_are_counted_once_a_warp_that_executes_them():
    body = """
setp.lt.u32 %p0, %tid, 32; @%p0 bra END;
ex2.approx.f32 %f0, %f1; ex2.approx.f32 %f0, %f0; cvt.rn.f16.f32 %h0, %f0; fma.rn.f32 %f0, %f0, %f0, %f0; mov.u32 %r0,
  %r1;
shfl.sync.bfly.b32 %r0, %r0, 1, 31, -1;
END: bar.sync 0;"""
    counters = run_ptx(body, threads=96, blocks=2).counters
    assert (counters.special, counters.conversions, counters.fp32, counters.shuffles, counters.barriers) == (
        8,
        4,
        4,
        4,
        6,
    )
    assert counters.branches == 2 * (3 + 3)  # the branch and ret, by three warps of two blocks
    assert counters.issue_slots == counters.branches + 8 + 4 + 4 + 4 + 6 + counters.int_ops and counters.memory_ops == 0


def test_loops_count_each_round():
    body = "mov.u32 %r0, 0; AGAIN: add.u32 %r0, %r0, 1; setp.lt.u32 %p0, %r0, 10; @%p0 bra AGAIN;"
    assert run_ptx(body).counters.int_ops == 1 + 2 * 10  # and the mad of the prologue


def test_copies_count_bytes_and_wavefronts():
    body = """
shl.b32 %r0, %tid, 4; mov.u32 %r1, tile; add.u32 %r1, %r1, %r0; cvt.u64.u32 %q0, %r0; add.s64 %q0, %q0, %a0;
cp.async.cg.shared.global [%r1], [%q0], 16;"""
    counters = run_ptx(body, np.zeros(512, np.uint8), declarations=TILE).counters
    assert (counters.async_copy_bytes, counters.shared_wavefronts, counters.global_sectors) == (512, 4, 16)


def test_counters_add_and_scale():
    a = Counters(issue_slots=3, fp32=2)
    assert (a + a * 2 - a) * 0.5 == Counters(issue_slots=3, fp32=2)
    assert run_ptx("bar.sync 0;", count=False).counters == Counters()
