"""Kernels that are checked on this machine, once. Reading the record of that imports nothing that a check needs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from evoattn.backends.cache_folder import mark_used, write_whole
from evoattn.model.space import KernelConfig
from evoattn.ops.choice import Choice
from evoattn.ops.cubins import Cubin
from evoattn.ops.kernel import LoadedKernel
from evoattn.ops.platform import Platform


def _place(cubin: Cubin, machine: str, folder: Path) -> Path:
    return folder / f"{hashlib.sha256(f'{cubin.digest} {machine}'.encode()).hexdigest()}.check"


def recorded(cubin: Cubin, machine: str, folder: Path) -> str | None:
    """What the check of this machine code on this GPU and driver said: empty if right, None if there was none."""
    try:
        path = _place(cubin, machine, folder)
        row = json.loads(path.read_text(encoding="utf-8"))
        mark_used(path)
        return str(row["wrong"]) if row["cubin"] == cubin.digest and row["machine"] == machine else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def record(cubin: Cubin, machine: str, folder: Path, config: KernelConfig, wrong: str) -> None:
    """Write down what the check of this machine code on this GPU and driver said."""
    row = {"cubin": cubin.digest, "machine": machine, "config": config.describe(), "wrong": wrong}
    write_whole(_place(cubin, machine, folder), json.dumps(row).encode())


def load(choice: Choice, cubin: Cubin, index: int, platform: Platform, folder: Path) -> LoadedKernel:
    """The chosen kernel on a device. Its `failure` is set if it answered wrong there, now or at an earlier check.

    Raises what loading and checking raise, and keeps no record then: it may go well in the next process.
    """
    family, problem, config = choice.family, choice.problem.packed, choice.config
    kernel, machine = LoadedKernel(cubin.code, platform, index), platform.identity(index)
    wrong = recorded(cubin, machine, folder)
    if wrong is None:
        from evoattn.ops.proof import prove  # and with it the reference, which a checked kernel does not need

        wrong = prove(family, problem, config, choice.gpu, cubin, kernel, platform)
        record(cubin, machine, folder, config, wrong)
    if wrong:
        kernel.failure = f"{family.name} {config.describe()} failed its check on this machine: {wrong.rstrip('.')}"
    return kernel
