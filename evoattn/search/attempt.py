"""One config tried by hand: what it lacks filled in, then every step of an evaluation, each with what it found."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from evoattn.backends.base import LaunchError
from evoattn.backends.compiler import CompileError, compile_candidate
from evoattn.backends.interpreter import InterpreterBackend, NotInterpreted
from evoattn.correctness.cases import proof_of
from evoattn.correctness.judge import first_wrong
from evoattn.correctness.validate import run_case
from evoattn.cost.cost import cost
from evoattn.evaluation.handlers import DEVICE_SECONDS, DeviceHandler
from evoattn.evaluation.process import Ending, Handler
from evoattn.evaluation.tasks import Evaluate, Inspect
from evoattn.evaluation.workers import Worker, failed
from evoattn.families.base import Family
from evoattn.families.built import BuiltKernel
from evoattn.families.registry import load_space
from evoattn.families.render import render
from evoattn.model.errors import meant
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.records import Candidate, CompileInfo, Evaluation, TrialState
from evoattn.model.space import ConfigError, KernelConfig, parse_choices, spelling
from evoattn.samplers.base import ConfigPool
from evoattn.search.starting import starting_configs

REPAIRS = 2000
"""Changes to the values that were left out before a config counts as impossible; each takes some 20 µs."""


@dataclass(frozen=True)
class Step:
    """What one step found. `agrees` is None for what is said for information only."""

    what: str
    sentence: str
    agrees: bool | None = None
    log: str = ""
    """The compiler's whole log, where it refused the source."""


@dataclass(frozen=True)
class Filled:
    """A whole config: the values that were given, and those that were filled in."""

    config: KernelConfig
    given: dict[str, Any]
    source: str
    """Where the others come from, in words; empty if nothing was left out."""
    why_invalid: str
    """Empty if the config can be."""

    @property
    def added(self) -> dict[str, Any]:
        """The values that were filled in."""
        return {name: value for name, value in self.config.params.items() if name not in self.given}


def fill_in(family: Family, words: list[str], problem: AttentionProblem, gpu: GpuSpec) -> Filled:
    """The config of `NAME=VALUE` words. What they leave out comes from the starting config that agrees with most of
    them, changed where they would not go together.

    Raises `ConfigError` on a name or a value that the family does not have, `ProblemError` where the family cannot
    serve the problem."""
    if reason := family.why_unsupported(problem, gpu):
        raise ProblemError(reason)
    space, choices = load_space(family.name, gpu), parse_choices(words)
    if others := sorted(set(choices) - set(space.names())):
        raise ConfigError(
            f"{family.name} has no parameter {others[0]}; it has {', '.join(space.names())}."
            f"{meant(others[0], space.names())}"
        )
    if several := [name for name, values in choices.items() if len(values) > 1]:
        raise ConfigError(f"One config has one value of {several[0]}; give one, not {', '.join(choices[several[0]])}.")
    part = space.restricted(choices)
    given = {p.name: p.values[0] for p in part.parameters if p.name in choices}
    if starting := starting_configs(space, problem, gpu):
        nearest = max(starting, key=lambda config: sum(config[name] == value for name, value in given.items()))
        base, source = nearest.params, "the nearest starting config"
    else:
        base, source = {p.name: p.values[0] for p in space.parameters}, "the first values of the search space"
    params = {**base, **given}

    def why_invalid(_: str, params: dict[str, Any]) -> str | None:
        return family.why_invalid(problem, KernelConfig(family.name, params), gpu)

    reason = why_invalid(family.name, params)
    if reason and len(given) < len(params):
        pool = ConfigPool({family.name: part}, why_invalid, random.Random(0))
        if repaired := pool.claim(family.name, params, REPAIRS):
            params, reason, source = repaired, None, f"{source}, changed until the config was valid"
    whole = len(given) == len(params)
    return Filled(space.make_config(params), given, "" if whole else source, reason or "")


def attempt(
    family: Family,
    filled: Filled,
    problem: AttentionProblem,
    gpu: GpuSpec,
    device: bool = False,
    make_device: Callable[..., Handler] = DeviceHandler,
) -> Iterator[Step]:
    """The steps of an evaluation as they end, up to the first that fails.

    `device`: also validate and time the kernel on CUDA device 0, in a process of its own that `make_device` makes.
    Raises `WorkerFailed` where that process does not start."""
    if filled.why_invalid:
        yield Step("config", filled.why_invalid, False)
        return
    yield Step("config", "It can be, by all that is known before compiling.", True)
    candidate = render(family, problem, filled.config, gpu)
    try:
        compiled = compile_candidate(candidate)
    except CompileError as error:
        yield Step("compile", f"{error}.", False, error.log)
        return
    kernel = BuiltKernel(family, filled.config, gpu, compiled)
    yield Step("compile", _compile_sentence(compiled.info), True)
    yield from _occupancy(kernel, problem)
    right = True
    for step in check_on_interpreter(kernel, candidate, problem):
        right = right and step.agrees is not False
        yield step
    if device and right:
        yield from _on_device(kernel, problem, make_device)


