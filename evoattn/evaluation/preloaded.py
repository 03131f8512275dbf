"""What worker processes need and takes long to import. The process that they are forked from imports this module.

Nothing here starts CUDA: a forked process could not use it any more.
"""

import ctypes
import gc
import os
import threading
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from evoattn.model.timeline import mark

LIBRARIES = ("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL), ("libtorch_python.so", os.RTLD_NOW)
"""Of torch, and how it loads them: the former with all of CUDA's."""


def load_libraries() -> None:
    """Load torch's libraries, which takes half as long as to import torch, without Python's lock: by `dlopen` itself,
    as `ctypes.CDLL` holds it. What fails here fails again when torch is imported, and is said then."""
    torch, dlopen = find_spec("torch"), getattr(ctypes.CDLL(None), "dlopen", None)
    if torch is None or torch.origin is None or dlopen is None:
        return
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for name, how in LIBRARIES:
        dlopen(str(Path(torch.origin).parent / "lib" / name).encode(), how)
    mark("torch's libraries are loaded")


mark("the slow imports begin")
gc.disable()  # it would look at all that is imported again and again, and find nothing: a seventh of torch's import
loading = threading.Thread(target=load_libraries)
loading.start()
for name in ("numpy", "cupy", "evoattn.families.registry", "evoattn.timing.clocks"):
    import_module(name)
with suppress(ImportError):
    import_module("pynvml")
mark("all but torch is imported")
loading.join()
import_module("torch")
mark("torch is imported")
for name in ("backends.cuda", "evaluation.device", "evaluation.evaluate"):
    import_module(f"evoattn.{name}")
compiler = import_module("evoattn.backends.compiler")
compiler.version()  # loads NVRTC
compiler.include_options()
gc.enable()
gc.collect()
gc.freeze()  # what lives now lives on: no worker's collector looks at it, so that its memory stays shared
mark("the slow imports end")
