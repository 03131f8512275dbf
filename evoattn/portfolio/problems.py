"""Which problems a campaign measures: those that one compiled kernel serves make a group, and kinds on which picks have
lost most come more often than they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from evoattn.engine.alike import row_tiles
from evoattn.model.problem import AttentionProblem

MOST_FLOPS = {"16": 1.2e12, "32": 1.2e11}
"""Per problem, by bits: larger ones are many waves of the same tiles, and take the time of a hundred others."""
FP16 = " fp16"
"""End of the name of a group that has problems of fp16 alone."""
FEW_ROWS, WAVE_TILES = 128, 132
"""Query rows that share a K/V head up to which reading K and V is what takes time; tiles up to which all run at once on
an H100 or H200."""
BRIEF_US = 20.0
LAUNCH_US, BYTES_PER_US, FLOPS_PER_US = 3.0, 2.2e6, 4e8
"""Of an H100's fast kernels, roughly: with these 24 of the 25 problems of a check that took less than BRIEF_US are
brief, and none of the others."""
CACHE_BYTES = 20 << 20
"""K and V of so many bytes and more take longer to read than a launch does, from L2 (50 MB on an H100) or memory."""
FP32_FLOPS = 2e10
"""Of a problem in fp32 of that kind: at most about a ms. Longer ones take the time of many others."""


def bits_of(problem: AttentionProblem) -> str:
    """`32` or `16`: fp16 and bf16 share their kernels, the same instructions at the same rates."""
    return "32" if problem.dtype == "fp32" else "16"


def group_of(problem: AttentionProblem) -> str:
    """What one compiled kernel can serve: bits, head_dim, mask and variants, e.g. `16 d64 causal+window+sink`,
    `16 d192 causal+dv128`."""
    words = (f"dv{problem.value_dim}" if name == "value_dim" else name for name in problem.variants)
    mask = "+".join(("causal" if problem.causal else "full", *words))
    return f"{bits_of(problem)} d{problem.head_dim} {mask}"


def stand_in(problem: AttentionProblem) -> AttentionProblem:
    """The problem with the causal mask that all lengths have, if it has a causal one."""
    return problem.with_(mask="full" if problem.mask == "full" else "causal_lower_right")


def by_group(problems: Iterable[AttentionProblem]) -> dict[str, list[AttentionProblem]]:
    """Different problems by the name of their group, in the order drawn; those of fp16 have groups of their own."""
    groups: dict[str, dict[AttentionProblem, None]] = {}
    for problem in problems:
        name = group_of(problem) + (FP16 if problem.dtype == "fp16" else "")
        groups.setdefault(name, {})[stand_in(problem)] = None
    return {name: list(rows) for name, rows in groups.items()}


def brief(problem: AttentionProblem) -> bool:
    """Whether it should take less than some 20 µs on an H100."""
    return LAUNCH_US + max(problem.bytes / BYTES_PER_US, problem.flops / FLOPS_PER_US) < BRIEF_US


def _few(problem: AttentionProblem) -> bool:
    return problem.group_size * problem.seqlen_q <= FEW_ROWS


def _large_cache(problem: AttentionProblem) -> bool:
    keys = problem.batch * problem.kv_heads * problem.seqlen_k
    return keys * (problem.head_dim + problem.head_dim_v) * problem.element_bytes >= CACHE_BYTES


def _one_wave(problem: AttentionProblem) -> bool:
    return row_tiles(problem) * problem.heads <= WAVE_TILES


EMPHASIS: dict[str, tuple[float, Callable[[AttentionProblem], bool]]] = {
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
1.022 on the others."""


def emphasis_of(problem: AttentionProblem) -> str:
    """The first of EMPHASIS that the problem is of."""
    return next(name for name, (_, of_kind) in EMPHASIS.items() if of_kind(problem))


def emphasized(drawn: Iterable[AttentionProblem], count: int) -> list[AttentionProblem]:
    """`count` of the problems, of each kind its part, the first ones drawn; fewer where fewer are drawn."""
    left = {name: round(part * count) for name, (part, _) in EMPHASIS.items()}
    found = []
    for problem in drawn:
        if left[name := emphasis_of(problem)]:
            left[name] -= 1
            found.append(problem)
    return found


def chosen(
    drawn: Iterable[AttentionProblem], timed: Iterable[AttentionProblem], count: int, emphasis: bool
) -> list[AttentionProblem]:
    """The first `count` of the drawn problems that are not `timed` and not too long, or with `emphasis` of each kind
    its part."""
    known = set(timed)
    found = (p for p in dict.fromkeys(map(stand_in, drawn)) if p not in known and p.flops <= MOST_FLOPS[bits_of(p)])
    return emphasized(found, count) if emphasis else list(islice(found, count))
