"""Divergence, barriers, deadlocks and limits."""

import numpy as np

from tests.ptx.golden.harness import run_cuda, run_ptx

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
