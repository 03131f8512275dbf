"""What a GPU worker needs and takes long to import: torch.

Nothing here starts CUDA: a process that is forked after it could not use it any more.
"""

import gc
import os
import threading
from contextlib import suppress
from importlib import import_module

from evoattn.evaluation.torch_libraries import load_libraries
from evoattn.model.timeline import mark


def import_others() -> None:
    """What takes long beside torch: while one thread waits for the disk the other goes on."""
    for name in ("evoattn.backends.with_cupy", "evoattn.families.registry", "evoattn.timing.clocks", "pynvml"):
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
