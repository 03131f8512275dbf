"""What a process needs that compiles, or thinks of configs: no torch. See `evoattn.evaluation.server`."""

import gc
from importlib import import_module

from evoattn.model.timeline import mark

gc.disable()  # as in `preloaded_device`
for name in ("evaluation.compile", "families.render", "samplers.for_problem", "samplers.guided", "samplers.prior"):
    import_module(f"evoattn.{name}")
compiler = import_module("evoattn.backends.compiler")
compiler.version()  # loads NVRTC
compiler.include_options()
gc.enable()
gc.collect()
gc.freeze()
mark("the server of compile workers: all is imported")
