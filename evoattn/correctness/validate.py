"""Is an output right? Runs a candidate over the cases that catch wrong kernels and judges each by
`reference.Answer`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from evoattn.backends.base import Backend
from evoattn.correctness import reference
from evoattn.correctness.arena import BANDS, UNWRITTEN, Arena, Layout, bits
from evoattn.families.built import BuiltKernel
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CheckResult

OUTSIDE = "the kernel wrote outside its buffers"


@dataclass(frozen=True)
class Case:
    """One problem with inputs: `tensors` q, k, v on the backend's device, and the answer to them."""

    name: str
    problem: AttentionProblem
    tensors: dict[str, torch.Tensor]
    answer: reference.Answer


def make_case(
    name: str,
    problem: AttentionProblem,
    seed: int,
    device: torch.device | str,
    kind: str = "plain",
    double: bool = False,
) -> Case:
    """Inputs of `kind` (see `reference.make_inputs`) and their answer, on `device`."""
    tensors = reference.make_inputs(problem, seed, device, kind)
    return Case(name, problem, tensors, reference.make_answer(problem, tensors, double))


def _grouped(problem: AttentionProblem, heads: int) -> dict[str, int]:
    """`heads` query heads with the problem's kind of grouping: two a K/V head if it groups at all."""
    return {"heads": heads, "kv_heads": heads // 2 if problem.group_size > 1 else heads}


def device_cases(problem: AttentionProblem) -> list[tuple[str, AttentionProblem, str]]:
    """(name, problem, kind of inputs) of the ladder that every candidate climbs on a GPU before its own shape; cheap
    ones first.

    All keep the compile-time key of `problem` (head_dim, dtype, mask), so they run the very cubin that is timed.
    Lengths divide by no tile.
    """
    other = "bshd" if problem.layout == "bhsd" else "bhsd"
    small = problem.with_(batch=1, heads=2, kv_heads=1)
    return [
        ("ragged", small.with_(batch=2, heads=4, kv_heads=2, seqlen_q=203, seqlen_k=239), "plain"),
        ("ragged, strided, Sq > Sk", small.with_(seqlen_q=415, seqlen_k=113, layout=other), "plain"),
        ("one query", small.with_(seqlen_q=1, seqlen_k=799), "plain"),
        ("one key", small.with_(seqlen_q=127, seqlen_k=1), "plain"),
        ("logits x30", small.with_(seqlen_q=259, seqlen_k=1023), "large_logits"),
        ("a huge late key", small.with_(seqlen_q=130, seqlen_k=1025), "late_huge_key"),
        ("rising maximum", small.with_(seqlen_q=190, seqlen_k=900), "rising_maximum"),
        ("equal keys", small.with_(seqlen_q=65, seqlen_k=513), "equal_keys"),
    ]


def interpreter_cases(problem: AttentionProblem, block_m: int, block_n: int) -> list[tuple[str, AttentionProblem, str]]:
    """(name, problem, kind) of the small cases that the interpreter runs for a kernel with tiles of `block_m` rows and
    `block_n` keys.

    Just past two key tiles and one row tile, so that every buffer is reused, the tail is ragged and two blocks run; the
    problem's mask, grouping and layout are kept, and a second case bends them. That one has 40 rows, since the largest
    error of a few is a small sample: with 13, kernels as coarse as torch's own 16-bit scores failed it for 5 to 17 of
    100 seeds, with 40 for 1 to 3.
    """
    other = "bshd" if problem.layout == "bhsd" else "bhsd"
    first = problem.with_(batch=1, **_grouped(problem, 2), seqlen_q=min(block_m + 7, 140), seqlen_k=2 * block_n + 5)
    rows = (
        block_n + 9 if problem.masking.queries_to_see_all(block_n + 3) > 1 else 40
    )  # under that mask only rows as many as keys see the last key
    second = problem.with_(batch=1, heads=2, kv_heads=1, seqlen_q=rows, seqlen_k=block_n + 3, layout=other)
    return [
        ("ragged", first, "plain"),
        ("grouped, strided, logits x30, a late huge key", second, "large_logits_late_key"),
    ]


def output_layouts(problem: AttentionProblem) -> dict[str, Layout]:
    """What a kernel writes: `o` and, where the problem asks for it, `lse`."""
    layouts = {"o": Layout(problem.shape("o"), problem.strides("o"), reference.torch_dtype(problem))}
    if problem.lse:
        _, heads, rows = problem.lse_shape
        layouts["lse"] = Layout(problem.lse_shape, (heads * rows, rows, 1), torch.float32)
    return layouts


def make_arena(case: Case, scratch: dict[str, int], device: torch.device) -> Arena:
    """Guarded buffers for `case` and a family's `scratch` (name: bytes)."""
    return Arena(case.tensors, output_layouts(case.problem), scratch, device)


def check(
    backend: Backend,
    kernel: BuiltKernel,
    case: Case,
    repeat: bool = False,
) -> CheckResult:
    """Run a candidate once on `case` (twice if `repeat`, comparing bits) over poisoned output between guard bands, and
    judge it.

    The inputs are copies between guard bands too, compared with the originals afterwards; the second run finds other
    bytes in the bands, so that an answer that depends on them shows. Raises `LaunchError` if the launch fails.
    """
    return run_case(backend, kernel, case, repeat)[0]


def run_case(
    backend: Backend,
    kernel: BuiltKernel,
    case: Case,
    repeat: bool = False,
) -> tuple[CheckResult, dict[str, torch.Tensor] | None]:
    """`check`, and the outputs that were judged, by name (None where the run itself showed a fault)."""
    started = time.perf_counter()
    arena = make_arena(case, kernel.workspace(case.problem), backend.device)
    launches = kernel.launches(case.problem)
    outputs, damage = [], []

    def result(reason: str, largest: float = math.nan) -> CheckResult:
        sentence = f"Case '{case.name}': {reason}" if reason else ""
        return CheckResult(
            case.name, not reason, largest, case.answer.allowed_error, sentence, time.perf_counter() - started
        )

    def run(band: int) -> str:
        arena.arm(band)
        faults = backend.run(kernel.compiled, launches, arena.buffers)
        if not faults:
            outputs.append({name: out.clone() for name, out in arena.outputs.items()})
            damage.append(torch.stack([arena.changed_bands(), *arena.changed_inputs(), *arena.dirty_zeros()]))
        return faults[0] if faults else ""

    for band in BANDS[: 2 if repeat else 1]:
        if fault := run(band):
            return result(fault), None
    bands, *counts = torch.stack(damage).sum(0).tolist()
    if bands:
        return result(f"{OUTSIDE}, beside {arena.touched_band()}."), outputs[0]
    for name, changed in zip(case.tensors, counts[: len(case.tensors)], strict=True):
        if changed:
            return result(f"the kernel changed {changed} elements of its input {name}."), outputs[0]
    reason, largest = judge(outputs[0], case.answer)
    if repeat and different(*outputs):
        run(BANDS[0])
        run(BANDS[0])
        reason = _why_different(*outputs)
    return result(reason or dirty_sentence(arena.zeroed, counts[len(case.tensors) :]), largest), outputs[0]


def dirty_sentence(zeroed: tuple[str, ...], counts: list[int]) -> str:
    """Which of the scratch buffers `zeroed` the next launch would not find so, by their bytes that are not zero; empty
    if none.
    """
    name = next((name for name, count in zip(zeroed, counts, strict=True) if count), "")
    return name and f"the kernel did not leave zeros in {name}, where its next launch expects them."


def different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> int:
    """Elements of the outputs of two runs that are not the same bits; waits for the device."""
    return int(sum((bits(one[name]) != bits(other[name])).sum() for name in one))


def _why_different(first: dict, other_bands: dict, third: dict, fourth: dict) -> str:
    """Two runs differ; two more between the bands of the first tell why."""
    count = different(first, other_bands)
    if not different(first, third) and not different(first, fourth):
        return f"{count} outputs change with the bytes outside the buffers: the kernel reads out of bounds."
    if not all(different(other_bands, later) for later in (third, fourth)):
        return (
            f"{count} outputs are not the same in every launch on the same inputs: the kernel remembers its launches."
        )
    return f"two runs on the same inputs differ in {count} outputs: a race, or a kernel that remembers its launches."


def judge(outputs: dict[str, torch.Tensor], answer: reference.Answer) -> tuple[str, float]:
    """(what is wrong with the outputs, an empty string if nothing; the largest error of `o`)."""
    reason, largest = judge_o(outputs["o"], answer)
    return reason or ("" if answer.lse is None else _judge_lse(outputs["lse"], answer)), largest


def judge_o(out: torch.Tensor, answer: reference.Answer) -> tuple[str, float]:
    """As `judge`, of O alone: all that a peer gives."""
    difference = out.to(answer.exact.dtype) - answer.exact
    missing, nan, largest, rms = torch.stack(
        [
            (bits(out) == UNWRITTEN).sum().double(),
            torch.isnan(out).sum().double(),
            difference.abs().max().double(),
            difference.double().square().mean().sqrt(),
        ]
    ).tolist()
    if missing:
        return f"{missing:.0f} of {out.numel()} outputs were never written.", largest
    if nan:
        return f"{nan:.0f} of {out.numel()} outputs are NaN.", largest
    if not largest <= answer.allowed_error:
        return f"the largest error is {largest:.2e}, allowed are {answer.allowed_error:.2e}.", largest
    if not rms <= answer.allowed_rms:
        return f"the root-mean-square error is {rms:.2e}, allowed are {answer.allowed_rms:.2e}.", largest
    return "", largest


def _judge_lse(lse: torch.Tensor, answer: reference.Answer) -> str:
    """As `judge`, for the log-sum-exp: -inf exactly where no key is seen, elsewhere within what `Answer` allows."""
    unseen = answer.lse == -math.inf
    missing, nan, misplaced, error = torch.stack(
        [
            (bits(lse) == UNWRITTEN).sum().double(),
            torch.isnan(lse).sum().double(),
            ((lse == -math.inf) != unseen).sum().double(),
            torch.where(unseen, 0, lse.double() - answer.lse).abs().max(),
        ]
    ).tolist()
    if missing:
        return f"{missing:.0f} of {lse.numel()} log-sum-exps were never written."
    if nan:
        return f"{nan:.0f} of {lse.numel()} log-sum-exps are NaN."
    if misplaced:
        return "the log-sum-exp must be -inf for a query that sees no key, and for no other."
    if not error <= answer.allowed_lse:
        return f"the largest error of a log-sum-exp is {error:.2e}, allowed are {answer.allowed_lse:.2e}."
    return ""
