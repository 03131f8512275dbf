"""How fast a search starts and goes on, on the machine that is here: `evoattn search` as a user runs it, in a database
of its own.

    python -m benchmarks.samplers.search_speed [--timeline] [--repeat 1] [--keep FILE] [-- --problem seed_h100 …]

What stands behind `--` are words of `evoattn search`; without them it is `--problem seed_h100 --budget 30s`. Prints a
table: seconds from Enter to the first candidate timed and to the first leaderboard (the first eight starting configs
are recorded), candidates per second between the first candidate and the final, ms per candidate on the device and in
the compiler, how many are compiled at once, the share of the time in which the GPU worker had a candidate, the share of
a candidate's time on the device that went into checks, the share of candidates that were pruned, and of a core that the
search's own process took. `--timeline` also prints when what happened, in seconds from Enter, and how many were
recorded in each second. Each search has a cache of compiled kernels of its own, and a database of which `--keep` names
the last one's file."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from evoattn.evaluation.imports import why_slow
from evoattn.model.paths import ROOT
from evoattn.model.records import Trial, TrialState
from evoattn.model.timeline import FILE
from evoattn.samplers.base import STARTING
from evoattn.storage import Storage

USUAL = ["--problem", "seed_h100", "--budget", "30s"]
DATABASE, CUBINS = "speed.sqlite", "cubins"
"""In the folder of a search: its database, and its cache of compiled kernels."""
LOOK_SECONDS = 0.05
"""Between two looks at the time line of a search that is to be interrupted."""
FINAL = "the final begins"
LEADERS = 8
"""Starting configs whose results make the first leaderboard: as many as a portfolio gives a search."""


@dataclass(frozen=True)
class Event:
    """`seconds` from Enter."""

    seconds: float
    process: int
    core: float
    """Seconds of a core that the process had taken."""
    what: str


@dataclass(frozen=True)
class Speed:
    """One search."""

    first: float
    leaderboard: float | None
    candidates: int
    per_second: float
    busy: float | None
    checks: float | None
    device_ms: float | None
    compile_ms: float
    at_once: float
    """Compiles under way, on average: as many as there are compile processes if none ever waits."""
    pruned: float
    own_core: float
    """Seconds of a core that the search's own process took, per second."""

    def cells(self) -> list[str]:
        start, rate = (self.first, self.leaderboard, self.candidates, self.per_second), (self.compile_ms, self.at_once)
        numbers = (*start, self.device_ms, *rate)
        shares = (self.busy, self.checks, self.pruned, self.own_core)
        texts = ["-" if n is None else f"{n:.4g}" for n in numbers]
        return texts + ["-" if share is None else f"{share:.0%}" for share in shares]


OF_THE_SEARCH = ["first s", "board s", "trials", "per s"]
HEADS = [*OF_THE_SEARCH, "ms/trial", "compile ms", "at once", "busy", "checks", "pruned", "own core"]


def run(words: list[str], folder: Path, until: str = "") -> tuple[list[Event], list[Trial], str]:
    """One search: its events, its trials, and what it printed. `until`: it is interrupted at that event, as by Ctrl-C.
    Raises `CalledProcessError`."""
    timeline, db = folder / "timeline", folder / DATABASE
    command = [sys.executable, "-m", "evoattn", "search", *words, "--db", str(db)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    own = {FILE: str(timeline), "PYTHONPATH": path, "EVOATTN_CACHE": str(folder / CUBINS)}
    timeline.touch()
    started = time.time()
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=os.environ | own, stdout=pipe, stderr=pipe, text=True) as process:
        out, err = said(process, timeline, until)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, out, err)
    lines = [line.split("\t") for line in timeline.read_text().splitlines()]
    events = [Event(float(when) - started, int(process), float(core), what) for when, process, core, what in lines]
    storage = Storage.open(str(db), create=False)
    try:
        study = storage.latest_study()
        trials = list(storage.iter_trials(study, evidence=True)) if study else []
    finally:
        storage.close()
    return sorted(events, key=lambda e: e.seconds), trials, out


