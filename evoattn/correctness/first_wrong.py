"""Which element of an answer is wrong first: where to begin to look for the fault of a kernel."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from evoattn.correctness.arena import UNWRITTEN, bits
from evoattn.correctness.reference import Answer


def first_wrong(outputs: Mapping[str, torch.Tensor], answer: Answer) -> str:
    """One sentence about the first wrong element: its indices, what the kernel wrote, what is right, and how many are
    wrong.

    `outputs` are `o` (`[batch, heads, seqlen_q, head_dim]`) and, where the answer has it, `lse`
    (`[batch, heads, seqlen_q]`). An element is wrong if it was never written, is NaN, or is further from the exact
    answer than `answer` allows a single element to be. Empty if there is none: the error is then one of many elements
    together.
    """
    sentence = _first(outputs["o"], answer.exact, answer.allowed_error, "o", ("batch", "head", "query", "dim"))
    if sentence or answer.lse is None:
        return sentence
    return _first(outputs["lse"], answer.lse, answer.allowed_lse, "lse", ("batch", "head", "query"))


def _first(out: torch.Tensor, exact: torch.Tensor, allowed: float, name: str, dims: tuple[str, ...]) -> str:
    got = out.to(exact.dtype)
    unwritten = bits(out) == UNWRITTEN
    close = (got - exact).abs() <= allowed
    wrong = unwritten | ~(close | (got == exact))  # equal infinities differ by NaN
    places = wrong.nonzero()
    if not len(places):
        return ""
    index = tuple(places[0].tolist())
    where = ", ".join(f"{dim} {i}" for dim, i in zip(dims, index, strict=True))
    what = "was never written" if unwritten[index] else f"is {got[index].item():.6g}"
    return (
        f"The first wrong element, {name}{list(index)} ({where}), {what}; right is {exact[index].item():.6g} "
        f"± {allowed:.2g}. {len(places)} of {out.numel()} elements are wrong."
    )
