"""Is an output right, and are two outputs the same? Each answer is one sentence, empty where nothing is wrong."""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from evoattn.correctness.arena import bits, unwritten
from evoattn.correctness.reference import FP32_RELATIVE, Answer, Exact

LEAST_ROWS, LEANS, DEVIATIONS = 40, 0.15, 4.0
"""Rows that an average is taken of, what it may be in units of the dtype's `eps`, and standard errors on top."""
LEAST_NORMALS = 16.0
"""The dtype's least normal number times this: rows whose numbers are less in the mean are not looked at."""

Outputs = dict[str, torch.Tensor]
"""By name, in their logical shapes."""


def dirty_sentence(zeroed: tuple[str, ...], counts: list[int]) -> str:
    """Which of the scratch buffers `zeroed` the next launch would not find so, by their bytes that are not zero; empty
    if none."""
    name = next((name for name, count in zip(zeroed, counts, strict=True) if count), "")
    return name and f"the kernel did not leave zeros in {name}, where its next launch expects them."


def different(one: Outputs, other: Outputs) -> int:
    """Elements of the outputs of two runs that are not the same bits; waits for the device."""
    return int(sum((bits(one[name]) != bits(other[name])).sum() for name in one))


def order_error(output: torch.Tensor) -> torch.Tensor:
    """How far apart an element of an output, and the same with its fp32 parts added up in another order, may be: `eps`
    of the output's dtype, or 1e-5, of the largest element. A float64 scalar on the device."""
    return max(torch.finfo(output.dtype).eps, FP32_RELATIVE) * output.abs().max().double()


def ordered(outputs: Outputs, unordered: Collection[str]) -> Outputs:
    """The outputs without those of which two runs may leave other bits (`Family.unordered`)."""
    return {name: out for name, out in outputs.items() if name not in unordered}


def apart(one: Outputs, other: Outputs, unordered: Collection[str]) -> int:
    """As `different`; of the outputs `unordered` those elements that are further apart than `order_error`."""
    found = different(ordered(one, unordered), ordered(other, unordered))
    for name in unordered:
        difference = (one[name].double() - other[name].double()).abs()
        found += int((~(difference <= order_error(other[name]))).sum())  # NaN is far from everything
    return found


def why_different(first: Outputs, other_bands: Outputs, third: Outputs, fourth: Outputs) -> str:
    """Two further runs tell nondeterminism from out-of-bounds reads: a sentence.

    `first` and `other_bands` differ. They ran on the same inputs with other bytes in the guard bands; `third` and
    `fourth` ran with the bytes of `first`."""
    count = different(first, other_bands)
    if not different(first, third) and not different(first, fourth):
        return f"{count} outputs change with the bytes outside the buffers: the kernel reads out of bounds."
    if not all(different(other_bands, later) for later in (third, fourth)):
        return (
            f"{count} outputs are not the same in every launch on the same inputs: the kernel remembers its launches."
        )
    return f"two runs on the same inputs differ in {count} outputs: a race, or a kernel that remembers its launches."


def judge(outputs: Outputs, answer: Answer) -> tuple[str, float]:
    """(what is wrong with the outputs, an empty string if nothing; the largest error of the first)."""
    found = [judge_one(outputs[name], exact) for name, exact in answer.items()]
    return next((reason for reason, _ in found if reason), ""), found[0][1]


def judge_one(out: torch.Tensor, exact: Exact) -> tuple[str, float]:
    """As `judge`, of one output."""
    if exact.partial:
        left = torch.isnan(exact.values)
        if strays := int((left & ~unwritten(out)).sum()):
            return f"{strays} elements were written that are not the kernel's to write.", math.inf
        out, exact = out.masked_fill(left, 0), replace(exact, values=exact.values.masked_fill(left, 0))
    return _judge_logarithms(out, exact) if exact.logarithms else _judge_values(out, exact)


def _judge_values(out: torch.Tensor, answer: Exact) -> tuple[str, float]:
    nowhere = torch.isnan(answer.values)
    nan = torch.isnan(out)
    difference = (out.to(answer.values.dtype) - answer.values).masked_fill(nan & nowhere, 0)
    missing, strays, largest, rms = torch.stack(
        [
            unwritten(out).sum().double(),
            (nan & ~nowhere).sum().double(),
            difference.abs().max().double(),
            difference.double().square().mean().sqrt(),
        ]
    ).tolist()
    if missing:
        return f"{missing:.0f} of {out.numel()} outputs were never written.", largest
    if strays:
        return f"{strays:.0f} of {out.numel()} outputs are NaN.", largest
    if not largest <= answer.allowed_error:
        return f"the largest error is {largest:.2e}, allowed are {answer.allowed_error:.2e}.", largest
    if not rms <= answer.allowed_rms:
        return f"the root-mean-square error is {rms:.2e}, allowed are {answer.allowed_rms:.2e}.", largest
    return judge_rounding(out, answer.values) if answer.rounds_evenly else "", largest


