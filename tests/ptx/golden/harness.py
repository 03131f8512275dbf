"""Runs small PTX programs, and small CUDA C kernels compiled by NVRTC, on the interpreter."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

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
