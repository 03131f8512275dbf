"""The check of a kernel at its first use on a machine, once. Reading the record of that imports nothing that a check
needs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from evoattn.backends.base import ContextLost
from evoattn.backends.cache_folder import mark_used, read_own, write_whole
from evoattn.model.space import KernelConfig
from evoattn.ops.choice import Choice
from evoattn.ops.cubins import Cubin
from evoattn.ops.kernel import KernelBackend, LoadedKernel
from evoattn.ops.platform import Platform

CASES = ("ragged", "ragged, strided, Sq > Sk")
"""Of the small cases with which a search checks every candidate: two ragged shapes, both layouts, grouped heads."""
SEED = 20


def _place(cubin: Cubin, machine: str, folder: Path) -> Path:
    words = f"{cubin.recipe} {cubin.digest} {machine}"
    return folder / f"{hashlib.sha256(words.encode()).hexdigest()}.check"


def recorded(cubin: Cubin, machine: str, folder: Path) -> str | None:
    """What the check of this machine code on this GPU and driver said: empty if right, None if there was none.

    A record counts for the recipe that it was written for alone: the same code may have been asked for by another.
    """
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


def record(cubin: Cubin, machine: str, folder: Path, config: KernelConfig, wrong: str) -> None:
    """Write down what the check of this machine code on this GPU and driver said."""
    of = {"recipe": cubin.recipe, "cubin": cubin.digest, "machine": machine}
    row = of | {"config": config.describe(), "wrong": wrong}
    write_whole(_place(cubin, machine, folder), json.dumps(row).encode())


def load(choice: Choice, cubin: Cubin, index: int, platform: Platform, folder: Path) -> LoadedKernel:
    """The chosen kernel on a device. Its `failure` is set if it answered wrong there, now or at an earlier check.

    Raises what loading and checking raise, and keeps no record then: it may go well in the next process.
    """
    family, config = choice.family, choice.config
    kernel, machine = LoadedKernel(cubin.code, platform, index), platform.identity(index)
    wrong = recorded(cubin, machine, folder)
    if wrong is None:
        wrong = prove(choice, cubin, kernel, platform)
        record(cubin, machine, folder, config, wrong)
    if wrong:
        kernel.failure = f"{family.name} {config.describe()} failed its check on this machine: {wrong.rstrip('.')}"
    return kernel


def prove(choice: Choice, cubin: Cubin, kernel: LoadedKernel, platform: Platform) -> str:
    """Empty if the kernel answers right on this machine, else one sentence.

    Two small problems of the same head_dim, dtype and mask, over poisoned outputs between guard bands, judged by
    flash-attention's rule (`correctness.reference.Answer`); the second is run twice and compared bit for bit. A kernel
    that loses the device's context is not right either. Waits for the device.

    Raises what says nothing of the kernel: `LaunchError` where the driver refuses something, torch's errors where there
    is no memory, `ContextLost` where the context was lost before.
    """
    from evoattn.correctness.cases import make_case, proof_of  # what a kernel with a record does not need
    from evoattn.correctness.validate import check
    from evoattn.families.built import BuiltKernel
    from evoattn.model.records import CompiledKernel, CompileInfo

    backend = KernelBackend(kernel, platform)
    built = BuiltKernel(choice.family, choice.config, choice.gpu, CompiledKernel(cubin.code, "", CompileInfo()))
    platform.synchronize(kernel.index)  # a fault in what was enqueued before is not this kernel's
    try:
        with platform.guard(kernel.index), torch.no_grad(), torch.autocast(platform.device_type, enabled=False):
            problem = choice.problem.as_searched
            for name, shape, kind in proof_of(problem).device_cases(problem):
                if name in CASES:
                    case = make_case(name, shape, SEED, backend.device, kind, double=True)
                    result = check(backend, built, case, repeat=name == CASES[-1])
                    if not result.passed:
                        return result.reason
    except ContextLost as error:
        return str(error)
    return ""
