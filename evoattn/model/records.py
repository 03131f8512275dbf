"""The records that pass along the line: candidate, compile info, validation, timing, evaluation, trial, study."""

from __future__ import annotations

import hashlib
import math
import zlib
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal

from evoattn.model.gpu import GpuSpec, lookup
from evoattn.model.gpu_table import GPU_ROW, restored


@dataclass(frozen=True)
class Timing:
    """Times of one candidate in µs per call, each sample the mean over one graph replay."""

    samples_us: tuple[float, ...]
    protocol: dict[str, Any]
    """Cache mode, calls per replay, stage (`screen`, `repeat`, `final`), the `run` (timings with the same one were
    taken in turns), the device's `clocks`; in a search on several GPUs the `board` and its `board_factor`; of a final
    also least and most `sm_mhz`, `power_w` and `temperature_c` over its rounds, `energy_mj_per_call` of the whole
    board, `sanitizer`, `disqualified`: the sentence by which a finalist proved wrong, and `out`: the sentence by
    which it left the final, without samples or with one of a probe."""

    @staticmethod
    def out(sentence: str, disqualified: bool) -> Timing:
        """Of a finalist that failed in a final, so that it has no time of it."""
        return Timing(
            (),
            {"stage": "final", "out": sentence}
            | ({"disqualified": f"In the final: {sentence}"} if disqualified else {}),
        )

    @property
    def board_factor(self) -> float:
        """How much longer its board took for the study's reference kernel than the first board that timed it; 1 in a
        search on one GPU."""
        return float(self.protocol.get("board_factor", 1.0))

    @property
    def median_us(self) -> float:
        """Comparable between boards: the samples' median over `board_factor`. Infinite where there are no samples."""
        from statistics import median  # with decimal and fractions: a process that only runs kernels needs none of them

        return median(self.samples_us) / self.board_factor if self.samples_us else math.inf

    def interleaved_with(self, other: Timing) -> bool:
        """Whether both come out of the same rounds, so that their ratio is fair."""
        run = self.protocol.get("run")
        return run is not None and run == other.protocol.get("run")

    @property
    def disqualified(self) -> str:
        """Of a final: how the finalist proved wrong, in one sentence; empty if it did not."""
        return str(self.protocol.get("disqualified", ""))

    def quantile_us(self, share: float) -> float:
        """Sample at `share` (0 to 1) of the sorted samples, by nearest rank; comparable as `median_us` is."""
        ordered = sorted(self.samples_us)
        return ordered[round(share * (len(ordered) - 1))] / self.board_factor


SM_COUNT = "sm_count"
"""Among the options of a study: SMs of the device."""
MAX_SM_COUNT = 1 << 10
"""More is no GPU: a database may hold anything."""


def is_positive(value: float) -> bool:
    """Whether a time or cost can be divided by and drawn on a logarithmic axis; a damaged database may hold
    anything."""
    return 0 < value < math.inf


class TrialState(StrEnum):
    """What became of a trial. Users and their scripts rely on these names."""

    COMPLETE = "COMPLETE"
    """Right before and after timing, and timed on the device."""
    ESTIMATED = "ESTIMATED"
    """Compiled, right on the interpreter, ranked by the cost model; never timed."""
    INVALID_CONFIG = "INVALID_CONFIG"
    COMPILE_ERROR = "COMPILE_ERROR"
    LAUNCH_ERROR = "LAUNCH_ERROR"
    WRONG_RESULT = "WRONG_RESULT"
    TIMEOUT = "TIMEOUT"
    WORKER_DIED = "WORKER_DIED"
    IMPLAUSIBLE = "IMPLAUSIBLE"
    """Faster than the hardware allows: a broken measurement."""
    DUPLICATE = "DUPLICATE"
    PRUNED = "PRUNED"
    """Right in the small cases, and so far behind the best in a short timing that it was not proved in full: it is on
    no leaderboard and in no final."""


@dataclass(frozen=True)
class Candidate:
    """A config made source. `source` is whole: it compiles alone."""

    family: str
    config: dict[str, Any]
    config_id: str
    source: str
    arch: str

    @cached_property
    def source_hash(self) -> str:
        """sha256 of the source text, hex."""
        return hashlib.sha256(self.source.encode()).hexdigest()


@dataclass(frozen=True)
class CompileInfo:
    """What the compiler said of one kernel; all of it read from its log."""

    registers: int = 0
    """Per thread; the most of all kernels in the source."""
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    stack_bytes: int = 0
    static_smem_bytes: int = 0
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    compiler: str = ""
    """E.g. `NVRTC 13.0`."""
    options: tuple[str, ...] = ()

    @property
    def spill_bytes(self) -> int:
        return self.spill_store_bytes + self.spill_load_bytes


@dataclass(frozen=True)
class CompiledKernel:
    """A candidate's machine code and the PTX of the same compile."""

    cubin: bytes
    ptx: str
    info: CompileInfo


@dataclass(frozen=True)
class CheckResult:
    """One validation case: largest error and what the rule allows, both absolute, in output units."""

    case: str
    passed: bool
    max_error: float
    allowed_error: float
    reason: str = ""
    seconds: float = 0.0
    """Wall time of the check."""


