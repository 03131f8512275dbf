"""The drawn problems are the same for the same seed, and those that others draw with the same rules."""

from evoattn.model.gpu import GPUS
from evoattn.portfolio.strata import by_class, group_of, spread
from evoattn.portfolio.workload import draw

SEED_7 = [
    "B=7 H=1 S=128 D=64 fp16 causal_lower_right bshd",
    "B=9 H=1 S=15616 D=128 fp32 causal_lower_right",
    "B=1 H=32/4 S=8197 D=160 bf16 causal_upper_left",
]
"""By the program that judges results."""


def test_a_seed_always_gives_the_same_problems():
    assert [p.describe() for p in draw(7, 3)] == SEED_7
    assert draw(7, 20) == draw(7, 25)[:20]
    assert draw(7, 20) != draw(8, 20)


def test_spread_takes_problems_that_differ():
    groups = by_class(draw(1, 600))
    problems = groups["16 d128 full"]
    chosen = spread(problems, 12, GPUS["h100"])
    assert len(chosen) == len(set(chosen)) == 12
    assert all(group_of(p) == "16 d128 full" for p in chosen)
    keys = sorted(p.seqlen_k for p in chosen)
    assert keys[0] < 200 and keys[-1] > 8000
