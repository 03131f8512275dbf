"""What the op asks of a machine: `Platform`, which `CudaPlatform` answers by torch, and by libcuda through ctypes."""

import contextlib
import ctypes
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from evoattn.backends import tensor_map
from evoattn.backends.base import ContextLost, LaunchError
from evoattn.backends.versions import driver_version
from evoattn.model.gpu import GpuSpec, detect_devices
from evoattn.model.launch import TensorMap

# Enumerators of cuda.h.
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
INVALID_CONTEXT, INVALID_HANDLE = 201, 400
NO_CONTEXT = frozenset((INVALID_CONTEXT, INVALID_HANDLE))
"""What a launch answers in a thread in which the device's context is not current yet."""
FAULTS = frozenset((700, 702, 714, 715, 716, 717, 718, 719))
"""What cuda.h's CUresult says of a kernel that went wrong while it ran: ILLEGAL_ADDRESS, LAUNCH_TIMEOUT,
HARDWARE_STACK_ERROR, ILLEGAL_INSTRUCTION, MISALIGNED_ADDRESS, INVALID_ADDRESS_SPACE, INVALID_PC and LAUNCH_FAILED (all
CUDA_ERROR_…). The context is lost with it. Every other status says something of the machine at that moment, too: no
memory, a capture in another thread."""


def error_of(status: int, sentence: str) -> LaunchError | ContextLost:
    """What to raise for a status of the driver: `ContextLost` for a kernel's own fault, else `LaunchError`."""
    return (ContextLost if status in FAULTS else LaunchError)(sentence)


class Platform(Protocol):
    """The device side of the op. Tests put a recording one in its place.

    `launch(config, function, arguments, None)` is cuLaunchKernelEx: addresses in, the driver's status out, 0 for
    success."""

    device_type: str
    launch: Callable[[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, None], int]
    stream: Callable[[int], int]
    """The CUstream that torch's work on a device goes to at present in this thread."""
    capturing: Callable[[], bool]
    """Whether the current stream records into a CUDA graph."""
    current_device: Callable[[], int]
    guard: Callable[[int], contextlib.AbstractContextManager[object]]
    """Makes a device the current one."""
    lost_in_fork: Callable[[], bool]
    """Whether this process is a child that was forked from one that had used its devices: it cannot use them."""

    def device(self, index: int) -> torch.device:
        """Torch's name for a device."""
        ...

    def spec(self, index: int) -> GpuSpec | None:
        """The GPU, with the number of SMs that it really has; None if evoattn does not know it."""
        ...

    def identity(self, index: int) -> str:
        """Product and driver version: what a kernel's check is recorded for."""
        ...

    def make_context_current(self, index: int) -> None:
        """Make the device's primary context, which torch uses, current in this thread."""
        ...

    def load(self, cubin: bytes) -> int:
        """Load a module into the current context: its handle. Raises `LaunchError`."""
        ...

    def function(self, module: int, name: str) -> int:
        """The handle of a kernel of a module. Raises `LaunchError`."""
        ...

    def allow_shared_memory(self, function: int, smem_bytes: int) -> None:
        """Let a kernel have so much dynamic shared memory. Raises `LaunchError`."""
        ...

    def encode_map(self, tensor: TensorMap, address: int, destination: int) -> None:
        """Write the 128 bytes of a tensor map over the buffer at device `address` to host memory. Raises
        `LaunchError`."""
        ...

    def move_map(self, destination: int, address: int) -> None:
        """Point an encoded tensor map at another buffer of the same shape and strides. Raises `LaunchError`."""
        ...

    def outside_pools(self, make: Callable[[], torch.Tensor], index: int, stream: int) -> torch.Tensor:
        """What `make` allocates on a stream, from no pool of a CUDA graph that this thread may be allocating from."""
        ...

    def describe(self, status: int) -> str:
        """The driver's words for a status."""
        ...

    def synchronize(self, index: int) -> None:
        """Wait for the device. Raises `ContextLost` where a kernel went wrong, `LaunchError` on any other failure."""
        ...


