"""What decides how fast the kernel of a config is beside the card: templates, NVRTC, the driver."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path

from evoattn.model.paths import TEMPLATES

DRIVER_FILE = Path("/proc/driver/nvidia/version")


def header_folders(name: str, folder: Path = TEMPLATES) -> tuple[str, ...]:
    """Where the headers of a family lie: what all share, its own, and those of a family whose parts it is made of."""
    included = re.findall(r'#include "(\w+)/', (folder / f"{name}.cu.j2").read_text(encoding="utf-8"))
    return tuple(sorted({"device", name, *included}))


@cache
def template_digest(name: str, folder: Path = TEMPLATES) -> str:
    """sha256 over a family's template and all that it may include: with the constants, all that its sources have."""
    walks = (os.walk(folder / own) for own in header_folders(name, folder))
    included = [os.path.join(at, one) for walk in walks for at, _, found in walk for one in found]
    included = [path for path in included if path.endswith((".cuh", ".j2"))]
    included.sort(key=lambda path: path.split(os.sep))
    files = (folder / f"{name}.cu.j2", *folder.glob("problem.j2"), *map(Path, included))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


@cache
def nvrtc_version() -> str:
    """The version of NVRTC's package, which costs no import of CuPy; NVRTC's own word where it is no package."""
    try:
        return package_version("nvidia-cuda-nvrtc")
    except PackageNotFoundError:
        from evoattn.backends import compiler

        return compiler.version()


@cache
def driver_version() -> str:
    """The kernel module's version, e.g. `580.95.05`; the CUDA version of the driver where the file is not there, and
    nothing without a driver."""
    with contextlib.suppress(OSError, IndexError):
        words = DRIVER_FILE.read_text(encoding="utf-8").splitlines()[0].split()
        return next((word for word in words if word[:1].isdigit() and "." in word), words[-1])
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return ""
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
