"""Faults of the processes that a search works with, on one GPU, on several, and on a Ray cluster of this machine."""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

from tests.faults.run import Run, finish, require, wait_for_trials

BOARDS = ("--boards", "3")
ACTOR = "actor"


def alive(pid: int) -> bool:
    """Whether the process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def victims(run: Run, ray: bool) -> dict[str, list[int]]:
    """Living processes by kind: those that the workers noted, and of Ray the actors above the GPU workers."""
    found: dict[str, list[int]] = {}
    for name, pid in run.lines("worker"):
        if alive(int(pid)):
            found.setdefault(name, []).append(int(pid))
    if ray:
        # A worker's parent is the process that workers are forked from; that one's is the actor.
        found[ACTOR] = [parent(parent(pid)) for pid in found.get("FakeDevice", [])]
    return found


def worker_runs(run: Run, kills: int, rng: random.Random, words: tuple[str, ...] = ()) -> str:
    """Kill GPU workers, compile workers and, of a Ray cluster, actors at random under one search: it goes on to the end
    of its budget, and each candidate is recorded once."""
    budget, killed = 60 + 5 * kills, Counter[str]()
    process = run.search(f"{budget}trials", *words)
    for n in range(kills):
        wait_for_trials(run, process, 3 + n * budget // (kills + 1))
        time.sleep(rng.uniform(0, 0.1))
        kinds = {kind: pids for kind, pids in victims(run, "--ray" in words).items() if pids}
        if process.poll() is not None or not kinds:
            break
        kind = sorted(kinds)[n % len(kinds)]
        os.kill(rng.choice(kinds[kind]), signal.SIGKILL)
        killed[kind] += 1
    finish(process, (0,), "Done (budget spent)", 400)
    require(killed.total() >= kills // 2, f"Only {killed.total()} of {kills} kills found somebody.")
    require(run.check() == budget, f"{run.check()} trials for a budget of {budget}.")
    died = run.count_of("WORKER_DIED")
    counts = ", ".join(f"{count} x {kind}" for kind, count in killed.items())
    return f"killed {counts}; {budget} of {budget} trials, {died} WORKER_DIED"
