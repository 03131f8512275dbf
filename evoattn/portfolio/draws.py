"""Every kind of problems that portfolios are made for and judged on, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from evoattn.model.problem import AttentionProblem
from evoattn.portfolio.kind_workload import KINDS, draw_kind
from evoattn.portfolio.variant_workload import draw_variants
from evoattn.portfolio.wide_workload import draw_wide
from evoattn.portfolio.workload import draw

PLAIN, WIDE, SCORES = "plain", "wide", "scores"
"""Full and causal attention; the same beyond a head_dim of 256; windows, soft caps and sinks."""
DRAWS: dict[str, Callable[[int, int], list[AttentionProblem]]] = {
    PLAIN: draw,
    WIDE: draw_wide,
    SCORES: draw_variants,
    **{kind: partial(draw_kind, kind) for kind in KINDS},
}
"""The first so many problems of a seed."""


def drawn(kinds: Iterable[str], seeds: Iterable[int], each: int) -> list[AttentionProblem]:
    """`each` of every kind and seed. Raises `KeyError` on a kind that is not of `DRAWS`."""
    return [problem for kind in kinds for seed in seeds for problem in DRAWS[kind](seed, each)]


def draw_all(kinds: Sequence[str], seeds: Sequence[int], count: int) -> list[AttentionProblem]:
    """`count` problems in all, about as many of each kind and seed. Raises as `drawn` does."""
    return drawn(kinds, seeds, math.ceil(count / (len(kinds) * len(seeds))))[:count]