def said(process: subprocess.Popen[str], timeline: Path, until: str) -> tuple[str, str]:
    """What the process prints until it ends."""
    while True:
        try:
            return process.communicate(timeout=LOOK_SECONDS if until else None)
        except subprocess.TimeoutExpired:
            if until in timeline.read_text():
                process.send_signal(signal.SIGINT)
                until = ""


def speed(events: list[Event], trials: list[Trial], printed: str) -> Speed:
    """Raises `ValueError` where no candidate was recorded."""
    recorded = [e for e in events if e.what.startswith("trial ")]
    good = [e for e in recorded if e.what.split()[2] in ("COMPLETE", "ESTIMATED", "PRUNED")]
    if not good:
        raise ValueError(f"No candidate was right:\n{printed}")
    starting = [e for e in recorded if e.what.endswith(f" {STARTING}")]
    first = next((e for e in events if e.what == "the budget's time begins"), good[0])
    last = next((e for e in events if e.what == FINAL), recorded[-1])
    begun, end = first.seconds, last.seconds
    number = sum(e.seconds <= end for e in recorded)
    timed = [t for t in trials if t.validation and t.validation.backend == "cuda"]
    on_device = sum(t.seconds for t in timed)
    checked = sum(c.seconds for t in timed if t.validation for c in t.validation.checks)
    compiles = [t.compile_info.seconds for t in trials if t.compile_info]
    return Speed(
        good[0].seconds,
        starting[LEADERS - 1].seconds if len(starting) >= LEADERS else None,
        number,
        number / (end - begun),
        on_device / (end - begun) if timed else None,
        checked / on_device if timed else None,
        1e3 * mean(t.seconds for t in timed) if timed else None,
        1e3 * mean(compiles),
        mean(compiles) * number / (end - begun),
        sum(t.state is TrialState.PRUNED for t in trials) / len(trials),
        (last.core - first.core) / (end - begun),
    )


def print_timeline(events: list[Event]) -> None:
    """Each event once, with how many processes had it; of the trials only the first, the eighth and the last."""
    trials = [e for e in events if e.what.startswith("trial ")]
    kept = {id(e) for n, e in enumerate(trials) if n in (0, LEADERS - 1, len(trials) - 1)}
    last = 0.0
    seen: set[str] = set()
    for event in events:
        if event in trials and id(event) not in kept:
            continue
        alike = sum(e.what == event.what for e in events)
        if event.what not in seen:
            first = f", the first of {alike}" if alike > 1 else ""
            print(f"{event.seconds:8.3f} s  (+{event.seconds - last:.3f})  {event.what}{first}")
            last = event.seconds
        seen.add(event.what)
    if trials:
        seconds = Counter(int(e.seconds - trials[0].seconds) for e in trials)
        print("Recorded in each second since the first:", *(seconds[n] for n in range(max(seconds) + 1)))


def main() -> int:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="FILE")
    options = parser.parse_args(words[:split])
    rows = []
    for _ in range(options.repeat):
        with TemporaryDirectory() as folder:
            try:
                events, trials, printed = run(words[split + 1 :] or USUAL, Path(folder))
                rows.append(speed(events, trials, printed))
                if options.keep:
                    shutil.copy(Path(folder) / DATABASE, options.keep)
            except subprocess.CalledProcessError as error:
                print(error.stdout, error.stderr, sep="\n", file=sys.stderr)
                return 1
            except ValueError as error:
                print(error, file=sys.stderr)
                return 1
        if options.timeline:
            print_timeline(events)
        print(printed.rstrip())
    if note := why_slow(find_spec("torch")):
        print(f"Note: {note}")
    print(*(f"{head:>10}" for head in HEADS))
    for row in rows:
        print(*(f"{cell:>10}" for cell in row.cells()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
