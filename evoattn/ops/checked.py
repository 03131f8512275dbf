"""Records of kernels that were checked on this machine. Reading one imports nothing that a check needs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from evoattn.backends.cache_folder import mark_used, write_whole
from evoattn.model.space import KernelConfig
from evoattn.ops.cubins import Cubin


def _place(cubin: Cubin, machine: str, folder: Path) -> Path:
    return folder / f"{hashlib.sha256(f'{cubin.digest} {machine}'.encode()).hexdigest()}.check"


def recorded(cubin: Cubin, machine: str, folder: Path) -> str | None:
    """What the check of this machine code on this GPU and driver said: empty if right, None if there was none."""
    try:
        path = _place(cubin, machine, folder)
        row = json.loads(path.read_text())
        mark_used(path)
        return str(row["wrong"]) if row["cubin"] == cubin.digest and row["machine"] == machine else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def record(cubin: Cubin, machine: str, folder: Path, config: KernelConfig, wrong: str) -> None:
    """Write down what the check of this machine code on this GPU and driver said."""
    row = {"cubin": cubin.digest, "machine": machine, "config": config.describe(), "wrong": wrong}
    write_whole(_place(cubin, machine, folder), json.dumps(row).encode())
