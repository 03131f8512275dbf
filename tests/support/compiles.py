"""Compiles of sources that tests make, most of them with a fault: kept from run to run in the cache that
`tests/conftest.py` names, as they take most time.

A test of what the compiler says of a source compiles it itself: the cache tells no patch level of NVRTC apart."""

from dataclasses import replace

from evoattn.backends.cache_folder import OPTIONS
from evoattn.backends.compiler import (
    CompileError,
    KernelFiles,
    compile_candidate,
    first_error,
    include_options,
    version,
)
from evoattn.model.paths import cubin_cache
from evoattn.model.records import Candidate, CompiledKernel, CompileInfo

NOT_KNOWN = CompileInfo(registers=-1, spill_store_bytes=-1, spill_load_bytes=-1, stack_bytes=-1, static_smem_bytes=-1)
"""Of PTX alone: a test that asks it for spills fails."""


def compile_kept(source: str, arch: str) -> CompiledKernel:
    """As `compile_source`, or what an earlier run made of the same source. Raises `CompileError`."""
    return compile_candidate(Candidate("", {}, "", source, arch))


def ptx_kept(source: str, arch: str) -> CompiledKernel:
    """PTX without machine code, which is all that the interpreter reads; kept likewise. Raises `CompileError`."""
    candidate, files = Candidate("", {}, "", source, arch), KernelFiles(cubin_cache(), f"{version()}, PTX alone")
    if found := files.get(candidate):
        return replace(found, info=NOT_KNOWN)
    compiled = CompiledKernel(b"", compile_ptx(source, arch), NOT_KNOWN)
    files.put(candidate, compiled)
    return compiled


def compile_ptx(source: str, arch: str, *options: str) -> str:
    """PTX alone, in half the time that machine code takes besides. Raises `CompileError`."""
    from cupy.cuda import nvrtc

    kept = [option for option in OPTIONS if "ptxas" not in option]
    program = nvrtc.createProgram(source, "kernel.cu", (), ())
    try:
        target = f"-arch={arch.replace('sm_', 'compute_')}"
        nvrtc.compileProgram(program, (target, *kept, *include_options(), *options))
        ptx = nvrtc.getPTX(program)
    except nvrtc.NVRTCError:
        log = nvrtc.getProgramLog(program)
        raise CompileError(first_error(log), log) from None
    finally:
        nvrtc.destroyProgram(program)
    return (ptx.decode() if isinstance(ptx, bytes) else ptx).rstrip("\0")
