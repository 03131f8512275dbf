"""Small problems, inputs and their answers: what catches wrong kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle

import torch

from evoattn.correctness import reference
from evoattn.correctness.case_shapes import fitted, sequenced, used_cases, windowed
from evoattn.model.problem import AttentionProblem

PACKING = 256
"""Bytes: tensors that are packed into one piece of memory begin at multiples of them."""


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
    tile: int = 64,
) -> Case:
    """Inputs of `kind` and `tile` (see `reference.make_inputs`) and their answer, on `device`; `double` as
    `reference.make_answer` has it, and judges how plain inputs are rounded besides (soft caps by `tanh.approx` have an
    error of one sign)."""
    tensors = reference.make_inputs(problem, seed, device, kind, tile)
    answer = reference.make_answer(problem, tensors, double)
    evenly = double and kind == "plain" and problem.dtype != "fp32" and not problem.softcap
    return Case(name, problem, tensors, replace(answer, rounds_evenly=evenly))


def tensors_of(case: Case) -> list[torch.Tensor]:
    """The inputs and the answer: all that a kernel is never handed."""
    answer = case.answer
    return [*case.tensors.values(), answer.exact, *([] if answer.lse is None else [answer.lse])]


def packed(cases: Sequence[Case]) -> tuple[list[Case], torch.Tensor]:
    """The same cases with all their tensors in one piece of memory, and that piece as int64."""
    tensors = [tensor for case in cases for tensor in tensors_of(case)]
    starts = [0, *accumulate(-(-t.untyped_storage().nbytes() // PACKING) * PACKING for t in tensors)]
    whole = torch.zeros(starts[-1], dtype=torch.uint8, device=tensors[0].device)
    kept = []
    for tensor, start in zip(tensors, starts, strict=False):
        offset = start // tensor.element_size() + tensor.storage_offset()
        copy = whole.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), offset)
        kept.append(copy.copy_(tensor))
    left = iter(kept)

    def moved(case: Case) -> Case:
        inputs = {name: next(left) for name in case.tensors}
        exact = next(left)
        lse = None if case.answer.lse is None else next(left)
        return replace(case, tensors=inputs, answer=replace(case.answer, exact=exact, lse=lse))

    return [moved(case) for case in cases], whole.view(torch.int64)


def device_cases(problem: AttentionProblem) -> list[tuple[str, AttentionProblem, str]]:
    """(name, problem, kind of inputs) of the small cases that every candidate passes on a GPU before its own shape;
    cheap ones first.

    All keep the compile-time key of `problem` (head_dim, dtype, mask, variants), so they run the very cubin that is
    timed.
    Lengths divide by no tile; some lie one beside a multiple of 64, and those of the plain cases are odd.
    """
    other = "bshd" if problem.layout == "bhsd" else "bhsd"
    small = problem.with_(varlen="", batch=1, heads=2, kv_heads=1)
    ladder = [
        ("ragged", small.with_(batch=2, heads=4, kv_heads=2, seqlen_q=203, seqlen_k=239), "plain"),
        ("ragged, strided, Sq > Sk", small.with_(seqlen_q=415, seqlen_k=113, layout=other), "plain"),
        ("one query", small.with_(seqlen_q=1, seqlen_k=799), "plain"),
        ("one key", small.with_(seqlen_q=127, seqlen_k=1), "plain"),
        ("logits x30", small.with_(seqlen_q=259, seqlen_k=1023), "large_logits"),
        ("a huge late key", small.with_(seqlen_q=130, seqlen_k=1025), "late_huge_key"),
        ("rising maximum", small.with_(seqlen_q=190, seqlen_k=900), "rising_maximum"),
        ("equal keys", small.with_(seqlen_q=65, seqlen_k=513), "equal_keys"),
    ]
    if problem.term_shapes:
        ladder.append(("extreme terms", small.with_(kv_heads=2, seqlen_q=190, seqlen_k=333), "extreme_terms"))
    if problem.shared_kv:
        ladder.append(("many heads", small.with_(batch=2, heads=142, kv_heads=2, seqlen_q=3, seqlen_k=333), "plain"))
    pasts = cycle((64, 65, 128, 0, 127, 1000, 300, 33, 63, 31))
    made = [(name, fitted(p, past, past // 2), kind) for (name, p, kind), past in zip(ladder, pasts)]
    if problem.seqused:
        made += [(name, windowed(p, 100, 30), kind) for name, p, kind in used_cases(problem, 256)]
    return [(name, sequenced(p), kind) for name, p, kind in made] if problem.varlen else made
