"""Loads, stores, address spaces; every access out of bounds or misaligned is named; of cp.async what is visible when,
and to whom. What whole accesses and atomics give, an H100 has said (`test_golden.py`)."""

import numpy as np
import pytest

from evoattn.ptx import PtxError
from tests.ptx.golden.harness import cuda_kernel, launch, ptx_kernel, run_ptx

AT_4 = "mul.wide.u32 %q0, %i, 4; add.s64 %q0, %q0, %a0; "


def test_a_store_past_the_end_names_buffer_thread_and_line():
    out = np.zeros(60, np.uint32)
    [fault] = run_ptx(AT_4 + "\nst.global.u32 [%q0], %i;", out, blocks=2).faults
    assert fault.startswith(
        'thread (28, 0, 0) of block (1, 0, 0) accesses 4 bytes of global memory at byte 240 of buffer "a0"'
    )
    assert "st.global.u32" in fault and "PTX line" in fault and fault.endswith(".")
    [fault] = run_ptx("ld.global.u32 %r0, [%a1+-4];", out, out.copy()).faults
    assert 'at byte -4 of buffer "a1"' in fault


def test_a_load_across_two_buffers_is_a_fault_in_the_gap():
    body = "setp.eq.u32 %p0, %tid, 5; selp.b64 %q1, %a1, %a0, %p0; ld.global.u32 %r0, [%q1+32];"
    [fault] = run_ptx(body, np.zeros(9, np.uint32), np.zeros(8, np.uint32)).faults
    assert "thread (5, 0, 0)" in fault and '"a1"' in fault
    assert not run_ptx(body, np.zeros(9, np.uint32), np.zeros(9, np.uint32)).faults
    [fault] = run_ptx("mov.u64 %q0, 0; ld.global.u32 %r0, [%q0];", np.zeros(9, np.uint32)).faults
    assert "outside" in fault or "buffer" in fault


def test_misaligned_accesses():
    assert "no multiple of 8" in run_ptx("ld.global.v2.u32 {%r0,%r1}, [%a0+4];", np.zeros(9, np.uint32)).faults[0]
    tile = ".shared .align 16 .b8 tile[64];"
    assert "misaligned" in run_ptx("mov.u32 %r0, tile; ld.shared.u32 %r1, [%r0+2];", declarations=tile).faults[0]
    assert not run_ptx("mov.u32 %r0, tile; add.u32 %r0, %r0, 2; ld.shared.u32 %r1, [%r0+2];", declarations=tile).faults


def test_an_offset_is_no_address_of_shared_memory():
    """The first bytes are the system's: nobody writes them, and what is read there is nothing that was written."""
    out, options = np.zeros(1, np.uint32), {"declarations": ".shared .align 16 .b8 tile[64];", "threads": 1}
    written = "mov.u32 %r0, tile; mov.u32 %r1, 7; st.shared.u32 [%r0], %r1; mov.u32 %r2, 0; "
    for place, right in (("tile", True), ("%r2", False)):
        assert not run_ptx(f"{written} ld.shared.u32 %r3, [{place}]; st.global.u32 [%a0], %r3;", out, **options).faults
        assert (out[0] == 7) == right
    [fault] = run_ptx("mov.u32 %r0, 16; st.shared.u32 [%r0], %tid;", blocks=2, **options).faults
    assert "Block 0 writes shared memory that is the system's" in fault


def test_shared_bounds_are_static_plus_dynamic():
    declarations = ".shared .align 16 .b8 tile[64]; .extern .shared .align 16 .b8 more[];"
    body = "mov.u32 %r0, more; shl.b32 %r1, %tid, 2; add.u32 %r0, %r0, %r1; st.shared.u32 [%r0], %tid;"
    assert not run_ptx(body, declarations=declarations, smem=128).faults
    [fault] = run_ptx(body + "st.shared.u32 [tile], 0;", declarations=declarations, smem=124).faults
    assert "thread (31, 0, 0)" in fault and "at byte 188, outside its 188 bytes" in fault
    [fault] = run_ptx("st.shared.u32 [tile+-4], %tid;", declarations=declarations, smem=124).faults
    assert "byte -4" in fault


