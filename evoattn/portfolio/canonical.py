"""The problem that a pick is made for, in place of the very one: what a caller knows without waiting for the device,
with lengths rounded, so that a sequence that grows keeps its kernel for some while."""

from __future__ import annotations

import math
from collections.abc import Iterator

from evoattn.model.backward import parse_grads
from evoattn.model.block_list import parse_blocks
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.score import parse_tables
from evoattn.model.sequences import PACKED_PARTS, power_below, rounded_up

FEW_QUERIES = 16
FINE, PARTS = 4, 64
"""Lengths are rounded up to multiples of FINE, and of the power of two that is a PARTS-th of them at most. On 60
problems that costs nothing; 16 and 32 cost 0.6 % (26 % at worst, a tile more)."""
LEAST_STEP, STEP, STEPS = 16, 64, 8
"""Between numbers of keys where there are few queries: STEP, but a STEPS-th of the power of two below at least and this
power at most. Of 90 drawn problems the end of a climb for the next such number scores 0.06 % more than the better one
of the two nearest ones (3.3 % at worst), with steps of 128 and a quarter 0.3 % (22.6 %)."""
SPREAD = 64
"""Of the lengths of packed sequences about their mean, so that the last tile of one is half full in the mean. On 155
problems of three campaigns the cost model's choice loses 1.051 so, 1.062 with equal lengths, 1.041 with the true ones.
"""
LEAST_USED = 0.1
"""Of the keys that there is room for. On 414 problems of the same campaigns the cost model's choice loses 1.059 with
lengths spread from a tenth to all, 1.064 from a quarter, 1.066 with half and all of them, 1.035 with the true ones."""


def is_few(problem: AttentionProblem) -> bool:
    """Whether keys are read for few queries, as for a token over a cache that grows."""
    return problem.seqlen_q <= FEW_QUERIES


def likely(problem: AttentionProblem) -> AttentionProblem:
    """The problem with lengths in place of those that only the device knows.

    Lengths of packed sequences and numbers of keys in use are data of the device. Known are how many sequences there
    are, the longest that they may be, and of packed ones how many rows they have together. So a choice is the same
    whatever the lengths are that a problem records.
    """
    if problem.varlen:
        sides = ((problem.shape("q")[2], problem.seqlen_q), (_rows_of_keys(problem), problem.seqlen_k))
        return problem.with_(varlen=_spread(problem.batch, *sides))
    if problem.seqused:
        least = max(math.ceil(LEAST_USED * problem.seqlen_k), problem.seqlen_q if problem.causal else 1)
        return problem.with_(seqused=f"{min(least, problem.seqlen_k)}:{problem.seqlen_k}")
    return problem


def canonical(problem: AttentionProblem) -> AttentionProblem:
    """The `likely` problem with lengths rounded up, and without sizes of tables and small differences of block lists;
    itself where that would be too large."""
    try:
        problem = _without_sizes(problem)
        if problem.varlen:
            return _packed(problem)
        queries, keys = problem.seqlen_q, problem.seqlen_k
        if is_few(problem):
            step = max(LEAST_STEP, min(STEP, power_below(keys)), power_below(keys) // STEPS)
            keys = -(-keys // step) * step
        else:
            queries, keys = rounded_up(queries, FINE, PARTS), rounded_up(keys, FINE, PARTS)
        used = {"seqused": f"0:{keys}"} if problem.seqused else {}
        return likely(problem.with_(seqlen_q=queries, seqlen_k=keys, **used))
    except ProblemError:
        return problem


def size_class(problem: AttentionProblem) -> AttentionProblem:
    """The `canonical` problem, lengths of many queries rounded to one of eight numbers between two powers of two: of
    such a size one race is enough."""
    about = canonical(problem)
    if is_few(about) or about.varlen:
        return about
    queries, keys = (rounded_up(length, FINE, PACKED_PARTS) for length in (about.seqlen_q, about.seqlen_k))
    used = {"seqused": f"0:{keys}"} if about.seqused else {}
    try:
        return likely(about.with_(seqlen_q=queries, seqlen_k=keys, **used))
    except ProblemError:
        return about


def _without_sizes(problem: AttentionProblem) -> AttentionProblem:
    """The problem with tables of one element, on whose sizes no kernel depends, but where several scores may be of an
    element that has a deterministic gradient, and with numbers of listed blocks that are powers of two."""
    changed: dict[str, str] = {}
    if problem.tables:
        sized = parse_grads(problem.grads) if problem.deterministic else ()
        tables = (
            table._replace(shape=tuple(rounded_up(n, FINE, PARTS) if table.buffer in sized else 1 for n in table.shape))
            for table in parse_tables(problem.tables)
        )
        changed["tables"] = "+".join(table.describe() for table in tables)
    mask = parse_blocks(problem.blocks) if problem.blocks else None
    if mask is not None and not mask.documents and not mask.mixed:
        partial, full, most = (count and power_below(2 * count - 1) for count in mask.counts)
        head, _, _ = problem.blocks.rpartition(":")
        changed["blocks"] = f"{head}:{partial}/{full}/{max(most, partial + full)}"
    return problem.with_(**changed) if changed else problem


def grown(problem: AttentionProblem, most_keys: int) -> Iterator[AttentionProblem]:
    """The problem, and those with more keys, up to `most_keys`, at which a pick for it may change: one for each number
    that keys are rounded to. Raises `ProblemError` where a problem cannot have so many."""
    yield problem
    last = canonical(problem).seqlen_k
    while last < most_keys:
        problem = problem.with_(seqlen_k=last + 1)
        yield problem
        last = max(last + 1, canonical(problem).seqlen_k)


def _packed(problem: AttentionProblem) -> AttentionProblem:
    batch, *longest = (rounded_up(n, 1, PACKED_PARTS) for n in (problem.batch, problem.seqlen_q, problem.seqlen_k))
    rows = problem.shape("q")[2], _rows_of_keys(problem)
    rounded = (min(rounded_up(one, 1, PACKED_PARTS), batch * most) for one, most in zip(rows, longest))
    lengths = _spread(batch, *zip(rounded, longest))
    return problem.with_(batch=batch, seqlen_q=longest[0], seqlen_k=longest[1], varlen=lengths)


def _rows_of_keys(problem: AttentionProblem) -> int:
    """Of packed sequences, all keys together; how many there are in pages the device alone knows, so that it is half of
    what there is room for."""
    return problem.batch * problem.seqlen_k // 2 + 1 if problem.page else problem.shape("k")[2]


def _spread(batch: int, *sides: tuple[int, int]) -> str:
    """Lengths for the field `varlen` of `batch` sequences. `sides`: (rows together, longest) of queries and of keys."""
    texts = []
    for rows, longest in sides:
        if batch == 1 or rows == batch * longest:
            texts.append(f"sum:{rows}")
        else:
            low = max(1, rows // batch - SPREAD)
            texts.append(f"{low}:{max(low, min(longest, rows // batch + SPREAD))}")
    return "/".join(texts)