@dataclass(frozen=True)
class ValidationReport:
    """All checks run on one candidate, on which backend."""

    backend: Literal["cuda", "interpreter"]
    checks: tuple[CheckResult, ...]
    seed: int | None = None
    """Of the inputs; drawn anew by each worker process, so that no kernel can have been made for them."""

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(c.passed for c in self.checks)

    @property
    def first_failure(self) -> str:
        """One sentence that names the first failed check, or an empty string."""
        return next((c.reason for c in self.checks if not c.passed), "")


@dataclass(frozen=True)
class Evaluation:
    """What evaluating one candidate came to: a state, the sentence behind it, and all evidence gathered on the way."""

    state: TrialState
    reason: str = ""
    compile_info: CompileInfo | None = None
    validation: ValidationReport | None = None
    timings: tuple[Timing, ...] = ()
    """In the order taken: screen, then repeat."""
    relative_cost: float | None = None
    """The cost model's estimate in its own unit: only for ranking, never a time."""
    seconds: float = 0.0
    """Wall time that the evaluation took."""
    doubtful: bool = False
    """A kernel known to be right failed in the same process: it is evaluated again in a fresh one. Never recorded."""

    @property
    def timing(self) -> Timing | None:
        """The most trusted timing: the last stage taken."""
        return self.timings[-1] if self.timings else None


@dataclass(frozen=True)
class Proposal:
    """What a sampler asks to be evaluated."""

    family: str
    params: dict[str, Any]
    parents: tuple[int, ...] = ()
    """Trial numbers that it was bred from."""
    operator: str = ""
    """How it was made: `starting`, `random`, `crossover`, `mutation`, `tpe` …"""


@dataclass(frozen=True)
class Trial:
    """One recorded evaluation. `number` is unique in the database."""

    number: int
    study_id: int
    family: str
    config: dict[str, Any]
    config_id: str
    state: TrialState
    reason: str
    source_hash: str | None
    compile_info: CompileInfo | None
    validation: ValidationReport | None
    timings: tuple[Timing, ...]
    relative_cost: float | None
    parents: tuple[int, ...]
    operator: str
    created_at: str
    seconds: float

    @property
    def timing(self) -> Timing | None:
        """The most trusted timing: the last stage recorded (screen, then repeat, then final) in which it has a time."""
        return next((t for t in reversed(self.timings) if t.samples_us), None)

    @property
    def disqualified(self) -> str:
        """Why it is on no leaderboard although it was right when it was recorded; empty if it is on one."""
        return next((t.disqualified for t in self.timings if t.disqualified), "")

    @property
    def value(self) -> float | None:
        """What a search minimises: the median in µs where it was measured, the relative cost where it was estimated; a
        study has one or the other. None for a trial that is not right, and for a number that no kernel can have."""
        value = self.relative_cost if self.state is TrialState.ESTIMATED else None
        if self.state is TrialState.COMPLETE and self.timing and not self.disqualified:
            value = self.timing.median_us
        return value if value is not None and is_positive(value) else None


@dataclass(frozen=True)
class Study:
    """One search: its problem, device, versions and sampler."""

    id: int
    name: str
    problem: dict[str, Any]
    gpu: str
    arch: str
    offline: bool
    sampler: str
    seed: int
    families: tuple[str, ...]
    versions: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)
    created_at: str = ""

    @property
    def spec(self) -> GpuSpec:
        """The GPU that was searched for, with the SMs of the device, or of the table where they were not recorded.

        Raises `GpuError` on a GPU that is not in the table and whose row was not recorded."""
        row = restored(self.options.get(GPU_ROW), self.gpu) or lookup(self.gpu)
        count = self.options.get(SM_COUNT)
        return replace(row, sm_count=count) if type(count) is int and 0 < count <= MAX_SM_COUNT else row


@dataclass(frozen=True)
class KernelCounters:
    """One kernel that a call launched.

    `counters` holds the words of `evoattn.profiling.ncu` and their values: shares of a peak in percent, sizes in
    their unit."""

    kernel: str
    us: float
    """Its time under the profiler in µs. Clocks are left as they are, but each kernel runs alone: no result to rank
    by."""
    counters: dict[str, float]


@dataclass(frozen=True)
class Profile:
    """One call of a trial's kernel, or of a peer in its study."""

    peer: str
    """Empty for the trial's own kernel."""
    tool: str
    """E.g. `ncu 2025.3.1.0`."""
    cache: str
    """`warm`: the call before it left its inputs in L2; `cold`: caches were flushed."""
    kernels: tuple[KernelCounters, ...]
    created_at: str = ""


LEVEL = 1
"""Of compression: a third of the time of the usual 6, which would leave 22 KB of a source of 78 KB, not 26."""


@dataclass(frozen=True)
class CompressedSource:
    """A source's sha256 in hex, and its compressed UTF-8."""

    hash: str
    zlib: bytes

    @classmethod
    def of(cls, candidate: Candidate) -> CompressedSource:
        return cls(candidate.source_hash, zlib.compress(candidate.source.encode(), LEVEL))
