"""Versions of everything that can change a result, for the record."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

from evoattn import __version__, compiler
from evoattn.gpu import DetectedDevice
from evoattn.paths import ROOT

_PACKAGES = ("torch", "numpy", "optuna", "sqlalchemy", "jinja2")


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _commit() -> str:
    """The checkout's commit, with `+` behind it if files differ from it; `unknown` outside a checkout."""
    def git(*words: str) -> str:
        done = subprocess.run(("git", "-C", ROOT, *words), capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def collect(device: DetectedDevice | None) -> dict[str, str]:
    """Names and versions, JSON-ready: evoattn and its commit, Python, packages, the compiler, and the device with its driver if one is used."""
    found = {"evoattn": __version__, "commit": _commit(), "python": platform.python_version(), "compiler": compiler.version()}
    found |= {package: _installed(package) for package in _PACKAGES}
    found["cupy"] = _installed("cupy-cuda13x")
    if device:
        found |= {"device": device.product, "driver": f"CUDA {device.driver}"}
    return found
