"""evoattn: finds the fastest attention kernel for the GPU and the shapes that a user has.

A name of the public face is imported when it is first used: `import evoattn` alone imports nothing else."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what type checkers and editors see of the names below
    from evoattn import flash_attn as flash_attn
    from evoattn.model.errors import FailedRun as FailedRun
    from evoattn.model.errors import WrongUse as WrongUse
    from evoattn.model.gpu import GPUS as GPUS
    from evoattn.model.problem import AttentionProblem as AttentionProblem
    from evoattn.ops.arguments import Score as Score
    from evoattn.ops.attention import attention as attention
    from evoattn.ops.attention import attention_mixed as attention_mixed
    from evoattn.ops.attention import attention_paged as attention_paged
    from evoattn.ops.attention import attention_varlen as attention_varlen
    from evoattn.ops.attention_fp8 import attention_fp8 as attention_fp8
    from evoattn.ops.beside import quantize_kv as quantize_kv
    from evoattn.ops.explain import explain as explain
    from evoattn.ops.explain import load as load
    from evoattn.ops.explain import settle as settle
    from evoattn.ops.explain import warmup as warmup
    from evoattn.ops.flex import create_block_mask as create_block_mask
    from evoattn.ops.flex import flex as flex
    from evoattn.ops.flex import flex_attention as flex_attention
    from evoattn.ops.sdpa import capture as capture
    from evoattn.ops.sdpa import disable as disable
    from evoattn.ops.sdpa import enable as enable
    from evoattn.ops.sdpa import sdpa as sdpa
    from evoattn.ops.shapes import Shapes as Shapes
    from evoattn.ops.torch_answer import NoKernel as NoKernel
    from evoattn.ops.tune import tune as tune
    from evoattn.search.api import search as search

__version__ = "0.1.0"

_HOMES = {
    "AttentionProblem": "evoattn.model.problem",
    "FailedRun": "evoattn.model.errors",
    "GPUS": "evoattn.model.gpu",
    "NoKernel": "evoattn.ops.torch_answer",
    "Score": "evoattn.ops.arguments",
    "Shapes": "evoattn.ops.shapes",
    "WrongUse": "evoattn.model.errors",
    "attention": "evoattn.ops.attention",
    "attention_fp8": "evoattn.ops.attention_fp8",
    "attention_mixed": "evoattn.ops.attention",
    "attention_paged": "evoattn.ops.attention",
    "attention_varlen": "evoattn.ops.attention",
    "capture": "evoattn.ops.sdpa",
    "create_block_mask": "evoattn.ops.flex",
    "disable": "evoattn.ops.sdpa",
    "enable": "evoattn.ops.sdpa",
    "explain": "evoattn.ops.explain",
    "flash_attn": "evoattn.flash_attn",
    "flex": "evoattn.ops.flex",
    "flex_attention": "evoattn.ops.flex",
    "load": "evoattn.ops.explain",
    "quantize_kv": "evoattn.ops.beside",
    "sdpa": "evoattn.ops.sdpa",
    "search": "evoattn.search",
    "settle": "evoattn.ops.explain",
    "tune": "evoattn.ops.tune",
    "warmup": "evoattn.ops.explain",
}
"""Public name → the module that defines it; `search` is a package that can be called."""

__all__ = ["__version__", *_HOMES]


if not TYPE_CHECKING:  # so that a name that is not there is an error

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = import_module(_HOMES[name])
        value = home if home.__name__ == f"{__name__}.{name}" else getattr(home, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
