"""Packed sequences, one at a time: what the reference and the inputs need of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from evoattn.model.problem import AttentionProblem
from evoattn.model.sequences import starts


@dataclass(frozen=True)
class One:
    """One sequence, or for a dense batch all of them."""

    queries: slice
    """Rows of Q and O."""
    keys: slice
    """Rows of K and V."""

    @property
    def lengths(self) -> tuple[int, int]:
        """(queries, keys)."""
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start

    def alone(self, problem: AttentionProblem) -> AttentionProblem:
        """The dense problem of this sequence, which has queries and keys."""
        seqlen_q, seqlen_k = self.lengths
        return problem.with_(batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, varlen="")


def each(problem: AttentionProblem) -> Iterator[One]:
    """The sequences in their order; of a dense batch one that is all of each."""
    if not problem.varlen:
        yield One(slice(0, problem.seqlen_q), slice(0, problem.seqlen_k))
        return
    queries, keys = (starts(lengths) for lengths in zip(*problem.sequences, strict=True))
    for i in range(problem.batch):
        yield One(slice(queries[i], queries[i + 1]), slice(keys[i], keys[i + 1]))


def with_pairs(problem: AttentionProblem) -> Iterator[One]:
    """Those that have both queries and keys."""
    return (one for one in each(problem) if all(one.lengths))
