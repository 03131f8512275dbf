"""Launches by libcuda's own call, through ctypes: CuPy knows no launch attributes, and takes several times as long for
a launch, of which a graph has hundreds."""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Protocol

from evoattn.backends.base import LaunchError
from evoattn.model.launch import KernelLaunch

Call = Callable[..., int]
"""cuLaunchKernelEx: (config, function, arguments, extra) → CUresult."""
# cuda.h of CUDA 13.0: CUlaunchAttributeID, CUlaunchAttribute and CUlaunchConfig, laid out as C does on a 64-bit
# machine.
PROGRAMMATIC_STREAM_SERIALIZATION = 6
VALUE_BYTES = 64
ALIGNMENT = 64
"""Of an argument in host memory: what a tensor map asks for."""


class LaunchAttributeValue(ctypes.Union):
    """CUlaunchAttributeValue, of which one member is used here. Others hold pointers, which is why it begins at a
    multiple of 8 bytes."""

    _fields_ = [
        ("programmatic_stream_serialization_allowed", ctypes.c_int),
        ("pad", ctypes.c_uint64 * (VALUE_BYTES // 8)),
    ]


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: 72 bytes, the value from byte 8 on."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", LaunchAttributeValue)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: 56 bytes, the stream at byte 32, the attributes at 40, their number at 48."""

    _fields_ = [
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    ]


@cache
def _launcher() -> Call:
    """cuLaunchKernelEx of the driver. Raises `LaunchError` if it is too old to have one."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError) as error:
        raise LaunchError(f"The driver has no cuLaunchKernelEx: {error}.") from None
    function.argtypes = (
        ctypes.POINTER(LaunchConfig),
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_void_p),
    )
    function.restype = ctypes.c_int
    call: Call = function
    return call


class LoadedFunction(Protocol):
    """A kernel of a loaded module, which it keeps loaded: CuPy's `Function`. `ptr` is the CUfunction."""

    ptr: int


class DriverLaunch:
    """`launch` of a loaded function, ready to be enqueued as often as is wanted. One that `overlaps` may begin before
    the one before it has ended (sm_90); a graph that is captured gets a programmatic edge.

    Keeps the arguments and the function's module for as long as it can be called: the driver copies the arguments at
    each call."""

    def __init__(
        self, function: LoadedFunction, launch: KernelLaunch, arguments: Sequence[bytes], call: Call | None = None
    ) -> None:
        """`arguments` are passed by value. Raises `LaunchError` if the driver is too old."""
        self._call, self._function, self._kernel = call or _launcher(), function, launch.kernel
        starts = list(accumulate((-(-len(a) // ALIGNMENT) * ALIGNMENT for a in arguments), initial=0))
        self._memory = ctypes.create_string_buffer(starts[-1] + ALIGNMENT)
        begin = -(-ctypes.addressof(self._memory) // ALIGNMENT) * ALIGNMENT
        for start, argument in zip(starts, arguments, strict=False):
            ctypes.memmove(begin + start, argument, len(argument))
        self._pointers = (ctypes.c_void_p * len(arguments))(*(begin + start for start in starts[:-1]))
        self._attribute = LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION)
        self._attribute.value.programmatic_stream_serialization_allowed = 1
        self._config = LaunchConfig(
            *launch.grid, *launch.block, launch.smem_bytes, None, ctypes.pointer(self._attribute), int(launch.overlaps)
        )

    def __call__(self, stream: int) -> None:
        """Enqueue on the CUstream `stream`. Raises `LaunchError` if the driver refuses."""
        self._config.stream = stream
        status = self._call(self._config, self._function.ptr, self._pointers, None)
        if status:
            raise LaunchError(f"The launch of {self._kernel} failed (CUDA error {status}).")
