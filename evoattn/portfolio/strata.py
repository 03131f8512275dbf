"""Problems to measure a portfolio on: of each class some as they are drawn, the others chosen to lie far from all
that are there."""

from __future__ import annotations

import random
from collections.abc import Iterable

from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.portfolio.features import class_of, features

MOST_FLOPS = {"16": 1.2e12, "32": 1.2e11}
"""Per problem, by bits: larger ones are many waves of the same tiles, and take the time of a hundred others."""


FP16 = " fp16"
"""End of the name of a group that has problems of fp16 alone."""


def canonical(problem: AttentionProblem, dtypes: bool = False) -> AttentionProblem:
    """The problem that stands for its class: bf16 for 16 bits, unless `dtypes` are kept, and the causal mask that all
    lengths have."""
    return problem.with_(
        dtype=problem.dtype if dtypes or problem.dtype == "fp32" else "bf16",
        mask="full" if problem.mask == "full" else "causal_lower_right",
    )


def group_of(problem: AttentionProblem) -> str:
    """The problems that one compiled kernel can serve are measured together: a class without its number of queries."""
    return class_of(problem).rpartition(" ")[0]


def by_class(problems: Iterable[AttentionProblem], dtypes: bool = False) -> dict[str, list[AttentionProblem]]:
    """Different problems by group, in the order drawn; with `dtypes` those of fp16 have groups of their own."""
    classes: dict[str, dict[AttentionProblem, None]] = {}
    for problem in problems:
        name = group_of(problem) + (FP16 if dtypes and problem.dtype == "fp16" else "")
        classes.setdefault(name, {})[canonical(problem, dtypes)] = None
    return {name: list(rows) for name, rows in classes.items()}


def spread(problems: list[AttentionProblem], count: int, gpu: GpuSpec) -> list[AttentionProblem]:
    """`count` of the problems: half at random, half each as far as can be from those chosen before, in the space of
    `features`."""
    bits = group_of(problems[0]).split()[0]
    problems = [p for p in problems if p.flops <= MOST_FLOPS[bits]]
    rng = random.Random(0)
    chosen = problems[: count // 2]
    rest = problems[count // 2 :]
    points = {id(p): tuple(features(p, gpu).values()) for p in problems}

    def distance(a: AttentionProblem, b: AttentionProblem) -> float:
        return sum((x - y) ** 2 for x, y in zip(points[id(a)], points[id(b)], strict=True))

    nearest = {id(p): min((distance(p, c) for c in chosen), default=1.0) for p in rest}
    rng.shuffle(rest)
    while rest and len(chosen) < count:
        farthest = max(rest, key=lambda p: nearest[id(p)])
        rest.remove(farthest)
        chosen.append(farthest)
        for p in rest:
            nearest[id(p)] = min(nearest[id(p)], distance(p, farthest))
    return chosen


def of_each_class(problems: list[AttentionProblem], count: int) -> list[AttentionProblem]:
    """The first `count` problems of each class, without those that take too long."""
    chosen: dict[str, list[AttentionProblem]] = {}
    for problem in problems:
        of_class = chosen.setdefault(class_of(problem), [])
        if len(of_class) < count and problem.flops <= MOST_FLOPS[class_of(problem).split()[0]]:
            of_class.append(problem)
    return [p for of_class in chosen.values() for p in of_class]
