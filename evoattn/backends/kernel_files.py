"""Compiled kernels on disk, one file each: a line of JSON, the PTX, the machine code."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from evoattn.backends.cache_folder import keep_small, mark_used, read_headed, write_headed

if TYPE_CHECKING:
    from evoattn.model.records import Candidate, CompiledKernel

OPTIONS = ("--std=c++17", "-default-device", "--ptxas-options=-v", "--no-cache")
"""NVRTC's own cache would answer a repeated compile without the log that says registers and spills."""


SUFFIX = ".kernel"
"""Of a file: one line of JSON about what is compiled, then that."""


class KernelFiles:
    """Those in `folder`, as a compiler of this `version` makes them. The name of a file covers source, architecture,
    compiler version and options."""

    def __init__(self, folder: Path, version: str) -> None:
        self._folder, self._version = folder, version

    def _path(self, candidate: Candidate) -> Path:
        words = "\n".join((candidate.source_hash, candidate.arch, self._version, *OPTIONS))
        key = hashlib.sha256(words.encode()).hexdigest()
        return self._folder / key[:2] / f"{key}{SUFFIX}"

    def get(self, candidate: Candidate) -> CompiledKernel | None:
        """The candidate's kernel; None where no file has it, or one that cannot be read or lacks its end."""
        from evoattn.model.records import (  # here: the op imports this file for OPTIONS alone
            CompiledKernel,
            CompileInfo,
        )

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
