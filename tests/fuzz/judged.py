"""One drawn call, run and judged. The answer of a drawn call by the formula, and how far from it an honest kernel may
be. Written apart from `evoattn.correctness`, whose reference proves the kernels before they answer."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from evoattn.ops.torch_answer import NoKernel
from tests.fuzz.calls import Call
from tests.fuzz.formula import FP32_RELATIVE, FP32_ROUNDING, LSE_ABSOLUTE, LSE_RELATIVE, why_far
from tests.fuzz.made import POISON, Made, Maker, called, explained, within
from tests.fuzz.ways import Answer, has_same_bits, made_by

SCORES_AT_ONCE = 1 << 26


@dataclass(frozen=True)
class Sequence:
    """One sequence of a call: `q` [heads, rows, dim], `k` and `v` [kv_heads, keys, dim], `bias` that fits the scores;
    `out` [heads, rows, dim of v] and `lse` [heads, rows] are the places of its answer."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    out: Tensor
    lse: Tensor


def sequences(call: Call, made: Made, out: Tensor, lse: Tensor) -> Iterator[Sequence]:
    """Each with views of `out` (as the call answers) and of `lse` [batch, heads, rows]; packed ones [heads, rows]."""
    if call.op == "varlen":
        assert made.starts is not None
        ends = [one.tolist() for one in made.starts]
        for q0, q1, k0, k1 in zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False):
            parts = (tensor[a:b].transpose(0, 1) for tensor, a, b in ((made.q, q0, q1), (made.k, k0, k1)))
            q, k = parts
            yield Sequence(q, k, made.v[k0:k1].transpose(0, 1), None, out[q0:q1].transpose(0, 1), lse[:, q0:q1])
        return
    if call.op == "mixed":
        assert made.starts is not None and made.table is not None and made.used is not None
        bounds = made.starts[0].tolist()
        for b, (first, end) in enumerate(pairwise(bounds)):
            keys = int(made.used[b])
            pages = made.table[b, : -(-keys // call.page)].long()
            k, v = (cache[pages].flatten(0, 1)[:keys].transpose(0, 1) for cache in (made.k, made.v))
            q, some = made.q[first:end].transpose(0, 1), out[first:end].transpose(0, 1)
            yield Sequence(q, k, v, None, some, lse[:, first:end])
        return
    used = [call.seqlen_k] * call.batch if made.used is None else made.used.tolist()
    for b, keys in enumerate(used):
        if made.table is not None:
            pages = made.table[b, : -(-keys // call.page)].long()
            k, v = (cache[pages].flatten(0, 1)[:keys].transpose(0, 1) for cache in (made.k, made.v))
            yield Sequence(made.q[b].transpose(0, 1), k, v, None, out[b].transpose(0, 1), lse[b])
            continue
        bias = None
        if made.bias is not None:
            whole = made.bias[(None,) * (4 - made.bias.dim())].expand(-1, -1, -1, call.seqlen_k)
            bias = whole[b if whole.shape[0] > 1 else 0, ..., :keys]
        yield Sequence(made.q[b], made.k[b, :, :keys], made.v[b, :, :keys], bias, out[b], lse[b])


def fill(call: Call, made: Made, one: Sequence, dtype: torch.dtype) -> float:
    """Write the sequence's answer, computed in `dtype`; the largest scaled product of a query and a key."""
    heads, rows, dim = one.q.shape
    keys = one.k.shape[1]
    one.out.zero_()
    one.lse.fill_(-math.inf)
    scale = dim**-0.5 if call.scale is None else call.scale
    upper = call.is_causal and call.causal == "upper_left" and call.op == "attention"
    offset = 0 if upper else keys - rows
    largest = 0.0
    if not keys:
        if made.sinks is not None:
            one.lse.copy_(made.sinks[:, None].expand(-1, rows))
        return 0.0
    k, v = one.k.to(dtype), one.v.to(dtype)
    step = max(1, SCORES_AT_ONCE // max(1, heads * keys))
    for first in range(0, rows, step):
        part = slice(first, min(rows, first + step))
        q = one.q[:, part].to(dtype).reshape(one.k.shape[0], -1, dim)
        scores = ((q * scale) @ k.transpose(1, 2)).view(heads, -1, keys)
        if dtype == torch.float64 and call.dtype == "fp32" and scores.numel():
            largest = max(largest, scores.abs().max().item())
        scores = _changed(call, made, one, scores, part, offset)
        seen = ~torch.isneginf(scores).all(-1, keepdim=True)
        if made.sinks is not None:
            scores = torch.cat((scores, made.sinks.to(dtype)[:, None, None].expand(*scores.shape[:2], 1)), -1)
        weights = torch.softmax(scores, -1)[..., :keys].masked_fill(~seen, 0)
        one.out[:, part] = (weights.view(one.k.shape[0], -1, keys) @ v).view(heads, -1, v.shape[-1])
        one.lse[:, part] = torch.logsumexp(scores.double(), -1)
    return largest


def _changed(call: Call, made: Made, one: Sequence, scores: Tensor, part: slice, offset: int) -> Tensor:
    """Scores after all that comes between the scaled product and the sum."""
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    middle = torch.arange(part.start, part.stop, device=scores.device)[:, None] + offset
    keys = torch.arange(scores.shape[-1], device=scores.device)
    if made.slopes is not None:
        scores = scores - (made.slopes[:, None, None] * (middle - keys).abs()).to(scores.dtype)
    if one.bias is not None:
        bias = one.bias if one.bias.shape[-2] == 1 else one.bias[..., part, :]
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias.to(scores.dtype)
    past, ahead = call.window or (-1, -1)
    ahead = 0 if call.is_causal else ahead
    hidden = torch.zeros(middle.shape[0], keys.shape[0], dtype=torch.bool, device=scores.device)
    if ahead >= 0:
        hidden |= keys > middle + ahead
    if past >= 0:
        hidden |= keys < middle - past
    return scores.masked_fill(hidden, -math.inf)


def why_wrong(call: Call, made: Made, answer: Tensor, lse: Tensor | None) -> tuple[str, float]:
    """(What is wrong with an answer, empty if nothing; its largest error as a part of what is allowed): by the rule of
    `why_far`, with a factor of 3 where there is a soft cap. Of fp32, which is judged against float64, what rounded
    scores make is allowed."""
    exact, low = (
        torch.empty(answer.shape, dtype=dtype, device=answer.device) for dtype in (torch.double, answer.dtype)
    )
    sums = torch.empty(
        (*(made.q.shape[1::-1] if call.op in ("varlen", "mixed") else _rows(call)),), device=answer.device
    ).double()
    others = sums.clone()
    largest = 0.0
    for right, rough in zip(sequences(call, made, exact, sums), sequences(call, made, low, others), strict=True):
        largest = max(largest, fill(call, made, right, torch.double))
        fill(call, made, rough, answer.dtype)
    part = 0.0
    if call.dtype == "fp32":
        part = FP32_RELATIVE + (2 + math.sqrt(call.head_dim) / 3) * FP32_ROUNDING * largest
    wrong, worst = why_far(answer, exact, low, 3 if call.softcap else 2, part)
    if wrong or lse is None or not lse.numel():
        return wrong, worst
    return why_wrong_lse(lse, sums), worst


def _rows(call: Call) -> tuple[int, int, int]:
    return call.batch, call.heads, call.seqlen_q


def why_wrong_lse(lse: Tensor, exact: Tensor) -> str:
    """-inf exactly where no key is seen, elsewhere off by no more than the polynomial exponential is."""
    none = torch.isnan(exact) | torch.isposinf(exact)
    if not torch.equal(torch.isnan(lse) | torch.isposinf(lse), none):
        return "the log-sum-exp is a number where the formula's is none, or none where that is one"
    lse, exact = lse.masked_fill(none, 0), exact.masked_fill(none, 0)
    unseen = torch.isneginf(exact)
    if not torch.equal(torch.isneginf(lse), unseen):
        return "the log-sum-exp is -inf elsewhere than where nothing is seen"
    error = (lse.double() - exact).masked_fill(unseen, 0).abs().max().item()
    allowed = LSE_ABSOLUTE + LSE_RELATIVE * exact.masked_fill(unseen, 0).abs().max().item()
    return "" if error <= allowed else f"the log-sum-exp is {error:.2e} off, allowed are {allowed:.2e}"


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
