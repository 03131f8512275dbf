"""Machine code by the recipe that makes it, compiled once and kept on disk: what a call from PyTorch reads, without
rendering a source."""

import hashlib
import json
import warnings
from dataclasses import dataclass
from pathlib import Path

from evoattn.backends.cache_folder import KERNEL, OPTIONS, keep_small, mark_used, read_headed, write_headed
from evoattn.backends.versions import nvrtc_version, template_digest
from evoattn.families.base import Family
from evoattn.model.gpu import GpuSpec
from evoattn.model.paths import TEMPLATES
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig


@dataclass(frozen=True)
class Cubin:
    """One kernel's machine code. `digest` is its sha256, `source_hash` that of the CUDA source, `recipe` that of all
    that decides the code."""

    code: bytes
    digest: str
    source_hash: str
    recipe: str


def recipe_of(
    family: Family, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, templates: Path = TEMPLATES
) -> str:
    """sha256 over all that decides the machine code: template, constants, architecture, compiler version and options.

    As good as the hash of the rendered source, without rendering it."""
    constants = json.dumps(family.all_constants(problem, config, gpu), sort_keys=True, default=str)
    parts = (family.name, template_digest(family.name, templates), constants, gpu.arch, nvrtc_version(), *OPTIONS)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _read_cubin(path: Path, wanted: str) -> Cubin | None:
    """The cubin of the recipe `wanted` in a file, None where there is none. A file that is not whole, or of another
    recipe, is passed over with a warning."""
    found = read_headed(path)
    if found is None:
        return None
    row, code = found
    digest = hashlib.sha256(code).hexdigest()
    if row.get("digest") == digest and row.get("recipe") == wanted and "source" in row:
        mark_used(path)
        return Cubin(code, digest, row["source"], wanted)
    warnings.warn(f"evoattn: the cached kernel {path} is damaged; it is compiled again.", RuntimeWarning, stacklevel=2)
    return None


def get_cubin(family: Family, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, folder: Path) -> Cubin:
    """The kernel's machine code from `folder`, or compiled now and put there. Raises `CompileError`."""
    wanted = recipe_of(family, problem, config, gpu)
    path = folder / f"{wanted}{KERNEL}"
    found = _read_cubin(path, wanted)
    if found is None:
        found = _compile(family, problem, config, gpu, wanted)
        head = {"digest": found.digest, "source": found.source_hash, "recipe": wanted, "config": config.describe()}
        if write_headed(path, head, found.code):
            keep_small(folder)
    return found


def kept_cubin(
    family: Family, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, folder: Path
) -> Cubin | None:
    """The kernel's machine code from `folder`; None where it was not compiled before."""
    wanted = recipe_of(family, problem, config, gpu)
    return _read_cubin(folder / f"{wanted}{KERNEL}", wanted)


def _compile(family: Family, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, wanted: str) -> Cubin:
    """Render and compile; imports jinja2 and CuPy, which a process that finds its kernels on disk never does."""
    from evoattn.backends.compiler import compile_source
    from evoattn.families.render import render

    candidate = render(family, problem, config, gpu)
    code = compile_source(candidate.source, candidate.arch).cubin
    return Cubin(code, hashlib.sha256(code).hexdigest(), candidate.source_hash, wanted)
