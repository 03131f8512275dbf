"""Source → cubin and PTX by NVRTC through CuPy, with what the compiler's log says; needs no GPU and no CUDA toolkit."""

from __future__ import annotations

import re
import time
from concurrent.futures import Executor
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from evoattn.backends.kernel_files import OPTIONS, KernelFiles
from evoattn.model import forks
from evoattn.model.paths import cubin_cache
from evoattn.model.played import target
from evoattn.model.records import Candidate, CompiledKernel, CompileInfo

NO_NVRTC = (
    "NVRTC, the CUDA compiler of the package nvidia-cuda-nvrtc, is not found: `pip install --force-reinstall "
    "nvidia-cuda-nvrtc` brings it"
)


class CompileError(RuntimeError):
    """The compiler refused the source: the message is its first error line; `log` is the whole log."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log

    def __reduce__(self) -> tuple[type[CompileError], tuple[str, str]]:
        return CompileError, (str(self), self.log)


_LOADING = forks.Lock()


def _nvrtc() -> Any:
    """CuPy's NVRTC. Raises `ImportError` or `OSError`.

    One thread looks for it: a compile beside that fails, as NVRTC finds its built-in functions only when all is loaded.
    """
    with _LOADING:
        return _found_nvrtc()


@cache
def _found_nvrtc() -> Any:
    from evoattn.backends.with_cupy import cupy

    return loaded(cupy.cuda.nvrtc)


def loaded(nvrtc: Any) -> Any:
    """CuPy's NVRTC after its first call, at which CuPy looks for the library. Raises `OSError` where there is none."""
    try:
        nvrtc.getVersion()
    except RuntimeError:
        raise OSError(NO_NVRTC) from None
    return nvrtc


@cache
def include_options() -> tuple[str, ...]:
    """`-I` options for the CUDA headers of the PyPI packages (`mma.h` and its like; most kernels include nothing)."""
    folders: list[str] = []
    for package in ("nvidia-cuda-runtime", "nvidia-cuda-crt"):
        try:
            for file in files(package) or ():
                if file.name in ("cuda_fp16.h", "mma.h") and file.parent.name in ("include", "crt"):
                    folder = Path(str(file.locate())).parent
                    folders.append(str(folder.parent if folder.name == "crt" else folder))
        except PackageNotFoundError:
            continue
    return tuple(f"-I{folder}" for folder in dict.fromkeys(folders))


@cache
def version() -> str:
    """E.g. `NVRTC 13.0`."""
    return "NVRTC {}.{}".format(*_nvrtc().getVersion())


def parse_log(log: str) -> CompileInfo:
    """Registers, spills, stack, static shared memory and warnings out of a ptxas `-v` log; the most over its
    kernels."""

    def most(pattern: str) -> int:
        return max((int(n) for n in re.findall(pattern, log)), default=0)

    return CompileInfo(
        registers=most(r"Used (\d+) registers"),
        spill_store_bytes=most(r"(\d+) bytes spill stores"),
        spill_load_bytes=most(r"(\d+) bytes spill loads"),
        stack_bytes=most(r"(\d+) bytes stack frame"),
        static_smem_bytes=most(r"(\d+) bytes smem"),
        warnings=tuple(sorted(set(re.findall(r"\bC75\d\d\b", log)))),
    )


def first_error(log: str) -> str:
    """The first line of a compiler log that names an error."""
    lines = [line.strip() for line in log.splitlines() if "error" in line.lower()]
    return lines[0] if lines else (log.strip().splitlines() or ["the compiler failed without a message"])[0]


def compile_source(source: str, arch: str) -> CompiledKernel:
    """Compile `source` for `arch` (`sm_89`, `sm_90a`, …). Raises `CompileError`.

    One NVRTC call gives the cubin that a GPU would load and the PTX of that same compile."""
    nvrtc = _nvrtc()
    options = (f"-arch={target(arch)}", *OPTIONS, *include_options())
    started = time.perf_counter()
    program = nvrtc.createProgram(source, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        log = nvrtc.getProgramLog(program)
        raise CompileError(first_error(log), log) from None
    else:
        # CuPy 14.2 drops the last byte of a cubin; loaders accept that, cuobjdump and nvdisasm do not.
        cubin = nvrtc.getCUBIN(program) + b"\0"
        ptx = nvrtc.getPTX(program)
        log = nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)
    ptx_text = ptx.decode() if isinstance(ptx, bytes) else ptx
    info = replace(
        parse_log(log),
        seconds=time.perf_counter() - started,
        compiler=version(),
        options=tuple(o for o in options if not o.startswith("-I")),
    )
    return CompiledKernel(cubin, ptx_text.rstrip("\0"), info)


def compile_candidate(
    candidate: Candidate, folder: Path | None = None, writing: Executor | None = None
) -> CompiledKernel:
    """Compile a candidate, or take it from the cache `folder` (default: `cubin_cache()`). Raises `CompileError`.

    `writing` writes to the cache; who gives none waits for that."""
    files = KernelFiles(folder or cubin_cache(), version())
    if found := files.get(candidate):
        return found
    compiled = compile_source(candidate.source, candidate.arch)
    if writing:
        writing.submit(files.put, candidate, compiled)
    else:
        files.put(candidate, compiled)
    return compiled
