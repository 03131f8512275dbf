"""Decoding with a static cache of transformers: how many of its places are filled is a tensor on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evoattn.model.mask import CAUSAL_LOWER_RIGHT, FULL
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.ops import current, varied
from evoattn.ops.asked import DTYPES
from evoattn.ops.choice import choose
from evoattn.ops.explain import strided
from evoattn.ops.plan import Refusal
from evoattn.ops.variant import Variant

MOST_QUERIES = 8
"""Of a step; more are a prompt, for which a mask tensor costs little."""
_served: dict[tuple[object, ...], bool] = {}
"""Whether a kernel serves steps of a model, by all that decides it."""


def kernel_serves(config: Any, batch: int, queries: int, places: int, dtype: object, device: torch.device) -> bool:
    """Whether a kernel would run for a step of a model of this config: without one a mask tensor, made once for all
    layers, is cheaper."""
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES or not heads or not hidden:
        return False
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    # A range makes numbers of symbols: a trace is of these sizes, and another one is made for others.
    shape = len(range(batch)), heads, kv_heads, len(range(queries)), len(range(places)), head_dim
    served: bool = _serves(*shape, DTYPES[dtype], device.type, device.index or 0)
    return served


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _serves(
    batch: int, heads: int, kv_heads: int, queries: int, places: int, head_dim: int, dtype: str, kind: str, index: int
) -> bool:
    """As `kernel_serves`; of a trace a constant."""
    runtime = current.runtime()
    if runtime.platform is None or kind != runtime.device_type:
        return False
    shape = batch, heads, kv_heads, queries, places, head_dim
    asked = runtime.pick, runtime.estimated, *shape, dtype, index
    if asked not in _served:
        gpu = runtime.platform.spec(index)
        mask = CAUSAL_LOWER_RIGHT if queries > 1 else FULL
        try:
            problem = AttentionProblem(*shape, dtype, mask, seqused=f"0:{places}")
        except ProblemError:
            gpu = None
        _served[asked] = gpu is not None and not isinstance(
            choose(strided(problem), gpu, runtime.pick, runtime.estimated), Refusal
        )
    return _served[asked]


def filled_places(batch: int, queries: int, offset: Tensor) -> Tensor:
    """In place of a mask tensor: the keys of each sequence after this step, int32 `[batch, 1, 1, 1]`. Four dimensions,
    as transformers passes such on as they are."""
    return (offset + queries).to(torch.int32).reshape(-1, 1, 1, 1).repeat(batch, 1, 1, 1)


def is_filled_places(mask: Tensor | None) -> bool:
    """Whether a mask is what `filled_places` made."""
    return mask is not None and mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[1:] == (1, 1, 1)


def as_mask(filled: Tensor, queries: int, places: int) -> Tensor:
    """The mask tensor that says the same, bool `[batch, 1, queries, places]`."""
    rows = torch.arange(queries, device=filled.device)[:, None]
    return torch.arange(places, device=filled.device) <= filled - queries + rows


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    filled: Tensor,
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """A step's attention `[batch, heads, queries, head_dim]` over a cache whose empty places hold zeros."""
    variant = Variant(softcap=softcap, sinks=sinks, seqused=filled.reshape(-1), finite=True)
    causal, grouped = query.shape[2] > 1, key.shape[1] != query.shape[1]
    answer = varied.attention(
        query, key, value, variant, causal, scale, grouped, "lower_right", False, None, strict=False
    )
    assert isinstance(answer, Tensor)
    return answer