def judge_rounding(out: torch.Tensor, exact: torch.Tensor) -> str:
    """What is wrong if the rows of O are too short or too long on average; empty if nothing, or if few rows that
    differ see keys and are not so small, as beside a sink, that numbers of the dtype lie further apart there.

    The error of a row along the row itself is 0 on average where weights and outputs are rounded to the nearest: of 133
    right kernels' cases with 40 rows or more 0.03 `eps` at most, a row's standard deviation 0.03 to 0.2. Where they are
    cut instead it is half a unit in the last place, 0.36 `eps`, which the largest and the root-mean-square error allow.
    """
    exact = exact.double()
    lengths, info = exact.square().sum(-1), torch.finfo(out.dtype)
    seen = lengths > exact.shape[-1] * (LEAST_NORMALS * info.smallest_normal) ** 2
    if (rows := lengths[seen].unique().numel()) < LEAST_ROWS:  # rows with one answer are rounded alike
        return ""
    along = (((out.double() - exact) * exact).sum(-1)[seen] / lengths[seen]) / info.eps
    mean, allowed = along.mean().item(), LEANS + DEVIATIONS * along.std().item() / math.sqrt(rows)
    if abs(mean) <= allowed:
        return ""
    how = "long" if mean > 0 else "short"
    return f"rows are {abs(mean):.2f} eps too {how} on average, allowed are {allowed:.2f}: something is not rounded."


def _judge_logarithms(lse: torch.Tensor, answer: Exact) -> tuple[str, float]:
    """As `judge`, for log-sum-exps: -inf exactly where no key is seen, NaN exactly where the answer is, elsewhere at
    most what is allowed off."""
    exact, allowed = answer.values, answer.allowed_error
    unseen, nowhere, none = exact == -math.inf, torch.isnan(exact), torch.isnan(lse)
    missing, nan, misplaced, error = torch.stack(
        [
            unwritten(lse).sum().double(),
            (none & ~nowhere).sum().double(),
            ((lse == -math.inf) != unseen).sum().double(),
            (lse.double() - exact).masked_fill(unseen | (none & nowhere), 0).abs().max(),
        ]
    ).tolist()
    if missing:
        return f"{missing:.0f} of {lse.numel()} log-sum-exps were never written.", error
    if nan:
        return f"{nan:.0f} of {lse.numel()} log-sum-exps are NaN.", error
    if misplaced:
        return "the log-sum-exp must be -inf for a query that sees no key, and for no other.", error
    if not error <= allowed:
        return f"the largest error of a log-sum-exp is {error:.2e}, allowed are {allowed:.2e}.", error
    return "", error


def first_wrong(outputs: Mapping[str, torch.Tensor], answer: Answer) -> str:
    """One sentence about the first wrong element: its indices, what the kernel wrote, what is right, and how many are
    wrong.

    An element is wrong if it was never written, is NaN, or is further from the exact answer than `answer` allows a
    single element to be. Empty if there is none: the error is then one of many elements together."""
    return next(filter(None, (_first(outputs[name], name, exact) for name, exact in answer.items())), "")


def _first(out: torch.Tensor, name: str, answer: Exact) -> str:
    exact, allowed = answer.values, answer.allowed_error
    got = out.to(exact.dtype)
    missing = unwritten(out)
    close = (got - exact).abs() <= allowed
    same = (got == exact) | (got.isnan() & exact.isnan())  # equal infinities differ by NaN
    wrong = missing | ~(close | same)
    places = wrong.nonzero()
    if not len(places):
        return ""
    index = tuple(places[0].tolist())
    where = ", ".join(f"{dim} {i}" for dim, i in zip(answer.dims, index, strict=False))
    what = "was never written" if missing[index] else f"is {got[index].item():.6g}"
    return (
        f"The first wrong element, {name}{list(index)} ({where}), {what}; right is {exact[index].item():.6g} "
        f"± {allowed:.2g}. {len(places)} of {out.numel()} elements are wrong."
    )
