"""What a process needs that compiles, or thinks of configs: no torch. See `evoattn.evaluation.server`."""

import contextlib
import gc
import os
from importlib import import_module

from evoattn.model.timeline import mark

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as in `preloaded_device`, and so is the next
gc.disable()
for name in ("evaluation.compile", "families.render", "samplers.for_problem", "samplers.guided", "samplers.prior"):
    import_module(f"evoattn.{name}")
compiler = import_module("evoattn.backends.compiler")
with contextlib.suppress(OSError):  # without NVRTC the search ends with a sentence
    compiler.version()  # loads NVRTC
compiler.include_options()
gc.enable()
gc.collect()
gc.freeze()
mark("the server of compile workers: all is imported")
