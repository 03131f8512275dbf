"""A `TensorMap` as the 128 bytes that the tensor copy engine reads; asks libcuda by ctypes, which torch has loaded
already.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from evoattn.backends.base import LaunchError
from evoattn.model.dtype import DTYPES
from evoattn.model.launch import TensorMap

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
    over 256 …).
    """
    raw = ctypes.create_string_buffer(BYTES + ALIGNMENT)
    aligned = (ctypes.addressof(raw) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    encode_at(aligned, tensor_map, address)
    return ctypes.string_at(aligned, BYTES)


@lru_cache(1024)
def _numbers(kind: type[ctypes.c_uint32 | ctypes.c_uint64], values: tuple[int, ...]) -> ctypes.Array[Any]:
    return (kind * len(values))(*values)


def encode_at(destination: int, tensor_map: TensorMap, address: int) -> None:
    """As `encode`, to host memory at `destination`, a multiple of ALIGNMENT."""
    rank = len(tensor_map.shape)
    status = _encoder()(
        ctypes.c_void_p(destination),
        DTYPES[tensor_map.dtype].tensor_map_code,
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*tensor_map.shape),
        _numbers(ctypes.c_uint64, tensor_map.strides_bytes),
        _numbers(ctypes.c_uint32, tensor_map.box),
        _numbers(ctypes.c_uint32, (1,) * rank),
        0,
        SWIZZLES[tensor_map.swizzle_bytes],
        L2_PROMOTION_128_BYTES,
        0,
    )
    if status:
        raise LaunchError(
            f"The driver refused the tensor map of {tensor_map.buffer} (CUDA error {status}): {tensor_map}."
        )
