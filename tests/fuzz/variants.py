"""Variants of a drawn question, alone and several at once: words of `evoattn.attention`, and what they are by the
formula."""

import math
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.asked import Draw
from tests.fuzz.formula import Change, Formula, hides

Offset = int | Tensor
"""How far the diagonal is shifted: a number, or `[batch, 1, 1, 1]`."""


def band(offset: Offset, causal: bool, window: tuple[int, int] | None) -> Change:
    """What hides keys outside of a causal mask and a window."""
    past, ahead = window or (-1, -1)
    ahead = 0 if causal else ahead

    def hidden(i: Tensor, j: Tensor) -> Tensor:
        middle = i + offset
        none = torch.zeros_like(i + j, dtype=torch.bool)
        return none | ((j > middle + ahead) if ahead >= 0 else none) | ((j < middle - past) if past >= 0 else none)

    return hides(hidden)


def variants(
    draw: Draw, sizes: tuple[int, int, int, int], dim: int, dense: bool = True
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Words of a call of `sizes` (batch, heads, queries, keys) and a head_dim, and those that may want gradients. What
    only `dense` calls have: biases, masks, keys in use."""
    batch, heads, _, keys = sizes
    often = 3 if draw.chance("combined", 0.35) else 1
    words: dict[str, Any] = {"causal": draw.pick("causal", None, None, *(("upper_left",) if dense else ()), True)}
    terms: dict[str, Tensor] = {}
    if draw.chance("scaled", 0.3):
        words["scale"] = draw.pick("scale", 0.05, 0.2, 1 / math.sqrt(dim))
    if draw.chance("windowed", 0.25 * often):
        words["window"] = draw.pick("window", (17, 0), (64, 3), (-1, 5), (0, 0), (200, -1))
    if draw.chance("capped", 0.2 * often):
        words["softcap"] = draw.pick("softcap", 5.0, 30.0)
    if draw.chance("sinks", 0.2 * often):
        terms["sinks"] = draw.numbers(heads)
    kind = draw.pick("term", "", "", "" if often == 1 else "bias", *(("bias", "mask") if dense else ()), "alibi")
    if kind == "alibi":
        words["alibi_slopes"] = torch.linspace(0.02, 0.4, heads, device=draw.device)
    elif kind:
        over = [n if draw.rng.random() < 0.6 or at == 3 else 1 for at, n in enumerate(sizes)]
        over = over[draw.pick("fewer dimensions", 0, 0, 0, 1, 2) :]
        if kind == "mask":
            words |= {"causal": None, "attn_mask": draw.numbers(*over) > -0.7}
        elif dense:
            terms["bias"] = draw.numbers(*over, dtype=torch.float32 if draw.chance("float32 bias", 0.1) else None)
    if dense and draw.chance("seqused", 0.2 * often):
        words["seqused_k"] = draw.ints(0, keys, batch)
    return words | terms, terms


def formula_of(words: dict[str, Any], offset: Offset, dtype: torch.dtype) -> Formula:
    """Of words of `evoattn.attention`, whose terms are in `dtype`."""
    made = Formula(words.get("scale"), sinks=words.get("sinks"))
    if cap := words.get("softcap"):
        made.change.append(lambda s, b, h, i, j: cap * torch.tanh(s / cap))
    if (slopes := words.get("alibi_slopes")) is not None:
        made.change.append(lambda s, b, h, i, j: s - slopes.to(dtype)[h] * (i + offset - j).abs())
    if (bias := words.get("bias")) is not None:
        made.change.append(lambda s, b, h, i, j: s + bias)
    if (mask := words.get("attn_mask")) is not None:
        made.change.append(lambda s, b, h, i, j: s.masked_fill(~mask, -math.inf))
    if (used := words.get("seqused_k")) is not None:
        made.change.append(lambda s, b, h, i, j: s.masked_fill(j >= used.view(-1, 1, 1, 1), -math.inf))
    if words.get("causal") or words.get("window"):
        made.change.append(band(offset, bool(words.get("causal")), words.get("window")))
    return made


def offset_of(words: dict[str, Any], q: Tensor, k: Tensor) -> Offset:
    """The shift of the diagonal for `q` and `k` `[batch, heads, rows, dim]`; keys in use end where they do."""
    if words.get("causal") == "upper_left":
        return 0
    used = words.get("seqused_k")
    return (k.shape[2] if used is None else used.view(-1, 1, 1, 1)) - q.shape[2]
