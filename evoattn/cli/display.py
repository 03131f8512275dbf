"""The live view of a running search: on a terminal a panel, elsewhere a line now and then."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from evoattn.search.progress import Progress
from evoattn.timing.peers.labels import peer_label

LINE_EVERY = 10.0
"""Seconds between lines where the output is no terminal."""


def _clock(seconds: float) -> str:
    seconds = max(0, round(seconds))
    return (
        f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        if seconds >= 3600
        else f"{seconds // 60}:{seconds % 60:02}"
    )


def best_sentence(progress: Progress) -> str:
    """The best so far and how it stands against its peers; offline a relative cost and nothing more."""
    best = progress.best
    if best is None:
        return "none yet"
    if best.timing is None:
        return f"trial {best.number} ({best.family}), relative cost {best.relative_cost:.4g}, never timed"
    text = f"trial {best.number} ({best.family}), {best.timing.median_us:.2f} µs"
    if progress.tied_with:
        text += f", a tie with {'trial' if len(progress.tied_with) == 1 else 'trials'} {', '.join(map(str, progress.tied_with))}"
    baselines = sorted(progress.peers.items(), key=lambda item: item[1])
    versus = [f"{us / best.timing.median_us:.2f}x {peer_label(name)}" for name, us in baselines]
    return f"{text}; its speed is {', '.join(versus)}" if versus else text


class Display:
    """A context in which `refresh` shows the progress. `total_seconds` or `total_trials` is the budget."""

    def __init__(
        self, console: Console, progress: Progress, title: str, total_seconds: float | None, total_trials: int | None
    ) -> None:
        self._console, self._progress, self._title = console, progress, title
        self._seconds, self._trials = total_seconds, total_trials
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._next_line = 0.0

    def __enter__(self) -> Display:
        if self._live:
            self._live.__enter__()
        return self

    def __exit__(self, *error) -> None:
        if self._live:
            self._live.__exit__(*error)

    def refresh(self) -> None:
        """Show the state of now; cheap enough to call in a loop."""
        if self._live:
            self._live.update(self._panel())
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_EVERY
            line = f"{_clock(self._progress.seconds)}: {self._left()}, {self._counts()}; best: {best_sentence(self._progress)}"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _left(self) -> str:
        if self._progress.started is None:
            return f"starting for {_clock(self._progress.starting_seconds)}"
        if self._seconds is not None:
            return f"{_clock(self._seconds - self._progress.seconds)} left"
        return f"{max(0, self._trials - self._progress.recorded)} trials left"

    def _counts(self) -> str:
        progress = self._progress
        states = (
            ", ".join(f"{count} {state}" for state, count in progress.states.most_common()) or "nothing recorded yet"
        )
        return f"{states}; {progress.candidates_per_second:.1f} candidates/s"

    def _panel(self) -> Panel:
        progress = self._progress
        done, total = (
            (progress.seconds, self._seconds) if self._seconds is not None else (progress.recorded, self._trials)
        )
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold")
        rows.add_column()
        rows.add_row("budget", ProgressBar(total=total, completed=min(done, total), width=60))
        rows.add_row("stage", f"{progress.stage}, {self._left()}")
        rows.add_row("trials", self._counts())
        waiting = (
            f", {progress.ready} waiting for the device; the device is {progress.on_device}"
            if progress.on_device
            else ", no device"
        )
        rows.add_row("on the way", f"{progress.compiling} compiling{waiting}")
        rows.add_row("best", Text(best_sentence(progress)))
        return Panel(rows, title=self._title)