def check_on_interpreter(kernel: BuiltKernel, candidate: Candidate, problem: AttentionProblem) -> Iterator[Step]:
    """The interpreter's cases up to the first that fails, with its first wrong element; else the relative cost."""
    try:
        right = True
        for step in _cases(kernel, candidate, problem):
            right = right and step.agrees is True
            yield step
        info = kernel.compiled.info
        if right and (found := cost(problem, kernel.config, kernel.gpu, info.registers, info.spill_bytes)):
            yield Step("cost", f"Relative cost {found.score:.6g}: for ranking, not a time. {found.sentence()}")
    except NotInterpreted as error:
        yield Step("interpreter", f"Not interpreted, so that nothing is known of its answers: {error}")
    except LaunchError as error:
        yield Step("interpreter", str(error), False)


def _on_device(kernel: BuiltKernel, problem: AttentionProblem, make_device: Callable[..., Handler]) -> Iterator[Step]:
    """The whole evaluation on the device; of a wrong kernel also the first wrong element."""
    worker = Worker(make_device, (problem, kernel.gpu, "warm"))
    try:
        outcome = worker.ask(Evaluate(kernel, None), DEVICE_SECONDS)
        done = outcome.ending is Ending.RESULT
        evaluation: Evaluation = outcome.value if done else failed(outcome, "device", kernel.compiled.info)
        timing, report = evaluation.timing, evaluation.validation
        if evaluation.state is TrialState.COMPLETE and timing and report:
            spread = f"{timing.quantile_us(0.1):.2f} to {timing.quantile_us(0.9):.2f}"
            yield Step(
                "device",
                f"Right in all {len(report.checks)} cases; {timing.median_us:.2f} µs (10-90 %: {spread}).",
                True,
            )
            return
        yield Step("device", f"{evaluation.state}: {evaluation.reason}", False)
        if evaluation.state is TrialState.WRONG_RESULT:
            outcome = worker.ask(Inspect(kernel), DEVICE_SECONDS)
            if outcome.ending is Ending.RESULT and outcome.value:
                yield Step("first wrong", outcome.value)
    finally:
        worker.stop()


def _compile_sentence(info: CompileInfo) -> str:
    warnings = f"; warnings {', '.join(info.warnings)}" if info.warnings else "; no warnings"
    return (
        f"{info.compiler}: {info.registers} registers per thread, {info.spill_store_bytes} bytes of spill stores and "
        f"{info.spill_load_bytes} of spill loads, {info.stack_bytes} bytes of stack, {info.static_smem_bytes} bytes of "
        f"static shared memory{warnings}."
    )


def _occupancy(kernel: BuiltKernel, problem: AttentionProblem) -> Iterator[Step]:
    """For each launch of the problem: how many blocks fit on one SM, and what limits them."""
    info, gpu = kernel.compiled.info, kernel.gpu
    for launch in kernel.launches(problem):
        smem = info.static_smem_bytes + launch.smem_bytes
        limits = gpu.block_limits(info.registers, launch.threads, smem)
        fits = min(limits.values())
        limited = ", ".join(name for name, blocks in limits.items() if blocks == fits)
        blocks = launch.grid[0] * launch.grid[1] * launch.grid[2]
        yield Step(
            "launch",
            f"{launch.kernel}: {blocks} blocks of {launch.threads} threads with {smem} bytes of shared memory; "
            f"{fits} fit on an SM of the {gpu.product}, limited by {limited}.",
            None if fits else False,
        )


def _cases(kernel: BuiltKernel, candidate: Candidate, problem: AttentionProblem) -> Iterator[Step]:
    """The interpreter's cases up to the first that fails. Raises `NotInterpreted` or `LaunchError`."""
    seed = int(candidate.source_hash[:8], 16)  # the inputs of an offline evaluation
    for small in proof_of(problem).interpreter_cases(problem, kernel.config):
        case = small.make(seed)
        result, outputs = run_case(small.backend(InterpreterBackend()), small.placed(kernel), case)
        where = f"{small.name} ({small.problem.describe()})"
        if result.passed:
            error = f"largest error {result.max_error:.2e}, allowed {result.allowed_error:.2e}"
            yield Step("interpreter", f"Right: {where}; {error}.", True)
            continue
        yield Step("interpreter", f"WRONG: {where}; {result.reason}", False)
        if outputs and (sentence := first_wrong(outputs, case.answer)):
            yield Step("first wrong", sentence)
        return


def settings(params: dict[str, Any]) -> str:
    """`NAME=VALUE` words as the command line takes them."""
    return " ".join(f"{name}={spelling(value)}" for name, value in params.items())
