"""Divergence, barriers, deadlocks and limits. Warps: who takes part in an instruction of all lanes. What it computes,
an H100 has said (`test_golden.py`)."""

import numpy as np
import pytest

from evoattn.ptx import PtxError
from tests.ptx.golden.harness import evaluate, run_cuda, run_ptx

AT_4 = "mul.wide.u32 %q0, %i, 4; add.s64 %q0, %q0, %a0; "


def collatz(n):
    steps = 0
    while n > 1:
        n = 3 * n + 1 if n % 2 else n // 2
        steps += 1
    return steps


def test_threads_that_loop_differently():
    """Every thread takes its own path; what one group computes must not leak into registers that others still need."""
    source = """
extern "C" __global__ void k(int* out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, n = i, steps = 0, odd = 0;
  while (n > 1) { if (n % 2) { n = 3 * n + 1; odd += 1000; } else n /= 2; steps++; if (steps == 40 && i % 7 == 3) {
    steps = -odd; break; } }
  if (i % 5 == 4) return;
  out[i] = steps;
}"""
    out = np.full(96, -1, np.int32)
    assert not run_cuda(source, out, blocks=3).faults

    def expected(i):
        if i % 5 == 4:
            return -1
        steps, odd, n = 0, 0, i
        while n > 1:
            odd += 1000 * (n % 2)
            n = 3 * n + 1 if n % 2 else n // 2
            steps += 1
            if steps == 40 and i % 7 == 3:
                return -odd
        return steps

    assert out.tolist() == [expected(i) for i in range(96)] and collatz(27) == 111


def test_predicated_instructions_change_their_threads_only():
    body = (
        AT_4
        + """
mov.u32 %r0, 1; and.b32 %r1, %tid, 1; setp.eq.u32 %p0, %r1, 1;
@%p0 add.u32 %r0, %tid, 100; @!%p0 st.global.u32 [%q0], %r0; @%p0 bra END;
mov.u32 %r0, 7; @!%p0 exit;
END: st.global.u32 [%q0], %r0;"""
    )
    out = np.zeros(32, np.uint32)
    assert not run_ptx(body, out).faults
    assert out.tolist() == [100 + i if i % 2 else 1 for i in range(32)]


def test_a_register_wanted_by_waiting_threads_is_kept():
    """The even threads jump ahead with %r0; the odd ones then write it before both meet."""
    body = (
        AT_4
        + """
mov.u32 %r0, 5; and.b32 %r1, %tid, 1; setp.eq.u32 %p0, %r1, 0; @%p0 bra MEET;
mov.u32 %r0, 6; add.u32 %r0, %r0, 1;
MEET: st.global.u32 [%q0], %r0;"""
    )
    out = np.zeros(32, np.uint32)
    assert not run_ptx(body, out).faults
    assert out.tolist() == [5, 7] * 16


def test_exited_threads_are_not_waited_for():
    body = AT_4 + "setp.gt.u32 %p0, %tid, 40; @%p0 exit; bar.sync 0; st.global.u32 [%q0], 1;"
    out = np.zeros(64, np.uint32)
    assert not run_ptx(body, out, threads=64).faults
    assert out.tolist() == [1] * 41 + [0] * 23


def test_deadlock_is_told():
    body = "setp.gt.u32 %p0, %tid, 31; @%p0 bra OTHER; bar.sync 1; bra END; OTHER: bar.sync 2; END:"
    [fault] = run_ptx(body, threads=64).faults
    assert "deadlocked" in fault and '32 threads at "bar.sync 1"' in fault and '32 threads at "bar.sync 2"' in fault
    [fault] = run_ptx("setp.gt.u32 %p0, %tid, 31; @!%p0 bar.sync 0, 64; @%p0 exit;", threads=64).faults
    assert "deadlocked" in fault


def test_a_kernel_without_end_is_stopped():
    [fault] = run_ptx("AGAIN: bra AGAIN;", step_limit=1000).faults
    assert "may never end" in fault
    [fault] = run_ptx(
        "mov.u32 %r0, 0; AGAIN: add.u32 %r0, %r0, %tid; setp.ne.u32 %p0, %r0, 1; @%p0 bra AGAIN;", step_limit=1000
    ).faults
    assert "may never end" in fault


def test_trap_is_a_fault():
    [fault] = run_ptx("setp.eq.u32 %p0, %tid, 9; @%p0 trap;").faults
    assert "thread (9, 0, 0)" in fault and "trap" in fault


def test_blocks_with_different_loop_counts():
    """Block b sums b + 1 rounds through shared memory, with barriers: blocks run apart, threads of a block together."""
    source = """
extern "C" __global__ void k(int* out) {
  __shared__ int tile[64];
  int sum = 0;
  for (int i = 0; i <= (int)blockIdx.x; i++) {
    __syncthreads(); tile[threadIdx.x] = threadIdx.x + i; __syncthreads(); sum += tile[63 - threadIdx.x];
  }
  out[blockIdx.x * 64 + threadIdx.x] = sum;
}"""
    out = np.zeros(5 * 64, np.int32)
    assert not run_cuda(source, out, blocks=5, threads=64).faults
    assert out.tolist() == [sum(63 - t + i for i in range(b + 1)) for b in range(5) for t in range(64)]


VALUES = np.random.default_rng(0).integers(0, 2**32, 96, np.uint32)


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
    by then."""
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


def test_mma_by_a_part_of_the_warps_leaves_the_others_alone():
    """Warp 1 skips it; its registers keep what they had."""
    body = """
mov.u32 %r0, 0x3c003c00; mov.f32 %f0, 0f40000000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;
setp.gt.u32 %p0, %tid, 31; @%p0 bra SKIP;
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0,%f1,%f2,%f3}, {%r0,%r0,%r0,%r0}, {%r0,%r0}, {%f0,%f1,%f2,%f3};
SKIP: mul.wide.u32 %q0, %tid, 16; add.s64 %q0, %q0, %a0; st.global.v4.b32 [%q0], {%f0,%f1,%f2,%f3};"""
    out = np.zeros((64, 4), np.float32)
    execution = run_ptx(body, out, threads=64)
    assert not execution.faults and execution.counters.tensor_flops == 2 * 16 * 8 * 16
    assert (out[:32] == 18).all() and (out[32:] == 2).all()
