"""Attention by the formula in any dtype, with gradients, for what is drawn beside `Call`s; and the rule by which an
answer is near enough to it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

FP32_RELATIVE, FP32_ROUNDING = 1e-5, 2.0**-24
FEW = 16
"""Numbers of which a mean says nothing: the formula may be near by chance."""
LSE_ABSOLUTE, LSE_RELATIVE = 2e-4, 2e-5
"""How far a log-sum-exp may be off, as the polynomial exponential is."""
NO_KEY = -300.0
Change = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Scores `[batch, heads, rows, keys]`, and the indices of these dimensions, to scores."""


@dataclass
class Formula:
    """`scale`, and what comes between the scaled product and the sum: `change`, then `sinks` `[heads]`."""

    scale: float | None = None
    change: list[Change] = field(default_factory=list)
    sinks: Tensor | None = None

    def of(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output `[batch, heads, rows, dim of v]` and log-sum-exp `[batch, heads, rows]` in the tensors' dtype; a query
        that sees no key has the output 0."""
        groups = q.shape[1] // k.shape[1]
        k, v = (one.repeat_interleave(groups, dim=1) for one in (k, v))
        scores = (q * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)) @ k.mT
        sides = [torch.arange(n, device=q.device).view(-1, *(1,) * (3 - at)) for at, n in enumerate(scores.shape)]
        for one in self.change:
            scores = one(scores, *sides).to(q.dtype)
        seen = ~torch.isneginf(scores)
        if self.sinks is not None:
            column = self.sinks.to(q.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, column), -1)
        lse = torch.logsumexp(scores.masked_fill(~torch.isfinite(scores).any(-1, keepdim=True), -math.inf), -1)
        some = torch.isfinite(scores.detach()).any(-1, keepdim=True)
        weights = torch.softmax(torch.where(some, scores, 0.0), -1)[..., : k.shape[2]]
        return torch.where(seen & some, weights, 0.0) @ v, lse


def hides(which: Callable[[Tensor, Tensor], Tensor]) -> Change:
    """What hides keys by the places of query and key."""
    return lambda s, b, h, i, j: s.masked_fill(which(i, j), -math.inf)


def comparable(lse: Tensor) -> Tensor:
    """Log-sum-exps as numbers that `why_far` takes: one far below all that are drawn in place of -inf."""
    return lse.detach().clamp(NO_KEY)


def why_far(
    found: Tensor, exact: Tensor, low: Tensor, factor: float = 2, part: float = 0.0, least: float = 0.0
) -> tuple[str, float]:
    """(How an answer is too far from `exact`, which is in float64, empty if it is not; its largest error as a part of
    what is allowed).

    flash-attention's rule: no more than twice (`factor`) what `low`, the formula in the input's dtype, is off, and
    twice the rounding of the output's; the root mean square by the same rule. At least an `eps` of the largest output
    is allowed, and `part` of it; and `least`, of gradients that are 0 by differences."""
    if not found.numel():
        return "", 0.0
    if not torch.equal(torch.isnan(found), nan := torch.isnan(exact)):
        return f"{int(torch.isnan(found).sum())} of {found.numel()} outputs are NaN, not {int(nan.sum())}", math.inf
    found, exact, low = (tensor.masked_fill(nan, 0) for tensor in (found, exact, low))
    if found.dtype == torch.float32 and low.dtype.itemsize == 2:  # a log-sum-exp, which is not rounded
        error = (found.double() - exact).abs().max().item()
        most = LSE_ABSOLUTE + LSE_RELATIVE * exact.abs().max().item()
        wrong = "" if error <= most else f"a log-sum-exp is {error:.2e} off, allowed are {most:.2e}"
        return wrong, error / most
    off, apart, eps = found.double() - exact, low.double() - exact, torch.finfo(found.dtype).eps
    rounded = exact.to(found.dtype)
    nudged = (rounded + 0.3 - 0.3).double() - rounded.double()
    size = exact.abs().max().item()
    allowed = max(factor * apart.abs().max().item() + 2 * nudged.abs().max().item(), max(eps, part) * size)
    allowed_rms = max(factor * rms(apart) + 2 * rms(rounded.double() - exact), max(eps / 2, part) * rms(exact))
    if found.numel() < FEW:
        allowed_rms = max(allowed_rms, allowed)
    allowed, allowed_rms = max(allowed, least, 1e-30), max(allowed_rms, least, 1e-30)
    worst = max(off.abs().max().item() / allowed, rms(off) / allowed_rms)
    if worst > 1:
        return f"{worst:.2f} times the error that is allowed ({off.abs().max().item():.2e}, {allowed:.2e})", worst
    return "", worst


def rms(x: Tensor) -> float:
    """The root mean square."""
    return x.square().mean().sqrt().item()
