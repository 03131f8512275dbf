"""What variants of attention add to a tile of scores: see `evoattn.families.work`."""

from __future__ import annotations

import math

from evoattn.families.work import WARP, Step
from evoattn.model.problem import AttentionProblem

SOFTCAP, ALIBI, BIAS = (1.0, 1.0, 2.0), (0.0, 2.0, 3.3), (0.0, 2.0, 6.2)
"""(exponentials, FP32 operations, instructions) for each score, as the interpreter counts them in kernels of flash_mma
and flash_wgmma: a hyperbolic tangent with two factors; a distance times a slope; a load with its address."""


def variant_step(problem: AttentionProblem, scores: float, lanes: float = 1.0) -> Step:
    """Of `scores` scores of a block, of each of which so many lanes find the place."""
    if not (problem.softcap or problem.alibi or problem.bias):
        return Step()
    chosen = [SOFTCAP] * bool(problem.softcap) + [tuple(lanes * n for n in ALIBI)] * problem.alibi
    chosen += [tuple(lanes * n for n in BIAS)] * bool(problem.bias)
    special, fp32, instructions = (scores * sum(each[i] for each in chosen) for i in range(3))
    loaded = scores * problem.element_bytes * bool(problem.bias)
    return Step(fp32=fp32, special=special, instructions=instructions / WARP, loaded_bytes=loaded)


def bias_bytes(problem: AttentionProblem) -> float:
    """Of the bias, 0 without one."""
    return float(problem.element_bytes * math.prod(problem.term_shapes.get("bias", (0,))))
