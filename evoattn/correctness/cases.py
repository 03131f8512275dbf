"""Small problems, inputs and their answers: what catches wrong kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evoattn.correctness import reference
from evoattn.model.problem import AttentionProblem


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
    """`heads` query heads with the problem's kind of grouping: two per K/V head if it groups at all."""
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
