"""Is an output right? Runs a candidate over the cases that catch wrong kernels and judges each by `reference.Answer`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from evoattn import reference
from evoattn.backends.base import Backend
from evoattn.config import KernelConfig
from evoattn.families.base import Family, starts_zeroed
from evoattn.problem import AttentionProblem
from evoattn.trial import CheckResult, CompiledKernel

POISON = float("nan")


@dataclass(frozen=True)
class Case:
    """One problem with inputs: `tensors` q, k, v on the backend's device, and the answer to them."""

    name: str
    problem: AttentionProblem
    tensors: dict[str, torch.Tensor]
    answer: reference.Answer


def make_case(name: str, problem: AttentionProblem, seed: int, device: torch.device | str, kind: str = "plain", double: bool = False) -> Case:
    """Inputs of `kind` (see `reference.make_inputs`) and their answer, on `device`."""
    tensors = reference.make_inputs(problem, seed, device, kind)
    return Case(name, problem, tensors, reference.make_answer(problem, tensors, double))


def _grouped(problem: AttentionProblem, heads: int) -> dict[str, int]:
    """`heads` query heads with the problem's kind of grouping: two a K/V head if it groups at all."""
    return {"heads": heads, "kv_heads": heads // 2 if problem.group_size > 1 else heads}


def device_cases(problem: AttentionProblem) -> list[tuple[str, AttentionProblem, str]]:
    """(name, problem, kind of inputs) of the ladder that every candidate climbs on a GPU before its own shape; cheap ones first.

    All keep the compile-time key of `problem` (head_dim, dtype, mask), so they run the very cubin that is timed. Lengths divide by no tile.
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
    """(name, problem, kind) of the small cases that the interpreter runs for a kernel with tiles of `block_m` rows and `block_n` keys.

    Just past two key tiles and one row tile, so that every buffer is reused, the tail is ragged and two blocks run; the problem's mask,
    grouping and layout are kept, and a second case bends them.
    """
    other = "bshd" if problem.layout == "bhsd" else "bhsd"
    first = problem.with_(batch=1, **_grouped(problem, 2), seqlen_q=min(block_m + 7, 140), seqlen_k=2 * block_n + 5)
    second = problem.with_(batch=1, heads=2, kv_heads=1, seqlen_q=13, seqlen_k=block_n + 3, layout=other)
    return [("ragged", first, "plain"), ("grouped, strided, logits x30", second, "large_logits")]


def check(
    backend: Backend, family: Family, config: KernelConfig, compiled: CompiledKernel, case: Case, repeat: bool = False,
) -> CheckResult:
    """Run a candidate once on `case` (twice if `repeat`, comparing bits) over poisoned output between guard bands, and judge it.

    The inputs are copies between guard bands too, compared with the originals afterwards. Raises `LaunchError` if the launch fails.
    """
    problem, exact = case.problem, case.answer.exact
    buffers, wholes, views = _guarded_buffers(case)
    launches = family.launches(problem, config)
    for name, size in family.workspace(problem, config).items():
        wholes[name], buffers[name] = _guarded_bytes(size, 0 if starts_zeroed(name) else 0xFF, backend.device)
    outputs = []
    for _ in range(2 if repeat else 1):
        for name in _outputs(problem):
            buffers[name].fill_(POISON)
        faults = backend.run(compiled, launches, buffers)
        if faults:
            return CheckResult(case.name, False, math.nan, case.answer.allowed_error, f"Case '{case.name}': {faults[0]}")
        outputs.append({name: views[name].clone() for name in _outputs(problem)})
    reason = _judge(case, outputs, wholes, views) or _why_unclean(case, buffers)
    largest, _ = reference.rms_error(outputs[0]["o"], exact)
    return CheckResult(case.name, not reason, largest, case.answer.allowed_error, reason)


def _outputs(problem: AttentionProblem) -> tuple[str, ...]:
    """Buffers that a kernel writes."""
    return ("o", "lse") if problem.lse else ("o",)


def _guarded_buffers(case: Case) -> tuple[dict, dict, dict]:
    """(flat buffers for the launch, whole allocations with guards, logical views) of q, k, v and the outputs."""
    buffers, wholes, views = {}, {}, {}
    pattern = dict(case.tensors)
    problem = case.problem
    shape, strides = problem.shape("o"), problem.strides("o")
    like = case.tensors["q"]
    pattern["o"] = torch.zeros(like.numel(), dtype=like.dtype, device=like.device).as_strided(shape, strides)
    if problem.lse:
        pattern["lse"] = torch.zeros(problem.lse_shape, device=like.device)
    for name, view in pattern.items():
        wholes[name], views[name] = reference.guarded_like(view)
        buffers[name] = wholes[name][reference.GUARD_BYTES:-reference.GUARD_BYTES].view(view.dtype)
    return buffers, wholes, views


def _guarded_bytes(size: int, value: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(whole, `size` bytes of `value` between guard bands): a family's scratch buffer, uint8."""
    guard = reference.GUARD_BYTES
    whole = torch.full((size + 2 * guard,), reference.GUARD_VALUE, dtype=torch.uint8, device=device)
    whole[guard:guard + size] = value
    return whole, whole[guard:guard + size]


def _why_unclean(case: Case, buffers: dict[str, torch.Tensor]) -> str:
    """The sentence that names a zeroed scratch buffer which the next launch would not find so, or an empty string."""
    for name, buffer in buffers.items():
        if starts_zeroed(name) and buffer.any():
            return f"Case '{case.name}': the kernel did not leave zeros in {name}, where its next launch expects them."
    return ""


def _judge(case: Case, outputs: list[dict[str, torch.Tensor]], wholes: dict[str, torch.Tensor], views: dict[str, torch.Tensor]) -> str:
    """The sentence that says what is wrong, or an empty string."""
    answer, out = case.answer, outputs[0]["o"]
    for name, whole in wholes.items():
        if not reference.guards_intact(whole):
            return f"Case '{case.name}': the kernel wrote outside {name}."
    for name in "qkv":
        if not torch.equal(views[name], case.tensors[name]):
            return f"Case '{case.name}': the kernel changed its input {name}."
    unwritten = torch.isnan(out) & ~torch.isnan(answer.exact)
    if unwritten.any():
        return f"Case '{case.name}': {int(unwritten.sum())} of {out.numel()} outputs are NaN or were never written."
    again = outputs[-1]["o"]
    if not torch.equal(out, again):
        return f"Case '{case.name}': two runs on the same inputs differ in {int((out != again).sum())} outputs."
    largest, rms = reference.rms_error(out, answer.exact)
    if not largest <= answer.allowed_error:
        return f"Case '{case.name}': the largest error is {largest:.2e}, allowed are {answer.allowed_error:.2e}."
    if not rms <= answer.allowed_rms:
        return f"Case '{case.name}': the root-mean-square error is {rms:.2e}, allowed are {answer.allowed_rms:.2e}."
    return _judge_lse(case, outputs[0]["lse"], outputs[-1]["lse"]) if answer.lse is not None else ""


def _judge_lse(case: Case, lse: torch.Tensor, again: torch.Tensor) -> str:
    """As `_judge`, for the log-sum-exps of two runs: -inf exactly where no key is seen, elsewhere within what `Answer` allows."""
    exact = case.answer.lse
    if lse.isnan().any():
        return f"Case '{case.name}': {int(lse.isnan().sum())} of {lse.numel()} log-sum-exps are NaN or were never written."
    if not torch.equal(lse, again):
        return f"Case '{case.name}': two runs on the same inputs differ in {int((lse != again).sum())} log-sum-exps."
    if not torch.equal(lse == -math.inf, exact == -math.inf):
        return f"Case '{case.name}': the log-sum-exp must be -inf for a query that sees no key, and for no other."
    error = torch.where(exact == -math.inf, 0, lse.double() - exact).abs().max().item()
    if not error <= case.answer.allowed_lse:
        return f"Case '{case.name}': the largest error of a log-sum-exp is {error:.2e}, allowed are {case.answer.allowed_lse:.2e}."
    return ""
