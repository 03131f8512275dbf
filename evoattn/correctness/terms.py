"""What is done to the scores of the reference between the product and the softmax, and the inputs that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from evoattn.correctness import block_list
from evoattn.correctness.sequences import make_key_terms
from evoattn.model.mask import MaskKind
from evoattn.model.problem import AttentionProblem


def torch_dtype(problem: AttentionProblem) -> torch.dtype:
    """The problem's dtype in torch."""
    dtype: torch.dtype = getattr(torch, problem.element.torch)
    return dtype


def qkv(
    problem: AttentionProblem, tensors: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v out of the inputs of a problem; v is a view of k where it lies within."""
    k = tensors["k"]
    return tensors["q"], k, k[..., : problem.head_dim_v] if problem.shared_kv else tensors["v"]


def make_terms(
    problem: AttentionProblem, generator: torch.Generator, device: torch.device | str, extreme: bool
) -> dict[str, torch.Tensor]:
    """The inputs of `AttentionProblem.term_shapes`: normal sinks and biases, the slopes of the ALiBi paper, lengths and
    pages as `sequences.make_key_terms` makes them, block lists as the problem's text says.

    `extreme`: lengths as `make_key_terms` has them then, sinks of -inf and of 30 by turns, slopes of which every other
    is steep and negative, and a bias that hides all keys from the first query, the last half of them from the second
    and every third one from the fourth, and takes 10,000 from every other score of the third. The columns of a bias
    past the last key are NaN.
    """
    made = make_key_terms(problem, generator, device, extreme) | block_list.make_block_terms(problem, device)
    heads = torch.arange(problem.heads, device=device)
    for name, shape in problem.term_shapes.items():
        if name in made:
            continue
        if name == "slopes":
            made[name] = torch.exp2(-8.0 * (heads + 1) / problem.heads).float()
            if extreme:
                made[name] *= torch.where(heads % 2 == 0, -8.0, 1.0)
            continue
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        if extreme and name == "sinks":
            values = torch.where(heads % 2 == 0, float("-inf"), 30.0)
        elif extreme:
            values[..., 0, :] = values[..., 1:2, problem.seqlen_k // 2 :] = values[..., 3:4, ::3] = float("-inf")
            values[..., 2:3, ::2] = -10_000
        if name == "bias":
            values[..., problem.seqlen_k :] = float("nan")
        made[name] = values.to(torch_dtype(problem))
    return made


@dataclass(frozen=True)
class Terms:
    """What the problem does to a block of scores `[heads, rows, seqlen_k]`."""

    softcap: float
    bias: torch.Tensor | None
    """Broadcasts over the scores."""
    visible: torch.Tensor | None
    """Bool that broadcasts over the scores; None without a mask."""
    sinks: torch.Tensor | None
    """`[heads]`."""

    @property
    def may_hide(self) -> bool:
        """Whether a score may be -inf."""
        return self.visible is not None or self.bias is not None

    def apply(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores capped, with the bias added (in float32 or better) and what is hidden at -inf."""
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.bias is not None:
            wide = torch.promote_types(scores.dtype, torch.float32)
            scores = scores.to(wide) + self.bias.to(wide)
        return scores if self.visible is None else scores.masked_fill(~self.visible, float("-inf"))

    def with_sink(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores and one more column, that of the sinks if there are any."""
        if self.sinks is None:
            return scores
        column = self.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat((scores, column), -1)


def terms_of(
    problem: AttentionProblem,
    others: Mapping[str, torch.Tensor] | None,
    batch: int,
    heads: slice,
    rows: slice,
    device: torch.device,
) -> Terms:
    """The terms of some heads and query rows of a batch. `others` holds the problem's inputs beside q, k and v.

    Raises `KeyError` where the problem has an input that `others` lacks.
    """
    given = {name: (others or {})[name] for name in problem.term_shapes}
    queries = torch.arange(rows.start, rows.stop, device=device)[:, None]
    keys, bias = torch.arange(problem.seqlen_k, device=device), None
    if problem.bias:
        whole = given["bias"][min(batch, given["bias"].shape[0] - 1)]
        bias = (whole[heads] if "h" in problem.bias else whole)[:, rows, : problem.seqlen_k]
    if problem.alibi:
        distance = (keys - queries - problem.diagonal).abs()
        bias = -given["slopes"][heads, None, None].double() * distance
    visible = None if problem.masking.kind is MaskKind.FULL else problem.band.sees(queries, keys)
    if problem.blocks:
        visible = block_list.visible(problem, given, batch, heads, rows)
    return Terms(problem.softcap, bias, visible, given["sinks"][heads] if problem.sink else None)
