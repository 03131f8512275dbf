"""Runs small CUDA C kernels for sm_90a, made of the project's own device leaves, on the interpreter."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from evoattn.families.includes import resolve
from evoattn.model.paths import TEMPLATES
from evoattn.ptx import Execution
from tests.ptx.golden.harness import cuda_kernel, observed

LEAVES = (
    "element",
    "shared_address",
    "mbarrier",
    "tma",
    "wgmma",
    "ldmatrix",
    "stmatrix",
    "setmaxnreg",
    "named_barrier",
    "cluster",
)
HEAD = resolve("".join(f'#include "device/ptx/{name}.cuh"\n' for name in LEAVES), TEMPLATES)


def run_hopper(
    source: str,
    arrays: list[np.ndarray],
    maps: Sequence[dict[str, Any]] = (),
    scalars: Sequence[Any] = (),
    threads: int = 128,
    smem: int = 0,
    blocks: int = 1,
    **options: Any,
) -> Execution:
    """Run the one kernel of `source`, which takes the tensor maps, then a pointer to each array (changed in place),
    then the scalars.

    A map is the keywords of `TensorMap`, with the number of an array as its address."""
    kernel = cuda_kernel(HEAD + source, "sm_90a")
    return observed(kernel, list(maps), arrays, list(scalars), blocks, threads, smem, **options)


def tiled(array: int, tensor: np.ndarray, box: tuple[int, ...], swizzle: int) -> dict[str, Any]:
    """The map of a C-contiguous tensor of 16-bit elements; `box` counts from the innermost dimension."""
    return {
        "address": array,
        "shape": tensor.shape[::-1],
        "strides_bytes": tensor.strides[::-1][1:],
        "box": box,
        "swizzle_bytes": swizzle,
    }


def swizzle_address(address: np.ndarray, swizzle: int) -> np.ndarray:
    """Bits 4, 5, 6 of a byte address XORed with bits 7, 8, 9: the lowest one, two or three of them for 32, 64, 128
    bytes."""
    for bit in range({0: 0, 32: 1, 64: 2, 128: 3}[swizzle]):
        address = address ^ ((address >> (7 + bit) & 1) << (4 + bit))
    return address


def accumulators_to_matrix(registers: np.ndarray) -> np.ndarray:
    """`[128 threads, columns / 2]` of a warpgroup → `[64, columns]` (PTX ISA, wgmma m64nNk16, fragment D)."""
    matrix = np.zeros((64, 2 * registers.shape[1]), registers.dtype)
    for thread in range(128):
        warp, g, t = thread // 32, thread % 32 // 4, thread % 4
        for i in range(registers.shape[1]):
            matrix[16 * warp + g + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * t + i % 2] = registers[thread, i]
    return matrix
