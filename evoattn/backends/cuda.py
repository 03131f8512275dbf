"""Runs cubins on a CUDA device through CuPy, on torch's stream. Only a worker process imports this: it makes a CUDA
context."""

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch

from evoattn.backends import tensor_map
from evoattn.backends.base import ContextLost, DeviceBuffer, LaunchError, require_order_of_calls
from evoattn.backends.driver_launch import DriverLaunch
from evoattn.backends.with_cupy import cupy
from evoattn.model.launch import STATIC_SMEM_LIMIT, Buffer, KernelArg, KernelLaunch, TensorMap
from evoattn.model.records import CompiledKernel

SCALARS = {"int32": struct.Struct("<i"), "int64": struct.Struct("<q"), "float32": struct.Struct("<f")}
ADDRESS = struct.Struct("<Q")
_encoded = lru_cache(maxsize=4096)(tensor_map.encode)  # all candidates share the small cases' buffers, and many maps
MODULES_KEPT = 32


def _argument(argument: KernelArg, buffers: Mapping[str, DeviceBuffer]) -> bytes:
    """A kernel argument as it lies in memory. Raises `LaunchError` where a tensor map is refused."""
    if isinstance(argument, Buffer):
        return ADDRESS.pack(buffers[argument.name].data_ptr())
    if isinstance(argument, TensorMap):
        return _encoded(argument, buffers[argument.buffer].data_ptr())
    return SCALARS[argument.ctype].pack(argument.value)


def _is_sticky() -> bool:
    """Whether the context answers no more."""
    try:
        cupy.cuda.runtime.deviceSynchronize()
        return False
    except cupy.cuda.runtime.CUDARuntimeError:
        return True


class CudaBackend:
    """A `Backend` on the first CUDA device that this process may see."""

    name = "cuda"

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        torch.zeros(1, device=self.device)  # makes the primary context that CuPy shares
        cupy.cuda.Device(0).use()
        self._modules: OrderedDict[bytes, cupy.cuda.function.Module] = OrderedDict()
        self._latest: tuple[Any, Callable[[], None]] | None = None

    def prepare(
        self, compiled: CompiledKernel, launches: tuple[KernelLaunch, ...], buffers: Mapping[str, DeviceBuffer]
    ) -> Callable[[], None]:
        """A call that enqueues `launches` on torch's current stream, once each, with nothing left to set up: see
        `QueuedBackend.prepare`.

        Raises `LaunchError` where the module cannot be loaded or an attribute or a tensor map is refused."""
        enqueue = self._enqueue(compiled, launches, buffers)

        def call(kept: Mapping[str, DeviceBuffer] = buffers) -> None:
            enqueue()

        return call

    def _enqueue(
        self, compiled: CompiledKernel, launches: tuple[KernelLaunch, ...], buffers: Mapping[str, DeviceBuffer]
    ) -> Callable[[], None]:
        """What `prepare` makes, without the buffers: it has their addresses alone."""
        require_order_of_calls(launches)
        try:
            module = self._module(compiled.cubin)
            steps = []
            for launch in launches:
                function = module.get_function(launch.kernel)
                if launch.smem_bytes > STATIC_SMEM_LIMIT:
                    cupy.cuda.driver.funcSetAttribute(
                        function.ptr,
                        cupy.cuda.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                        launch.smem_bytes,
                    )
                steps.append(DriverLaunch(function, launch, [_argument(a, buffers) for a in launch.args]))
        except cupy.cuda.driver.CUDADriverError as error:
            raise LaunchError(f"The driver refused the kernel: {error}.") from None

        # What torch.cuda.current_stream() asks, without its Python: a graph is made of hundreds of calls.
        current_stream, index = torch._C._cuda_getCurrentRawStream, self.device.index

        def enqueue() -> None:
            stream = current_stream(index)
            for step in steps:
                step(stream)

        return enqueue

    def run(
        self, compiled: CompiledKernel, launches: tuple[KernelLaunch, ...], buffers: Mapping[str, DeviceBuffer]
    ) -> tuple[str, ...]:
        """See `Backend.run`. The device shows no faults of its own. Raises `ContextLost` when the context is lost."""
        key = compiled.cubin, launches, tuple((name, buffer.data_ptr()) for name, buffer in buffers.items())
        if self._latest is None or self._latest[0] != key:  # a case is run twice
            self._latest = key, self._enqueue(compiled, launches, buffers)  # a case's memory goes with the case
        self._latest[1]()
        self.synchronize()
        return ()

    def synchronize(self) -> None:
        """Wait for the device. Raises `ContextLost` when the context is lost, `LaunchError` on any other failure."""
        try:
            cupy.cuda.runtime.deviceSynchronize()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            if _is_sticky():
                raise ContextLost(f"The kernel broke the CUDA context: {error}.") from None
            raise LaunchError(f"The launch failed: {error}.") from None

    def _module(self, cubin: bytes) -> cupy.cuda.function.Module:
        """The loaded module of a cubin, out of the most recent ones."""
        if cubin in self._modules:
            self._modules.move_to_end(cubin)
            return self._modules[cubin]
        module = cupy.cuda.function.Module()
        module.load(cubin)
        self._modules[cubin] = module
        if len(self._modules) > MODULES_KEPT:
            self._modules.popitem(last=False)
        return module
