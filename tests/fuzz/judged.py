"""One drawn call, run and judged."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from evoattn.ops.torch_answer import NoKernel
from tests.fuzz.calls import Call
from tests.fuzz.exact import why_wrong
from tests.fuzz.made import POISON, Made, Maker, called, explained, within
from tests.fuzz.ways import Answer, has_same_bits, made_by

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


def judged(number: int, call: Call, device: str, made: Made | None = None, way: str = "eager") -> Judged:
    """Runs the call twice, the second time in that way, and judges it; nothing that it raises passes. `made`: its
    tensors, where they are there."""
    try:
        made = made or Maker(call, device).made()
        kernel, ran = _what_runs(call, made)
        wrong, error = _judged(call, made, kernel, way)
    except Exception as failure:  # a device that a kernel broke fails at anything: the calls so far are worth telling
        kernel, ran, error = False, "", math.inf
        wrong = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
    return Judged(number, f"{way}: {call.describe()}", kernel, ran, error, wrong)


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


def _run(call: Call, made: Made, way: str) -> list[Answer]:
    """The answers of a run over poisoned memory, as copies where they lie in a given tensor."""
    before = made.q.clone() if call.out == "query" else None
    _poison(call, made)
    answers = made_by(way, call, made)
    if call.out:
        answers = [(answer.clone(), lse) for answer, lse in answers]
    if before is not None:
        made.q.copy_(before)
    return answers


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _same(one: Answer, other: Answer) -> bool:
    """Whether two answers, and their log-sum-exps, are the same bit for bit."""
    if one[1] is not None and other[1] is not None and not torch.equal(_bits(one[1]), _bits(other[1])):
        return False
    return torch.equal(_bits(one[0]), _bits(other[0]))


def _judged(call: Call, made: Made, kernel: bool, way: str) -> tuple[str, float]:
    inputs = [_bits(tensor).clone() for tensor in made.inputs]
    (first,) = _run(call, made, "eager")
    if beside := _written_beside(call, made):
        return beside, math.inf
    again = _run(call, made, way)
    if beside := _written_beside(call, made):
        return beside, math.inf
    changed = [now for now, before in zip(made.inputs, inputs, strict=True) if not torch.equal(_bits(now), before)]
    if changed:
        return f"{len(changed)} of the inputs were changed", math.inf
    if call.numbers in ("nan", "inf") and not kernel:
        return "", 0.0  # kernels of torch differ there: that of a CPU answers 0 to some rows of NaN
    wrong, error = why_wrong(call, made, *again[-1])
    if not wrong and kernel and has_same_bits(way, call) and not all(_same(first, one) for one in again):
        wrong = "two runs differ"
    return wrong, error


def _written_beside(call: Call, made: Made) -> str:
    """What a run wrote around `out`, and between its columns."""
    if made.room is None or made.out is None:
        return ""
    rest = made.room.clone()
    poison = torch.full((rest.element_size(),), POISON, dtype=torch.uint8, device=rest.device).view(rest.dtype)
    within(rest, tuple(made.out.shape), call.out).copy_(poison)
    count = int((rest.view(torch.uint8) != POISON).sum())
    return f"{count} bytes beside out were written" if count else ""
