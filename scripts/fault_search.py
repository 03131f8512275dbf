"""`evoattn search` for the fault runs: it writes down what it was promised, so that another program can hold the database to it.

    python scripts/fault_search.py JOURNAL (real|fake) WORDS-OF-SEARCH...

JOURNAL gets a line for each trial as soon as the storage has acknowledged it (`trial NUMBER CONFIG_ID`) and for each worker process started
(`worker HANDLER PID`). `fake` stands in for compiler and GPU: the loop, the worker processes and the storage are the real ones, on a made-up H100.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time

from evoattn.evaluation.workers import Handler, Worker
from evoattn.model.gpu import DetectedDevice
from evoattn.model.records import CompiledKernel, CompileInfo, Evaluation, Timing, TrialState

KERNEL = CompiledKernel(b"", "", CompileInfo(registers=64))
FAKE_SECONDS = 0.02
"""What a compile and an evaluation take: long enough that a kill hits some of them."""


def made_up_us(config_id: str) -> float:
    return 10.0 + int(hashlib.sha256(config_id.encode()).hexdigest()[:6], 16) / (1 << 20)


class FakeCompiler(Handler):
    """Compiles nothing."""

    def __init__(self, problem, gpu, offline) -> None:
        from evoattn.evaluation.evaluate import Compiled  # slow to import (torch), so only where it is used

        self._compiled = Compiled

    def __call__(self, task):
        candidate, config = task
        time.sleep(FAKE_SECONDS)
        return self._compiled(KERNEL, None, made_up_us(config.id))


class FakeDevice(Handler):
    """Times nothing."""

    def __init__(self, problem, gpu, cache) -> None:
        pass

    def __call__(self, task):
        method, args = task
        time.sleep(FAKE_SECONDS)
        if method == "final":
            run = {"stage": "final", "run": os.urandom(4).hex()}
            found = {name: Timing((made_up_us(config.id),), run) for name, (_, config, _) in args[0].items()}
            return found | {"flash": Timing((30.0,), run)}, {}, True
        return Evaluation(
            TrialState.COMPLETE, "", KERNEL.info, None, (Timing((made_up_us(args[1].id),), {"stage": "screen"}),)
        )


def main(journal: str, kind: str, *words: str) -> None:
    from evoattn.cli.main import main as cli
    from evoattn.model import gpu
    from evoattn.search import finals
    from evoattn.search import loop as search
    from evoattn.storage import Storage

    descriptor = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    record, spawn = Storage.record, Worker._spawn

    def recorded(self, *args, **named):
        trial = record(self, *args, **named)
        os.write(descriptor, f"trial {trial.number} {trial.config_id}\n".encode())
        return trial

    def spawned(self):
        spawn(self)
        os.write(descriptor, f"worker {self._make_handler.__name__} {self.pid}\n".encode())

    Storage.record, Worker._spawn = recorded, spawned
    if kind == "fake":
        search.CompileHandler, search.DeviceHandler = FakeCompiler, FakeDevice
        finals.compile_candidate = lambda candidate: KERNEL
        gpu.detect_devices = lambda: [DetectedDevice(0, "NVIDIA H100 (made up)", (9, 0), "13.0")]
    cli.app(["search", *words])


if __name__ == "__main__":
    main(*sys.argv[1:])
