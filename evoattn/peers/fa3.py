"""FlashAttention 3 from whichever package holds it: its own build (flash-attention's `hopper` folder), or fa3-fwd, its
forward alone as a wheel.

Both have one Python interface. `num_splits=0` lets FA3 choose how many blocks share a row of queries: the default of
its `flash_attn_func` is 1, which leaves most of the GPU idle in decode, that of its `flash_attn_with_kvcache` is 0.
Where there are blocks enough, 0 chooses 1. Keys in use and pages go to the latter (`cache_seqlens`, `page_table`)."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch

Call = Callable[[], torch.Tensor | tuple[torch.Tensor, ...]]
Prepare = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, Mapping[str, Any]], Call]
"""(q, k, v `[batch, seqlen, heads, head_dim]`, causal, other arguments) → a call that gives O of q's shape, alone or
first. `causal` means causal_lower_right."""
Load = Callable[[str], ModuleType]
"""Imports a module by name. Raises `ImportError` if it is absent, `OSError` if a library in it does not load."""
PACKAGES = {"flash_attn": "flash-attn-3", "fa3_fwd": "fa3-fwd"}
"""Distributions by the stem of their modules, the first choice first."""


class LacksDtype(RuntimeError):
    """What is installed is built without the dtype: the message is one sentence."""


@dataclass(frozen=True)
class Fa3:
    """What was found: `prepare`, and the distribution with its version."""

    prepare: Prepare
    version: str


@cache
def find(dtype: str, load: Load = importlib.import_module) -> Fa3:
    """The first package that takes `dtype`, among those that `load` imports by name.

    Raises `LacksDtype` if one is built without the dtype, and `ImportError` if none is installed and loads."""
    absent, lacking = [], []
    for stem, distribution in PACKAGES.items():
        try:
            interface = load(f"{stem}_interface")
        except (ImportError, OSError) as error:  # OSError: a library built for another torch or CUDA does not load
            absent.append(" ".join(str(error).split())[:140])
            continue
        if dtype == "fp16" and _build_flags(stem, load).get("FLASHATTENTION_DISABLE_FP16"):
            lacking.append(f"{distribution} is built without fp16.")
            continue
        return Fa3(partial(_prepare, interface), f"{distribution} {_installed(distribution)}")
    if lacking:
        raise LacksDtype(lacking[0])
    raise ImportError("; ".join(absent))


def _prepare(
    interface: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, options: Mapping[str, Any]
) -> Call:
    """Lengths of a cache and pages are another function's of it, and packed sequences, `[total, heads, head_dim]`, of a
    third."""
    function = interface.flash_attn_with_kvcache if "cache_seqlens" in options else interface.flash_attn_func
    if "cu_seqlens_q" in options:
        function = interface.flash_attn_varlen_func
    return partial(function, q, k, v, causal=causal, num_splits=0, **options)


def _build_flags(stem: str, load: Load) -> dict[str, bool]:
    """What FA3's setup.py wrote down of the build; builds before it did so have all dtypes."""
    try:
        flags: dict[str, bool] = load(f"{stem}_config").CONFIG["build_flags"]
    except ImportError:
        return {}
    return flags


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"
