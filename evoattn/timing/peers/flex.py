"""FlexAttention, compiled, with a block mask: PyTorch's own way to a variant of attention
(https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from evoattn.model.problem import AttentionProblem
from evoattn.model.variant import SCORE_VARIANTS
from evoattn.timing.peers.caches import whole_keys, without_nan
from evoattn.timing.peers.flex_pages import physical_blocks, whole_cache
from evoattn.timing.peers.refused import PeerRefused
from evoattn.timing.peers.variants import refuse_all_but

Tensors = dict[str, torch.Tensor]
ScoreMod = Callable[..., torch.Tensor]
Compiler = Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]

BLOCK = 128
"""Rows and keys of a block of FlexAttention's masks, as it has them; of keys in pages a page."""


def make(
    problem: AttentionProblem,
    tensors: Tensors,
    compiler: Compiler | None = None,
) -> Callable[[], torch.Tensor]:
    """A call that gives O. Sinks are folded in by the log-sum-exp, in the same compiled function.
    `compiler` is `torch.compile` unless given.

    Raises `PeerRefused` for plain attention, which the fused kernels serve, and whatever torch's compiler raises.
    """
    if not problem.variants:
        raise PeerRefused("FlexAttention is asked for variants of attention only: its compiler takes seconds.")
    # Imported here, as it brings torch._dynamo: a second of every worker's start.
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    refuse_all_but((*SCORE_VARIANTS, "value_dim", "shared_kv", "seqused", "page"), problem, "FlexAttention")
    if (problem.seqused and problem.alibi) or (problem.page and (problem.bias or problem.shared_kv)):
        raise PeerRefused("FlexAttention is not asked for slopes of different lengths, nor for a bias of pages.")
    if problem.page:
        clean = without_nan(problem, tensors)
        q, k, v = tensors["q"], whole_cache(clean["k"]), whole_cache(clean["v"])
    else:
        q, (k, v) = tensors["q"], whole_keys(problem, tensors)()
    used, at_end = tensors.get("seqused"), problem.masking.corner == "lower_right"
    lowest, highest = problem.masking.edges(problem.seqlen_q, problem.seqlen_k)

    def visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        keys = problem.seqlen_k if used is None else used[b]
        query = i + keys - problem.seqlen_k if at_end else i
        past = -problem.seqlen_k * 2 if lowest is None else lowest
        return (j < keys) & (j <= query + (problem.seqlen_k * 2 if highest is None else highest)) & (j >= query + past)

    blocks = None
    if highest is not None or used is not None:
        batches = None if used is None else problem.batch
        sizes = batches, None, problem.seqlen_q, problem.seqlen_k, str(q.device)
        blocks = create_block_mask(visible, *sizes, (BLOCK, problem.page or BLOCK))
    if problem.page:
        blocks = physical_blocks(problem, tensors, blocks)
    score_mod, sinks = _score_mod(problem, tensors), tensors.get("sinks")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = flex_attention(
            q,
            k,
            v,
            score_mod=score_mod,
            block_mask=blocks,
            scale=problem.softmax_scale,
            enable_gqa=problem.group_size > 1,
            return_lse=True,
        )
        if sinks is None:
            return out
        return (out * torch.sigmoid(lse - sinks.float()[None, :, None])[..., None]).to(out.dtype)

    compiled = compiler(attend) if compiler else torch.compile(attend, dynamic=False)
    return lambda: compiled(q, k, v)


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
