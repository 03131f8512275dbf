"""One launch over allocations of exactly the buffers' sizes, nothing else on the device: what compute-sanitizer can
judge to the byte."""

import numpy as np

from evoattn.backends.cuda import CudaBackend
from evoattn.backends.with_cupy import cupy
from evoattn.model.launch import KernelLaunch
from evoattn.model.records import CompiledKernel


class _Allocation:
    """Device memory of its own; looks to the backend like a tensor."""

    def __init__(self, contents: np.ndarray) -> None:
        self._address = cupy.cuda.runtime.malloc(contents.nbytes)
        cupy.cuda.runtime.memcpy(
            self._address, contents.ctypes.data, contents.nbytes, cupy.cuda.runtime.memcpyHostToDevice
        )

    def data_ptr(self) -> int:
        return int(self._address)


def run_bare(compiled: CompiledKernel, launches: tuple[KernelLaunch, ...], contents: dict[str, np.ndarray]) -> None:
    """Launch once over uint8 `contents` by buffer name, and wait. Raises `LaunchError` or `ContextLost`. The process
    frees the memory."""
    backend = CudaBackend()
    backend.run(compiled, launches, {name: _Allocation(data) for name, data in contents.items()})