def test_shared_memory_starts_as_nan_and_belongs_to_its_block():
    body = (
        AT_4
        + """
setp.eq.u32 %p0, %bid, 0; shl.b32 %r1, %tid, 2; mov.u32 %r0, tile; add.u32 %r0, %r0, %r1;
@%p0 st.shared.f32 [%r0], 0f3F800000;
ld.shared.f32 %f0, [%r0]; st.global.f32 [%q0], %f0;"""
    )
    out = np.zeros(64, np.float32)
    assert not run_ptx(body, out, blocks=2, declarations=".shared .align 4 .b8 tile[128];").faults
    assert (out[:32] == 1).all() and np.isnan(out[32:]).all()
    assert (out[32:].view(np.int32) != -1).all()  # callers mark by 0xFF what was never written


def test_generic_addresses_local_arrays_and_structs():
    """By NVRTC: a struct by value, an array indexed at run time (local memory), pointers whose space is known at run
    time only."""
    source = """
struct Pair { int scale; float weights[3]; };
extern "C" __global__ void k(float* out, const float* in, Pair pair, int n) {
  __shared__ float tile[32];
  float local[8];
  for (int i = 0; i < 8; i++) local[i] = in[(threadIdx.x + i) % 32];
  tile[threadIdx.x] = in[threadIdx.x] * pair.weights[threadIdx.x % 3];
  __syncthreads();
  const float* choice = threadIdx.x % 2 ? &tile[31 - threadIdx.x] : &in[threadIdx.x];
  out[threadIdx.x] = *choice * pair.scale + local[(threadIdx.x * n) % 8];
}"""
    values = np.arange(1, 33, dtype=np.float32)
    out = np.zeros(32, np.float32)
    weights = np.float32([2, 3, 5])
    pair = np.int32(10).tobytes() + weights.tobytes()
    assert not launch(cuda_kernel(source), out, values, scalars=(pair, np.int32(3))).faults
    i = np.arange(32)
    chosen = np.where(i % 2, (values * weights[i % 3])[31 - i], values)
    assert np.array_equal(out, chosen * 10 + values[(i + i * 3 % 8) % 32])


@pytest.mark.parametrize("vector, values", [("", "%f0"), (".v2", "{%f0,%f1}"), (".v4", "{%f0,%f1,%f0,%f1}")])
@pytest.mark.parametrize("order", ["", ".relaxed.gpu"])
def test_floats_are_added_to_global_memory(vector, values, order):
    """Three threads to each place, in turn; others do not ask."""
    width, sums = values.count("%"), np.arange(48, dtype=np.float32)
    body = f"""
mul.wide.u32 %q0, %tid, 4; add.s64 %q1, %q0, %a1; ld.global.f32 %f0, [%q1]; add.f32 %f1, %f0, 0f40000000;
rem.u32 %r0, %tid, 10; mul.wide.u32 %q0, %r0, {4 * width}; add.s64 %q2, %q0, %a0; setp.lt.u32 %p0, %tid, 30;
@%p0 red{order}.global.add{vector}.f32 [%q2], {values};"""
    added = np.random.default_rng(1).standard_normal(32).astype(np.float32)
    expected = sums.copy()
    for thread, value in enumerate(added[:30]):
        for i in range(width):
            expected[thread % 10 * width + i] += (value, value + np.float32(2))[i % 2]
    assert not run_ptx(body, sums, added).faults
    assert np.array_equal(sums, expected)


def test_added_floats_are_aligned_and_within_their_buffer():
    body = "mul.wide.u32 %q0, %tid, 16; add.s64 %q0, %q0, %a0; red.global.add.v4.f32 [%q0+OFFSET], {%f0,%f0,%f0,%f0};"
    whole = np.zeros(128, np.float32)
    assert not run_ptx(body.replace("OFFSET", "0"), whole).faults
    assert "no multiple of 16" in run_ptx(body.replace("OFFSET", "8"), np.zeros(132, np.float32)).faults[0]
    assert "thread (31, 0, 0)" in run_ptx(body.replace("OFFSET", "0"), whole[:124].copy()).faults[0]


