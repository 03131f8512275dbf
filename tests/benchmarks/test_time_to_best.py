"""`benchmarks/samplers/time_to_best.py` without a GPU: its problems, and what it reads out of a search."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest

from benchmarks.samplers.search_speed import Event
from benchmarks.samplers.time_to_best import ENTERS, SEEDS, Found, Step, course, finalists, problems, row, shape
from evoattn.model.records import Timing
from evoattn.model.shape_text import parse_shape
from evoattn.portfolio.workload import BUILD_SEEDS


@pytest.mark.slow
def test_the_problems_are_six_that_nothing_was_fitted_to():
    campaigns = range(750)  # reports/any_shape.md: the last of them drew from seeds up to 749
    assert not set(SEEDS) & (set(BUILD_SEEDS) | set(campaigns))
    chosen = problems(6)
    assert len(set(chosen)) == 6 and all(parse_shape(shape(p)) == p for p in chosen)
    assert problems(2, skipped=3) == chosen[3:5]


def step(seconds: float, us: float, block: int = 64) -> Step:
    return Step(seconds, us, "flash_mma", {"BLOCK_M": block})


def test_the_course_is_of_the_improvements_and_leaves_finals_out():
    def trial(number, us, stage="repeat"):
        timing = Timing((us,), {"stage": stage})
        return SimpleNamespace(number=number, timing=timing, family="flash_mma", config={"BLOCK_M": number})

    trials = [
        trial(1, 9.0),
        trial(2, 9.5),
        trial(3, 7.0),
        SimpleNamespace(number=4, timing=None),
        trial(5, 1.0, "final"),
    ]
    events = [Event(seconds=4.0 + n, process=1, core=0.0, what=f"trial {n} COMPLETE guided") for n in range(1, 6)]
    events.insert(2, Event(seconds=6.5, process=1, core=0.0, what="the final begins"))
    assert course(events, trials) == [step(5.0, 9.0, 1), step(7.0, 7.0, 3)]


def test_the_final_has_who_was_near_the_best_and_the_last_of_earlier_runs():
    one = Found("p", "portfolio", [step(4.0, 12.0, 16), step(5.0, 10.5, 32), step(6.0, 10.0, 64)], 3)
    other = Found("p", "random", [step(5.0, ENTERS * 10.0 + 0.1, 128), step(7.0, 10.1, 64)], 40)
    known = Found("p", "random", [step(5.0, 30.0, 16), step(9.0, 20.0, 256)], 40)
    assert [s.params["BLOCK_M"] for s in finalists([one, other], [known])] == [32, 64, 256]


@pytest.mark.slow
def test_a_search_is_held_against_the_best_of_the_final_not_against_its_own_times():
    problem = problems(1)[0]
    found = {"random": Found("p", "random", [step(5.0, 10.0, 32), step(7.0, 9.9, 64), step(8.0, 9.5, 16)], 40)}
    times = {step(0, 0, 32).identity: 10.4, step(0, 0, 64).identity: 10.1, step(0, 0, 128).identity: 10.0}
    judged = {begun: one.judged(times) for begun, one in found.items()}
    assert judged["random"].until(10.2) == 7.0 and judged["random"].until(10.0) is None
    assert row(problem, judged, 10.0).endswith("| - | - | 40 | 7.0 | 10.00 |")
    assert row(problem, judged, 9.0).endswith("| 40 | +12.2% at the end | 9.00 |")
    assert row(problem, found, 9.0).endswith("| 40 | far behind at the end | 9.00 |")
    assert Found.read(asdict(judged["random"])) == judged["random"]
