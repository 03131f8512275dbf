"""What goes to the worker processes, and what comes back. Imports no torch, so that a process that only passes it on
starts fast."""

from __future__ import annotations

from dataclasses import dataclass

from evoattn.families.base import Family
from evoattn.families.built import BuiltKernel, behaviour
from evoattn.families.render import Renderer, render
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate, CompiledKernel, CompressedSource, Evaluation, Timing
from evoattn.model.space import KernelConfig
from evoattn.timing.protocol import Finalists, FinalResult, Protocol


@dataclass(frozen=True)
class Compile:
    """For a compile worker: `config` as `family` has it for `problem`. The answer is `Rendered`.

    `candidate`: as it was rendered already; None: the worker renders it by `render`, which is sent by its name."""

    family: Family
    config: KernelConfig
    problem: AttentionProblem
    candidate: Candidate | None = None
    render: Renderer = render

    def rendered(self, gpu: GpuSpec) -> Candidate:
        """The config made source."""
        return self.candidate or self.render(self.family, self.problem, self.config, gpu)


@dataclass(frozen=True)
class Compiled:
    """What a device needs of a candidate: machine code with the cost model's estimate, or the failure that ended it."""

    kernel: CompiledKernel | None
    failure: Evaluation | None
    relative_cost: float | None = None


@dataclass(frozen=True)
class Rendered:
    """A compile worker's answer: the source with its `behaviour`, and what became of it; offline that is an
    `Evaluation`."""

    source: CompressedSource
    behaviour: str
    answer: Compiled | Evaluation

    @classmethod
    def of(cls, task: Compile, candidate: Candidate, gpu: GpuSpec, answer: Compiled | Evaluation) -> Rendered:
        """`candidate` is the task's config made source."""
        known = behaviour(candidate.source_hash, task.family, task.problem, task.config, gpu)
        return cls(CompressedSource.of(candidate), known, answer)


@dataclass(frozen=True)
class Evaluate:
    """For the GPU worker: validate and time one candidate. The answer is an `Evaluation`.

    `best_us`: the best median so far: a candidate far behind it is `PRUNED`. None: it is proved in full."""

    kernel: BuiltKernel
    best_us: float | None


@dataclass(frozen=True)
class HoldFinal:
    """For the GPU worker: time the finalists and every peer but the `refused`, in turns. The answer is a
    `FinalResult`."""

    finalists: Finalists
    protocol: Protocol
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gauge:
    """For the GPU worker: time a kernel that was found right, as a measure of the board. The answer is a `Timing`."""

    kernel: BuiltKernel


@dataclass(frozen=True)
class Inspect:
    """For the GPU worker: find the first wrong element of a candidate. The answer is a sentence, empty if none is."""

    kernel: BuiltKernel


@dataclass(frozen=True)
class OnProblem:
    """A task of the GPU worker for a problem that it was not made for: that one's inputs are made first, in the place
    of those before."""

    problem: AttentionProblem
    task: Evaluate | Gauge | HoldFinal | Inspect


@dataclass(frozen=True)
class Survey:
    """For the GPU worker: times of one kernel on several problems that it serves. The answer is a `Surveyed`.

    `best_us`: the best time so far of each, infinity where none is known. `check`: it passes the small cases first."""

    kernel: BuiltKernel
    problems: tuple[AttentionProblem, ...]
    best_us: tuple[float, ...]
    check: bool = True


@dataclass(frozen=True)
class Surveyed:
    """µs on each problem, in the order asked, and whether that is the time of one call, as the kernel is far behind; or
    a sentence in `failure`, which begins with `wrong:` or `launch:`."""

    times: tuple[tuple[float, bool], ...] = ()
    failure: str = ""


DeviceAnswer = Evaluation | FinalResult | Surveyed | Timing | str
DeviceTask = Evaluate | Gauge | HoldFinal | Inspect | OnProblem | Survey