def test_blocks_beyond_one_batch_and_odd_block_sizes():
    """More blocks than run together, of 40 threads: two warps, the second a quarter full."""
    out = np.zeros(40 * 150, np.uint32)
    body = (
        "activemask.b32 %r1; popc.b32 %r1, %r1; mad.lo.u32 %r1, %r1, 65536, %i; bar.sync 0; st.global.u32 [%q0], %r1;"
    )
    execution = run_ptx(AT_4 + body, out, blocks=150, threads=40)
    assert not execution.faults
    i = np.arange(6000)
    assert np.array_equal(out, i + 65536 * np.where(i % 40 < 32, 32, 8))


def test_arguments_and_sizes_must_fit():
    kernel = ptx_kernel("", 1)
    with pytest.raises(PtxError, match="takes 1 arguments"):
        launch(kernel)
    with pytest.raises(PtxError, match="8 bytes, not 4"):
        launch(kernel, scalars=(np.int32(1),))
    with pytest.raises(PtxError, match="cannot be launched"):
        launch(ptx_kernel(""), threads=1025)


def test_several_launches_see_one_memory():
    kernel = ptx_kernel(AT_4 + "ld.global.u32 %r0, [%q0]; add.u32 %r0, %r0, 1; st.global.u32 [%q0], %r0;", 1)
    array = np.zeros(32, np.uint32)
    for _ in range(3):
        launch(kernel, array)
    assert (array == 3).all()


TILE = ".shared .align 16 .b8 tile[4096];"
ADDRESSES = """
shl.b32 %r0, %tid, 4; mov.u32 %r1, tile; add.u32 %r1, %r1, %r0; cvt.u64.u32 %q0, %r0; add.s64 %q1, %a0, %q0;
  add.s64 %q2, %a1, %q0;
"""
OUT = "ld.shared.v4.u32 {%r2,%r3,%r4,%r5}, [%r1]; st.global.v4.u32 [%q2], {%r2,%r3,%r4,%r5};"
SOURCE = np.arange(1, 129, dtype=np.uint32).reshape(32, 4)
POISON = 0x7FFE7FFE


def copied(body, source=SOURCE, **options):
    out = np.zeros_like(source)
    execution = run_ptx(ADDRESSES + body + OUT, source, out, declarations=TILE, **options)
    return out, execution.faults


def test_data_lands_at_the_wait_and_is_poison_before():
    issue = "cp.async.cg.shared.global [%r1], [%q1], 16; cp.async.commit_group;"
    out, faults = copied(issue + "cp.async.wait_group 0;")
    assert np.array_equal(out, SOURCE) and not faults
    out, faults = copied(issue)
    assert (out == POISON).all() and "has not yet waited for" in faults[0]
    out, faults = copied(issue + "cp.async.wait_group 1;")
    assert (out == POISON).all() and faults
    out, faults = copied("cp.async.ca.shared.global [%r1], [%q1], 16; cp.async.wait_all;")
    assert np.array_equal(out, SOURCE) and not faults
    out, faults = copied("cp.async.ca.shared.global [%r1], [%q1], 16; cp.async.wait_group 0;")  # never committed
    assert (out == POISON).all() and faults


def test_zero_filling():
    some = "and.b32 %r6, %tid, 1; shl.b32 %r6, %r6, 4; "
    out, faults = copied(some + "cp.async.cg.shared.global [%r1], [%q1], 16, %r6; cp.async.wait_all;")
    assert not faults and np.array_equal(out, SOURCE * (np.arange(32) % 2)[:, None].astype(np.uint32))
    out, faults = copied(
        "setp.lt.u32 %p0, %tid, 9; cp.async.cg.shared.global [%r1], [%q1], 16, %p0; cp.async.wait_all;"
    )
    assert not faults and not out[:9].any() and np.array_equal(out[9:], SOURCE[9:])
    small = """
cp.async.ca.shared.global [%r1], [%q1], 8, 4;
cp.async.ca.shared.global [%r1+8], [%q1+8], 4; cp.async.ca.shared.global [%r1+12], [%q1], 4;"""
    out, faults = copied(small + "cp.async.wait_all;")
    assert not faults and np.array_equal(out, np.stack([SOURCE[:, 0], 0 * SOURCE[:, 0], SOURCE[:, 2], SOURCE[:, 0]], 1))


