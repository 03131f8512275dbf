"""Candidate → Evaluation: every failure becomes a state with a sentence; nothing raised for a bad kernel."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from evoattn import baselines, benchmark, cost_model
from evoattn.backends.base import Backend, LaunchError
from evoattn.backends.interpreter import InterpreterBackend, NotInterpreted
from evoattn.benchmark import CacheMode, Contestant, Protocol
from evoattn.compiler import CompileError, compile_candidate
from evoattn.config import KernelConfig
from evoattn.families import registry
from evoattn.families.base import starts_zeroed
from evoattn.gpu import GpuSpec
from evoattn.problem import AttentionProblem
from evoattn.trial import Candidate, CompiledKernel, CompileInfo, Evaluation, Timing, TrialState, ValidationReport
from evoattn.validate import Case, check, device_cases, interpreter_cases, make_case

INPUT_SEED, FRESH_SEED = 1, 2
IMPLAUSIBLE_SHARE = 0.95
"""A time under this share of the roofline floor is a broken measurement; above it the floor's own clock may be a little off."""


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
        cost = cost_model.estimate(registry.lookup(candidate.family), config, problem, gpu, kernel)
    except NotInterpreted:
        cost = None                                # the device decides; only the order in which it is timed knows less
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
    family, backend = registry.lookup(candidate.family), InterpreterBackend()
    checks = []
    try:
        for case in _interpreter_cases(problem, config["BLOCK_M"], config["BLOCK_N"]):
            checks.append(check(backend, family, config, kernel, case))
            if not checks[-1].passed:
                break
        report = ValidationReport("interpreter", tuple(checks))
        if not report.passed:
            return done(TrialState.WRONG_RESULT, report.first_failure, compile_info=kernel.info, validation=report)
        cost = cost_model.estimate(family, config, problem, gpu, kernel)
    except NotInterpreted as error:
        return done(TrialState.COMPILE_ERROR, f"Not interpreted: {error}", compile_info=kernel.info)
    except LaunchError as error:
        return done(TrialState.LAUNCH_ERROR, str(error), compile_info=kernel.info)
    if cost is None:
        return done(
            TrialState.LAUNCH_ERROR, f"No block of {kernel.info.registers} registers a thread fits on an SM of the {gpu.product}.",
            compile_info=kernel.info, validation=report)
    return done(TrialState.ESTIMATED, "Right on the interpreter; never timed.", compile_info=kernel.info, validation=report, relative_cost=cost)


@lru_cache(maxsize=64)
def _interpreter_cases(problem: AttentionProblem, block_m: int, block_n: int) -> tuple[Case, ...]:
    return tuple(
        make_case(name, case, INPUT_SEED, "cpu", kind, double=True) for name, case, kind in interpreter_cases(problem, block_m, block_n)
    )


