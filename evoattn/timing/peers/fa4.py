"""FlashAttention 4 (`flash_attn.cute`), whose kernels are compiled just in time; one split per row, as it has no more
on Hopper. Slopes and a bias are a function of the scores there, which evoattn brings (`fa4_scores`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from evoattn.model.problem import AttentionProblem
from evoattn.timing.peers.fa3 import Load, Prepare
from evoattn.timing.peers.fa4_scores import ScoreMod, find_score_mod
from evoattn.timing.peers.refused import PeerRefused

OWN = ("sink", "alibi", "bias")
"""Variants that it takes beside those of FlashAttention 3."""


def prepare(problem: AttentionProblem, load: Load, score_mod: Callable[[str], ScoreMod] = find_score_mod) -> Prepare:
    """Its function for the problem: the one for sequences of several lengths takes a batch too, with keys in use and
    pages.

    Raises `PeerRefused` for a softcap with slopes or a bias: each is the one function of the scores. Raises
    `ImportError` where it is not installed.
    """
    changed = problem.alibi or bool(problem.bias)
    if changed and problem.softcap:
        raise PeerRefused("FlashAttention 4 has one function of the scores: no softcap beside slopes or a bias.")
    module = load("flash_attn.cute")
    several = problem.seqused or problem.varlen
    function = module.flash_attn_varlen_func if several else module.flash_attn_func
    modified = score_mod("add_slopes" if problem.alibi else "add_bias") if changed else None

    def make(q: Any, k: Any, v: Any, causal: bool, options: Mapping[str, Any]) -> Callable[[], Any]:
        words = dict(options)
        added = words.pop("slopes", None), words.pop("bias", None)
        if modified is not None:
            words |= {"score_mod": modified, "aux_tensors": [tensor for tensor in added if tensor is not None]}
        return partial(function, q, k, v, causal=causal, **words)

    return make
