"""One problem after another: compile, validate, time interleaved with every peer, record."""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from evoattn.bench.contenders import Contender, choose, read_configs
from evoattn.bench.records import BenchRecords
from evoattn.bench.row import Note, Row, Time, grouped
from evoattn.engine.finals import Final, FinalFailed
from evoattn.engine.tools import Tools
from evoattn.evaluation.handlers import DEVICE_SECONDS
from evoattn.evaluation.process import Ending
from evoattn.evaluation.tasks import Compile, Compiled, Evaluate, OnProblem
from evoattn.evaluation.workers import Outcome, Pool, Worker, failed, processes
from evoattn.families import registry
from evoattn.families.built import BuiltKernel
from evoattn.model import gpu as gpus
from evoattn.model.errors import FailedRun
from evoattn.model.gpu import DetectedDevice, GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompiledKernel, Evaluation, Timing, TrialState
from evoattn.model.shape_text import by_name_or_shape
from evoattn.peers.labels import PEER_NAMES
from evoattn.search.request import choose_device
from evoattn.storage import Storage
from evoattn.timing.protocol import Finalists, FinalResult

Configs = list[tuple[str, dict[str, Any]]]
"""(family, parameters) of each."""
Proved = list[tuple[Contender, CompiledKernel, Evaluation]]
"""Contenders that are right, the fastest first."""


COMPILE_SECONDS = 60.0
START_SECONDS = 60.0
"""Inputs and answers of a problem: 0.1 to 5 s."""
FINAL_SECONDS = 240.0
"""A final in which FlashAttention 4 is imported and compiled just in time takes 20 to 40 s."""


@dataclass(frozen=True)
class BenchWords:
    """What `evoattn bench` was told: problems by name or shape, databases of which the first takes what is new, a file
    of configs, how many of the best known stand for each problem, compile workers, and which of `PEER_NAMES` are
    asked."""

    problems: tuple[str, ...]
    gpu: str
    urls: tuple[str, ...]
    configs: Path | None
    top: int
    jobs: int
    peers: Collection[str] = PEER_NAMES


