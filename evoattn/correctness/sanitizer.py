"""compute-sanitizer on one candidate: accesses out of bounds that no answer shows (memcheck), races in shared memory
(racecheck), and other tools by their names."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from evoattn.families import registry
from evoattn.families.built import BuiltKernel
from evoattn.model.gpu import GpuSpec
from evoattn.model.paths import ROOT
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompiledKernel, CompileInfo
from evoattn.model.space import KernelConfig

TOOLS = ("memcheck", "racecheck")
CASES = 2
"""Of the small cases (`device_cases`): ragged lengths, then strided views. With keys in use the last one too, which has
sequences without any."""
SECONDS = 120.0
FOUND = 9
"""Exit code by which the tool says that it found something."""
NOT_INSTALLED = "compute-sanitizer is not installed: it comes with the CUDA toolkit, and must be on the PATH."
CLEAN = "no errors"


def find() -> str | None:
    """Path of compute-sanitizer: on the PATH, or where the toolkit puts it."""
    usual = Path("/usr/local/cuda/bin/compute-sanitizer")
    return shutil.which("compute-sanitizer") or (str(usual) if usual.exists() else None)


def sanitize(
    problem: AttentionProblem,
    kernel: BuiltKernel,
    tools: tuple[str, ...] = TOOLS,
    find: Callable[[], str | None] = find,
) -> dict[str, str]:
    """What each tool says of a candidate at the first small shapes: `CLEAN`, or a sentence.

    Each tool runs in a process of its own. `find` gives the path of compute-sanitizer, None if it is not installed."""
    path = find()
    if path is None:
        return dict.fromkeys(tools, NOT_INSTALLED)
    verdicts = {}
    with TemporaryDirectory() as folder:
        (Path(folder) / "kernel.cubin").write_bytes(kernel.compiled.cubin)
        job = {
            "problem": problem.to_dict(),
            "family": kernel.family.name,
            "params": kernel.config.params,
            "gpu": asdict(kernel.gpu),
        }
        (Path(folder) / "job.json").write_text(json.dumps(job), encoding="utf-8")
        for tool in tools:
            command = [
                path,
                "--tool",
                tool,
                "--error-exitcode",
                str(FOUND),
                sys.executable,
                "-m",
                "evoattn.correctness.sanitizer",
                folder,
            ]
            try:
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
                verdicts[tool] = verdict(done.returncode, done.stdout + done.stderr)
            except subprocess.TimeoutExpired:
                verdicts[tool] = f"no verdict within {SECONDS:.0f} s."
    return verdicts


def verdict(code: int, output: str) -> str:
    """A sentence out of what the tool printed (its lines begin with `=========`)."""
    said = [line.strip("= \t") for line in output.splitlines() if line.startswith("=====")]
    if code == 0:
        return CLEAN
    if code != FOUND:
        last = (output.strip().splitlines() or ["no output"])[-1]
        return f"no verdict, exit code {code}: {last[:200]}"
    first = next(
        (
            line
            for line in said
            if re.search(r"Invalid|Error:|Barrier error|hazard|Race|out of bounds|Misaligned", line)
        ),
        "an error",
    )
    return f"found: {first[:200]}"


def is_damning(verdicts: dict[str, str], kernel: CompiledKernel) -> bool:
    """Whether a tool found something. A race that racecheck reports in a kernel with mbarriers is recorded and no more:
    it does not follow every one of their forms, nor `barrier.cta.arrive` (reports/variant_kernels.md), which only such
    kernels have."""
    found = {tool for tool, sentence in verdicts.items() if sentence.startswith("found")}
    return bool(found - {"racecheck"}) or ("racecheck" in found and "mbarrier" not in kernel.ptx)


def main(folder: Path) -> None:
    """Inside the tool: the candidate of `folder`, once on each case."""
    import numpy as np
    import torch

    from evoattn.backends.bare import run_bare
    from evoattn.correctness.cases import proof_of
    from evoattn.correctness.validate import output_layouts

    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    config = KernelConfig(job["family"], job["params"])
    compiled = CompiledKernel((folder / "kernel.cubin").read_bytes(), "", CompileInfo())
    kernel = BuiltKernel(registry.lookup(config.family), config, GpuSpec(**job["gpu"]), compiled)
    proof = proof_of(whole := AttentionProblem(**job["problem"]))
    cases = proof.device_cases(whole)
    last = cases[-1:] if job["problem"].get("seqused") else []
    for _, problem, kind in cases[:CASES] + last:
        tensors = proof.make_inputs(problem, 1, "cpu", kind)
        contents = {name: t.as_strided((t.numel(),), (1,)).view(torch.uint8).numpy() for name, t in tensors.items()}
        sizes = {name: layout.nbytes for name, layout in output_layouts(problem).items()} | kernel.workspace(problem)
        contents |= {name: np.zeros(size, np.uint8) for name, size in sizes.items()}
        run_bare(compiled, kernel.launches(problem), contents)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
