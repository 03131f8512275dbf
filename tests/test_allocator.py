"""A process that keeps the memory that it frees."""

import ctypes
import multiprocessing
import resource

import pytest

from evoattn.evaluation.allocator import keep_freed_memory

MEGABYTES = 48


def faults(keep: bool) -> int:
    """Page faults of the third of three allocations alike, each freed before the next."""
    if keep:
        keep_freed_memory()
    counts = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
    for _ in range(3):
        bytearray(MEGABYTES << 20)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return counts[-1] - counts[-2]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_memory_that_was_freed_is_used_again_without_a_page_fault():
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        given_back, kept = pool.map(faults, [False, True], chunksize=1)
    assert given_back > 10 * max(kept, 1)
