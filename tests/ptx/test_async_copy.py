"""cp.async: what is visible when, and to whom."""

import numpy as np
import pytest

from tests.ptx.golden.harness import run_ptx

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
    of warp 0's.
    """
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
