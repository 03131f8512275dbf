"""What a GPU worker needs and takes long to import: torch.

Nothing here starts CUDA: a process that is forked after it could not use it any more.
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


def import_others() -> None:
    """What takes long beside torch: while one thread waits for the disk the other goes on."""
    for name in ("cupy", "evoattn.families.registry", "evoattn.timing.clocks", "pynvml"):
        with suppress(ImportError):  # said where it is needed
            import_module(name)
    mark("all but torch is imported")


mark("the slow imports begin")
# NumPy's own would start a thread for each core, which spins for a while; no worker multiplies on the CPU in earnest.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
gc.disable()  # it would look at all that is imported again and again, and find nothing: a seventh of torch's import
loading, importing = threading.Thread(target=load_libraries), threading.Thread(target=import_others)
loading.start()
import_module("numpy")  # which torch and the others need
importing.start()
loading.join()
import_module("torch")
mark("torch is imported")
importing.join()
for name in ("backends.cuda", "evaluation.device"):
    import_module(f"evoattn.{name}")
gc.enable()
mark("the slow imports end")
