"""A process that keeps the memory that it frees."""

import ctypes
import multiprocessing
import resource

import pytest

from evoattn.evaluation.handlers import keep_freed_memory

PIECES, BYTES = 600, 1 << 16


def faults(keep: bool) -> int:
    """Page faults of the third of three rounds of small allocations, all freed before the next."""
    if keep:
        keep_freed_memory()
    counts = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        pieces = [b"x" * BYTES for _ in range(PIECES)]
        del pieces
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return counts[-1]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_memory_that_was_freed_is_used_again_without_a_page_fault():
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        given_back, kept = pool.map(faults, [False, True], chunksize=1)
    assert given_back > 10 * max(kept, 1)
