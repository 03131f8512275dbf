"""How many candidates per second the process with sampler and database can drive, with workers that answer at once.

    python scripts/driver_ceiling.py [--seconds 10] [--boards 8] [--sampler guided] [--db FILE] [--inside]
                                     [--disk-ms 0] [--profile]

Compile workers and GPU workers are objects of this process, so that all CPU time is the driver's: rendering, writing to
the database, taking the sampler's proposals, and the loop. The sampler has a process of its own, as in a
search; with `--inside` it is in this one. `--disk-ms` is added to each transaction: hosts with GPUs took 5 to 8. A real
search also passes each candidate's source and machine code to processes; `--pickle` adds what that costs, with machine
code of the usual size. Prints what one candidate costs by part, and the bound that follows.
"""

from __future__ import annotations

import argparse
import cProfile
import hashlib
import os
import pickle
import pstats
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from evoattn.evaluation.process import Ending  # noqa: E402
from evoattn.evaluation.tasks import Compile, Compiled, Gauge, HoldFinal  # noqa: E402
from evoattn.evaluation.workers import BaseWorker, Outcome, nothing, wait_for_any  # noqa: E402
from evoattn.model.gpu import GPUS  # noqa: E402
from evoattn.model.named_problems import lookup  # noqa: E402
from evoattn.model.records import (  # noqa: E402
    CheckResult,
    CompiledKernel,
    CompileInfo,
    Evaluation,
    Timing,
    TrialState,
    ValidationReport,
)
from evoattn.samplers.for_problem import sampler_of  # noqa: E402
from evoattn.search import ahead  # noqa: E402
from evoattn.search.ahead import AheadSampler  # noqa: E402
from evoattn.search.budget import Budget  # noqa: E402
from evoattn.search.loop import Search  # noqa: E402
from evoattn.search.request import choose_spaces  # noqa: E402
from evoattn.search.tools import Tools  # noqa: E402
from evoattn.storage import Storage  # noqa: E402
from evoattn.timing.finalists import FinalResult  # noqa: E402

INFO = CompileInfo(128, seconds=0.5, compiler="NVRTC 13.0", options=("--std=c++17",) * 8)
CUBIN_BYTES, PTX_BYTES = 60_000, 90_000
"""Of a `flash_wgmma` kernel."""
CHECKS = tuple(CheckResult(f"case {n}", True, 1e-3, 2e-3, "", 1e-3) for n in range(12))
"""As many as a real evaluation has."""


def made_up_us(config_id: str) -> float:
    return 10.0 + int(hashlib.sha256(config_id.encode()).hexdigest()[:6], 16) / (1 << 20)


def timing_of(config_id: str) -> Timing:
    us = made_up_us(config_id)
    return Timing((us,) * 5, {"stage": "screen", "run": config_id, "calls_per_replay": 40, "clocks": {"sm_mhz": 1755}})


def answer(task: Any) -> Any:
    """What a worker would say, at once."""
    if isinstance(task, Compile):
        kernel = CompiledKernel(os.urandom(CUBIN_BYTES), "x" * PTX_BYTES, INFO)
        return Compiled(kernel, None, made_up_us(task.config.id))
    if isinstance(task, HoldFinal):
        run = {"stage": "final", "run": "final"}
        return FinalResult({n: Timing((made_up_us(f.config.id),), run) for n, f in task.finalists.items()}, {}, True)
    timing = timing_of(task.kernel.config.id)
    if isinstance(task, Gauge):
        return Timing((10.0,), timing.protocol)
    return Evaluation(TrialState.COMPLETE, "", INFO, ValidationReport("cuda", CHECKS, 1), (timing,), seconds=0.03)


class AtOnce(BaseWorker):
    """Has the answer when it is asked for; `passes` candidates through pickle as a pipe would."""

    def __init__(self, passes: bool) -> None:
        super().__init__()
        self.ready, self._passes = True, passes
        self.connection, self._bell = Pipe(duplex=False)
        self._answers: deque[Any] = deque()

    def submit(self, tag: Any, task: Any, seconds: float) -> None:
        self._begin(tag)
        value = answer(task)
        if self._passes:
            pickle.dumps(task, pickle.HIGHEST_PROTOCOL)
            value = pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
        self._answers.append(value)
        self._bell.send_bytes(b"!")

    def poll(self) -> Outcome | None:
        if not self._answers:
            return None
        self.connection.recv_bytes()
        return self._end(Ending.RESULT, self._answers.popleft())

    def stop(self) -> None:
        with suppress(OSError):
            self._bell.close()
            self.connection.close()


