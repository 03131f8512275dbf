"""A search for the fault runs: it writes down what it was promised, so that another program can hold the database to
it.

    python -m tests.faults.search JOURNAL (real|fake) --db FILE --budget BUDGET
                                   [--gpu GPU] [--shape SHAPE] [--family NAME] [--study NAME]
                                   [--jobs N] [--resume]

JOURNAL gets a line for each trial as soon as the storage has acknowledged it (`trial NUMBER CONFIG_ID`), and one for
each worker process that started (`worker HANDLER PID`). `fake` stands in for compiler and GPU: the loop, the worker
processes and the storage are the real ones, on a made-up H100. The words are those of `evoattn search`."""

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from evoattn.cli.run import run_search
from evoattn.engine.tools import Tools
from evoattn.evaluation.handlers import CompileHandler, DeviceHandler
from evoattn.evaluation.process import Handler
from evoattn.evaluation.tasks import Compile, Compiled, DeviceTask, Evaluate, Gauge, HoldFinal, Rendered
from evoattn.fleet.ray_fleet import LOCAL, RayFleet
from evoattn.model.errors import FailedRun
from evoattn.model.gpu import DetectedDevice, GpuSpec, detect_devices
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompiledKernel, CompileInfo, Evaluation, Timing, Trial, TrialState
from evoattn.search.machines import Machines
from evoattn.search.request import SearchWords
from evoattn.storage import Storage
from evoattn.timing.protocol import FinalResult
from tests.support.prepared import prepare_search

KERNEL = CompiledKernel(b"", "", CompileInfo(registers=64))
FAKE_SECONDS = 0.02
"""What a compile and an evaluation take: long enough that a kill hits some of them."""


def made_up(number: int) -> DetectedDevice:
    return DetectedDevice(number, "NVIDIA H100 (made up)", (9, 0), "13.0", f"made up {number}")


def made_up_here() -> list[DetectedDevice]:
    """In an actor of Ray: the one that it was given."""
    return [made_up(int(os.environ["CUDA_VISIBLE_DEVICES"]))]


def note(journal: str, line: str) -> None:
    """Append a line, whole."""
    descriptor = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


class JournaledStorage(Storage):
    """Notes each trial once it is recorded."""

    journal = ""

    def record_all(self, *args: Any, **named: Any) -> list[Trial]:
        trials = super().record_all(*args, **named)
        for trial in trials:
            note(self.journal, f"trial {trial.number} {trial.config_id}")
        return trials


def made_up_us(config_id: str) -> float:
    return 10.0 + int(hashlib.sha256(config_id.encode()).hexdigest()[:6], 16) / (1 << 20)


class FakeCompiler(Handler):
    """Renders, but compiles nothing."""

    def __init__(self, gpu: GpuSpec, offline: bool) -> None:
        self._gpu = gpu

    def __call__(self, task: Compile) -> Rendered:
        time.sleep(FAKE_SECONDS)
        answer = Compiled(KERNEL, None, made_up_us(task.config.id))
        return Rendered.of(task, task.rendered(self._gpu), self._gpu, answer)


class FakeDevice(Handler):
    """Times nothing."""

    def __init__(self, problem: AttentionProblem, gpu: GpuSpec, cache: Path) -> None:
        pass

    def __call__(self, task: DeviceTask) -> Evaluation | FinalResult | Timing:
        time.sleep(FAKE_SECONDS)
        if isinstance(task, HoldFinal):
            run = {"stage": "final", "run": os.urandom(4).hex()}
            found = {name: Timing((made_up_us(f.config.id),), run) for name, f in task.finalists.items()}
            return FinalResult(found | {"flash": Timing((30.0,), run)}, {})
        assert isinstance(task, Evaluate | Gauge), task
        timing = Timing((made_up_us(task.kernel.config.id),), {"stage": "screen"})
        if isinstance(task, Gauge):
            return timing
        return Evaluation(TrialState.COMPLETE, "", KERNEL.info, None, (timing,))


def journaled(journal: str, handler: Callable[..., Handler], *args: Any) -> Handler:
    """In the worker process: the handler, once its process is noted."""
    note(journal, f"worker {handler.__name__} {os.getpid()}")
    return handler(*args)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journal")
    parser.add_argument("kind", choices=["real", "fake"])
    for name in ("--db", "--budget"):
        parser.add_argument(name, required=True)
    parser.add_argument("--gpu", default="auto")
    for name in ("--shape", "--study", "--family"):
        parser.add_argument(name)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--boards", type=int, default=0, help="made-up GPUs, on which all is timed")
    parser.add_argument("--ray", action="store_true", help="on a Ray cluster of this machine")
    words = parser.parse_args()
    fake = words.kind == "fake"
    compiler, device = (FakeCompiler, FakeDevice) if fake else (CompileHandler, DeviceHandler)
    tools = Tools(
        make_compiler=partial(journaled, words.journal, compiler), make_device=partial(journaled, words.journal, device)
    )
    if fake:
        tools = replace(tools, compile=lambda candidate: KERNEL)
    JournaledStorage.journal = words.journal
    try:
        search = SearchWords(
            gpu=words.gpu,
            budget=words.budget,
            shape=words.shape,
            families=(words.family,) if words.family else (),
            study=words.study,
            db=words.db,
            jobs=words.jobs,
            resume=words.resume,
            devices="all" if words.boards and not words.ray else None,
            ray=LOCAL if words.ray else None,
        )
        cluster = None
        here = [made_up(number) for number in range(words.boards or 1)] if fake else detect_devices()
        if words.ray:
            size = {"num_cpus": words.jobs + words.boards, "num_gpus": words.boards}
            cluster = RayFleet(LOCAL, words.jobs, size, made_up_here)
            here = cluster.detect()
        prepared = prepare_search(search, here)
        prepared.storage.close()
        prepared = replace(prepared, storage=JournaledStorage.open(words.db, create=False))
        run_search(prepared, Machines(here, cluster), Console(width=160, highlight=False), tools)
    except FailedRun as error:
        print(f"evoattn: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":  # workers import this file by its name: what they are sent may not be of `__main__`
    sys.exit(import_module("tests.faults.search").main())
