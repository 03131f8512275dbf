"""The program under ncu: one call of a contestant, between the marks that tell ncu to look.

    python -m evoattn.profiling.target FOLDER

FOLDER holds what `evoattn.profiling.ncu` wrote."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evoattn.correctness.cases import proof_of
from evoattn.correctness.validate import output_layouts
from evoattn.families import registry
from evoattn.families.built import BuiltKernel
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompiledKernel, CompileInfo
from evoattn.model.space import KernelConfig
from evoattn.peers.table import peers_of

SEED = 1
WARM_UP = 3
"""Calls before: a peer compiles, and L2 holds the inputs."""


def kernel_call(kernel: BuiltKernel, problem: AttentionProblem) -> Callable[[], object]:
    """A call of the kernel on random inputs on CUDA device 0."""
    from evoattn.backends.cuda import CudaBackend

    backend = CudaBackend()
    sizes = {name: layout.nbytes for name, layout in output_layouts(problem).items()} | kernel.workspace(problem)
    buffers = proof_of(problem).make_inputs(problem, SEED, backend.device)
    buffers |= {name: torch.zeros(size, dtype=torch.uint8, device=backend.device) for name, size in sizes.items()}
    return backend.prepare(kernel.compiled, kernel.launches(problem), buffers)


def call_of(job: dict[str, Any], cubin: Path) -> Callable[[], object]:
    """The contestant that a job names."""
    problem = AttentionProblem(**job["problem"])
    if peer := job.get("peer"):
        return peers_of(problem)[peer].make(problem, proof_of(problem).make_inputs(problem, SEED, "cuda"))
    config = KernelConfig(job["family"], job["params"])
    compiled = CompiledKernel(cubin.read_bytes(), "", CompileInfo())
    return kernel_call(BuiltKernel(registry.lookup(config.family), config, GpuSpec(**job["gpu"]), compiled), problem)


def main(folder: Path) -> None:
    """Warm up, then one call for ncu (`--profile-from-start off`)."""
    call = call_of(json.loads((folder / "job.json").read_text(encoding="utf-8")), folder / "kernel.cubin")
    profiler: Any = torch.cuda.profiler  # it has no types
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    profiler.start()
    call()
    torch.cuda.synchronize()
    profiler.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
