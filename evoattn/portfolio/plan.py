"""A campaign's plan: its problems and what is to be tried first on each, compiled on a machine without a GPU."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from evoattn.backends.compiler import CompileError, compile_source
from evoattn.backends.kernel_files import KernelFiles
from evoattn.engine.groups import Group
from evoattn.engine.planned import Planned
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate, CompiledKernel
from evoattn.portfolio.campaign import plain_families
from evoattn.portfolio.climbing import ClimbingBreeder

PLAN, KERNELS = "plan.json", "kernels"
"""Of a plan's folder: the file, and the folder of machine code."""


def make(groups: Iterable[Group], gpu: GpuSpec, seed: int = 0) -> list[Planned]:
    """What a breeder proposes first for each problem (`ClimbingBreeder.steps`): the first of every problem, then the
    second, and so on; of equal configs of a group the first alone."""
    rows = []
    for group in groups:
        breeder = ClimbingBreeder(group, gpu, seed)
        for target in range(len(group.problems)):
            steps = breeder.steps(target)
            rows.append([Planned(group, config.family, config.params, target, origin) for config, origin in steps])
    found = dict[tuple[str, str], Planned]()
    for turn in zip_longest(*rows):
        for one in filter(None, turn):
            found.setdefault((one.group.name, one.kernel().id), one)
    return list(found.values())


def compile_ahead(
    planned: Iterator[Planned], files: KernelFiles, gpu: GpuSpec, seconds: float, jobs: int
) -> Iterator[Planned]:
    """Compile what is planned into `files`, in its order, until `seconds` are over and `jobs` processes have ended what
    they had begun. Yields what has machine code, as it is ready; what does not compile is left out."""
    end = time.monotonic() + seconds
    running: dict[Future[CompiledKernel | None], tuple[Planned, Candidate]] = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        while True:
            while len(running) < 2 * jobs and time.monotonic() < end and (one := next(planned, None)):
                candidate = one.candidate(gpu)
                if files.has(candidate):
                    yield one
                else:
                    running[pool.submit(_compiled, candidate)] = one, candidate
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                one, candidate = running.pop(done)
                if compiled := done.result():
                    files.put(candidate, compiled)
                    yield one


def _compiled(candidate: Candidate) -> CompiledKernel | None:
    try:
        return replace(compile_source(candidate.source, candidate.arch), ptx="")  # nothing on the GPU's side reads it
    except CompileError:
        return None


def save(path: Path, planned: Iterable[Planned]) -> None:
    """The groups' problems, and the kernels in their order."""
    planned = list(planned)
    groups = {one.group.name: [problem.to_dict() for problem in one.group.problems] for one in planned}
    kernels = [[one.group.name, one.family, one.params, one.target, one.origin] for one in planned]
    path.write_text(json.dumps({"groups": groups, "kernels": kernels}), encoding="utf-8")


def load(path: Path) -> tuple[list[Group], list[Planned]]:
    """What `save` wrote. A group has a share of the time by its number of problems. Raises `OSError`."""
    found = json.loads(path.read_text(encoding="utf-8"))
    groups = {}
    for name, rows in found["groups"].items():
        problems = [AttentionProblem(**row) for row in rows]
        groups[name] = Group(name, problems, plain_families(name), len(problems))
    return list(groups.values()), [Planned(groups[name], *words) for name, *words in found["kernels"]]