class DeviceEvaluator:
    """Validates and times candidates for one problem on one device. Lives in the worker process; `broken` once its CUDA context is lost."""

    def __init__(self, problem: AttentionProblem, gpu: GpuSpec, cache: CacheMode = "warm", device: int = 0) -> None:
        from evoattn.backends.cuda import CudaBackend, StickyError

        self.problem, self.gpu, self.cache, self.broken = problem, gpu, cache, False
        self._sticky_error = StickyError
        self.backend: Backend = CudaBackend(device)
        dev = self.backend.device
        self.ladder = [make_case(name, case, INPUT_SEED, dev, kind) for name, case, kind in device_cases(problem)]
        self.own = make_case("the problem's own shape", problem, INPUT_SEED, dev)
        self.fresh = make_case("fresh inputs after timing", problem, FRESH_SEED, dev)
        self.flush = benchmark.l2_flush(dev) if cache == "cold" else None
        self.outputs = {"o": torch.empty_like(self.own.tensors["q"])}
        if problem.lse:
            self.outputs["lse"] = torch.empty(problem.lse_shape, device=dev)

    def evaluate(self, family_name: str, config: KernelConfig, kernel: CompiledKernel, best_us: float | None) -> Evaluation:
        """The whole ladder: small cases, own shape twice, screen, more samples if within reach of `best_us`, fresh inputs, plausibility."""
        started = time.perf_counter()
        checks, timings = [], []

        def done(state: TrialState, reason: str = "") -> Evaluation:
            report = ValidationReport("cuda", tuple(checks)) if checks else None
            return Evaluation(state, reason, kernel.info, report, tuple(timings), seconds=time.perf_counter() - started)

        family = registry.lookup(family_name)
        try:
            for case in (*self.ladder, self.own):
                checks.append(check(self.backend, family, config, kernel, case, repeat=True))
                if not checks[-1].passed:
                    return done(TrialState.WRONG_RESULT, checks[-1].reason)
            timings.append(self._time(family_name, config, kernel, benchmark.SCREEN, best_us))
            if best_us is None or timings[0].median_us <= best_us * benchmark.REPEAT_WITHIN:
                timings.append(self._time(family_name, config, kernel, benchmark.REPEAT, best_us))
            checks.append(check(self.backend, family, config, kernel, self.fresh))
            if not checks[-1].passed:
                return done(TrialState.WRONG_RESULT, checks[-1].reason)
        except LaunchError as error:
            return done(TrialState.LAUNCH_ERROR, str(error))
        except self._sticky_error as error:
            self.broken = True
            return done(TrialState.LAUNCH_ERROR, str(error))
        except RuntimeError as error:                 # torch's own complaint about a failed capture or a lost context
            self.broken = True
            return done(TrialState.LAUNCH_ERROR, f"Timing failed: {' '.join(str(error).split())[:200]}")
        return done(*self._plausible(timings[-1]))

    def _plausible(self, timing: Timing) -> tuple[TrialState, str]:
        floor = self.gpu.floor_us(self.problem.flops, self.problem.bytes, self.problem.dtype)
        if timing.median_us < IMPLAUSIBLE_SHARE * floor:
            return TrialState.IMPLAUSIBLE, (
                f"{timing.median_us:.2f} µs is under the {floor:.2f} µs that the {self.gpu.product}'s peak rates allow: a broken measurement.")
        return TrialState.COMPLETE, ""

    def _enqueue(self, family_name: str, config: KernelConfig, kernel: CompiledKernel):
        """An enqueue of the candidate over the problem's own inputs."""
        family = registry.lookup(family_name)
        buffers = {**self.own.tensors, **self.outputs}
        for name, size in family.workspace(self.problem, config).items():
            make = torch.zeros if starts_zeroed(name) else torch.empty
            buffers[name] = make(size, dtype=torch.uint8, device=self.backend.device)
        return self.backend.prepare(kernel, family.launches(self.problem, config), buffers), buffers

    def _time(self, family_name: str, config: KernelConfig, kernel: CompiledKernel, protocol: Protocol, best_us: float | None) -> Timing:
        enqueue, buffers = self._enqueue(family_name, config, kernel)
        contestant = Contestant("candidate", enqueue, protocol, self.cache, self.flush)
        hopeless = best_us is not None and contestant.estimate_us > benchmark.HOPELESS * best_us
        timing = benchmark.measure([contestant], protocol, self.cache, rounds=1 if hopeless else None)["candidate"]
        del buffers                                   # the graph used them until here
        return timing

    def final(self, finalists: dict[str, tuple[str, KernelConfig, CompiledKernel]], protocol: Protocol) -> tuple[dict[str, Timing], dict[str, str]]:
        """(timings by name, refusals by peer): finalists `{name: (family, config, kernel)}` and every peer of `baselines.PEERS` that answers right, interleaved.

        A peer's timing carries its package and version in its protocol.
        """
        contestants, refusals, kept = [], {}, []
        for name, (family_name, config, kernel) in finalists.items():
            enqueue, buffers = self._enqueue(family_name, config, kernel)
            kept.append(buffers)
            contestants.append(Contestant(name, enqueue, protocol, self.cache, self.flush))
        for name in baselines.PEERS:
            try:
                call = baselines.peer_call(name, self.problem, self.own.tensors, self.own.answer)
                contestants.append(Contestant(name, call, protocol, self.cache, self.flush))
            except baselines.PeerRefused as refused:
                refusals[name] = str(refused)
            except torch.cuda.OutOfMemoryError:
                refusals[name] = "It needs more device memory than is free."
        timings = benchmark.measure(contestants, protocol, self.cache)
        for name in timings.keys() & baselines.PEERS.keys():
            peer = baselines.PEERS[name]
            timings[name] = replace(timings[name], protocol=timings[name].protocol | {"version": f"{peer.package} {peer.version() or 'unknown'}"})
        return timings, refusals

    def recheck(self, family_name: str, config: KernelConfig, kernel: CompiledKernel) -> str:
        """What is wrong with the answer to fresh inputs after a final, in one sentence; empty if nothing."""
        try:
            return check(self.backend, registry.lookup(family_name), config, kernel, self.fresh).reason
        except LaunchError as error:
            return str(error)


def with_cost(evaluation: Evaluation, cost: float | None, info: CompileInfo) -> Evaluation:
    """The evaluation with what the compile pool found."""
    return replace(evaluation, relative_cost=cost, compile_info=evaluation.compile_info or info)
