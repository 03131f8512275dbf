"""Few of many candidates that together show all that the candidates show."""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from itertools import combinations
from typing import TypeVar

from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

Candidate = TypeVar("Candidate")


def covering(
    candidates: Sequence[Candidate],
    shown: Callable[[Candidate], Collection[Hashable]],
    begin: Iterable[Candidate] = (),
    most: int | None = None,
) -> list[Candidate]:
    """Candidates that show what all show, those of `begin` and then at every turn the one that shows most that none
    did (Chvátal, A greedy heuristic for the set-covering problem, 1979); with `most` no more than so many beside
    `begin`."""
    chosen = list(begin)
    left = {one for candidate in candidates for one in shown(candidate)}
    left -= {one for candidate in chosen for one in shown(candidate)}
    most = len(chosen) + (len(candidates) if most is None else most)
    while left and len(chosen) < most:
        chosen.append(max(candidates, key=lambda candidate: len(left & set(shown(candidate)))))
        left -= set(shown(chosen[-1]))
    return chosen


def gene_pairs(drawn: tuple[AttentionProblem, KernelConfig]) -> set[tuple[object, ...]]:
    """Every pair of a config's genes with their values, and each with the head_dim that it is drawn for."""
    problem, config = drawn
    genes = [("head_dim", problem.head_dim), *sorted(config.params.items())]
    return {(config.family, *pair) for pair in combinations(genes, 2)}
