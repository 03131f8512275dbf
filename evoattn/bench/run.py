"""One problem after another: compile, prove, time interleaved with every peer under watch, record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from evoattn.bench.contenders import Contender, choose
from evoattn.bench.device import COMPILE_SECONDS, FINAL_SECONDS, START_SECONDS, BenchDevice, CompileAny
from evoattn.bench.notes import Note, grouped
from evoattn.evaluation.handlers import DEVICE_SECONDS
from evoattn.evaluation.workers import Ending, Outcome, Pool, Worker, wait_for_any
from evoattn.families import registry
from evoattn.families.built import BuiltKernel
from evoattn.model.errors import FailedRun
from evoattn.model.gpu import DetectedDevice, GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompiledKernel, Evaluation, Study, Timing, TrialState
from evoattn.search.finals import Final, FinalFailed
from evoattn.storage import Storage
from evoattn.storage.versions import collect
from evoattn.timing import benchmark


class BenchError(FailedRun):
    """The bench cannot go on: its message is one sentence."""


@dataclass(frozen=True)
class Time:
    """µs a call: the median, and the 10th and 90th percentiles of the samples."""

    median_us: float
    p10_us: float
    p90_us: float

    @staticmethod
    def of(timing: Timing) -> Time:
        return Time(timing.median_us, timing.quantile_us(0.1), timing.quantile_us(0.9))


@dataclass
class Row:
    """One problem's line: our best that is right, in the final too (None with a note that says why), and every peer's time or refusal."""

    problem: dict[str, Any]
    describe: str
    ours: Time | None = None
    tflops: float | None = None
    trial: int | None = None
    family: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    peers: dict[str, Time] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        """Our median over the best peer's: under 1 we are faster. None where one of them is missing."""
        if self.ours is None or not self.peers:
            return None
        return self.ours.median_us / min(time.median_us for time in self.peers.values())


