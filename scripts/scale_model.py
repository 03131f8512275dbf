"""What bounds a search on many GPUs: the search's own process, as a simulation of its loop, from measured costs.

    python scripts/scale_model.py [--device-ms 41] [--send-ms 1.4] [--result-ms 1.6] [--ask-ms 1.4] [--commit-ms 5.7]
                                  [--compile-s 0.61] [--cores 16] [--gpus 1,2,4,8,10,100,1000]

The loop is that of `evoattn/search/loop.py`: take all results that are there, give each idle board its next candidate
(`send` each), write all results in one transaction (`commit`, and `result` for each), then ask, render and hand out as
many candidates to compile as were used (`ask` each). Meanwhile boards work: a candidate takes a time drawn around
`device-ms`. Compiles are a bound of their own: `cores` per GPU, each candidate `compile-s` of one. Prints candidates
per second, the share of the time in which boards have a candidate, the process's share of a core, and what bounds it.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from dataclasses import dataclass

SIMULATED_SECONDS = 20.0
SPREAD = 0.3
"""Standard deviation of the log of a candidate's time on a board: some are hopeless at once, some are timed twice."""


@dataclass(frozen=True)
class Costs:
    """Seconds."""

    device: float
    send: float
    result: float
    ask: float
    commit: float

    @property
    def driver(self) -> float:
        """What the search's own process spends on one candidate, transactions apart."""
        return self.send + self.result + self.ask


def simulated(boards: int, costs: Costs, seed: int = 0) -> tuple[float, float, float]:
    """(candidates per second, share of the boards' time with a candidate, CPU seconds of the process per second)."""
    rng = random.Random(seed)
    now, cpu, done, useful = 0.0, 0.0, 0, 0.0
    idle, running = list(range(boards)), []
    while now < SIMULATED_SECONDS:
        finished = 0
        while running and running[0][0] <= now:
            idle.append(heapq.heappop(running)[1])
            finished += 1
        for board in idle:
            now += costs.send
            seconds = costs.device * rng.lognormvariate(-(SPREAD**2) / 2, SPREAD)
            useful += seconds
            heapq.heappush(running, (now + seconds, board))
        work = len(idle) * costs.send + finished * (costs.result + costs.ask)
        idle.clear()
        now += finished * (costs.result + costs.ask) + (costs.commit if finished else 0.0)
        cpu += work
        done += finished
        if running[0][0] > now:
            now = running[0][0]
    return done / now, min(1.0, useful / (now * boards)), cpu / now


def bound(boards: int, rate: float, costs: Costs, compiles: float) -> str:
    """What keeps the rate where it is."""
    if compiles <= 1.02 * rate:
        return "compiles"
    return "boards" if rate > 0.9 * boards / costs.device else "the search's own process"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device-ms", type=float, default=41.0)
    parser.add_argument("--send-ms", type=float, default=1.4)
    parser.add_argument("--result-ms", type=float, default=1.6)
    parser.add_argument("--ask-ms", type=float, default=1.4)
    parser.add_argument("--commit-ms", type=float, default=5.7)
    parser.add_argument("--compile-s", type=float, default=0.61)
    parser.add_argument("--cores", type=float, default=16.0)
    parser.add_argument("--gpus", default="1,2,4,8,10,100,1000")
    given = parser.parse_args()
    ms = (given.device_ms, given.send_ms, given.result_ms, given.ask_ms, given.commit_ms)
    costs = Costs(*(value / 1e3 for value in ms))
    print("GPUs | candidates/s | x one GPU | boards with a candidate | process, of a core | bound by")
    alone = simulated(1, costs)[0]
    for boards in map(int, given.gpus.split(",")):
        rate, share, cpu = simulated(boards, costs)
        compiles = boards * given.cores / given.compile_s
        rate = min(rate, compiles)
        print(
            f"{boards:4} | {rate:12.0f} | {rate / alone:9.2f} | {share:23.0%} | {cpu:18.0%} | "
            f"{bound(boards, rate, costs, compiles)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