class CudaPlatform:
    """The `Platform` of a CUDA build of torch."""

    device_type = "cuda"

    def __init__(self) -> None:
        """Raises `OSError` where there is no driver, `AttributeError` where it is older than CUDA 12."""
        self._cuda = ctypes.CDLL("libcuda.so.1")
        launch = self._cuda.cuLaunchKernelEx
        launch.argtypes, launch.restype = (ctypes.c_void_p,) * 4, ctypes.c_int
        self.launch: Callable[[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, None], int] = launch
        self._move_map = self._cuda.cuTensorMapReplaceAddress
        self._move_map.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self.stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self.capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing
        self.current_device: Callable[[], int] = torch._C._cuda_getDevice
        self.guard: Callable[[int], contextlib.AbstractContextManager[object]] = torch.cuda.device
        self.lost_in_fork: Callable[[], bool] = torch.cuda._is_in_bad_fork
        self._wait: Callable[[int], None] = torch.cuda.synchronize
        self._specs: dict[int, GpuSpec | None] = {}

    def device(self, index: int) -> torch.device:
        return torch.device("cuda", index)

    def spec(self, index: int) -> GpuSpec | None:
        if index not in self._specs:  # torch counts the visible devices as the driver does
            here = {device.index: device for device in detect_devices()}
            self._specs[index] = here[index].spec if index in here else None
        return self._specs[index]

    def identity(self, index: int) -> str:
        return f"{torch.cuda.get_device_name(index)}, driver {driver_version()}"

    def make_context_current(self, index: int) -> None:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._require(self._cuda.cuDeviceGet(ctypes.byref(device), index), "find the device")
        self._require(self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "take the context")
        self._require(self._cuda.cuCtxSetCurrent(context), "make the context current")

    def load(self, cubin: bytes) -> int:
        module = ctypes.c_void_p()
        self._require(self._cuda.cuModuleLoadData(ctypes.byref(module), cubin), "load the module")
        return module.value or 0

    def function(self, module: int, name: str) -> int:
        function = ctypes.c_void_p()
        status = self._cuda.cuModuleGetFunction(ctypes.byref(function), ctypes.c_void_p(module), name.encode())
        self._require(status, f"find {name}")
        if hasattr(self._cuda, "cuFuncLoad"):  # CUDA 12.4; modules load lazily, and a capture must not meet that
            self._require(self._cuda.cuFuncLoad(function), f"load {name}")
        return function.value or 0

    def allow_shared_memory(self, function: int, smem_bytes: int) -> None:
        status = self._cuda.cuFuncSetAttribute(ctypes.c_void_p(function), MAX_DYNAMIC_SHARED_SIZE_BYTES, smem_bytes)
        self._require(status, f"give a block {smem_bytes} bytes of shared memory")

    def encode_map(self, tensor: TensorMap, address: int, destination: int) -> None:
        tensor_map.encode_at(destination, tensor, address)

    def move_map(self, destination: int, address: int) -> None:
        """See `Platform`. Raises `LaunchError` where the driver refuses."""
        status = self._move_map(destination, address)
        if status in NO_CONTEXT:  # a thread's first call; the device is the current one
            self.make_context_current(self.current_device())
            status = self._move_map(destination, address)
        if status:
            raise LaunchError(f"The driver refused to move a tensor map: {self.describe(status)}.")

    def outside_pools(self, make: Callable[[], torch.Tensor], index: int, stream: int) -> torch.Tensor:
        def work() -> torch.Tensor:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=index)):
                return make()

        with ThreadPoolExecutor(1) as thread:  # pools are of one thread
            return thread.submit(work).result()

    def describe(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorString(status, ctypes.byref(text))
        return f"{(text.value or b'unknown error').decode()} (CUDA error {status})"

    def synchronize(self, index: int) -> None:
        """See `Platform`. Raises `ContextLost` or `LaunchError`."""
        try:
            self._wait(index)
        except RuntimeError as error:  # words in place of a status, but a fault stays with the context
            status = self._cuda.cuCtxSynchronize()
            raise error_of(status, f"The kernel failed: {str(error).splitlines()[0]}") from None

    def _require(self, status: int, what: str) -> None:
        if status:
            raise LaunchError(f"The driver could not {what}: {self.describe(status)}.")


def find_platform(make: Callable[[], Platform] = CudaPlatform) -> Platform | None:
    """The CUDA device side; None, with a warning, where torch has a GPU but the driver is not NVIDIA's or too old, and
    in the child of a process that has used CUDA."""
    try:
        platform = make()
        return None if platform.lost_in_fork() else platform
    except (OSError, AttributeError) as error:
        warnings.warn(f"evoattn: no kernel can run here, SDPA does: {error}.", RuntimeWarning, stacklevel=2)
        return None
