"""One drawn call, run and judged."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from evoattn.ops.runtime import NoKernel
from op_calls.calls import Call
from op_calls.exact import why_wrong
from op_calls.made import BAND, POISON, Made, Maker, called, explained, within

REFUSED = "No kernel serves this call: "


@dataclass(frozen=True)
class Judged:
    """What became of a call. `ran`: the kernel, or why PyTorch answered; `error`: the largest one as a part of what is
    allowed; `wrong`: empty if nothing is."""

    number: int
    call: str
    kernel: bool
    ran: str
    error: float
    wrong: str


def judged(number: int, call: Call, device: str, made: Made | None = None) -> Judged:
    """Runs the call twice and judges it; nothing that it raises passes. `made`: its tensors, where they are there."""
    try:
        made = made or Maker(call, device).made()
        kernel, ran = _what_runs(call, made)
        wrong, error = _judged(call, made, kernel)
    except Exception as failure:  # a device that a kernel broke fails at anything: the calls so far are worth telling
        kernel, ran, error = False, "", math.inf
        wrong = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
    return Judged(number, call.describe(), kernel, ran, error, wrong)


def _what_runs(call: Call, made: Made) -> tuple[bool, str]:
    """(Whether a kernel runs, its config or the reason why none does). The kernel has run once then."""
    before = made.q.clone() if call.out == "query" else None
    try:
        called(call, made, True, made.out)
    except NoKernel as refusal:
        return False, str(refusal).removeprefix(REFUSED).rstrip(".")
    finally:
        if before is not None:
            made.q.copy_(before)
    return True, explained(call, made).split(" runs: ")[0]


def _poison(call: Call, made: Made) -> None:
    """Fill the memory that the next allocations will get, and `out`, with NaN."""
    shape = *made.q.shape[:-1], call.value_dim
    sizes = [math.prod(shape) * made.q.element_size(), math.prod(made.q.shape[:-1]) * 4]
    blocks = [torch.full((size,), POISON, dtype=torch.uint8, device=made.q.device) for size in sizes * 2]
    del blocks
    if made.room is not None:
        made.room.view(torch.uint8).fill_(POISON)


def _run(call: Call, made: Made) -> tuple[Tensor, Tensor | None]:
    """One run over poisoned memory, its answer a copy."""
    before = made.q.clone() if call.out == "query" else None
    _poison(call, made)
    answer, lse = called(call, made, False, made.out)
    answer = answer.clone()
    if before is not None:
        made.q.copy_(before)
    return answer, lse


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _judged(call: Call, made: Made, kernel: bool) -> tuple[str, float]:
    inputs = [_bits(tensor).clone() for tensor in made.inputs]
    first, lse = _run(call, made)
    if beside := _written_beside(call, made):
        return beside, math.inf
    second, lse_again = _run(call, made)
    changed = [now for now, before in zip(made.inputs, inputs, strict=True) if not torch.equal(_bits(now), before)]
    if changed:
        return f"{len(changed)} of the inputs were changed", math.inf
    same = torch.equal(_bits(first), _bits(second))
    if lse is not None and lse_again is not None:
        same = same and torch.equal(_bits(lse), _bits(lse_again))
    wrong, error = why_wrong(call, made, first, lse)
    if not wrong and kernel and not same:
        wrong = "two runs differ"
    return wrong, error


def _written_beside(call: Call, made: Made) -> str:
    """What a run wrote into the bands around `out`."""
    if made.room is None or made.out is None:
        return ""
    rest = made.room.clone()
    within(rest, tuple(made.out.shape), call.out == "other order").view(torch.uint8)
    bands = torch.cat((rest[:BAND], rest[-BAND:])).view(torch.uint8)
    count = int((bands != POISON).sum())
    return f"{count} bytes beside out were written" if count else ""
