"""CUDA's context of the first device, made by libcuda alone: it takes 0.2 s, in which torch may be imported."""

import ctypes
from collections.abc import Callable
from typing import Any


def make_context(load: Callable[[str], Any] = ctypes.CDLL) -> bool:
    """Make the primary context of device 0, which torch and CuPy use and which stays for as long as the process;
    whether there is one. What stands in the way is said by whoever needs it. `load` gives the driver's library."""
    try:
        cuda = load("libcuda.so.1")
    except OSError:
        return False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return False
    return int(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)) == 0
