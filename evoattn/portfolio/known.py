"""What a caller knows of a problem without waiting for the device: by this alone a kernel is chosen."""

from __future__ import annotations

import math

from evoattn.model.problem import AttentionProblem


def known(problem: AttentionProblem) -> AttentionProblem:
    """The problem as `evoattn.attention` sees it.

    Lengths of packed sequences and numbers of keys in use are data of the device. Known are how many sequences there
    are, the longest that they may be, and of packed ones how many rows they have together. So a choice is the same
    whatever the lengths are that a problem records, and constants are fitted to what a choice can see. Packed sequences
    count as equally long, and half of the keys that there is room for as in use.
    """
    if problem.varlen:
        return problem.with_(varlen=f"sum:{problem.shape('q')[2]}/sum:{problem.shape('k')[2]}")
    used = math.ceil(problem.seqlen_k / 2)
    return problem.with_(seqused=f"{used}:{used}") if problem.seqused else problem