class Bench:
    """Runs problems on the device; `storages[0]` takes what is new."""

    def __init__(
        self,
        storages: list[Storage],
        gpu: GpuSpec,
        device: DetectedDevice,
        jobs: int,
        top: int = 4,
        cache: benchmark.CacheMode = "warm",
        make_compiler: Callable = CompileAny,
        make_device: Callable = BenchDevice,
    ) -> None:
        self.storages, self.gpu, self.detected, self.top, self.cache = storages, gpu, device, top, cache
        self._pool = Pool(jobs, make_compiler)
        self._device = Worker(make_device, (gpu, cache))

    def close(self) -> None:
        """End the processes."""
        self._pool.stop()
        self._device.stop()

    def run(
        self, problems: list[AttentionProblem], configs: Callable[[AttentionProblem], list[tuple[str, dict]]]
    ) -> Iterator[Row]:
        """A row a problem, as they end; `configs(problem)` are further [(family, parameters)]. Raises `BenchError` if no worker starts."""
        for problem in problems:
            row = Row(problem.to_dict(), problem.describe())
            row.notes = grouped(self._run(problem, configs(problem), row))
            yield row

    def _run(self, problem: AttentionProblem, configs: list[tuple[str, dict]], row: Row) -> list[Note]:
        """Fills the row; what there is to say beside it."""
        contenders, notes = choose(problem, self.gpu, self.storages, configs, self.top)
        if not contenders:
            notes.append(
                Note(
                    problem.name or problem.describe(), "No family has a recorded or starting config for this problem."
                )
            )
        proved = []
        for contender, kernel in self._compile(contenders):
            if isinstance(kernel, str):
                notes.append(self._failed(problem, contender, Evaluation(TrialState.COMPILE_ERROR, kernel)))
                continue
            evaluation = self._evaluate(problem, contender, kernel)
            if evaluation.state is TrialState.COMPLETE:
                proved.append((evaluation.timing.median_us, len(proved), contender, kernel, evaluation))
            else:
                notes.append(self._failed(problem, contender, evaluation))
        proved.sort(key=lambda entry: entry[:2])
        finalists = {str(i): self._built(c, kernel) for i, (_, _, c, kernel, _) in enumerate(proved[: self.top])}
        final = Final(finalists)
        try:
            while not final.result:
                left, refused = final.task
                final.take(self._ask(problem, "final", (left, benchmark.FINAL, refused), FINAL_SECONDS))
        except FinalFailed as error:
            return [*notes, Note(problem.name or problem.describe(), f"The final could not be held: {error}")]
        timings, row.refusals, _ = final.result
        peers = {name: timing for name, timing in timings.items() if name not in finalists}
        row.peers = {name: Time.of(timing) for name, timing in peers.items()}
        row.versions = {name: timing.protocol.get("version", "") for name, timing in peers.items()}
        entries = [(contender, evaluation) for _, _, contender, _, evaluation in proved[: self.top]]
        return notes + self._finish(problem, row, entries, timings, peers)

    def _failed(self, problem: AttentionProblem, contender: Contender, evaluation: Evaluation) -> Note:
        number = self._record(problem, contender, evaluation)[2]
        return Note(f"{contender.config.family} trial {number}", f"{evaluation.state}: {evaluation.reason}")

    def _finish(
        self,
        problem: AttentionProblem,
        row: Row,
        finalists: list[tuple],
        timings: dict[str, Timing],
        peers: dict[str, Timing],
    ) -> list[Note]:
        """Record the finalists beside the peers, and put the best that the final did not disqualify into the row; a note for each other."""
        notes = []
        studies: dict[tuple[int, int], tuple[Storage, Study]] = {}
        for index, (contender, evaluation) in enumerate(finalists):
            timing = timings[str(index)]
            storage, study, number = self._record(problem, contender, evaluation)
            storage.add_timing(number, timing)
            if not timing.samples_us:
                notes.append(
                    Note(f"{contender.config.family} trial {number}", f"left the final: {timing.protocol['out']}")
                )
                continue
            if timing.disqualified:
                notes.append(Note(f"{contender.config.family} trial {number}", f"disqualified: {timing.disqualified}"))
                continue
            studies[id(storage), study.id] = storage, study
            if row.ours is None or timing.median_us < row.ours.median_us:
                row.ours, row.trial, row.tflops = Time.of(timing), number, problem.flops / timing.median_us / 1e6
                row.family, row.config = contender.config.family, contender.config.params
        for storage, study in studies.values():
            for name, timing in peers.items():
                storage.add_baseline(study, name, timing)
            for name, reason in row.refusals.items():
                storage.add_baseline(study, name, None, reason)
        return notes

    def _record(
        self, problem: AttentionProblem, contender: Contender, evaluation: Evaluation
    ) -> tuple[Storage, Study, int]:
        """Where a contender's times go: the trial that it repeats and that is right still, else a new trial in this bench's study."""
        if contender.trial and evaluation.state is TrialState.COMPLETE:
            return contender.storage, contender.study, contender.trial.number
        study = self._study(problem)
        trial = self.storages[0].record(study, contender.config, contender.candidate, evaluation, (), "bench")
        return self.storages[0], study, trial.number

    def _study(self, problem: AttentionProblem) -> Study:
        """The study of this problem's benched configs in the first database; made when first needed. A search can go on with it."""
        storage, stem = self.storages[0], f"bench_{problem.name or 'shape'}_{self.gpu.name}"
        fields = problem.to_dict()
        for study in storage.studies():
            if study.name.startswith(stem) and study.problem == fields and not study.offline:
                return study
        from evoattn.families.registry import FAMILIES

        families = tuple(name for name, family in FAMILIES.items() if family.why_unsupported(problem, self.gpu) is None)
        taken = {study.name for study in storage.studies()}
        name = next(n for n in (stem, *(f"{stem}_{i}" for i in range(2, len(taken) + 3))) if n not in taken)
        environment = collect(self.detected)
        return storage.create_study(
            name, problem, self.gpu, False, "genetic", 0, families, environment, {"cache": self.cache}
        )

    # ---- processes

    def _compile(self, contenders: list[Contender]) -> list[tuple[Contender, CompiledKernel | str]]:
        """Each with its machine code, or the sentence with which it does not compile, in their order."""
        waiting, done = list(enumerate(contenders)), {}
        while len(done) < len(contenders):
            for worker in self._pool.idle():
                if waiting:
                    index, contender = waiting.pop(0)
                    worker.submit(index, contender.candidate, COMPILE_SECONDS)
            wait_for_any(self._pool.workers, 0.2)
            done |= {outcome.tag: outcome.value for outcome in self._pool.poll()}
            self._check(self._pool.workers)
        return [(c, done[i]) for i, c in enumerate(contenders)]

    def _built(self, contender: Contender, kernel: CompiledKernel) -> BuiltKernel:
        return BuiltKernel(registry.lookup(contender.config.family), contender.config, self.gpu, kernel)

    def _evaluate(self, problem: AttentionProblem, contender: Contender, kernel: CompiledKernel) -> Evaluation:
        task = self._built(contender, kernel), None
        for _ in range(2):  # a verdict of a process that may have been harmed is asked for again in a fresh one
            outcome = self._ask(problem, "evaluate", task, START_SECONDS + DEVICE_SECONDS)
            if outcome.ending is not Ending.RESULT or not outcome.value.doubtful:
                break
        if outcome.ending is Ending.RESULT:
            return outcome.value
        state = {Ending.TIMEOUT: TrialState.TIMEOUT, Ending.DIED: TrialState.WORKER_DIED}.get(
            outcome.ending, TrialState.LAUNCH_ERROR
        )
        return Evaluation(state, str(outcome.value), kernel.info)

    def _ask(self, problem: AttentionProblem, method: str, args: tuple, seconds: float) -> Outcome:
        """One task of the GPU worker, from start to end."""
        while not self._device.idle:
            wait_for_any([self._device], 0.2)
            self._device.poll()
            self._check([self._device])
        self._device.submit(method, (problem, method, args), seconds)
        while not (outcome := self._device.poll()):
            wait_for_any([self._device], 0.2)
        return outcome

    @staticmethod
    def _check(workers: list[Worker]) -> None:
        for worker in workers:
            if worker.failures_to_start >= 3:
                raise BenchError(f"A worker process failed to start three times; the last time: {worker.start_failure}")
