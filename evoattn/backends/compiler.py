"""Source → cubin and PTX by NVRTC through CuPy, with what the compiler's log says; needs no GPU and no CUDA toolkit.
And compiled kernels on disk, one file each."""

from __future__ import annotations

import hashlib
import re
import struct
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from evoattn.backends.cache_folder import KERNEL, OPTIONS, keep_small, mark_used, read_headed, write_headed
from evoattn.model import forks
from evoattn.model.gpu_table import target
from evoattn.model.paths import cubin_cache
from evoattn.model.records import Candidate, CompiledKernel, CompileInfo


class KernelFiles:
    """Those in `folder`, as a compiler of this `version` makes them. The name of a file covers source, architecture,
    compiler version and options."""

    def __init__(self, folder: Path, version: str) -> None:
        self._folder, self._version = folder, version

    def _path(self, candidate: Candidate) -> Path:
        words = "\n".join((candidate.source_hash, candidate.arch, self._version, *OPTIONS))
        key = hashlib.sha256(words.encode()).hexdigest()
        return self._folder / key[:2] / f"{key}{KERNEL}"

    def get(self, candidate: Candidate) -> CompiledKernel | None:
        """The candidate's kernel; None where no file has it, or one that cannot be read or lacks its end."""
        path = self._path(candidate)
        found = read_headed(path)
        if found is None:
            return None
        fields, rest = found
        try:
            if fields.pop("key") != path.stem:  # another kernel's file under this name
                return None
            length = int(fields.pop("ptx_bytes"))
            if len(rest) != length + int(fields.pop("cubin_bytes")):
                return None
            fields["warnings"], fields["options"] = tuple(fields["warnings"]), tuple(fields["options"])
            mark_used(path)
            return CompiledKernel(rest[length:], rest[:length].decode(), CompileInfo(**fields))
        except (ValueError, TypeError, KeyError):
            return None

    def has(self, candidate: Candidate) -> bool:
        """Whether there is a file for the candidate's kernel, whatever is in it."""
        return self._path(candidate).exists()

    def put(self, candidate: Candidate, compiled: CompiledKernel) -> None:
        """Keep a kernel, in place of those that were not used for longest if there are too many. It is put in place
        whole, so that a killed process leaves no half of it; a full or read-only disk keeps nothing."""
        ptx = compiled.ptx.encode()
        path = self._path(candidate)
        about = {"key": path.stem, "ptx_bytes": len(ptx), "cubin_bytes": len(compiled.cubin)}
        if write_headed(path, asdict(compiled.info) | about, ptx + compiled.cubin):
            keep_small(self._folder)


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


CODE_SECTIONS = re.compile(r"\.text\.|\.nv\.constant[0-3]")
"""How the names of the sections of a cubin begin that decide what it computes. Global variables (`.nv.global.init`, and
`.nv.constant4` with their addresses) are left out: those of the templates are constants that instructions hold."""


def sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, content) of each section of a 64-bit little-endian ELF file. Raises `ValueError` on anything else."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("a cubin is a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]
    names = headers[names_index][4]
    for name, kind, _, _, offset, length, *_ in headers:
        start = names + name
        content = b"" if kind == 8 else elf[offset : offset + length]  # 8: SHT_NOBITS has no bytes in the file
        yield elf[start : elf.index(b"\0", start)].decode(), content


def machine_code_hash(cubin: bytes) -> str:
    """sha256 (hex) of the instructions and constants of all kernels. Raises `ValueError` if there are none.

    Names of inlined functions, comments and line numbers of the source do not count."""
    parts = sorted((name, content) for name, content in sections(cubin) if CODE_SECTIONS.match(name))
    if not any(name.startswith(".text.") for name, _ in parts):
        raise ValueError("the cubin has no instructions")
    digest = hashlib.sha256()
    for name, content in parts:
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
