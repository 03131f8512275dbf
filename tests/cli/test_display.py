"""The live view: the best and its config, the ratio to the best peer, convergence, the time since it improved."""

import io

import pytest
from rich.console import Console

from evoattn.cli.display import Display, best_sentence, clock, curve
from evoattn.engine.progress import Progress
from evoattn.model.records import Timing, Trial, TrialState


def trial(number: int, us: float | None = None, cost: float | None = None) -> Trial:
    state = TrialState.ESTIMATED if us is None else TrialState.COMPLETE
    timings = () if us is None else (Timing((us,) * 5, {"stage": "screen"}),)
    config = {"BLOCK_M": 64, "BLOCK_N": 128, "SMEM_LAYOUT": "swizzled"}
    return Trial(number, 1, "flash_mma", config, "", state, "", None, None, None, timings, cost, (), "", "", 0.0)


class Elapsed(Progress):
    """A progress whose clock stands still."""

    @property
    def seconds(self) -> float:
        return 100.0


def shown(progress: Progress, width: int = 80) -> str:
    out = io.StringIO()
    display = Display(Console(file=out, width=width), progress, "evoattn search", 600.0, None)
    Console(file=out, width=width).print(display.panel())
    return out.getvalue()


@pytest.fixture
def measured() -> Progress:
    progress = Elapsed(started=0.0, recorded=12, best=trial(7, us=20.0))
    progress.improvements = [(10.0, 40.0), (30.0, 25.0), (75.0, 20.0)]
    progress.peers = {"math": 200.0, "flash": 30.0, "cudnn": 26.0}
    progress.states[TrialState.COMPLETE] = 12
    return progress


def test_the_panel_says_how_the_search_stands(measured):
    lines = shown(measured).splitlines()
    assert all(len(line) <= 80 for line in lines)
    words = " ".join(" ".join(line.strip("│╭╮╰╯─ ") for line in lines).split())
    assert "trial 7 (flash_mma), 20.00 µs, 1.30× the speed of SDPA cudnn, found 0:25 ago" in words
    assert "BLOCK_M=64 BLOCK_N=128 SMEM_LAYOUT=swizzled" in words
    assert "40.00 to 20.00 µs, 3 improvements" in words and "8:20 left" in words


def test_an_offline_panel_has_no_times():
    progress = Elapsed(started=0.0, best=trial(7, cost=1500.0), improvements=[(1.0, 3000.0), (2.0, 1500.0)])
    text = shown(progress)
    assert "relative cost 1,500" in text and "3,000 to 1,500" in text and "µs" not in text and "speed" not in text


def test_the_curve_falls_from_the_first_value_to_the_best():
    bars = curve([(0.0, 40.0), (50.0, 30.0), (90.0, 20.0)], 100.0, columns=10)
    assert bars == "████▅▅▅▅▁▁"
    assert curve([], 10.0) == curve([(1.0, 5.0)], 10.0) == ""
    assert len(curve([(5.0, 2.0), (5.0, 1.0)], 5.0, columns=7)) == 7


def test_without_a_terminal_there_is_a_line_now_and_then(measured):
    out = io.StringIO()
    with Display(Console(file=out, width=160), measured, "evoattn search", None, 20) as display:
        display.refresh()
        display.refresh()
    assert out.getvalue().count("\n") == 1
    for part in ("1:40: 8 trials left, 12 COMPLETE; 0.1 candidates per second", "1.30× the speed", "found 0:25 ago"):
        assert part in out.getvalue()


def test_a_tie_is_called_a_tie(measured):
    measured.tied_with = (3, 4)
    assert "20.00 µs, a tie with trials 3, 4, 1.30×" in best_sentence(measured)
    assert best_sentence(Progress()) == "none yet"
    assert (clock(65), clock(3605), clock(-1)) == ("1:05", "1:00:05", "0:00")
