"""Keys in use and pages as the peers take them: without NaN, since most multiply what is behind the last key by 0, and
with entries of the table that can be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from evoattn.correctness.sequences import NO_PAGE, gathered
from evoattn.model.problem import AttentionProblem

Tensors = Mapping[str, torch.Tensor]
KeysAndValues = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def without_nan(problem: AttentionProblem, tensors: Tensors) -> dict[str, torch.Tensor]:
    """The inputs with zeros in K and V for NaN, and page 0 in the table for none; the same where all keys are in use
    and every packed sequence has queries."""
    made = dict(tensors)
    if problem.seqused or (problem.varlen and not all(queries for queries, _ in problem.sequences)):
        made |= {name: copied(tensors[name]).nan_to_num_(0.0) for name in problem.tensors[1:]}
    if problem.page:
        made["table"] = tensors["table"].masked_fill(tensors["table"] == NO_PAGE, 0)
    return made


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def whole_keys(problem: AttentionProblem, tensors: Tensors) -> KeysAndValues:
    """A call that gives K and V `[batch, kv_heads, seqlen_k, head_dim]`: out of pages, which a peer that has none must
    gather at each step, they are copied at each call."""
    clean = without_nan(problem, tensors) if problem.page else gathered(problem, tensors)
    k, v = clean["k"], clean["k"][..., : problem.head_dim_v] if problem.shared_kv else clean["v"]
    if not problem.page:
        return lambda: (k, v)
    pages = clean["table"].long()

    def gather(cache: torch.Tensor) -> torch.Tensor:
        rows = cache.transpose(1, 2)[pages]  # [batch, pages of it, page, kv_heads, head_dim]
        return rows.flatten(1, 2)[:, : problem.seqlen_k].transpose(1, 2)

    return lambda: (gather(k), gather(v))
