"""What decides how fast the kernel of a config is beside the card: templates, NVRTC, the driver."""

import contextlib
import ctypes
import hashlib
import re
from functools import cache
from glob import glob
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path

from evoattn.model.paths import TEMPLATES

DRIVER_FILE = Path("/proc/driver/nvidia/version")


_INCLUDED, _CONSTANT = re.compile(rb'include "(.+)"'), re.compile(rb"{{.*?}}")
"""Of C++ and of Jinja; a part of a header's name that a constant says."""


@cache
def template_digest(name: str, folder: Path = TEMPLATES) -> str:
    """sha256 over a family's template and all that it may include: with the constants, all that its sources have. What
    other families alone are made of does not count, so that what was measured outlasts changes of these."""
    texts, left = dict[str, bytes](), [f"{name}.cu.j2"]
    while left:
        if (file := left.pop()) in texts:
            continue
        with open(f"{folder}/{file}", "rb") as opened:  # Path takes longer, and there are 60
            texts[file] = opened.read()
        for included in _INCLUDED.findall(texts[file]):
            names = _CONSTANT.sub(b"*", included).decode()
            left += (found := glob(names, root_dir=folder) if "*" in names else [names])
            if not found:
                raise FileNotFoundError(f"{file} includes {names}, which is not there.")
    in_order = sorted(texts, key=lambda file: file.split("/"))  # of paths, by which calibrations have digests
    return hashlib.sha256(b"\0".join(texts[file] for file in in_order)).hexdigest()


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
