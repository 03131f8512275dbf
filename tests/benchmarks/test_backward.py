"""The benchmark of backward passes: its problems and what it says of a row."""

import pytest

from benchmarks.backward import NAMED, both, drawn, line, named, ours_over_best, summary
from evoattn.bench.row import Row, Time


def row(ours, **peers):
    times = {name: Time(us, us, us) for name, us in peers.items()}
    return Row({}, "", Time(ours, ours, ours) if ours else None, peers=times)


@pytest.mark.slow
def test_its_problems_are_backward_passes_of_self_attention():
    assert len(named("bf16", True)) == len(NAMED) and all(p.deterministic for p in named("bf16", True))
    problems = drawn(901, 60)
    assert len(problems) == 60 and problems == drawn(901, 60) != drawn(902, 60)
    for problem in problems:
        assert problem.op == "backward" and 64 <= problem.seqlen_q == problem.seqlen_k <= 16384


def test_ratios_are_of_the_best_peer():
    backward, forward = row(100.0, fa4=120.0, cudnn=150.0), row(50.0, fa4=80.0, cudnn=40.0)
    assert ours_over_best(backward) == pytest.approx(1.2) and ours_over_best(row(None, fa4=1.0)) is None
    assert both(backward, forward) == pytest.approx(190 / 150)
    assert both(backward, row(50.0, flash=1.0)) is None
    assert "120.0 (" in line(named("bf16", False)[0], backward, None)
    assert summary([1.2, 0.9, 1.5]) == "2 of 3 ahead, geometric mean 1.174" and summary([]) == "none"
