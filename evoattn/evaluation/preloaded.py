"""What worker processes need and takes long to import. The process that they are forked from imports this module.

Nothing here starts CUDA: a forked process could not use it any more.
"""

import gc
from importlib import import_module

from evoattn.model.timeline import mark

mark("server: begins to import")
import_module("torch")
mark("server: torch is imported")
for name in ("backends.cuda", "evaluation.device", "evaluation.evaluate"):
    import_module(f"evoattn.{name}")
compiler = import_module("evoattn.backends.compiler")
compiler.version()  # loads NVRTC
compiler.include_options()
gc.collect()
gc.freeze()  # what lives now lives on: no worker's collector looks at it, so that its memory stays shared
mark("server: all is imported")
