"""An operator for xFormers: `memory_efficient_attention(q, k, v, attn_bias, op=(evoattn.integrations.xformers.op(),
None))`; and, as `op(MSLK)`, for mslk, where xFormers' attention lives on.

What these ask of one is `AttentionFwOpBase`,
https://github.com/facebookresearch/xformers/blob/main/xformers/ops/fmha/common.py, here as in version 0.0.35, and in
version 1.1.0 of mslk. Gradients are those of an operator that the library chooses, from the log-sum-exp."""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from evoattn.integrations.flash_attn.cache import Cache, attend_engine
from evoattn.integrations.flash_attn.options import MOST_COLUMNS, OPEN, Options
from evoattn.integrations.flash_attn.sequences import Keys, Queries, over_rows
from evoattn.ops.attention import attention
from evoattn.ops.call import Answer

XFORMERS, MSLK = "xformers.ops.fmha", "mslk.attention.fmha"
SERVED = (
    *("LowerTriangularMask", "LowerTriangularFromBottomRightMask", "LowerTriangularFromBottomRightLocalAttentionMask"),
    *("LocalAttentionFromBottomRightMask", "BlockDiagonalMask", "BlockDiagonalCausalFromBottomRightMask"),
    *("BlockDiagonalCausalLocalAttentionFromBottomRightMask", "BlockDiagonalPaddedKeysMask"),
    *("BlockDiagonalCausalWithOffsetPaddedKeysMask", "BlockDiagonalLocalAttentionPaddedKeysMask"),
    *("BlockDiagonalCausalLocalAttentionPaddedKeysMask", "BlockDiagonalGappyKeysMask"),
    *("BlockDiagonalCausalWithOffsetGappyKeysMask", "PagedBlockDiagonalPaddedKeysMask"),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask",
)
"""Biases of `attn_bias`, whose names say what they hide."""


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Any, scale: float | None) -> tuple[Tensor, Tensor]:
    """Output `[batch, rows, heads, head_dim]` and log-sum-exp `[batch, heads, rows]` of tensors with four dimensions,
    or with five of groups of heads, under one of the `SERVED` biases, a tensor, or None."""
    q, k, v = (without_groups(tensor, i > 0) for i, tensor in enumerate((query, key, value)))
    kind = type(bias).__name__
    if "BlockDiagonal" in kind:
        rows = q[0], k[0], v[0]
        output, lse = packed(*rows, bias, options_of(bias, scale))
        output, lse = output[None], lse[None]
    else:
        words = {"bias": bias} if isinstance(bias, Tensor) else dense(bias)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        output, lse = attention(q, k, v, scale=scale, enable_gqa=True, return_lse=True, **words)
        output = output.transpose(1, 2)
    return output.reshape(*query.shape[:-1], value.shape[-1]), lse


def without_groups(tensor: Tensor, shares: bool) -> Tensor:
    """`[batch, rows, heads, head_dim]`; of K and V, which may be one head that is seen as many (`shares`), that one."""
    if shares and tensor.shape[-2] > 1 and tensor.stride(-2) == 0:
        tensor = tensor[..., :1, :]
    return tensor.flatten(2, 3) if tensor.dim() == 5 else tensor


def dense(bias: Any) -> dict[str, Any]:
    """Arguments of `evoattn.attention` for a bias over whole tensors."""
    if type(bias).__name__ == "LowerTriangularMask":
        return {"causal": "upper_left"}
    options = options_of(bias, None)
    return {"causal": options.causal, "window": None if options.window == (OPEN, OPEN) else options.window}


def options_of(bias: Any, scale: float | None) -> Options:
    kind = type(bias).__name__
    causal = "Causal" in kind or kind.startswith("LowerTriangular")
    past, ahead = getattr(bias, "window_left", OPEN), getattr(bias, "window_right", OPEN)
    if (size := getattr(bias, "_window_size", 0)) > 0:
        past = size - 1
    return Options(scale, causal, (past, OPEN if causal else ahead), return_lse=True)


def packed(q: Tensor, k: Tensor, v: Tensor, bias: Any, options: Options) -> tuple[Tensor, Tensor]:
    """Of sequences in rows; lengths of keys are a bias's own, or those between the starts."""
    of_q, of_k = bias.q_seqinfo, bias.k_seqinfo
    queries = Queries(of_q.seqstart, of_q.max_seqlen)
    used = getattr(of_k, "seqlen", None)
    answer: Answer
    if (table := getattr(bias, "block_tables", None)) is not None:
        pages = [rows.unflatten(0, (-1, bias.page_size)) for rows in (k, v)]
        answer = attend_engine(q, queries, Cache(pages[0], pages[1], len(table), used, table), options)
    else:
        count = len(of_q.seqstart) - 1  # of gappy keys there may be as many starts as sequences
        bounds = None if used is not None else of_k.seqstart
        answer = over_rows(q, k, v, queries, Keys(of_k.seqstart[:count], of_k.max_seqlen, used, bounds), options)
    assert not isinstance(answer, Tensor)
    return answer


@cache
def op(library: str = XFORMERS) -> Any:
    """The operator, a class, for `XFORMERS` or `MSLK`; raises `ImportError` where there is none."""
    attn_bias, common = (import_module(f"{library}.{name}") for name in ("attn_bias", "common"))

    def apply(cls: Any, inp: Any, needs_gradient: bool) -> tuple[Tensor, Any]:
        output, lse = attend(inp.query, inp.key, inp.value, inp.attn_bias, inp.scale)
        return output, common.Context(lse=lse, out=output) if needs_gradient else None

    dtypes = {torch.float16, torch.bfloat16, torch.float32}
    words = {
        "NAME": "evoattn",
        "OPERATOR": attend,
        "SUPPORTED_DEVICES": {"cuda", "cpu"},
        "CUDA_MINIMUM_COMPUTE_CAPABILITY": (8, 0),
        "SUPPORTED_DTYPES": dtypes,
        "SUPPORTED_MAX_K": MOST_COLUMNS,
        "SUPPORTED_ATTN_BIAS_TYPES": (type(None), Tensor, *(getattr(attn_bias, name) for name in SERVED)),
        "SUPPORTS_DROPOUT": False,
        "SUPPORTS_CUSTOM_SCALE": True,
        "SUPPORTS_DIFFERENT_VALUE_EMBED": True,
        "SUPPORTS_BMGHK": True,
        "is_available": classmethod(lambda cls: True),
        "apply": classmethod(apply),
    }
    return type("EvoattnFwOp", (common.AttentionFwOpBase,), words)
