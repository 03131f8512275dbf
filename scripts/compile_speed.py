"""How long a compile takes, by how many run at once: what bounds the candidates per second of a host. Needs no GPU.

    python scripts/compile_speed.py [--family flash_wgmma] [--at-once 1,8,16] [--each 6] [--give-back]

Processes are those of a search: they keep the memory that they free, or give it back with `--give-back`. Each compiles
the same random configs for seed_h100 on an H100, each process beginning with another one, after one that does not
count. Prints ms of wall time and of CPU time per compile, and compiles per second.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from queue import Empty
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from evoattn.backends.compiler import CompileError, compile_source
from evoattn.evaluation.allocator import keep_freed_memory
from evoattn.evaluation.handlers import POLITE
from evoattn.families import registry
from evoattn.families.render import render
from evoattn.model.gpu import GPUS
from evoattn.model.named_problems import lookup
from evoattn.model.space import KernelConfig
from evoattn.samplers.pool import ConfigPool
from evoattn.search.spaces import choose_spaces

LOOK_SECONDS = 1.0
"""Between two looks at whether a process has failed."""


def sources(family_name: str, count: int) -> list[str]:
    """Of random configs."""
    family, problem, gpu = registry.lookup(family_name), lookup("seed_h100"), GPUS["h100"]

    def why_invalid(_: str, params: dict) -> str | None:
        return family.why_invalid(problem, KernelConfig(family_name, params), gpu)

    pool = ConfigPool(choose_spaces((family_name,), (), True, problem, gpu), why_invalid, random.Random(1))
    drawn = [pool.draw(family_name) for _ in range(count)]
    return [render(family, problem, KernelConfig(*config), gpu).source for config in drawn if config]


def compiled(texts: list[str], ready: Barrier) -> list[tuple[float, float]]:
    """(wall, CPU) seconds of each but the first, all processes at once; of those that compile."""
    seconds_of(texts[0])
    ready.wait()
    return [found for text in texts[1:] if (found := seconds_of(text))]


def seconds_of(text: str) -> tuple[float, float] | None:
    """(wall, CPU) seconds of a compile, None where the source has an error."""
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        compile_source(text, GPUS["h100"].arch)
    except CompileError:
        return None
    return time.perf_counter() - wall, time.process_time() - cpu


def work(texts: list[str], give_back: bool, ready: Barrier, queue: Queue) -> None:
    if not give_back:
        keep_freed_memory()
    os.nice(POLITE)
    queue.put(compiled(texts, ready))


def rows_of(processes: list[SpawnProcess], queue: Queue) -> list[tuple[float, float]]:
    """What all of them put into the queue. Raises `SystemExit` where one has failed: the others would wait for it."""
    rows: list[tuple[float, float]] = []
    left = len(processes)
    while left:
        try:
            rows += queue.get(timeout=LOOK_SECONDS)
            left -= 1
        except Empty:
            if any(process.exitcode for process in processes):
                for process in processes:
                    process.terminate()
                raise SystemExit("A process has failed; the others were ended.") from None
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="flash_wgmma")
    parser.add_argument("--at-once", default="1,8,16")
    parser.add_argument("--each", type=int, default=6)
    parser.add_argument("--give-back", action="store_true")
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    texts = sources(given.family, given.each)
    for count in map(int, given.at_once.split(",")):
        ready, queue = context.Barrier(count), context.Queue()
        turned = [texts[i % len(texts) :] + texts[: i % len(texts)] for i in range(count)]
        parts = [[part[-1], *part] for part in turned]
        processes = [context.Process(target=work, args=(part, given.give_back, ready, queue)) for part in parts]
        for process in processes:
            process.start()
        rows = rows_of(processes, queue)
        for process in processes:
            process.join()
        wall, cpu = (1e3 * mean(column) for column in zip(*rows, strict=True))
        print(f"{count:3} at once: {wall:5.0f} ms each, {cpu:5.0f} ms of CPU; {1e3 * count / wall:.1f} per second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
