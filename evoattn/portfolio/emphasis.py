"""Problems of the kinds on which picks have lost most, more often than they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from evoattn.model.problem import AttentionProblem
from evoattn.portfolio.features import DECODE_ROWS

Kind = Callable[[AttentionProblem], bool]
BRIEF_US = 20.0
LAUNCH_US, BYTES_PER_US, FLOPS_PER_US = 3.0, 2.2e6, 4e8
"""Of an H100's fast kernels, roughly: with these 24 of the 25 problems of a check that took less than BRIEF_US are
brief, and none of the others."""


def brief(problem: AttentionProblem) -> bool:
    """Whether it should take less than some 20 µs on an H100."""
    return LAUNCH_US + max(problem.bytes / BYTES_PER_US, problem.flops / FLOPS_PER_US) < BRIEF_US


def _decoding(problem: AttentionProblem) -> bool:
    """Whether few query rows share a K/V head."""
    return problem.group_size * problem.seqlen_q <= DECODE_ROWS


KINDS: dict[str, tuple[float, Kind]] = {
    "brief decoding": (0.28, lambda p: _decoding(p) and brief(p)),
    "decoding": (0.08, _decoding),
    "brief, few keys": (0.22, lambda p: p.seqlen_k <= 200 and brief(p)),
    "brief and causal": (0.18, lambda p: p.causal and brief(p)),
    "brief": (0.14, brief),
    "others": (0.10, lambda p: True),
}
"""By name: the part of the problems, and which are of the kind, if of none before it. Of 60 that were checked on an
H100 (seeds 109 to 114) the six of decoding lose 1.079, the 25 of less than 20 µs 1.050, the others 1.020."""


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