class Bench:
    """Runs problems on the device; `storages[0]` takes what is new."""

    def __init__(
        self,
        storages: list[Storage],
        gpu: GpuSpec,
        device: DetectedDevice,
        jobs: int,
        top: int = 4,
        tools: Tools | None = None,
        peers: Collection[str] = PEER_NAMES,
    ) -> None:
        """`peers`: of `PEER_NAMES`, those that are asked."""
        self.storages, self.gpu, self.detected, self.top = storages, gpu, device, top
        self._not_asked = {name: "It is not asked." for name in PEER_NAMES if name not in peers}
        tools = tools or Tools()
        self._pool = Pool(processes(jobs, tools.make_compiler, (gpu, False)))
        self._device = Worker(tools.make_device, (None, gpu, "warm"))

    def close(self) -> None:
        """End the processes."""
        self._pool.stop()
        self._device.stop()

    def run(self, problems: list[AttentionProblem], configs: Callable[[AttentionProblem], Configs]) -> Iterator[Row]:
        """A row per problem, as they end; `configs(problem)` are further contenders. Raises `WorkerFailed` if no worker
        starts."""
        for problem in problems:
            row = Row(problem.to_dict(), problem.describe())
            row.notes = grouped(self._run(problem, configs(problem), row))
            yield row

    def _run(self, problem: AttentionProblem, configs: Configs, row: Row) -> list[Note]:
        """Fills the row; returns remarks on it."""
        subject = problem.name or problem.describe()
        records = BenchRecords(self.storages[0], self.gpu, self.detected, problem)
        contenders, notes = choose(problem, self.gpu, self.storages, configs, self.top)
        if not contenders:
            notes.append(Note(subject, "No family has a recorded or starting config for this problem."))
        proved, failures = self._prove(problem, contenders, records)
        finalists = {str(i): self._built(contender, kernel) for i, (contender, kernel, _) in enumerate(proved)}
        try:
            result = self._hold(problem, finalists)
        except FinalFailed as error:
            return [*notes, *failures, Note(subject, f"The final could not be held: {error}")]
        row.refusals = {name: why for name, why in result.refusals.items() if name not in self._not_asked}
        peers = {name: timing for name, timing in result.timings.items() if name not in finalists}
        row.peers = {name: Time.of(timing) for name, timing in peers.items()}
        row.versions = {name: timing.protocol.get("version", "") for name, timing in peers.items()}
        finished = self._finish(row, records, proved, result.timings)
        records.add_peers(peers, row.refusals)
        return [*notes, *failures, *finished]

    def _prove(
        self, problem: AttentionProblem, contenders: list[Contender], records: BenchRecords
    ) -> tuple[Proved, list[Note]]:
        """The best `top` contenders that are right, and a note on each that is not."""
        proved: Proved = []
        notes = []
        tasks = [Compile(registry.lookup(c.config.family), c.config, problem, c.candidate) for c in contenders]
        outcomes = self._pool.ask(tasks, COMPILE_SECONDS)
        for contender, outcome in zip(contenders, outcomes, strict=True):
            ended = outcome.ending is Ending.RESULT
            done: Compiled = outcome.value.answer if ended else Compiled(None, failed(outcome, "compile"))
            kernel, evaluation = done.kernel, done.failure
            if kernel is not None and evaluation is None:
                evaluation = self._evaluate(problem, contender, kernel)
            assert evaluation is not None, "a compile gives a kernel or a failure"
            if kernel is not None and evaluation.state is TrialState.COMPLETE:
                proved.append((contender, kernel, evaluation))
            else:
                number = records.record(contender, evaluation)
                sentence = f"{evaluation.state}: {evaluation.reason}"
                notes.append(Note(f"{contender.config.family} trial {number}", sentence))
        proved.sort(key=lambda entry: entry[2].timing.median_us if entry[2].timing else 0.0)
        return proved[: self.top], notes

    def _evaluate(self, problem: AttentionProblem, contender: Contender, kernel: CompiledKernel) -> Evaluation:
        """Validated and timed alone; asked for again, in a fresh process, where the first may have been harmed."""
        task = Evaluate(self._built(contender, kernel), None)
        outcome = self._ask(problem, task)
        if outcome.ending is Ending.RESULT and outcome.value.doubtful:
            outcome = self._ask(problem, task)
        if outcome.ending is not Ending.RESULT:
            return failed(outcome, "device", kernel.info)
        evaluation: Evaluation = outcome.value
        return evaluation

    def _built(self, contender: Contender, kernel: CompiledKernel) -> BuiltKernel:
        return BuiltKernel(registry.lookup(contender.config.family), contender.config, self.gpu, kernel)

    def _ask(self, problem: AttentionProblem, task: Evaluate) -> Outcome:
        return self._device.ask(OnProblem(problem, task), START_SECONDS + DEVICE_SECONDS)

    def _hold(self, problem: AttentionProblem, finalists: Finalists) -> FinalResult:
        """Raises `FinalFailed`."""
        final = Final(finalists, refusals=self._not_asked, problem=problem)
        while final.result is None:
            final.take(self._device.ask(final.task, FINAL_SECONDS))
        return final.result

    def _finish(self, row: Row, records: BenchRecords, proved: Proved, timings: dict[str, Timing]) -> list[Note]:
        """Record the finalists' times; the best that the final did not disqualify goes into the row, a note says why of
        each other."""
        notes = []
        for index, (contender, _, evaluation) in enumerate(proved):
            timing, family = timings[str(index)], contender.config.family
            number = records.record(contender, evaluation)
            records.add_timing(contender, number, timing)
            if not timing.samples_us:
                notes.append(Note(f"{family} trial {number}", f"left the final: {timing.protocol['out']}"))
            elif timing.disqualified:
                notes.append(Note(f"{family} trial {number}", f"disqualified: {timing.disqualified}"))
            elif row.ours is None or timing.median_us < row.ours.median_us:
                row.ours, row.trial = Time.of(timing), number
                row.tflops = records.problem.flops / timing.median_us / 1e6
                row.family, row.config = family, contender.config.params
        return notes


def run_bench(
    words: BenchWords,
    progress: Console,
    devices: list[DetectedDevice] | None = None,
    make_bench: Callable[..., Bench] = Bench,
    keep: Callable[[list[Row]], None] = lambda rows: None,
) -> list[Row]:
    """The rows of the problems; as each ends, a line on `progress` and a call of `keep` with all so far.

    `devices`: those of this machine unless given. Raises `FailedRun` where there is none, `GpuError` where none is of
    the named kind, `ProblemError`, `ConfigError`, `StorageError` or `WorkerFailed`."""
    wanted = list(dict.fromkeys(map(by_name_or_shape, words.problems)))
    devices = gpus.detect_devices() if devices is None else devices
    spec, device = choose_device(words.gpu, devices) if devices else (None, None)
    if spec is None or device is None:
        raise FailedRun("There is no CUDA device here; `evoattn bench` times kernels, so run it where the GPU is.")
    from_file: dict[AttentionProblem, Configs] = {
        problem: read_configs(words.configs, problem, spec.arch) if words.configs else [] for problem in wanted
    }
    with ExitStack() as stack:
        storages = [Storage.open(url, create=i == 0) for i, url in enumerate(words.urls)]
        for storage in storages:
            stack.callback(storage.close)
        bench = make_bench(storages, spec, device, words.jobs, words.top, peers=words.peers)
        stack.callback(bench.close)
        rows = []
        for row in bench.run(wanted, from_file.__getitem__):
            rows.append(row)
            keep(rows)
            ratio = "no time" if row.ratio is None else f"{row.ratio:.3f} of the best peer"
            progress.print(f"{row.describe}: {ratio}", markup=False, soft_wrap=True)
        return rows
