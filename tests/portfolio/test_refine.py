"""Kernels near a portfolio's: each runs on the problem, and a climb by the cost model never ends higher."""

from __future__ import annotations

from itertools import pairwise

import pytest

from evoattn.cost.cost import scores
from evoattn.families import registry
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.portfolio.pick import portfolio_kernels
from evoattn.portfolio.refine import climb, neighbours

H100 = GPUS["h100"]
SHAPES = {
    "few keys, grouped": AttentionProblem(batch=49, heads=64, kv_heads=16, seqlen_q=39, seqlen_k=39, head_dim=64),
    "prefill": AttentionProblem(
        batch=2, heads=8, kv_heads=8, seqlen_q=1000, seqlen_k=1000, head_dim=128, mask="causal_lower_right"
    ),
    "decode": AttentionProblem(batch=34, heads=1, kv_heads=1, seqlen_q=1, seqlen_k=4160, head_dim=64),
}


@pytest.mark.parametrize("problem", SHAPES.values(), ids=SHAPES.keys())
def test_neighbours_run_and_a_climb_falls(problem: AttentionProblem) -> None:
    start = portfolio_kernels(problem, H100)[0]
    near = neighbours(start, problem, H100)
    family = registry.lookup(start.family)
    assert near and start.id not in {c.id for c in near}
    assert not any(family.why_impossible(problem, c, H100) for c in near)
    steps = climb(start, problem, H100, 3)
    assert steps[0].config == start
    assert all(b.score <= a.score * 1.001 for a, b in pairwise(steps))
    assert steps[-1].score == scores(problem, [steps[-1].config], H100)[0]


def test_few_keys_get_tiles_that_fit() -> None:
    problem = AttentionProblem(batch=37, heads=14, kv_heads=2, seqlen_q=90, seqlen_k=90, head_dim=160)
    start = portfolio_kernels(problem, H100)[0]
    steps = climb(start, problem, H100, 3)
    assert -(-90 // int(steps[-1].config["BLOCK_N"])) * int(steps[-1].config["BLOCK_N"]) < 128
