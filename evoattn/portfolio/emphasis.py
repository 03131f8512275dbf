"""Problems of the kinds on which picks have lost most, more often than they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from evoattn.model.problem import AttentionProblem
from evoattn.portfolio.features import FEW_ROWS, WAVE_TILES, row_tiles

Kind = Callable[[AttentionProblem], bool]
BRIEF_US = 20.0
LAUNCH_US, BYTES_PER_US, FLOPS_PER_US = 3.0, 2.2e6, 4e8
"""Of an H100's fast kernels, roughly: with these 24 of the 25 problems of a check that took less than BRIEF_US are
brief, and none of the others."""
CACHE_BYTES = 20 << 20
"""K and V of so many bytes and more take longer to read than a launch does, from L2 (50 MB on an H100) or memory."""
FP32_FLOPS = 2e10
"""Of a problem in fp32 of that kind: at most about a ms. Longer ones take the time of many others."""


def brief(problem: AttentionProblem) -> bool:
    """Whether it should take less than some 20 µs on an H100."""
    return LAUNCH_US + max(problem.bytes / BYTES_PER_US, problem.flops / FLOPS_PER_US) < BRIEF_US


def _few(problem: AttentionProblem) -> bool:
    """Whether few query rows share a K/V head, so that reading K and V is what takes time."""
    return problem.group_size * problem.seqlen_q <= FEW_ROWS


def _large_cache(problem: AttentionProblem) -> bool:
    keys = problem.batch * problem.kv_heads * problem.seqlen_k
    return keys * (problem.head_dim + problem.head_dim_v) * problem.element_bytes >= CACHE_BYTES


def _one_wave(problem: AttentionProblem) -> bool:
    return row_tiles(problem) * problem.heads <= WAVE_TILES


KINDS: dict[str, tuple[float, Kind]] = {
    "fp32": (0.07, lambda p: p.dtype == "fp32" and p.flops <= FP32_FLOPS),
    "few rows, large cache": (0.13, lambda p: _few(p) and _large_cache(p)),
    "few rows": (0.15, _few),
    "causal, one wave": (0.18, lambda p: p.causal and _one_wave(p)),
    "brief, few keys": (0.10, lambda p: p.seqlen_k <= 200 and brief(p)),
    "brief": (0.12, brief),
    "others": (0.25, lambda p: True),
}
"""By name: the part of the problems, and which are of the kind, if of none before it. Of 600 that were measured on an
H100 (campaign w) the cost model's first choice lost 1.093 in fp32, 1.046 on causal ones of one wave of tiles, 1.040 on
brief ones of few keys, 1.037 on few rows and a large cache, 1.031 on other brief ones, 1.029 on other few rows and
1.022 on the others. These are the most that are drawn: of the ten that lost most in the check after it four are others.
fp32 is rarely drawn."""


def kind_of(problem: AttentionProblem) -> str:
    """The first of KINDS that the problem is of."""
    return next(name for name, (_, of_kind) in KINDS.items() if of_kind(problem))


def emphasized(drawn: Iterable[AttentionProblem], count: int) -> list[AttentionProblem]:
    """`count` of the problems, of each kind its part, the first ones drawn; fewer where fewer are drawn."""
    left = {name: round(part * count) for name, (part, _) in KINDS.items()}
    found = []
    for problem in drawn:
        if left[name := kind_of(problem)]:
            left[name] -= 1
            found.append(problem)
    return found
