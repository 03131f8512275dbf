"""A `TensorMap` as the 128 bytes that the tensor copy engine reads; asks libcuda by ctypes, which torch has loaded
already."""

import ctypes
from collections.abc import Callable
from functools import cache

from evoattn.backends.base import LaunchError
from evoattn.model.dtype import DTYPES
from evoattn.model.launch import TensorMap
from evoattn.model.remembered import remember

BYTES, ALIGNMENT = 128, 64
# Enumerators of cuda.h: CUtensorMapSwizzle, CUtensorMapL2promotion.
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
L2_PROMOTION_128_BYTES = 2


@cache
def _encoder() -> Callable[..., int]:
    """cuTensorMapEncodeTiled of the driver. Raises `LaunchError` if it is too old to have one."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise LaunchError(f"The driver has no tensor maps: {error}.") from None
    function.restype = ctypes.c_int
    encode: Callable[..., int] = function
    return encode


def encode(tensor_map: TensorMap, address: int) -> bytes:
    """The CUtensorMap of `tensor_map` over the buffer at device `address`.

    Raises `LaunchError` where the driver refuses (an address or a stride that is no multiple of 16 bytes, a box side
    over 256 …)."""
    raw = ctypes.create_string_buffer(BYTES + ALIGNMENT)
    aligned = (ctypes.addressof(raw) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    encode_at(aligned, tensor_map, address)
    return ctypes.string_at(aligned, BYTES)


class _Arguments:
    """Of the encoder's call to one place in host memory: all arguments, of which the address and the shape change."""

    __slots__ = "address", "all", "box", "dtype", "shape", "strides_bytes", "swizzle_bytes"

    def __init__(self, destination: int, tensor_map: TensorMap) -> None:
        rank = len(tensor_map.box)
        self.dtype, self.strides_bytes = tensor_map.dtype, tensor_map.strides_bytes
        self.box, self.swizzle_bytes = tensor_map.box, tensor_map.swizzle_bytes
        self.address, self.shape, numbers = ctypes.c_void_p(), (ctypes.c_uint64 * rank)(), ctypes.c_uint32 * rank
        self.all = (
            ctypes.c_void_p(destination), ctypes.c_int(DTYPES[self.dtype].tensor_map_code), ctypes.c_uint32(rank),
            self.address, self.shape, (ctypes.c_uint64 * (rank - 1))(*self.strides_bytes), numbers(*self.box),
            numbers(*[1] * rank), ctypes.c_int(0), ctypes.c_int(SWIZZLES[self.swizzle_bytes]),
            ctypes.c_int(L2_PROMOTION_128_BYTES), ctypes.c_int(0),
        )  # fmt: skip


_KEPT: dict[int, _Arguments] = {}
"""By place in host memory."""


def encode_at(destination: int, tensor_map: TensorMap, address: int) -> None:
    """As `encode`, to host memory at `destination`, a multiple of ALIGNMENT, of which one thread makes one at a
    time."""
    kept = _KEPT.get(destination)
    # By identity, as maps of other rows share them: a comparison, or a hash of a key, takes longer than the encoder.
    if (
        kept is None
        or kept.strides_bytes is not tensor_map.strides_bytes
        or kept.box is not tensor_map.box
        or kept.dtype != tensor_map.dtype
        or kept.swizzle_bytes != tensor_map.swizzle_bytes
    ):
        kept = remember(_KEPT, destination, _Arguments(destination, tensor_map))
    kept.address.value, kept.shape[:] = address, list(tensor_map.shape)
    status = _encoder()(*kept.all)
    if status:
        raise LaunchError(
            f"The driver refused the tensor map of {tensor_map.buffer} (CUDA error {status}): {tensor_map}."
        )