class FleetAtOnce:
    """As many GPUs as are wanted."""

    def __init__(self, boards: int, jobs: int, passes: bool) -> None:
        self.boards, self.jobs, self._passes = tuple(f"board {n}" for n in range(boards)), jobs, passes

    def compilers(self, make_handler: Callable[..., Any], args: tuple[Any, ...]) -> list[BaseWorker]:
        return [AtOnce(self._passes) for _ in range(self.jobs)]

    def devices(self, make_handler: Callable[..., Any], args: tuple[Any, ...]) -> list[BaseWorker]:
        return [AtOnce(self._passes) for _ in self.boards]

    def referee(self, make_handler: Callable[..., Any], args: tuple[Any, ...]) -> None:
        return None

    def stop(self) -> None:
        pass


class Meter:
    """Wall seconds and CPU seconds of their thread of the calls that pass through it, by name."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def around(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **words: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return work(*args, **words)
            finally:
                self.wall[name] = self.wall.get(name, 0.0) + time.perf_counter() - wall
                self.cpu[name] = self.cpu.get(name, 0.0) + time.thread_time() - cpu
                self.calls[name] = self.calls.get(name, 0) + 1

        return measured


class Core:
    """CPU seconds of another process of this machine since it is looked at."""

    def __init__(self, pid: int) -> None:
        self._stat, self._before, self.seconds = Path(f"/proc/{pid}/stat"), 0.0, 0.0
        self.look()
        self._before, self.seconds = self.seconds, 0.0

    def look(self) -> None:
        """Bring `seconds` up to date; a process that has ended keeps them."""
        with suppress(OSError):
            fields = self._stat.read_text().rpartition(")")[2].split()
            self.seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") - self._before


def measured(given: argparse.Namespace, db: str) -> None:
    problem, gpu, meter = lookup(given.problem), GPUS["h200"], Meter()
    spaces = choose_spaces((), (), True, problem, gpu)
    storage = Storage.open(db)
    study = storage.create_study("ceiling", problem, gpu, False, given.sampler, 0, tuple(spaces), {}, {})
    made_of = given.sampler, spaces, problem, gpu, 0
    sampler = sampler_of(*made_of) if given.inside else AheadSampler.start(sampler_of, *made_of)
    for name in ("ask", "tell"):
        setattr(sampler, name, meter.around(name, getattr(sampler, name)))
    record_all = storage.record_all

    def on_a_slow_disk(*words: Any) -> Any:
        time.sleep(1e-3 * given.disk_ms)
        return record_all(*words)

    storage.record_all = meter.around("write", on_a_slow_disk)  # type: ignore[method-assign]
    tools = Tools()
    tools = Tools(render=meter.around("render", tools.render), compile=lambda candidate: CompiledKernel(b"", "", INFO))
    fleet = FleetAtOnce(given.boards, given.jobs, given.pickle)
    running = Search(storage, study, problem, gpu, spaces, sampler, fleet, tools=tools)
    while isinstance(sampler, AheadSampler) and not sampler.worker.ready:
        wait_for_any(ahead.listen(sampler), 1.0)
    thinking = Core(sampler.worker.pid) if isinstance(sampler, AheadSampler) else None
    cpu, profile = time.process_time(), cProfile.Profile()
    if given.profile:
        profile.enable()
    progress = running.run(Budget(seconds=given.seconds), thinking.look if thinking else nothing)
    profile.disable()
    cpu = time.process_time() - cpu
    storage.close()
    count = progress.recorded
    print(f"{count} candidates in {progress.seconds:.1f} s: {count / progress.seconds:.0f} per second of wall time,")
    print(f"{count / cpu:.0f} per second of CPU time ({1e3 * cpu / count:.2f} ms each); {meter.calls['write']} writes")
    rest = cpu
    for name in ("ask", "render", "write", "tell"):
        rest -= meter.cpu[name]
        print(
            f"  {name:<7} {1e3 * meter.cpu[name] / count:6.2f} ms of CPU per candidate, "
            f"{1e3 * meter.wall[name] / count:6.2f} ms of wall time"
        )
    print(f"  others  {1e3 * rest / count:6.2f} ms of CPU per candidate")
    if thinking:
        print(f"the sampler's own process: {1e3 * thinking.seconds / count:.2f} ms of CPU per candidate")
    if given.profile:
        pstats.Stats(profile).sort_stats("cumulative").print_stats(35)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--problem", default="seed_h100")
    parser.add_argument("--sampler", default="guided")
    parser.add_argument("--boards", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=64)
    parser.add_argument("--db")
    parser.add_argument("--disk-ms", type=float, default=0.0)
    parser.add_argument("--pickle", action="store_true")
    parser.add_argument("--inside", action="store_true")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        measured(given, given.db or str(Path(folder) / "ceiling.sqlite"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
