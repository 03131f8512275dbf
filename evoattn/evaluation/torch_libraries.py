"""What makes torch's import long: its shared libraries, which are loaded while Python imports something else, and
bytecode that is not kept."""

from __future__ import annotations

import ctypes
import os
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from evoattn.model.timeline import mark

LIBRARIES = ("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL), ("libtorch_python.so", os.RTLD_NOW)
"""Of torch, and how it loads them: the former with all of CUDA's."""


def load_libraries() -> None:
    """Load torch's libraries, which takes some 0.4 s, without Python's lock: by `dlopen` itself,
    as `ctypes.CDLL` holds it. What fails here fails again when torch is imported, and is said then."""
    torch, dlopen = find_spec("torch"), getattr(ctypes.CDLL(None), "dlopen", None)
    if torch is None or torch.origin is None or dlopen is None:
        return
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for name, how in LIBRARIES:
        dlopen(str(Path(torch.origin).parent / "lib" / name).encode(), how)
    mark("torch's libraries are loaded")


def why_slow(spec: ModuleSpec | None) -> str:
    """A sentence where each process that imports the package of `spec`, torch's, compiles its Python anew; else empty.
    800 files took 3 s on an H100's host. `pip install` keeps their bytecode, some images and installers do not."""
    if spec is None or spec.origin is None or spec.cached is None or Path(spec.cached).exists():
        return ""
    return (
        f"no bytecode of {spec.name} is kept here, so that each start takes seconds longer; "
        f"`python -m compileall -q {Path(spec.origin).parent}` writes it."
    )
