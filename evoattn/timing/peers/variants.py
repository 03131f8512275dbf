"""Variants of attention as the peers take them: SDPA as a tensor that is added to the scores, FlashAttention 3 and 4 as
options of their functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from evoattn.correctness.terms import terms_of, torch_dtype
from evoattn.model.problem import AttentionProblem
from evoattn.model.variant import SCORE_VARIANTS, parse_window
from evoattn.timing.peers.refused import PeerRefused

Tensors = Mapping[str, torch.Tensor]


def refuse_all_but(served: tuple[str, ...], problem: AttentionProblem, who: str) -> None:
    """Raises `PeerRefused` if the problem has a variant that is none of `served`."""
    if foreign := [name for name in problem.variants if name not in served]:
        raise PeerRefused(f"{who} has no {', '.join(foreign)}.")


def added_to_scores(problem: AttentionProblem, tensors: Tensors) -> torch.Tensor | None:
    """What SDPA takes as `attn_mask`: the bias or the slopes with -inf where the mask hides a key, `[1 or batch, 1 or
    heads, seqlen_q, seqlen_k]` in the problem's dtype with rows of whole 16 bytes, as SDPA's fast paths ask; of a
    window alone 0 and -inf, as SDPA would make a Bool mask into such a tensor in every call. None for plain attention.

    Raises `PeerRefused` on a softcap and on sinks.
    """
    refuse_all_but(("window", "alibi", "bias", "value_dim", "shared_kv"), problem, "SDPA")
    if not set(problem.variants) & set(SCORE_VARIANTS):
        return None
    rows, device = slice(0, problem.seqlen_q), tensors["q"].device
    everything = [
        terms_of(problem, tensors, b, slice(0, problem.heads), rows, device) for b in range(_batches(problem))
    ]
    visible = everything[0].visible
    columns, bias = -(-problem.seqlen_k // 8) * 8, everything[0].bias
    shape = (len(everything), 1 if bias is None else bias.shape[0], problem.seqlen_q, columns)
    mask = torch.zeros(shape, dtype=torch_dtype(problem), device=device)[..., : problem.seqlen_k]
    for batch, terms in zip(mask, everything, strict=True):
        if terms.bias is not None:
            batch.copy_(terms.bias)
        if visible is not None:
            batch.masked_fill_(~visible, float("-inf"))
    return mask


def _batches(problem: AttentionProblem) -> int:
    return problem.batch if "b" in problem.bias else 1


def flash_options(problem: AttentionProblem, tensors: Tensors, sinks: bool, who: str) -> dict[str, Any]:
    """Arguments beside q, k, v and causal of FlashAttention's functions; `sinks` says whether `who` takes them.

    Raises `PeerRefused` on what it does not take.
    """
    refuse_all_but(("window", "softcap", "value_dim", "shared_kv", *(["sink"] if sinks else [])), problem, who)
    options: dict[str, Any] = {}
    if problem.scale is not None:
        options["softmax_scale"] = problem.scale
    if problem.window:
        options["window_size"] = parse_window(problem.window)
    if problem.softcap:
        options["softcap"] = float(problem.softcap)
    if problem.sink:
        options["learnable_sink"] = tensors["sinks"].to(torch.bfloat16)
    return options
