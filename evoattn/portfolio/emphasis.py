"""Problems of the kinds on which picks have lost most, more often than they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from evoattn.model.problem import AttentionProblem
from evoattn.portfolio.features import DECODE_ROWS, class_of

Kind = Callable[[AttentionProblem], bool]


def _rows(problem: AttentionProblem) -> int:
    """Query rows that share a K/V head."""
    return problem.group_size * problem.seqlen_q


KINDS: dict[str, tuple[float, Kind]] = {
    "decoding": (0.18, lambda p: _rows(p) <= DECODE_ROWS),
    "few keys": (0.22, lambda p: p.seqlen_k <= 200),
    "short and causal": (0.26, lambda p: p.causal and p.seqlen_k <= 2048),
    "few rows for many keys": (0.12, lambda p: p.seqlen_q <= 512 and p.seqlen_k >= 8 * p.seqlen_q),
    "wide heads": (0.06, lambda p: p.head_dim >= 160),
    "few tiles": (0.06, lambda p: "short" in class_of(p)),
    "others": (0.10, lambda p: True),
}
"""By name: the part of the problems, and which are of the kind, if of none before it. Of 60 that were checked on an
H100 before campaign r (seeds 101 to 106) the ten worst are three causal ones of at most 2,048 keys, four of few keys,
two of few rows and one of decoding; most take 6 to 20 µs."""


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
