"""Where the bench keeps its results: in the trials that it repeats, else in a study of its own."""

from functools import partial

from evoattn.bench.contenders import Contender
from evoattn.families.registry import FAMILIES
from evoattn.model.gpu import DetectedDevice, GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Evaluation, Study, Timing, TrialState
from evoattn.storage import Storage
from evoattn.storage.storage import is_alike
from evoattn.storage.versions import collect


class BenchRecords:
    """The records of one problem's bench. Every method raises `StorageError`."""

    def __init__(self, storage: Storage, gpu: GpuSpec, device: DetectedDevice, problem: AttentionProblem) -> None:
        """`storage` takes what is new."""
        self.problem = problem
        self._storage, self._gpu, self._device = storage, gpu, device
        self._own: Study | None = None
        self._timed: dict[tuple[int, int], tuple[Storage, Study]] = {}
        """The studies that have a finalist with a time which stands."""

    def record(self, contender: Contender, evaluation: Evaluation) -> int:
        """The number of the trial that the contender repeats, if it is right still, else of a new one."""
        repeated = contender.recorded
        if repeated and evaluation.state is TrialState.COMPLETE:
            return repeated.trial.number
        trial = self._storage.record(self._study(), contender.config, contender.candidate, evaluation, (), "bench")
        return trial.number

    def add_timing(self, contender: Contender, number: int, timing: Timing) -> None:
        """A finalist's time goes to its trial `number`."""
        repeated = contender.recorded
        storage, study = (repeated.storage, repeated.study) if repeated else (self._storage, self._study())
        storage.add_timing(number, timing)
        if timing.samples_us and not timing.disqualified:
            self._timed[id(storage), study.id] = storage, study

    def add_peers(self, timings: dict[str, Timing], refusals: dict[str, str]) -> None:
        """The peers of the final go to every study that has one of its finalists."""
        for storage, study in self._timed.values():
            for name, timing in timings.items():
                storage.add_peer(study, name, timing)
            for name, reason in refusals.items():
                storage.add_peer(study, name, None, reason)

    def _study(self) -> Study:
        """The study of this problem's benched configs; made when first needed. A search can go on with it."""
        self._own = self._own or self._find() or self._make()
        return self._own

    @property
    def _stem(self) -> str:
        return f"bench_{self.problem.name or 'shape'}_{self._gpu.name}"

    def _find(self) -> Study | None:
        """One that a bench began, by its name, not a search."""
        for study in self._storage.studies():
            if study.name.startswith(self._stem) and is_alike(study, self.problem, self._gpu, offline=False):
                return study
        return None

    def _make(self) -> Study:
        families = tuple(
            name for name, family in FAMILIES.items() if family.why_unsupported(self.problem, self._gpu) is None
        )
        create = partial(
            self._storage.create_study,
            problem=self.problem,
            gpu=self._gpu,
            offline=False,
            sampler="genetic",
            seed=0,
            families=families,
            versions=collect(self._device),
            options={"cache": "warm"},  # all calls find what the one before left in the L2
        )
        return self._storage.create_numbered(self._stem, create)
