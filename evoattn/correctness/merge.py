"""The proof of merges of partial answers: a `cases.Proof`."""

import math

import torch
from torch import Tensor

from evoattn.correctness.interpreter_cases import SmallCase
from evoattn.correctness.reference import LSE_ABSOLUTE, LSE_RELATIVE, Answer, Exact, rms
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

KINDS = ("plain", "no_keys", "far_apart")
SPREAD = {"plain": 3.0, "no_keys": 3.0, "far_apart": 3e4}
"""Of log-sum-exps: those of parts of the keys are near each other; far apart one part alone counts."""
OF_WEIGHTS = 1e-5
"""Of the largest output: an exponential is 2^-22 off, its argument 2^-24 of itself."""


def make_inputs(
    problem: AttentionProblem, seed: int, device: torch.device | str, kind: str = "plain", tile: int = 64
) -> dict[str, Tensor]:
    """Normal parts. With `no_keys` a part of each row, by turns, and all parts of some rows saw no key: their
    log-sum-exp is -inf, and what they hold is no number. Raises `ValueError` on an unknown kind."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}.")
    generator = torch.Generator(device=device).manual_seed(seed)
    made = {}
    for spec in problem.inputs:
        values = torch.randn(spec.shape, generator=generator, device=device)
        memory = torch.empty(values.numel(), dtype=getattr(torch, spec.dtype), device=device)
        made[spec.name] = memory.as_strided(spec.shape, spec.strides).copy_(values)
    sums = made["part_sums"]
    sums *= SPREAD[kind]
    if kind == "no_keys":
        rows = torch.arange(sums[0].numel(), device=device).view(sums.shape[1:])
        part = torch.arange(len(sums), device=device).view(-1, 1, 1, 1)
        unseen = (rows % (len(sums) + 1) == part) | (rows % 5 == 4)
        sums.masked_fill_(unseen, -math.inf)
        made["parts"].masked_fill_(unseen[..., None], math.nan)
    return made


def make_answer(
    problem: AttentionProblem, tensors: dict[str, Tensor], kind: str = "plain", double: bool = False
) -> Answer:
    """float64: the parts weighted by the exponentials of their log-sum-exps, and rounded once."""
    sums = tensors["part_sums"].double()
    lse = torch.logsumexp(sums, dim=0)
    weights = (sums - lse).exp().masked_fill(sums.isneginf(), 0)[..., None]
    o = sum((part.double() * one).masked_fill(one == 0, 0) for part, one in zip(tensors["parts"], weights, strict=True))
    assert isinstance(o, Tensor)
    dtype = getattr(torch, problem.element.torch)
    rounding = torch.finfo(dtype).eps / 2 if problem.element_bytes == 2 else 0.0
    largest = o.abs().max().item()
    finite = lse.masked_fill(lse.isinf(), 0).abs().max().item()
    return {
        "o": Exact(o, (OF_WEIGHTS + rounding) * largest, OF_WEIGHTS * largest + rounding * rms(o)),
        "lse": Exact(lse, LSE_ABSOLUTE + LSE_RELATIVE * finite, logarithms=True),
    }


def device_cases(problem: AttentionProblem) -> list[tuple[str, AttentionProblem, str]]:
    small = problem.with_(batch=2, heads=3, kv_heads=3)
    other = "bshd" if problem.layout == "bhsd" else "bhsd"
    return [
        ("ragged", small.with_(seqlen_q=131, seqlen_k=7), "plain"),
        ("parts without keys", small.with_(seqlen_q=131, seqlen_k=3), "no_keys"),
        ("ragged, strided, Sq > Sk", small.with_(seqlen_q=37, seqlen_k=12, layout=other), "far_apart"),
        ("one part", small.with_(seqlen_q=1, seqlen_k=1), "plain"),
        ("many parts", small.with_(seqlen_q=5, seqlen_k=65), "no_keys"),
    ]


def interpreter_cases(problem: AttentionProblem, config: KernelConfig) -> list[SmallCase]:
    """Those of a device; the first has more rows than a block."""
    cases = [SmallCase(*case) for case in device_cases(problem)]
    rows = problem.with_(batch=1, heads=1, kv_heads=1, seqlen_q=int(config.params["BLOCK_M"]) + 3, seqlen_k=5)
    return [SmallCase("two blocks of rows", rows, "no_keys"), *(case for case in cases if case.name != "ragged")]
