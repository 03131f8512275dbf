"""What a process on a device needs before its first answer and has not to be imported: it starts beside the imports."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SIDE = 64


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


def load_products(device: str, *dtypes: str) -> None:
    """Have torch load its kernels for products and softmax of square matrices of `dtypes` (their names in torch) on
    `device`: cuBLAS takes some 0.2 s to start, which the first reference would wait for.

    What fails here fails again where it is needed, and is said there."""
    with suppress(ImportError, RuntimeError, AssertionError):  # the last of a torch without CUDA
        import torch

        for name in dtypes:
            matrix = torch.zeros(SIDE, SIDE, dtype=getattr(torch, name), device=device)
            torch.softmax(matrix @ matrix.T, -1).square().sum().sqrt().item()


def read_peers_ahead() -> None:
    """Have the system read what PyTorch's own attention is in from the disk: on a machine that has just started, the
    first call of the flash backend waited 6 s for it, on an H200's host."""
    for path in _libraries_of_peers():
        with suppress(OSError, AttributeError), path.open("rb") as file:  # only some systems can be told
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _libraries_of_peers() -> Iterator[Path]:
    for package, names in (("torch", "lib/libtorch_cuda.so"), ("nvidia.cudnn", "lib/*.so*")):
        with suppress(ImportError):
            spec = find_spec(package)
            for folder in (spec.submodule_search_locations or ()) if spec else ():
                yield from sorted(Path(folder).glob(names))
