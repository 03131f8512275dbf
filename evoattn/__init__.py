"""evoattn: finds the fastest attention kernel for the GPU and the shapes that a user has.

A name of the public face is imported when it is first used: `import evoattn` alone imports nothing else.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "AttentionProblem": "evoattn.model.problem",
    "FailedRun": "evoattn.model.errors",
    "GPUS": "evoattn.model.gpu",
    "NoKernel": "evoattn.ops.runtime",
    "Shapes": "evoattn.ops.shapes",
    "WrongUse": "evoattn.model.errors",
    "attention": "evoattn.ops.attention",
    "attention_paged": "evoattn.ops.paged",
    "attention_varlen": "evoattn.ops.varlen",
    "capture": "evoattn.ops.sdpa",
    "disable": "evoattn.ops.sdpa",
    "enable": "evoattn.ops.sdpa",
    "explain": "evoattn.ops.explain",
    "load": "evoattn.ops.load",
    "sdpa": "evoattn.ops.sdpa",
    "search": "evoattn.search",
    "tune": "evoattn.ops.tune",
    "warmup": "evoattn.ops.explain",
}
"""Public name → the module that defines it; `search` is a package that can be called."""

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(_HOMES[name])
    value = home if home.__name__ == f"{__name__}.{name}" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
