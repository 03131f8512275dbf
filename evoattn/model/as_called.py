"""A problem as the op says it of a call: what is the same answer has one form, so that the kernel that is picked, made
ready or searched for a shape is the one that a call of that shape gets."""

from __future__ import annotations

from evoattn.model.mask import FULL
from evoattn.model.problem import AttentionProblem
from evoattn.model.variant import parse_window


def called_mask(mask: str, seqlen_q: int) -> str:
    """The mask, or `full` where it hides nothing: a last query alone sees every key, and kernels without a mask are the
    faster ones."""
    return FULL if seqlen_q == 1 and mask == "causal_lower_right" else mask


def called_window(past: int, ahead: int, queries: int, keys: int, causal: bool) -> str:
    """The field `window` for a mask that is `causal` or not; empty where the window hides nothing of so many rows of
    each. A side that is open (-1), or wider, is as wide as both together. A query alone is that of the last key, so
    that nothing lies ahead of it.
    """
    everything = queries + keys
    past, ahead = (everything if side < 0 else min(side, everything) for side in (past, ahead))
    none_ahead = causal or queries == 1
    hides = min(past, everything if none_ahead else ahead) < max(queries, keys) - 1
    return f"{past}:{0 if none_ahead else ahead}" if hides else ""


def said_in(problem: AttentionProblem, mask: str, window: str) -> tuple[str, str]:
    """(mask, window) as a call of this problem's lengths says this mask and this `window`."""
    if window:
        keys = problem.shape("k")[2] if problem.varlen else problem.seqlen_k
        window = called_window(*parse_window(window), problem.shape("q")[2], keys, mask != FULL)
    return called_mask(mask, problem.seqlen_q), window


def as_called(problem: AttentionProblem) -> AttentionProblem:
    """The problem with the mask and the window of a call for it; itself where it has them already."""
    mask, window = said_in(problem, problem.mask, problem.window)
    return problem if (mask, window) == (problem.mask, problem.window) else problem.with_(mask=mask, window=window)


def as_picked(problem: AttentionProblem) -> AttentionProblem:
    """As `as_called`, with the lengths that only the device knows as the op has to take them: anything up to all keys
    in use, packed sequences of equal lengths."""
    problem = as_called(problem)
    if problem.seqused:
        return problem.with_(seqused=f"0:{problem.seqlen_k}")
    if problem.varlen:
        return problem.with_(varlen=f"sum:{problem.shape('q')[2]}/sum:{problem.shape('k')[2]}")
    return problem
