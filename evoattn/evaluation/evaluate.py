"""Candidate → Evaluation: every failure becomes a state with a sentence; nothing raised for a bad kernel."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from evoattn.backends.base import Backend, ContextLost, LaunchError
from evoattn.backends.compiler import CompileError, compile_candidate
from evoattn.backends.interpreter import InterpreterBackend, NotInterpreted
from evoattn.correctness.arena import Arena, Vault
from evoattn.correctness.validate import (
    OUTSIDE,
    check,
    device_cases,
    interpreter_cases,
    make_arena,
    make_case,
    run_case,
)
from evoattn.evaluation import cost_model
from evoattn.families import registry
from evoattn.families.built import BuiltKernel
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import (
    Candidate,
    CheckResult,
    CompiledKernel,
    CompileInfo,
    Evaluation,
    Timing,
    TrialState,
    ValidationReport,
)
from evoattn.model.space import KernelConfig
from evoattn.timing import benchmark
from evoattn.timing.benchmark import CacheMode, Protocol, Timer
from evoattn.timing.clocks import Clocks
from evoattn.timing.contest import Contest, Finalists, FinalResult
from evoattn.timing.peers.table import PEERS
from evoattn.timing.timed_run import TimedRun, TimingSetup, why_implausible


@dataclass(frozen=True)
class Compiled:
    """A candidate out of the compile pool: its machine code with the cost model's estimate, or the failure that ended it."""

    kernel: CompiledKernel | None
    failure: Evaluation | None
    relative_cost: float | None = None


def compile_and_rank(candidate: Candidate, config: KernelConfig, problem: AttentionProblem, gpu: GpuSpec) -> Compiled:
    """Compile a candidate and estimate its cost: the pool's task when a device will time it."""
    started = time.perf_counter()
    try:
        kernel = compile_candidate(candidate)
    except CompileError as error:
        return Compiled(None, Evaluation(TrialState.COMPILE_ERROR, str(error), seconds=time.perf_counter() - started))
    try:
        cost = cost_model.estimate(BuiltKernel(registry.lookup(candidate.family), config, gpu, kernel), problem)
    except (NotInterpreted, LaunchError):
        cost = None  # the device decides; only the order in which it is timed knows less
    return Compiled(kernel, None, cost)


def evaluate_offline(candidate: Candidate, config: KernelConfig, problem: AttentionProblem, gpu: GpuSpec) -> Evaluation:
    """Compile for `gpu`, decide right or wrong on the interpreter, rank by the cost model: the pool's task where no device is."""
    started = time.perf_counter()

    def done(state: TrialState, reason: str = "", **evidence) -> Evaluation:
        return Evaluation(state, reason, seconds=time.perf_counter() - started, **evidence)

    try:
        kernel = compile_candidate(candidate)
    except CompileError as error:
        return done(TrialState.COMPILE_ERROR, str(error))
    built, backend = BuiltKernel(registry.lookup(candidate.family), config, gpu, kernel), InterpreterBackend()
    seed = int(
        candidate.source_hash[:8], 16
    )  # the same verdict every time, on inputs that no source knows: it would hold its hash
    checks = []
    try:
        for name, small, kind in interpreter_cases(problem, config["BLOCK_M"], config["BLOCK_N"]):
            case = make_case(name, small, seed, "cpu", kind, double=True)
            checks.append(check(backend, built, case))
            if not checks[-1].passed:
                break
        report = ValidationReport("interpreter", tuple(checks), seed)
        if not report.passed:
            return done(TrialState.WRONG_RESULT, report.first_failure, compile_info=kernel.info, validation=report)
        cost = cost_model.estimate(built, problem)
    except NotInterpreted as error:
        return done(TrialState.COMPILE_ERROR, f"Not interpreted: {error}", compile_info=kernel.info)
    except LaunchError as error:
        return done(TrialState.LAUNCH_ERROR, str(error), compile_info=kernel.info)
    if cost is None:
        return done(
            TrialState.LAUNCH_ERROR,
            f"No block of {kernel.info.registers} registers a thread fits on an SM of the {gpu.product}.",
            compile_info=kernel.info,
            validation=report,
        )
    return done(
        TrialState.ESTIMATED,
        "Right on the interpreter; never timed.",
        compile_info=kernel.info,
        validation=report,
        relative_cost=cost,
    )


