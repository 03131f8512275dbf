"""Runs small PTX programs, and small CUDA C kernels compiled by NVRTC, on the interpreter. Runs small CUDA C kernels
for sm_90a, made of the project's own device leaves, on the interpreter."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from evoattn.families.includes import resolve
from evoattn.model.paths import TEMPLATES
from evoattn.ptx import Execution, Kernel, Program, TensorMap, parse_program, run_launch
from tests.support.compiles import ptx_kept

observers: list[Callable[..., Any]] = []
"""Called after each launch without a fault: `tests/ptx/golden` collects what the tests run, to run it on a GPU too."""
_texts: dict[int, str] = {}
"""The PTX of each kernel, by id."""


def parsed(text: str) -> Kernel:
    """The one kernel of a PTX text."""
    [kernel] = parse_program(text).kernels.values()
    _texts[id(kernel)] = text
    return kernel


def observed(
    kernel: Kernel,
    maps: Sequence[dict[str, Any]],
    arrays: list[np.ndarray],
    scalars: Sequence[Any],
    blocks: int,
    threads: int,
    smem: int,
    **options: Any,
) -> Execution:
    """Launch `kernel` with the tensor maps, a pointer to each array (called a0, a1, …), the scalars.

    A map is keywords of `TensorMap`, with the number of an array as its address."""
    names = [f"a{i}" for i in range(len(arrays))]
    encoded = [TensorMap(names[m["address"]], **{k: v for k, v in m.items() if k != "address"}) for m in maps]
    before = [array.copy() for array in arrays] if observers else []
    execution = run_launch(
        Program({kernel.name: kernel}),
        kernel.name,
        blocks,
        threads,
        [*encoded, *names, *scalars],
        dict(zip(names, arrays)),
        smem_bytes=smem,
        **options,
    )
    if not execution.faults:
        for observer in observers:
            observer(_texts[id(kernel)], list(maps), before, list(scalars), blocks, threads, smem)
    return execution


def ptx_kernel(body: str, parameters: int = 0, declarations: str = "", cluster: int = 1) -> Kernel:
    """A kernel around `body`, of clusters of so many blocks: its parameters are pointers, in %a0, %a1, …; %tid has the
    thread's number in the block, %i in the grid.

    Free registers: %p0-7 (predicates), %h0-15 (16 bits), %r0-63, %f0-15, %q0-15 (64 bits)."""
    names = ", ".join(f".param .u64 param_{i}" for i in range(parameters))
    loads = "\n".join(f"ld.param.u64 %a{i}, [param_{i}];" for i in range(parameters))
    text = f"""
.version {"8.3" if cluster > 1 or ".add.v" in body else "8.0"}
.target sm_90a
.address_size 64
{declarations}
.visible .entry kernel({names}){f" .explicitcluster .reqnctapercluster {cluster}, 1, 1" if cluster > 1 else ""}
{{
.reg .pred %p<8>; .reg .b16 %h<16>; .reg .b32 %r<64>; .reg .f32 %f<16>; .reg .b64 %q<16>; .reg .b64 %a<8>;
.reg .b32 %tid, %i, %bid, %n;
mov.u32 %tid, %tid.x; mov.u32 %bid, %ctaid.x; mov.u32 %n, %ntid.x;
mad.lo.s32 %i, %bid, %n, %tid;
{loads}
{body}
ret;
}}
"""
    return parsed(re.sub(r"%tid\b(?!\.)", "%thread", text))  # ptxas wants no register of a special register's name


def launch(
    kernel: Kernel,
    *arrays: np.ndarray,
    blocks: int = 1,
    threads: int = 32,
    smem: int = 0,
    scalars: tuple[Any, ...] = (),
    **options: Any,
) -> Execution:
    """Run with `arrays` (named a0, a1, …, changed in place) as the first arguments."""
    return observed(kernel, [], list(arrays), list(scalars), blocks, threads, smem, **options)


def run_ptx(body: str, *arrays: np.ndarray, declarations: str = "", cluster: int = 1, **options: Any) -> Execution:
    return launch(ptx_kernel(body, len(arrays), declarations, cluster), *arrays, cluster=(cluster, 1, 1), **options)


def evaluate(statements: str, result: npt.DTypeLike, *inputs: np.ndarray) -> np.ndarray:
    """`statements` on 1-D arrays, one element per thread: they read %x0, %x1, … and write %d, a register of the dtype
    `result`."""
    count = len(inputs[0])
    out = np.zeros(count, result)
    arrays = [*(np.ascontiguousarray(i) for i in inputs), out]
    body = [f".reg .b{8 * out.itemsize} %d; setp.ge.u32 %p7, %i, {count}; @%p7 exit;"]
    for number, array in enumerate(arrays):
        bits = 8 * array.itemsize
        body.append(
            f".reg .b64 %o{number}; mul.wide.u32 %o{number}, %i, {array.itemsize}; add.s64 %o{number}, %o{number}, "
            f"%a{number};"
        )
        if number < len(inputs):
            body.append(f".reg .b{bits} %x{number}; ld.global.b{bits} %x{number}, [%o{number}];")
    body += [statements, f"st.global.b{8 * out.itemsize} [%o{len(inputs)}], %d;"]
    execution = run_ptx("\n".join(body), *arrays, threads=min(count, 256), blocks=-(-count // 256), count=False)
    assert not execution.faults, execution.faults
    return out


@cache
def cuda_kernel(source: str, arch: str = "sm_80") -> Kernel:
    """The one kernel of a CUDA C source that NVRTC compiles."""
    return parsed(ptx_kept(source, arch).ptx)


def run_cuda(source: str, *arrays: np.ndarray, **options: Any) -> Execution:
    return launch(cuda_kernel(source), *arrays, **options)


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
