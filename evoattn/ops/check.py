"""The check of a kernel at its first use on a machine: reading its record imports nothing that a check needs."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from evoattn.backends.base import ContextLost
from evoattn.backends.cache_folder import mark_used, read_own, write_whole
from evoattn.backends.cubins import Cubin
from evoattn.backends.loaded import KernelBackend, LoadedKernel
from evoattn.backends.platform import Platform
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.ops.choice import Choice
from evoattn.portfolio.pick import of_its_code

if TYPE_CHECKING:
    from evoattn.correctness.cases import Case

CASES = (
    *("ragged", "ragged, strided", "ragged, strided, Sq > Sk"),
    *("new keys, the first ones", "new keys, strided"),
)
"""Of the small cases with which a search checks every candidate: ragged shapes in both layouts, grouped heads, and new
keys where a kernel writes them."""
SEED = 20
CHECKED = f"{', '.join(CASES)}; with most splits and with none"
"""What a check runs: a record of one that ran less does not count."""


def _place(cubin: Cubin, machine: str, folder: Path) -> Path:
    words = f"{cubin.recipe} {cubin.digest} {machine} {CHECKED}"
    return folder / f"{hashlib.sha256(words.encode()).hexdigest()}.check"


def recorded_check(cubin: Cubin, machine: str, folder: Path) -> str | None:
    """What the check of this machine code on this GPU and driver said: empty if right, None if there was none.

    A record counts for the recipe that it was written for alone: the same code may have been asked for by another."""
    path = _place(cubin, machine, folder)
    data = read_own(path)
    if data is None:
        return None
    try:
        row = json.loads(data)
        of = row["recipe"], row["cubin"], row["machine"]
        wrong = str(row["wrong"]) if of == (cubin.recipe, cubin.digest, machine) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    mark_used(path)
    return wrong


def record_check(cubin: Cubin, machine: str, folder: Path, config: KernelConfig, wrong: str) -> None:
    """Write down what the check of this machine code on this GPU and driver said."""
    of = {"recipe": cubin.recipe, "cubin": cubin.digest, "machine": machine}
    row = of | {"config": config.describe(), "wrong": wrong}
    write_whole(_place(cubin, machine, folder), json.dumps(row).encode())


def load_checked(
    choice: Choice, cubin: Cubin, index: int, platform: Platform, folder: Path, cases: Callable[[], list[Case]]
) -> LoadedKernel:
    """The chosen kernel on a device. Its `failure` is set if it answered wrong there, now or at an earlier check.
    `cases` are `cases_of` it, asked for where there was no check.

    Raises what loading and checking raise, and keeps no record then: it may go well in the next process."""
    family, config = choice.family, choice.config
    kernel, machine = LoadedKernel(cubin.code, platform, index), platform.identity(index)
    wrong = recorded_check(cubin, machine, folder)
    if wrong is None:
        wrong = prove(choice, cubin, kernel, platform, cases())
        record_check(cubin, machine, folder, config, wrong)
    if wrong:
        kernel.failure = f"{family.name} {config.describe()} failed its check on this machine: {wrong.rstrip('.')}"
    return kernel


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """A block of a check, whatever the caller has set. The number of CPU threads stays the caller's: torch gives each
    thread of the process the number that was set when it first computes."""
    with torch.device("cpu"), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def cases_of(choice: Choice) -> list[Case]:
    """Two small problems of the chosen kernel's head_dim, dtype and mask, with inputs and exact answers, on the CPU: a
    device takes most of a second for what it computed nothing of yet, and graphs may be captured there. Never none."""
    return _cases_of(choice.problem.as_searched)


@lru_cache(1)
def _cases_of(problem: AttentionProblem) -> list[Case]:
    """Those of the last problem are kept: its kernels are raced."""
    from evoattn.correctness.cases import make_case, proof_of  # what a kernel with a record does not need

    with _apart():
        known = proof_of(problem).device_cases(problem)
        wanted = [case for case in known if case[0] in CASES] or known[:2]
        return [make_case(name, shape, SEED, "cpu", kind, double=True) for name, shape, kind in wanted]


def prove(choice: Choice, cubin: Cubin, kernel: LoadedKernel, platform: Platform, cases: Sequence[Case]) -> str:
    """Empty if the kernel answers right on this machine, else one sentence.

    `cases_of` it, with and without splits, over poisoned outputs between guard bands, judged by flash-attention's rule
    (`correctness.reference.Answer`); the last is run twice and compared bit for bit. A kernel that loses the device's
    context is not right either. Waits for the device.

    Raises what says nothing of the kernel: `LaunchError` where the driver refuses something, torch's errors where there
    is no memory, `ContextLost` where the context was lost before."""
    from evoattn.correctness.validate import check
    from evoattn.families.built import BuiltKernel
    from evoattn.model.records import CompiledKernel, CompileInfo

    backend, code = KernelBackend(kernel, platform), CompiledKernel(cubin.code, "", CompileInfo())
    ways = [BuiltKernel(choice.family, config, choice.gpu, code) for config in of_its_code(choice.config)]
    platform.synchronize(kernel.index)  # a fault in what was enqueued before is not this kernel's
    try:
        with _apart():
            for case, built in product(cases, ways):
                result = check(backend, built, case, repeat=case is cases[-1])
                if not result.passed:
                    return result.reason
    except ContextLost as error:
        return str(error)
    return ""