class DeviceEvaluator:
    """Validates and times candidates for one problem on one device. Lives in the worker process; `broken` once its CUDA context is lost,
    or may have been harmed. The inputs' seed is drawn for each process, so that no kernel can have been made for them."""

    def __init__(
        self,
        problem: AttentionProblem,
        gpu: GpuSpec,
        cache: CacheMode = "warm",
        backend: Backend | None = None,
        timer: Timer | None = None,
        report: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`backend` and `timer` are CUDA device 0's unless given. `report` is told whose turn it is in a final."""
        self.problem, self.gpu, self.cache, self.broken = problem, gpu, cache, False
        self.backend = backend or _cuda_backend()
        dev = self.backend.device
        self.clocks = Clocks(str(torch.cuda.get_device_properties(dev).uuid) if dev.type == "cuda" else "")
        self.seed = int.from_bytes(os.urandom(4))
        self.ladder = [make_case(name, case, self.seed, dev, kind) for name, case, kind in device_cases(problem)]
        self.own = make_case("the problem's own shape", problem, self.seed, dev)
        self.fresh = make_case("fresh inputs after timing", problem, self.seed + 1, dev)
        cases = (*self.ladder, self.own, self.fresh)
        self.vault = Vault(
            [t for case in cases for t in (*case.tensors.values(), case.answer.exact, case.answer.lse) if t is not None]
        )
        flush = benchmark.l2_flush(dev) if cache == "cold" else None
        self.setup = TimingSetup(self.backend, timer or Timer(), cache, self.own, self.fresh, flush)
        self._report = report
        self._canary: BuiltKernel | None = None

    def evaluate(self, kernel: BuiltKernel, best_us: float | None) -> Evaluation:
        """The whole ladder: small cases, own shape twice, screen, more samples if within reach of `best_us`, the work that was timed,
        plausibility."""
        started = time.perf_counter()
        checks: list[CheckResult] = []
        timings: list[Timing] = []
        doubtful = False
        try:
            state, reason = self._climb(kernel, best_us, checks, timings)
            if not self.vault.intact():
                self.broken = True
                state = TrialState.WRONG_RESULT
                reason = "The kernel overwrote memory that it was never given: the original inputs, or answers."
            elif state is TrialState.WRONG_RESULT:
                doubtful = not self._canary_lives()
                self.broken = doubtful or OUTSIDE in reason
            elif state is TrialState.COMPLETE and self._canary is None:
                self._canary = kernel
        except LaunchError as error:
            state, reason, self.broken = TrialState.LAUNCH_ERROR, str(error), not self._context_lives()
        except ContextLost as error:
            self.broken, state, reason = True, TrialState.LAUNCH_ERROR, str(error)
        except RuntimeError as error:  # torch's own complaint about a failed capture or a lost context
            self.broken, state, reason = (
                True,
                TrialState.LAUNCH_ERROR,
                f"Timing failed: {' '.join(str(error).split())[:200]}",
            )
        report = ValidationReport("cuda", tuple(checks), self.seed) if checks else None
        return Evaluation(
            state,
            reason,
            kernel.compiled.info,
            report,
            tuple(timings),
            seconds=time.perf_counter() - started,
            doubtful=doubtful,
        )

    def _context_lives(self) -> bool:
        """Whether the device still answers, and the vault is as it was: a refused launch harms nothing, a faulty one may look refused."""
        try:
            return self.vault.intact()
        except RuntimeError:
            return False

    def _canary_lives(self) -> bool:
        """Whether the first right candidate of this process still is right: else the process, not the candidate, may be at fault."""
        return self._canary is None or check(self.backend, self._canary, self.own).passed

    def _climb(
        self,
        kernel: BuiltKernel,
        best_us: float | None,
        checks: list[CheckResult],
        timings: list[Timing],
    ) -> tuple[TrialState, str]:
        """Cheap checks first; what they find is added to `checks` and `timings`."""
        for case in (*self.ladder, self.own):
            result, outputs = run_case(self.backend, kernel, case, repeat=True)
            checks.append(result)
            if not result.passed:
                return TrialState.WRONG_RESULT, result.reason
        run = TimedRun(self.setup, kernel, outputs, self.timed_arena())
        contestant = run.contestant("candidate", benchmark.SCREEN)
        hopeless = best_us is not None and contestant.estimate_us > benchmark.HOPELESS * best_us
        timings += benchmark.measure(
            [contestant], benchmark.SCREEN, self.cache, self.clocks, rounds=1 if hopeless else None
        ).values()
        if best_us is None or timings[0].median_us <= best_us * benchmark.REPEAT_WITHIN:
            contestant = run.contestant("candidate", benchmark.REPEAT)
            timings += benchmark.measure([contestant], benchmark.REPEAT, self.cache, self.clocks).values()
        checks.append(run.check_work(contestant))
        if not checks[-1].passed:
            return TrialState.WRONG_RESULT, checks[-1].reason
        reason = why_implausible(timings[-1], self.problem, self.gpu)
        return (TrialState.IMPLAUSIBLE, reason) if reason else (TrialState.COMPLETE, "")

    def timed_arena(self) -> Arena:
        """Buffers with the problem's own inputs, ready for a `TimedRun`."""
        arena = make_arena(self.own, {}, self.backend.device)
        arena.arm()
        return arena

    def final(self, finalists: Finalists, protocol: Protocol, refused: Collection[str] = ()) -> FinalResult:
        """`finalists` and every peer of `baselines.PEERS` but the `refused` that answers right, all over the same inputs in the same memory.

        The process is `broken` after a result that is not complete. Raises only for a bug of ours.
        """
        self.broken = True
        contest = Contest(
            self.setup, self.gpu, self.clocks, self.timed_arena(), protocol, self._context_lives, self._report
        )
        result = contest.hold(finalists, [name for name in PEERS if name not in refused])
        self.broken = not result.complete
        return result


def _cuda_backend() -> Backend:
    from evoattn.backends.cuda import CudaBackend  # makes a CUDA context: only where one is wanted

    return CudaBackend()


def with_cost(evaluation: Evaluation, cost: float | None, info: CompileInfo) -> Evaluation:
    """The evaluation with what the compile pool found."""
    return replace(evaluation, relative_cost=cost, compile_info=evaluation.compile_info or info)
