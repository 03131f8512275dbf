"""Compiles of these tests, most of them of sources with a fault: kept from run to run, as they take most time."""

from __future__ import annotations

from evoattn.backends.compiler import compile_candidate
from evoattn.model.records import Candidate, CompiledKernel


def compile_kept(source: str, arch: str) -> CompiledKernel:
    """As `compile_source`, or what an earlier run made of the same source, in the cache that `tests/conftest.py` names.
    A test of what the compiler says of a source compiles it itself: the cache tells no patch level of NVRTC apart.

    Raises `CompileError`."""
    return compile_candidate(Candidate("", {}, "", source, arch))
