"""FlexAttention, compiled, with a block mask: PyTorch's own way to a variant of attention
(https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from evoattn.correctness.terms import qkv
from evoattn.model.problem import AttentionProblem
from evoattn.model.variant import SCORE_VARIANTS
from evoattn.timing.peers.caches import whole_keys, without_nan
from evoattn.timing.peers.flex_masks import block_mask, visible_keys
from evoattn.timing.peers.flex_pages import physical_blocks, whole_cache
from evoattn.timing.peers.refused import PeerRefused
from evoattn.timing.peers.variants import has_a_flag, refuse_all_but

Tensors = dict[str, torch.Tensor]
ScoreMod = Callable[..., torch.Tensor]
Compiler = Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]

BLOCK = 128
"""Rows and keys of a block of FlexAttention's masks, as it has them; of keys in pages a page."""
LARGE_HEADS: Any = {"BLOCK_M": 64, "BLOCK_N": 16, "num_stages": 1, "num_warps": 8, "FORCE_USE_FLEX_ATTENTION": True}
"""`kernel_options` for a head_dim over 256, whose tiles would not fit into shared memory by torch's own choice."""


def make(
    problem: AttentionProblem,
    tensors: Tensors,
    compiler: Compiler | None = None,
) -> Callable[[], torch.Tensor]:
    """A call that gives O. Sinks are folded in by the log-sum-exp, in the same compiled function.
    `compiler` is `torch.compile` unless given.

    Raises `PeerRefused` for plain attention that SDPA's fused kernels serve, and whatever torch's compiler raises.
    """
    if has_a_flag(problem):
        raise PeerRefused("FlexAttention is asked for what is no flag of SDPA: its compiler takes seconds.")
    # Imported here, as it brings torch._dynamo: a second of every worker's start.
    from torch.nn.attention.flex_attention import flex_attention

    refuse_all_but((*SCORE_VARIANTS, "value_dim", "shared_kv", "seqused", "page", "varlen"), problem, "FlexAttention")
    slopes_of_lengths = problem.alibi and (problem.seqused or problem.varlen)
    if slopes_of_lengths or (problem.page and (problem.bias or problem.shared_kv)):
        raise PeerRefused("FlexAttention is not asked for slopes of different lengths, nor for a bias of pages.")
    clean = without_nan(problem, tensors)
    if problem.page:
        q, k, v = tensors["q"], whole_cache(clean["k"]), whole_cache(clean["v"])
    elif problem.varlen:
        q, k, v = qkv(problem, clean)
    else:
        q, (k, v) = tensors["q"], whole_keys(problem, tensors)()
    visible, folded = visible_keys(problem, tensors), _heads_are_rows(problem)
    blocks = None
    if visible is not None:
        rows, keys = q.shape[2], problem.shape("k")[2] if problem.varlen else problem.seqlen_k
        batches = problem.batch if problem.seqused else None
        blocks = block_mask(visible, batches, rows, keys, (BLOCK, problem.page or BLOCK), q.device)
    if problem.page:
        blocks = physical_blocks(problem, tensors, blocks)
    options = LARGE_HEADS if problem.head_dim > 256 else None
    score_mod, sinks = _score_mod(problem, tensors), tensors.get("sinks")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result: Any = flex_attention(
            q.transpose(1, 2) if folded else q,
            k,
            v,
            score_mod=score_mod,
            block_mask=blocks,
            scale=problem.softmax_scale,
            enable_gqa=problem.group_size > 1 and not folded,
            return_lse=True,
            kernel_options=options,
        )
        out: torch.Tensor = result[0]
        if sinks is None:
            return out.transpose(1, 2) if folded else out
        return (out * torch.sigmoid(result[1] - sinks.float()[None, :, None])[..., None]).to(out.dtype)

    # A process that asks for one problem after another would reach the compiler's limit of variants of one function,
    # past which it runs uncompiled.
    torch.compiler.reset()
    compiled = compiler(attend) if compiler else torch.compile(attend, dynamic=False)
    return lambda: compiled(q, k, v)


def _heads_are_rows(problem: AttentionProblem) -> bool:
    """Whether the heads of one query, all of one K/V head, are given as queries: they fill a tile, which one query
    does not."""
    changed = {*SCORE_VARIANTS, "seqused"} & {*problem.variants}
    return problem.seqlen_q == problem.kv_heads == 1 and problem.heads > 1 and not changed and not problem.causal


def _score_mod(problem: AttentionProblem, tensors: Tensors) -> ScoreMod | None:
    """What is done to a scaled score of batch b, head h, query i and key j; None for nothing."""
    if not (problem.softcap or problem.alibi or problem.bias):
        return None
    cap, diagonal = problem.softcap, problem.diagonal
    slopes, bias = tensors.get("slopes"), tensors.get("bias")

    def change(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        if cap:
            score = cap * torch.tanh(score / cap)
        if slopes is not None:
            score = score - slopes[h] * (i + diagonal - j).abs()
        if bias is not None:
            score = score + bias[b if "b" in problem.bias else 0, h if "h" in problem.bias else 0, i, j]
        return score

    return change
