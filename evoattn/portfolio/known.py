"""What a caller knows of a problem without waiting for the device: by this alone a kernel is chosen."""

from __future__ import annotations

import math

from evoattn.model.problem import AttentionProblem

FILLED = (0.5, 1.0)
"""Parts of the keys that there is room for. Left out of everything, caches and pages of campaigns k and l lose 1.058
where a choice sees the first alone, and 1.050 with both; with 0.33 or 0.4 for the first as much as with 0.5."""


def visible(problem: AttentionProblem) -> tuple[AttentionProblem, ...]:
    """The problem as `evoattn.attention` sees it: one or several that it may be.

    Lengths of packed sequences and numbers of keys in use are data of the device. Known are how many sequences there
    are, the longest that they may be, and of packed ones how many rows they have together. So a choice is the same
    whatever the lengths are that a problem records. Packed sequences count as equally long. Of keys in use half are
    taken to be there, and all of them: a choice is the kernel that should do best on both.
    """
    if problem.varlen:
        return (problem.with_(varlen=f"sum:{problem.shape('q')[2]}/sum:{problem.shape('k')[2]}"),)
    if not problem.seqused:
        return (problem,)
    used = [math.ceil(problem.seqlen_k * filled) for filled in FILLED]
    return tuple(problem.with_(seqused=f"{count}:{count}") for count in used)


def known(problem: AttentionProblem) -> AttentionProblem:
    """The first of `visible`."""
    return visible(problem)[0]
