"""What bounds a search on many GPUs: a simulation of its loop, from measured costs.

    python scripts/scale_model.py [--device-ms 30] [--send-ms 0.35] [--result-ms 0.6] [--ask-ms 0.6] [--write-ms 1]
                                  [--think-ms 3.8] [--compile-s 0.58] [--cores 15] [--gpus 1,2,4,8,10,100,1000]

The loop is that of `evoattn/search/loop.py`: take all results that are there, give each idle board its next candidate
(`send` each), then take what was compiled and hand out as many candidates to compile as were used (`result` and `ask`
each). A thread writes (`write` for each result), whose CPU time is the loop's too, as both hold Python's lock in turn;
its waits for the disk are not. Meanwhile boards work: a candidate takes a time drawn around `device-ms`. Two bounds of
their own: compiles, `cores` per GPU, each candidate `compile-s` of one; and the sampler's process, `think` each. Prints
candidates per second, the share of the time in which boards have a candidate, the search's own process and the
sampler's as shares of a core, and what bounds the rate.
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
    write: float
    think: float

    @property
    def rest(self) -> float:
        """What the search's own process spends on one candidate, once a board has it."""
        return self.result + self.ask + self.write


def simulated(boards: int, costs: Costs) -> tuple[float, float, float]:
    """(candidates per second, share of the boards' time with a candidate, CPU seconds of the process per second)."""
    rng = random.Random(0)
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
        cpu += len(idle) * costs.send + finished * costs.rest
        idle.clear()
        now += finished * costs.rest
        done += finished
        if running[0][0] > now:
            now = running[0][0]
    return done / now, min(1.0, useful / (now * boards)), cpu / now


def bound(boards: int, rate: float, costs: Costs, compiles: float) -> str:
    """What keeps the rate where it is."""
    if compiles <= 1.02 * rate:
        return "compiles"
    if 1 / costs.think <= 1.02 * rate:
        return "the sampler's process"
    return "boards" if rate > 0.9 * boards / costs.device else "the search's own process"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device-ms", type=float, default=30.0)
    parser.add_argument("--send-ms", type=float, default=0.35)
    parser.add_argument("--result-ms", type=float, default=0.6)
    parser.add_argument("--ask-ms", type=float, default=0.6)
    parser.add_argument("--write-ms", type=float, default=1.0)
    parser.add_argument("--think-ms", type=float, default=3.8)
    parser.add_argument("--compile-s", type=float, default=0.58)
    parser.add_argument("--cores", type=float, default=15.0)
    parser.add_argument("--gpus", default="1,2,4,8,10,100,1000")
    given = parser.parse_args()
    ms = (given.device_ms, given.send_ms, given.result_ms, given.ask_ms, given.write_ms, given.think_ms)
    costs = Costs(*(value / 1e3 for value in ms))
    print("GPUs | candidates/s | x one GPU | boards with a candidate | process, sampler, of a core | bound by")
    alone = 0.0
    for boards in map(int, given.gpus.split(",")):
        free, share, cpu = simulated(boards, costs)
        compiles = boards * given.cores / given.compile_s
        rate = min(free, compiles, 1 / costs.think)
        alone = alone or rate / boards
        slower = rate / free
        print(
            f"{boards:4} | {rate:12.0f} | {rate / alone:9.2f} | {share * slower:23.0%} | {cpu * slower:10.0%}, "
            f"{rate * costs.think:14.0%} | {bound(boards, rate, costs, compiles)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
