"""evoattn's own search, as its command line runs it.

    python -m benchmarks.versus.by_evoattn PROBLEM -o FOUND.json -- --budget 60s
    python -m benchmarks.versus.by_evoattn PROBLEM -o FOUND.json -- --family flash_mma --sampler random
                                                                 --no-starting-configs --budget 80trials

What stands after `--` goes to `evoattn search`. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from benchmarks.versus.found import Found, Tried
from evoattn import __version__
from evoattn.model.paths import ROOT
from evoattn.model.records import Trial, TrialState
from evoattn.storage import Storage


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """What stands before and behind the first `--`: versions of argparse differ on options behind it."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def tried(trial: Trial, started: float) -> Tried:
    """A recorded trial; `started` is the epoch of the search's start. Its time is the one from before any final. One
    far behind the best is timed too, by fewer samples (`PRUNED`)."""
    at = datetime.fromisoformat(trial.created_at).timestamp() - started
    alone = [timing for timing in trial.timings if timing.protocol.get("stage") != "final" and timing.samples_us]
    right = trial.state in (TrialState.COMPLETE, TrialState.PRUNED) and bool(alone)
    return Tried(at, alone[-1].median_us if right else None, {"family": trial.family, "params": trial.config})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem", help="a name of `evoattn problems`, or a shape")
    parser.add_argument("-o", "--output", type=Path, required=True)
    own, words = split(sys.argv[1:])
    options = parser.parse_args(own)
    which = ["--shape" if "=" in options.problem else "--problem", options.problem]
    with tempfile.TemporaryDirectory() as folder:
        db = str(Path(folder) / "versus.sqlite")
        started = time.time()
        command = [sys.executable, "-m", "evoattn", "search", *which, "--db", db, *words]
        environment = os.environ | {"EVOATTN_CACHE": str(Path(folder) / "cubins")}  # empty: nothing is compiled yet
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{done.stdout[-500:]}\n{done.stderr[-500:]}")
        storage = Storage.open(db, create=False)
        study = storage.chosen_study(None)
        trials = [t for t in storage.iter_trials(study) if t.state is not TrialState.DUPLICATE]
        name = f"evoattn {__version__}"
        Found(name, "evoattn", options.problem, [tried(t, started) for t in trials]).write(options.output)
        storage.close()


if __name__ == "__main__":
    main()
