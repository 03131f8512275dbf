"""What any worker process needs and takes long to import. The process that they are forked from imports this module."""

import contextlib
import gc
from importlib import import_module

for name in ("evaluation.preloaded_device", "evaluation.evaluate"):
    import_module(f"evoattn.{name}")
compiler = import_module("evoattn.backends.compiler")
with contextlib.suppress(OSError):  # without NVRTC the search ends with a sentence
    compiler.version()  # loads NVRTC
compiler.include_options()
gc.collect()
gc.freeze()  # what lives now lives on: no worker's collector looks at it, so that its memory stays shared
