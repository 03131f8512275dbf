"""The proof of the backward pass: a `cases.Proof`."""

import math
from dataclasses import replace

import torch

from evoattn.correctness import inputs
from evoattn.correctness.backward_cases import device_cases as device_cases
from evoattn.correctness.backward_cases import interpreter_cases as interpreter_cases
from evoattn.correctness.gradients import attend, exact_gradients, gradients_of_torch
from evoattn.correctness.reference import FP32_RELATIVE, FP32_ROUNDING, Answer, Exact, largest_score, rms
from evoattn.correctness.terms import torch_dtype
from evoattn.model.problem import AttentionProblem

KINDS = (*inputs.KINDS, "low_scores", "large_gradients", "parts_of_keys")
LOW_SCORE = -400.0
"""Of each query and key in `low_scores`: exp of it is 0 in fp32, and exp of minus it infinite."""
CANCELLING = ("equal_keys", "low_equal_scores", "low_scores")
"""Kinds of which dQ is a sum of dS that is about 0 times one key: what is left of it is the roundings of dS."""
LARGE = 100.0
"""How much larger every other row of dO is in `large_gradients`: fp16 holds what a head_dim of 256 makes of it."""
SOFTCAP_FACTOR, SOFTCAP_ABSOLUTE = 3.0, 3e-4
DIMS = {"dk": ("batch", "head", "key", "dim"), "dbias": ("batch", "head", "query", "key"), "dsinks": ("head",)}
DIMS["dv"] = DIMS["dk"]
OF_TABLES = ("first index", "second", "third", "fourth")


def make_inputs(
    problem: AttentionProblem, seed: int, device: torch.device | str, kind: str = "plain", tile: int = 64
) -> dict[str, torch.Tensor]:
    """q, k, v and the terms as the forward pass has them (`inputs.make_inputs`); `o` and `lse` are its exact answer,
    rounded; `do` and `dlse` are normal.

    Of kinds beside its own, `low_scores` gives all pairs one score so low that the exponential of a hidden key's 0
    overflows; `large_gradients` makes every other row of dO large and the others 0; `parts_of_keys` says that O and the
    log-sum-exps are of more keys than these, as where several devices have some keys each.
    Raises `ValueError` on an unknown kind."""
    own = {"low_scores": "plain", "large_gradients": "plain", "parts_of_keys": "plain"}
    forward = problem.with_(op="forward", grads="", deterministic=False)
    tensors = inputs.make_inputs(forward, seed, device, own.get(kind, kind), tile)
    if kind == "low_scores":
        side = math.sqrt(-LOW_SCORE / problem.softmax_scale)
        tensors["q"].zero_()
        tensors["q"][..., -1], tensors["k"][..., -1] = -min(side, inputs.MOST_LONE), min(side, inputs.MOST_LONE)
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    wide = torch.float64 if problem.dtype == "fp32" or str(device) == "cpu" else torch.float32
    o, lse = attend(problem, tensors, wide)
    do = torch.randn(o.shape, generator=generator, device=device)
    if kind == "large_gradients":
        do *= LARGE * (torch.arange(do.shape[2], device=device) % 2)[:, None]
    elif (
        kind == "parts_of_keys"
    ):  # a share of 0.1 to 0.9 is of these keys, all of it of the others where there are none
        others = torch.randn(lse.shape, generator=generator, device=device)
        share = (0.1 + 0.8 * torch.rand(lse.shape, generator=generator, device=device)).to(lse)
        o = share[..., None] * o + (1 - share[..., None]) * others[..., None]
        lse = torch.where(lse.isneginf(), others.to(lse), lse - share.log())
    for name, values in (("o", o), ("do", do)):
        tensors[name] = _laid_out(problem, name, values)
    tensors["lse"] = lse.float()
    if problem.lse:
        tensors["dlse"] = torch.randn(lse.shape, generator=generator, device=device)
    return {spec.name: tensors[spec.name] for spec in problem.inputs}


def _laid_out(problem: AttentionProblem, name: str, values: torch.Tensor) -> torch.Tensor:
    """The values in the problem's dtype and layout."""
    out = torch.empty(values.numel(), dtype=torch_dtype(problem), device=values.device)
    return out.as_strided(problem.shape(name), problem.strides(name)).copy_(values)


def make_answer(
    problem: AttentionProblem, tensors: dict[str, torch.Tensor], kind: str = "plain", double: bool = False
) -> Answer:
    """The exact gradients of inputs of `kind`, and how far an honest kernel may be from each.

    flash-attention's rule for gradients: max|g − exact| ≤ 2·max|low − exact| + 2·max|(exact + 0.3 − 0.3) − exact|,
    `low` being torch's autograd in the input dtype; with a softcap 3 times and 3e-4 more (hopper/test_flash_attn.py of
    the flash-attention project). As in the forward pass (`reference.Exact`) the largest error may also be `eps` of the
    largest gradient, and the root-mean-square error is bounded by the same rule.

    Scores are fp32, and so are log-sum-exps, so that P has a relative error of that of a score: `units` of 2^-24 of the
    largest (`reference.Exact`). It is multiplied by what a gradient is a sum of, not by the sum: `Gradients.bounds`.
    Of normal inputs this is far below the rest, of logits of 1,000 above it. Of inputs whose gradients cancel out
    (`CANCELLING`) the same holds for the rounding of dS to 16 bits, of which `low` is a sample of few rows."""
    dtype = torch_dtype(problem)
    exact_dtype = torch.float64 if double or not problem.element.on_tensor_cores else torch.float32
    exact = exact_gradients(problem, tensors, exact_dtype)
    low = gradients_of_torch(problem, tensors, whole=kind != "parts_of_keys")
    factor, absolute = (SOFTCAP_FACTOR, SOFTCAP_ABSOLUTE) if problem.softcap else (2.0, 0.0)
    unit = FP32_RELATIVE if problem.dtype == "fp32" else torch.finfo(dtype).eps
    of_scores = (2 + math.sqrt(problem.head_dim) / 3) * FP32_ROUNDING * (1 + largest_score(problem, tensors))
    if kind in CANCELLING and problem.dtype != "fp32":
        of_scores += unit / 2
    info, answer = torch.finfo(dtype), dict[str, Exact]()
    step = info.smallest_normal * info.eps  # of subnormal numbers: what cancels out is rounded to it
    for name, values in exact.values.items():
        rounded, bound = values.to(dtype), of_scores * exact.bounds[name]
        held = rounded.isfinite()  # those of tables, biases and sinks are fp32, which holds more
        nudged = ((rounded + 0.3 - 0.3).to(exact_dtype) - rounded.to(exact_dtype)).where(held, 0)
        difference = low.values[name].to(exact_dtype) - values
        rounding = (rounded.to(exact_dtype) - values).where(held, 0)
        largest = factor * difference.abs().max().item() + 2 * nudged.abs().max().item() + absolute
        mean = factor * rms(difference) + 2 * rms(rounding) + absolute
        largest, mean = max(largest, unit * values.abs().max().item()), max(mean, unit / 2 * rms(values))
        answer[name] = Exact(values, largest + bound.max().item() + step / 2, mean + rms(bound) + step / 2)
        if name in DIMS or name.startswith("down_"):
            answer[name] = replace(answer[name], dims=DIMS.get(name, OF_TABLES))
    return answer
