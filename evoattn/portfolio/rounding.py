"""Lengths as a pick and its climbs see them: a sequence that grows keeps its kernel for some while."""

from __future__ import annotations

from collections.abc import Iterator

from evoattn.model.problem import AttentionProblem, ProblemError

FEW_QUERIES = 16
FINE, PARTS = {True: 16, False: 4}, {True: 32, False: 64}
"""Lengths are rounded up to multiples of FINE, and of the power of two that is a PARTS-th of them at most; by whether
there are FEW_QUERIES. On 60 problems 16 and 32 cost 0.6 % (26 % at worst, a tile more), 4 and 64 nothing; but lengths
that grow with every token of a decoding have new picks four times as often then."""
LEAST_STEP, STEP, STEPS = 16, 64, 8
"""Between numbers of keys that climbs are made for where there are few queries: STEP, but a STEPS-th of the power of
two below at least and this power at most. Of 90 drawn problems the end for the next such number scores 0.06 % more than
the better end of the two nearest ones (3.3 % at worst), and takes 34 ms of CPU time in place of 58. Of 200 that better
end scores 0.1 % more than the end for the very number (8.6 % at worst); with steps of 128 and a quarter 0.3 % (22.6
%)."""


def is_few(problem: AttentionProblem) -> bool:
    """Whether keys are read for few queries, as for a token over a cache that grows."""
    return problem.seqlen_q <= FEW_QUERIES


def rounded(problem: AttentionProblem) -> AttentionProblem:
    """The problem with lengths rounded up, by a sixty-fourth part or to a multiple of 4; where there are few queries
    these stay, and the keys are rounded by a thirty-second part or to a multiple of 16."""
    few = is_few(problem)
    queries = problem.seqlen_q if few else _up(problem.seqlen_q, FINE[few], PARTS[few])
    return _with_lengths(problem, queries, _up(problem.seqlen_k, FINE[few], PARTS[few]))


def lasting(problem: AttentionProblem) -> AttentionProblem:
    """The problem that a pick is made for: with few queries the `rounded` one, so that a pick holds for some while.
    Packed sequences and pages stay as they are."""
    if not is_few(problem) or problem.varlen or problem.page:
        return problem
    about = rounded(problem)
    if problem.seqused == f"0:{problem.seqlen_k}":  # as the op says it: any number of all keys
        about = about.with_(seqused=f"0:{about.seqlen_k}")
    return about


def climbed(problem: AttentionProblem) -> AttentionProblem:
    """The problem that climbs are made for: with few queries that of the next number of keys that is a whole step, else
    the `rounded` one."""
    if not is_few(problem):
        return rounded(problem)
    step = _step(problem.seqlen_k)
    return _with_lengths(problem, problem.seqlen_q, -(-problem.seqlen_k // step) * step)


def grown(problem: AttentionProblem, most_keys: int) -> Iterator[AttentionProblem]:
    """The problem, and those with more keys, up to `most_keys`, at which a pick for it may change: one for each number
    that keys are rounded to. Raises `ProblemError` where a problem cannot have so many."""
    yield problem
    last = rounded(problem).seqlen_k
    while last < most_keys:
        problem = problem.with_(seqlen_k=last + 1)
        yield problem
        last = max(last + 1, rounded(problem).seqlen_k)


def _with_lengths(problem: AttentionProblem, queries: int, keys: int) -> AttentionProblem:
    try:
        return problem.with_(seqlen_q=queries, seqlen_k=keys)
    except ProblemError:  # too large by the rounding
        return problem


def _up(length: int, fine: int, parts: int) -> int:
    granule = max(fine, _power(length) // parts)
    return -(-length // granule) * granule


def _step(keys: int) -> int:
    return max(LEAST_STEP, min(STEP, _power(keys)), _power(keys) // STEPS)


def _power(length: int) -> int:
    """The greatest power of two that is no more."""
    return 1 << length.bit_length() >> 1
