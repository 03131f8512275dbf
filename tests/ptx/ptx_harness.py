"""Runs small PTX programs, and small CUDA C kernels compiled by NVRTC, on the interpreter."""

from functools import cache

import numpy as np

from evoattn.compiler import compile_source
from evoattn.ptx.machine import Execution, Machine
from evoattn.ptx.memory import GlobalMemory
from evoattn.ptx.program import Kernel, parse_program


def ptx_kernel(body: str, parameters: int = 0, declarations: str = "") -> Kernel:
    """A kernel around `body`: its parameters are pointers, in %a0, %a1, …; %tid has the thread's number in the block, %i in the grid.

    Free registers: %p0-7 (predicates), %h0-15 (16 bits), %r0-63, %f0-15, %q0-15 (64 bits).
    """
    names = ", ".join(f".param .u64 param_{i}" for i in range(parameters))
    loads = "\n".join(f"ld.param.u64 %a{i}, [param_{i}];" for i in range(parameters))
    text = f"""
.version 8.0
.target sm_90
.address_size 64
{declarations}
.visible .entry kernel({names})
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
    return parse_program(text).kernels["kernel"]


def launch(kernel: Kernel, *arrays: np.ndarray, blocks: int = 1, threads: int = 32, smem: int = 0, scalars: tuple = (),
           **options) -> Execution:
    """Run with `arrays` (named a0, a1, …, changed in place) as the first arguments."""
    memory = GlobalMemory()
    addresses = [np.uint64(memory.map(f"a{i}", array.reshape(-1).view(np.uint8))) for i, array in enumerate(arrays)]
    machine = Machine(kernel, memory, [*addresses, *scalars], (blocks, 1, 1), (threads, 1, 1), smem, **options)
    return machine.run()


def run_ptx(body: str, *arrays: np.ndarray, declarations: str = "", **options) -> Execution:
    return launch(ptx_kernel(body, len(arrays), declarations), *arrays, **options)


def evaluate(statements: str, result: str, *inputs: np.ndarray) -> np.ndarray:
    """`statements` on 1-D arrays, one element a thread: they read %x0, %x1, … and write %d, a register of the dtype `result`."""
    count = len(inputs[0])
    out = np.zeros(count, result)
    arrays = [*(np.ascontiguousarray(i) for i in inputs), out]
    body = [f".reg .b{8 * out.itemsize} %d; setp.ge.u32 %p7, %i, {count}; @%p7 exit;"]
    for number, array in enumerate(arrays):
        bits = 8 * array.itemsize
        body.append(f".reg .b64 %o{number}; mul.wide.u32 %o{number}, %i, {array.itemsize}; add.s64 %o{number}, %o{number}, %a{number};")
        if number < len(inputs):
            body.append(f".reg .b{bits} %x{number}; ld.global.b{bits} %x{number}, [%o{number}];")
    body += [statements, f"st.global.b{8 * out.itemsize} [%o{len(inputs)}], %d;"]
    execution = run_ptx("\n".join(body), *arrays, threads=min(count, 256), blocks=-(-count // 256), count=False)
    assert not execution.faults, execution.faults
    return out


@cache
def cuda_kernel(source: str, arch: str = "sm_80") -> Kernel:
    """The one kernel of a CUDA C source that NVRTC compiles."""
    [kernel] = parse_program(compile_source(source, arch).ptx).kernels.values()
    return kernel


def run_cuda(source: str, *arrays: np.ndarray, **options) -> Execution:
    return launch(cuda_kernel(source), *arrays, **options)
