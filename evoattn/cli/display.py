"""The live view of a running search: on a terminal a panel, elsewhere a line now and then."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from evoattn.engine.progress import Progress
from evoattn.model.space import KernelConfig
from evoattn.peers.labels import peer_label
from evoattn.report.text import cost_text

LINE_EVERY = 10.0
"""Seconds between lines where the output is no terminal."""
PANEL_EVERY = 0.1
"""Seconds between panels of a terminal: to make one takes milliseconds, which candidates would wait for."""
CURVE_COLUMNS = 32
CURVE_LEVELS = "▁▂▃▄▅▆▇█"


def clock(seconds: float) -> str:
    """`1:05`, or `1:00:05` from an hour on."""
    seconds = max(0, round(seconds))
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"{hours}:{minutes:02}:{seconds % 60:02}" if hours else f"{minutes}:{seconds % 60:02}"


def best_sentence(progress: Progress) -> str:
    """The best so far and how it stands against the fastest peer; offline a relative cost and nothing more."""
    best = progress.best
    if best is None:
        return "none yet"
    if best.timing is None:
        return f"trial {best.number} ({best.family}), relative cost {cost_text(best.relative_cost)}, never timed"
    text = f"trial {best.number} ({best.family}), {best.timing.median_us:.2f} µs"
    if progress.tied_with:
        text += f", a tie with trial{'s' * (len(progress.tied_with) > 1)} {', '.join(map(str, progress.tied_with))}"
    if progress.best_peer and progress.ratio:
        text += f", {1 / progress.ratio:.2f}× the speed of {peer_label(progress.best_peer[0])}"
    return text


def curve(improvements: Sequence[tuple[float, float]], seconds: float, columns: int = CURVE_COLUMNS) -> str:
    """The best value over time as one line of bars, from the first improvement to now: the lower, the better.

    `improvements` are (seconds, value), both in order. Empty below two of them."""
    if len(improvements) < 2:
        return ""
    first, worst, best = improvements[0][0], improvements[0][1], improvements[-1][1]
    span = max(seconds - first, 1e-9)
    bars, known = "", 0
    for column in range(columns):
        until = first + span * (column + 1) / columns
        while known + 1 < len(improvements) and improvements[known + 1][0] <= until:
            known += 1
        height = (improvements[known][1] - best) / max(worst - best, 1e-9)
        bars += CURVE_LEVELS[round(height * (len(CURVE_LEVELS) - 1))]
    return bars


class Display:
    """A context in which `refresh` shows the progress. `total_seconds` or `total_trials` is the budget."""

    def __init__(
        self, console: Console, progress: Progress, title: str, total_seconds: float | None, total_trials: int | None
    ) -> None:
        self._console, self._progress, self._title = console, progress, title
        self._seconds, self._trials = total_seconds, total_trials or 0
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._next_line = self._next_panel = 0.0

    def __enter__(self) -> Display:
        if self._live:
            self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def refresh(self) -> None:
        """Show the state of now, unless it was shown a moment ago; cheap enough to call in a loop."""
        if self._live:
            if time.monotonic() >= self._next_panel:
                self._next_panel = time.monotonic() + PANEL_EVERY
                self._live.update(self.panel())
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_EVERY
            self._console.print(self.line(), highlight=False, markup=False, soft_wrap=True)

    def line(self) -> str:
        """All of the progress in one line."""
        progress = self._progress
        if progress.started is None:
            return f"{clock(progress.starting_seconds)}: workers are starting; the budget counts from then on"
        return (
            f"{clock(progress.seconds)}: {self._left()}, {self._counts()}; best: {best_sentence(progress)}"
            f"{self._since()}"
        )

    def _left(self) -> str:
        if self._progress.started is None:
            return "workers are starting"
        if self._seconds is not None:
            return f"{clock(self._seconds - self._progress.seconds)} left"
        return f"{max(0, self._trials - self._progress.recorded)} trials left"

    def _counts(self) -> str:
        progress = self._progress
        states = ", ".join(f"{count} {state}" for state, count in progress.states.most_common())
        return f"{states or 'nothing recorded yet'}; {progress.candidates_per_second:.1f} candidates per second"

    def _since(self) -> str:
        since = self._progress.since_improvement
        return "" if since is None else f", found {clock(since)} ago"

    def panel(self) -> Panel:
        """The progress as a panel of a terminal."""
        progress = self._progress
        timed = self._seconds is not None
        done = progress.seconds if timed else float(progress.recorded)
        total = self._seconds if self._seconds is not None else float(self._trials)
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold", no_wrap=True)
        rows.add_column()
        rows.add_row("budget", ProgressBar(total=total, completed=min(done, total), width=CURVE_COLUMNS))
        rows.add_row("stage", f"{progress.stage}, {self._left()}")
        rows.add_row("trials", self._counts())
        waiting = ", no device"
        if progress.on_device:
            waiting = f", {progress.ready} waiting for the device; the device is {progress.on_device}"
        rows.add_row("on the way", f"{progress.compiling} compiling{waiting}")
        rows.add_row("best", Text(best_sentence(progress) + self._since()))
        if best := progress.best:
            rows.add_row("its config", Text(KernelConfig(best.family, best.config).describe()))
        if bars := curve(progress.improvements, progress.seconds):
            values = [value for _, value in progress.improvements]
            ends = (
                f"{values[0]:.2f} to {values[-1]:.2f} µs"
                if progress.best and progress.best.timing
                else f"{cost_text(values[0])} to {cost_text(values[-1])}"
            )
            rows.add_row("best so far", Text(f"{bars} {ends}, {len(values)} improvements"))
        return Panel(rows, title=self._title)
