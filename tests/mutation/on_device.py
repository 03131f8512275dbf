"""Mutants that the interpreter alone finds, on the GPU: which of them ever answer wrong there?

    python -m tests.mutation.on_device --choose VERDICTS.jsonl… [--count 40]    offline: write the list of mutants
    python -m tests.mutation.on_device [--seconds 55] [--rounds 3] [--sanitize 4]    on an H100: run it

Each mutant runs the ladder of small cases and its problem's own shape, `--rounds` times with new inputs, each case
twice, the bits compared; the first `--sanitize` of those that answer right run under compute-sanitizer's racecheck too.
A process of its own runs the kernels: one that hangs or loses its context costs that process. Prints a table; the
mutants that the time did not suffice for are named as such. The list is tests/mutation/on_device.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

from evoattn.backends.compiler import CompileError, compile_source
from evoattn.correctness.sanitizer import sanitize
from evoattn.families.built import BuiltKernel
from evoattn.families.registry import FAMILIES
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from tests.mutation.chosen import Chosen, choose, load, save
from tests.mutation.table import load_verdicts

HANGS_AFTER = 8.0
"""Seconds for all cases of a mutant in one round; a right kernel takes some tenths of one."""
RIGHT = "right, the same bits"
Job = tuple[BuiltKernel, AttentionProblem, int]


def serve(jobs: Connection) -> None:
    """In a process of its own: what is wrong with each kernel that comes, one sentence; empty if nothing is."""
    from evoattn.backends.cuda import CudaBackend
    from evoattn.correctness.cases import device_cases, make_case
    from evoattn.correctness.validate import check

    backend = CudaBackend()
    jobs.send("ready")
    while True:
        kernel, problem, seed = jobs.recv()
        said = ""
        for name, case, kind in [*device_cases(problem), ("its own shape", problem, "plain")]:
            try:
                result = check(backend, kernel, make_case(name, case, seed, backend.device, kind), repeat=True)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                break
            if not result.passed:
                said = result.reason
                break
        jobs.send(said)


class Device:
    """The process that runs kernels, started again when it is lost."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._start()

    def _start(self) -> None:
        self._jobs, other = self._context.Pipe()
        self._process = self._context.Process(target=serve, args=(other,), daemon=True)
        self._process.start()
        other.close()
        self._jobs.recv()

    def run(self, job: Job) -> str:
        """What is wrong with a kernel, as `serve` says; a kernel that takes the process with it, or too long, in a
        sentence of its own."""
        said = f"hangs: no answer in {HANGS_AFTER:.0f} s"
        try:
            self._jobs.send(job)
            if self._jobs.poll(HANGS_AFTER):
                said = self._jobs.recv()
        except (EOFError, BrokenPipeError):
            said = "ends the process"
        if said.startswith(("hangs", "ends", "ContextLost", "LaunchError")):
            self.stop()
            self._start()
        return said

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def build(chosen: Chosen) -> BuiltKernel | str:
    """The mutant compiled, or why it is not. Raises `LookupError` if the templates have changed since it was chosen."""
    gpu = GPUS[chosen.setting.gpu]
    try:
        compiled = compile_source(chosen.source(), gpu.arch)
    except CompileError as error:
        return str(error)
    return BuiltKernel(FAMILIES[chosen.setting.family], chosen.setting.config, gpu, compiled)


def run(mutants: list[Chosen], seconds: float, rounds: int, sanitized: int) -> None:
    """Print a line per mutant as it ends, then the counts."""
    end, totals = time.monotonic() + seconds, Counter[str]()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        kernels = list(pool.map(build, mutants))
    device = Device()
    print("| mutant | config | the interpreter says | on the device | racecheck |\n|---|---|---|---|---|")
    for chosen, kernel in zip(mutants, kernels):
        said, checked = RIGHT, ""
        if isinstance(kernel, str):
            said = f"not compiled: {kernel}"
        elif time.monotonic() > end:
            said = "not run: the time was over"
        else:
            for seed in range(rounds):
                if wrong := device.run((kernel, chosen.setting.problem, seed)):
                    said = wrong
                    break
            if said == RIGHT and totals["sanitized"] < sanitized and time.monotonic() + 15 < end:
                totals["sanitized"] += 1
                checked = sanitize(chosen.setting.problem, kernel, ("racecheck",))["racecheck"]
        totals[said.split(":")[0] if said.startswith(("not", "right")) else "wrong"] += 1
        print(f"| {chosen.mutant} | {chosen.setting} | {chosen.reason} | {said} | {checked} |".replace("||", "∣∣"))
        sys.stdout.flush()
    device.stop()
    print(", ".join(f"{what}: {count}" for what, count in totals.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choose", type=Path, nargs="+", metavar="VERDICTS", help="write the list from these")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=55.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sanitize", type=int, default=4)
    words = parser.parse_args()
    if words.choose:
        chosen = choose(load_verdicts(words.choose), words.count, 0)
        save(chosen)
        print(f"{len(chosen)} mutants chosen.")
    else:
        run(load()[: words.count], words.seconds, words.rounds, words.sanitize)


if __name__ == "__main__":
    main()