def test_more_valid_bytes_than_the_copy_has_are_a_fault():
    many = "and.b32 %r6, %tid, 16; add.u32 %r6, %r6, 16; "
    [fault] = copied(many + "cp.async.cg.shared.global [%r1], [%q1], 16, %r6; cp.async.wait_all;")[1]
    assert "More bytes to read than the 16 of the copy" in fault


def test_what_is_not_read_may_lie_out_of_bounds():
    """Half a tile past the end of the source with no valid byte; then with one that is not there."""
    source = SOURCE[:16].copy()
    wide = np.zeros((32, 4), np.uint32)
    copy = "setp.lt.u32 %p0, %tid, LIMIT; selp.u32 %r6, 16, 0, %p0; "
    copy += "cp.async.cg.shared.global [%r1], [%q1], 16, %r6; cp.async.wait_all;"
    body = ADDRESSES + copy + OUT
    assert not run_ptx(body.replace("LIMIT", "16"), source, wide, declarations=TILE).faults
    assert np.array_equal(wide[:16], source) and not wide[16:].any()
    [fault] = run_ptx(body.replace("LIMIT", "17"), source, wide, declarations=TILE).faults
    assert "thread (16, 0, 0)" in fault and '"a0"' in fault
    part = body.replace("16, 0, %p0", "16, 4, %p0").replace("LIMIT", "15")
    assert not run_ptx(part, SOURCE.reshape(-1)[:64].copy(), wide, declarations=TILE, threads=16).faults
    last = np.arange(61, dtype=np.uint32)  # the last thread may read 4 of its 16 bytes
    assert not run_ptx(part, last, wide, declarations=TILE, threads=16).faults


@pytest.mark.parametrize("pending, landed", [(0, 3), (1, 2), (2, 1), (3, 0)])
def test_groups_land_in_order(pending, landed):
    """Three groups; a wait that leaves `pending` of them lets the oldest ones land."""
    issue = "".join(
        f"cp.async.ca.shared.global [%r1+{4 * i}], [%q1+{4 * i}], 4; cp.async.commit_group;" for i in range(3)
    )
    out, faults = copied(issue + f"cp.async.wait_group {pending};")
    assert [bool((out[:, i] == SOURCE[:, i]).all()) for i in range(3)] == [i < landed for i in range(3)]
    assert bool(faults) == (landed < 3)


def test_each_warp_counts_its_own_groups():
    """Warp 1 commits two groups more than warp 0 before both wait for all but one: its first three have landed, and one
    of warp 0's."""
    source = np.arange(1, 257, dtype=np.uint32).reshape(64, 4)
    body = """
cp.async.ca.shared.global [%r1], [%q1], 4; cp.async.commit_group;
setp.lt.u32 %p0, %tid, 32; @%p0 bra LAST;
cp.async.ca.shared.global [%r1+4], [%q1+4], 4; cp.async.commit_group; cp.async.ca.shared.global [%r1+8], [%q1+8], 4;
  cp.async.commit_group;
LAST: cp.async.ca.shared.global [%r1+12], [%q1+12], 4; cp.async.commit_group;
cp.async.wait_group 1;
"""
    out, _ = copied(body, source, threads=64, detect_races=False)
    assert np.array_equal(out[:32, 0], source[:32, 0]) and (out[:32, 1:] == POISON).all()
    assert np.array_equal(out[32:, :3], source[32:, :3]) and (out[32:, 3] == POISON).all()
    empty = "@%p0 cp.async.commit_group;"  # an empty group of one warp does not age the other's
    out, _ = copied(
        body.replace("cp.async.wait_group 1;", empty + "cp.async.wait_group 1;"), source, threads=64, detect_races=False
    )
    assert np.array_equal(out[:32, 3], source[:32, 3]) and (out[32:, 3] == POISON).all()
