"""`scripts/time_to_best.py` without a GPU: its problems, and what it reads out of a search."""

from types import SimpleNamespace

from landscape_groups import SEEDS as LANDSCAPE_SEEDS
from search_speed import Event
from time_to_best import SEEDS, Found, best_known, course, problems, row, shape

from evoattn.model.named_problems import parse_shape
from evoattn.model.records import Timing
from evoattn.portfolio.workload import BUILD_SEEDS


def test_the_problems_are_six_that_nothing_was_fitted_to():
    assert not set(SEEDS) & (set(BUILD_SEEDS) | set(LANDSCAPE_SEEDS) | set(range(100)))
    chosen = problems(6)
    assert len(set(chosen)) == 6 and all(parse_shape(shape(p)) == p for p in chosen)


def test_the_course_is_of_the_improvements_and_leaves_finals_out():
    def trial(number, us, stage="repeat"):
        return SimpleNamespace(number=number, timing=Timing((us,), {"stage": stage}))

    trials = [
        trial(1, 9.0),
        trial(2, 9.5),
        trial(3, 7.0),
        SimpleNamespace(number=4, timing=None),
        trial(5, 1.0, "final"),
    ]
    events = [Event(seconds=4.0 + n, process=1, core=0.0, what=f"trial {n} COMPLETE guided") for n in range(1, 6)]
    events.insert(2, Event(seconds=6.5, process=1, core=0.0, what="the final begins"))
    assert course(events, trials) == ([5.0, 7.0], [9.0, 7.0])
    found = Found("p", "random", [5.0, 7.0], [9.0, 7.0], 5)
    assert found.until(7.1) == 7.0 and found.until(6.9) is None


def test_a_line_holds_each_search_against_the_best_known():
    problem = problems(1)[0]
    known = Found("p", "portfolio", [5.0], [10.0], 3)
    found = {"random": Found("p", "random", [5.0, 7.0], [12.0, 10.1], 40)}
    best = best_known([known, *found.values()])
    assert best == 10.0 and row(problem, found, best).endswith("| - | - | 40 | 7.0 | 10.00 |")
    assert row(problem, found | {"portfolio": known}, 9.0).endswith(
        "| 3 | +11.1% at the end | 40 | +12.2% at the end | 9.00 |"
    )
