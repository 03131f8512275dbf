"""Versions of everything that can change a result, for the record."""

import platform
import re
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from evoattn import __version__
from evoattn.backends import compiler
from evoattn.model.gpu import DetectedDevice
from evoattn.model.paths import ROOT

_PACKAGES = ("torch", "numpy", "optuna", "sqlalchemy", "jinja2")


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


@cache
def _commit() -> str:
    """The checkout's commit, with `+` behind it if files differ from it; `unknown` outside a checkout.

    An installation may lie within another project's repository, whose commit says nothing of evoattn."""
    if not (ROOT / ".git").exists():
        return "unknown"

    def git(*words: str) -> str:
        done = subprocess.run(("git", "-C", ROOT, *words), capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (
            "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _kernel_driver() -> str:
    """The version of the loaded kernel module, e.g. `580.65.06`; `unknown` where a container hides it."""
    try:
        found = re.search(r"Kernel Module\D*([\d.]+)", Path("/proc/driver/nvidia/version").read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found[1] if found else "unknown"


def differences(then: dict[str, str], now: dict[str, str]) -> list[str]:
    """What differs between two results of `collect`, a phrase per field, in the order of `now`."""
    names = dict.fromkeys((*now, *then))
    return [
        f"{name} {then.get(name, 'absent')}, here {now.get(name, 'absent')}"
        for name in names
        if then.get(name) != now.get(name)
    ]


def collect(device: DetectedDevice | None) -> dict[str, str]:
    """Names and versions, JSON-ready: evoattn and its commit (`+` behind it: files differ from it), Python, packages,
    the compiler, host and system, and the device with its driver if one is used.

    Together with a trial's own record, which holds its inputs' seed, it says what ran."""
    found = {
        "evoattn": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "compiler": compiler.version(),
    }
    found |= {package: _installed(package) for package in _PACKAGES}
    found["cupy"] = _installed("cupy-cuda13x")
    found |= {"host": platform.node(), "system": platform.platform()}
    if device:
        found |= {"device": device.product, "driver": f"CUDA {device.driver}", "kernel driver": _kernel_driver()}
        if device.uuid:
            found["uuid"] = device.uuid
    return found
