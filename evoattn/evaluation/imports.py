"""What worker processes import, which takes seconds, and how that is made short: torch's shared libraries are loaded
while Python imports something else, and no garbage is looked for meanwhile.

Nothing here starts CUDA: a process that is forked after it could not use it any more."""

import ctypes
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from evoattn.model.timeline import mark

LIBRARIES = ("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL), ("libtorch_python.so", os.RTLD_NOW)
"""Of torch, and how it loads them: the former with all of CUDA's."""


def import_for_device() -> None:
    """What a GPU worker needs: torch above all."""
    with _at_best():
        loading, importing = threading.Thread(target=load_libraries), threading.Thread(target=_import_beside_torch)
        loading.start()
        import_module("numpy")  # which torch and the others need
        importing.start()
        loading.join()
        import_module("torch")
        mark("torch is imported")
        importing.join()
        for name in ("backends.cuda", "evaluation.device"):
            import_module(f"evoattn.{name}")


def import_for_all() -> None:
    """What any worker needs, in the process that they are forked from."""
    import_for_device()
    import_module("evoattn.evaluation.evaluate")
    _load_compiler()
    _freeze()


def import_for_compiling() -> None:
    """What a worker needs that compiles, or thinks of configs, in the process that these are forked from: no torch."""
    with _at_best():
        for name in ("evaluation.compile", "families.render", "samplers.for_problem", "samplers.guided"):
            import_module(f"evoattn.{name}")
        import_module("evoattn.samplers.for_problem")
        _load_compiler()
    _freeze()


@contextmanager
def _at_best() -> Iterator[None]:
    """For imports. NumPy's own would start a thread for each core, which spins for a while; no worker multiplies on the
    CPU in earnest. The collector would look at all that is imported again and again, and find nothing: a seventh of
    torch's import."""
    mark("the slow imports begin")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()
    yield
    gc.enable()
    mark("the slow imports end")


def _import_beside_torch() -> None:
    """What takes long beside it: while one thread waits for the disk the other goes on."""
    for name in ("evoattn.backends.with_cupy", "evoattn.families.registry", "evoattn.timing.clocks", "pynvml"):
        with suppress(ImportError):  # said where it is needed
            import_module(name)
    mark("all but torch is imported")


def _load_compiler() -> None:
    compiler = import_module("evoattn.backends.compiler")
    with suppress(OSError):  # without NVRTC the search ends with a sentence
        compiler.version()  # loads NVRTC
    compiler.include_options()


def _freeze() -> None:
    """What lives now lives on: no worker's collector looks at it, so that its memory stays shared."""
    gc.collect()
    gc.freeze()


def load_libraries() -> None:
    """Load torch's libraries, which takes some 0.4 s, without Python's lock: by `dlopen` itself, as `ctypes.CDLL`
    holds it. What fails here fails again when torch is imported, and is said then."""
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
        f"Python compiles {spec.name} anew at each start here, as its bytecode is not kept: seconds each time. "
        f"`python -m compileall -q {Path(spec.origin).parent}` ends that."
    )
