"""FlashAttention 3 from whichever package holds it: its own build (flash-attention's `hopper` folder), fa3-fwd, or the library in vLLM.

`num_splits=0` everywhere: FA3 then chooses how many blocks share a row of queries. Its `flash_attn_func` defaults to 1, which would leave
most of the GPU idle in decode; its `flash_attn_with_kvcache` and vLLM default to 0. Where there are blocks enough, 0 chooses 1.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], torch.Tensor | tuple[torch.Tensor, ...]]
Prepare = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], Call]
"""(q, k, v `[batch, seqlen, heads, head_dim]`, causal) → a call that gives O of q's shape, alone or first.
`causal` means causal_lower_right."""


@dataclass(frozen=True)
class Fa3:
    """What was found: `prepare`, and what to call it."""

    prepare: Prepare
    version: str


@cache
def find(dtype: str) -> Fa3:
    """The first package that is here and takes `dtype`. Raises `ImportError`, which says why each is none."""
    reasons = []
    for look in (partial(_interface, "flash_attn", "flash-attn-3"), partial(_interface, "fa3_fwd", "fa3-fwd"), _vllm):
        try:
            return look(dtype)
        except (ImportError, OSError) as error:      # OSError: a library built for another torch or CUDA does not load
            reasons.append(" ".join(str(error).split())[:200])
    raise ImportError("; ".join(reasons))


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"


def _interface(stem: str, distribution: str, dtype: str) -> Fa3:
    """A build with FA3's own Python interface; fa3-fwd is one without fp16, under another name."""
    function = importlib.import_module(f"{stem}_interface").flash_attn_func
    try:
        flags = importlib.import_module(f"{stem}_config").CONFIG["build_flags"]
    except ImportError:
        flags = {}
    if dtype == "fp16" and flags.get("FLASHATTENTION_DISABLE_FP16"):
        raise ImportError(f"{distribution} is built without fp16")
    return Fa3(lambda q, k, v, causal: partial(function, q, k, v, causal=causal, num_splits=0), f"{distribution} {_installed(distribution)}")


def _vllm(dtype: str) -> Fa3:
    """The operators of vLLM's library, found by its path: importing vllm takes long, and needs all that vllm needs."""
    spec = find_spec("vllm")
    folders = spec.submodule_search_locations if spec else None
    libraries = [path for folder in folders or () for path in Path(folder, "vllm_flash_attn").glob("_vllm_fa3_C*.so")]
    if not libraries:
        raise ImportError("no vllm with vllm_flash_attn/_vllm_fa3_C*.so")
    torch.ops.load_library(str(libraries[0]))
    return Fa3(prepare_vllm, f"vllm {_installed('vllm')}'s FA3, without its dense kernels")


def prepare_vllm(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
    """See `Prepare`. Raises `RuntimeError` on another GPU than a Hopper one.

    vLLM builds FA3 with `FLASHATTENTION_VARLEN_ONLY` (its flash-attention's CMakeLists.txt): the one tile scheduler in there reads what only
    a call with lengths prepares, so a plain dense call would read address 0. The length of every K and V is given therefore, all of it, and
    the schedule is made once ahead of the calls, as vLLM makes it once for all layers.
    """
    if q.is_cuda and torch.cuda.get_device_capability(q.device)[0] != 9:
        raise RuntimeError("The FA3 inside vLLM runs on Hopper GPUs only.")      # it would end the process (its CHECK_CUDA exits)
    batch, seqlen_q, heads, head_dim = q.shape
    lengths = torch.full((batch,), k.shape[1], dtype=torch.int32, device=q.device)
    both = dict(seqused_k=lengths, is_causal=causal, window_size_left=-1, window_size_right=-1, num_splits=0, sm_margin=0)
    operators = torch.ops._vllm_fa3_C
    schedule = operators.get_scheduler_metadata(**_arguments(operators.get_scheduler_metadata, both | dict(
        batch_size=batch, max_seqlen_q=seqlen_q, max_seqlen_k=k.shape[1], num_heads=heads, num_heads_k=k.shape[2], headdim=head_dim,
        headdim_v=v.shape[3], qkv_dtype=q.dtype, max_seqlen_k_new=0, has_softcap=False)))
    arguments = _arguments(operators.fwd, both | dict(
        q=q, k=k, v=v, softmax_scale=head_dim**-0.5, softcap=0.0, is_rotary_interleaved=True, scheduler_metadata=schedule, cp_world_size=1,
        cp_rank=0))
    return lambda: operators.fwd(**arguments)[0]


def _arguments(operator: Any, values: dict[str, Any]) -> dict[str, Any]:
    """`values` for the operator's own arguments, None for those that it may do without: vLLM's versions differ in some."""
    return {a.name: values.get(a.name) for a in operator.default._schema.arguments}
