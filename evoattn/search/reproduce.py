"""A recorded trial again: render, recompile, validate and time, each held against the record."""

from dataclasses import dataclass, replace

from evoattn.backends.compiler import CompileError, compile_source, machine_code_hash
from evoattn.evaluation.evaluate import evaluate_offline
from evoattn.evaluation.handlers import DEVICE_SECONDS, DeviceHandler
from evoattn.evaluation.process import Ending
from evoattn.evaluation.tasks import Compile, Evaluate
from evoattn.evaluation.workers import Worker, failed
from evoattn.families import registry
from evoattn.families.built import BuiltKernel
from evoattn.families.render import render
from evoattn.model import gpu as gpus
from evoattn.model import space as configs
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate, CompiledKernel, CompileInfo, Evaluation, Study, Trial, TrialState
from evoattn.model.space import KernelConfig
from evoattn.search.recorded import Finding, ReproduceError, require_device, require_fitting, require_trusted
from evoattn.storage import Storage
from evoattn.storage.versions import collect, differences

TIME_TOLERANCE = 0.05
"""Share by which a time may differ from its record: a shared H100 drifts by this much from hour to hour. A wider spread
of the samples widens it."""
COST_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Reproduction:
    """All findings about one trial."""

    trial: Trial
    findings: tuple[Finding, ...]

    @property
    def reproduced(self) -> bool:
        return all(f.agrees is not False for f in self.findings)


def reproduce(storage: Storage, trial: Trial, study: Study, trust_source: bool = False) -> Reproduction:
    """Run `trial` again.

    A recorded source is code of whoever wrote the database: unless today's template renders it byte for byte from the
    recorded config, it runs only if `trust_source`. Raises `ReproduceError` if the trial never ran, if today's
    launches do not fit its source, or if its device is not here; `FamilyError` if its family is not known;
    `StorageError` on a broken record."""
    if trial.state not in (TrialState.COMPLETE, TrialState.ESTIMATED) or trial.source_hash is None:
        raise ReproduceError(f"Trial {trial.number} is {trial.state} ({trial.reason}) and has no result to reproduce.")
    if trial.timing and trial.timing.median_us <= 0:
        raise ReproduceError(f"Trial {trial.number} has a record of {trial.timing.median_us:.2f} µs, which is no time.")
    spec = study.spec
    problem = AttentionProblem(**study.problem)
    source = storage.source(trial.source_hash)
    candidate = Candidate(trial.family, trial.config, trial.config_id, source, spec.arch)
    config = KernelConfig(trial.family, trial.config)
    rendered = require_trusted(trial, problem, spec, trust_source)
    require_fitting(trial, source)
    place, same_code = _place_finding(storage, trial, study)
    findings = [replace(rendered, agrees=None), place]
    try:
        kernel = compile_source(candidate.source, candidate.arch)
    except CompileError as error:
        findings.append(Finding("compile", f"The recorded source no longer compiles: {error}.", False))
        return Reproduction(trial, tuple(findings))
    findings.append(_compile_finding(trial, kernel))
    if rendered.agrees is None:
        findings += _code_finding(trial, problem, config, spec, kernel)
    if trial.state is TrialState.ESTIMATED:
        evaluation = evaluate_offline(Compile(registry.lookup(trial.family), config, problem, candidate), spec)
        findings += [_validation_finding(trial, evaluation), *_cost_finding(trial, evaluation, same_code)]
    else:
        evaluation = _on_device(problem, spec, study, trial, config, kernel)
        findings += [_validation_finding(trial, evaluation), *_time_finding(trial, evaluation)]
    return Reproduction(trial, tuple(findings))


def _place_finding(storage: Storage, trial: Trial, study: Study) -> tuple[Finding, bool]:
    """What differs here from there, field by field, by the study's own facts where the trial's were not recorded; and
    whether evoattn itself is the same."""
    recorded = storage.environments(trial)
    then = recorded[0] if recorded else study.versions
    now = collect(None if study.offline else next(iter(gpus.detect_devices()), None))
    changed = differences(then, now)
    whose = "its trial" if recorded else "its study (the trial's own were not recorded)"
    words = f"Not as recorded with {whose}: {'; '.join(changed)}." if changed else f"All as recorded with {whose}."
    return Finding("place", words, None), all(then.get(name) == now.get(name) for name in ("evoattn", "commit"))


def _code_finding(
    trial: Trial, problem: AttentionProblem, config: KernelConfig, spec: gpus.GpuSpec, kernel: CompiledKernel
) -> list[Finding]:
    """Whether the other text of today's template is the same kernel to the GPU; empty if there is no such text."""
    try:
        today = compile_source(render(registry.lookup(trial.family), problem, config, spec).source, spec.arch)
    except (registry.FamilyError, configs.ConfigError, CompileError):
        return []
    same = machine_code_hash(today.cubin) == machine_code_hash(kernel.cubin)
    return [Finding("code", f"Today's text compiles to {'the same' if same else 'other'} machine code here.", None)]


def _compile_finding(trial: Trial, kernel: CompiledKernel) -> Finding:
    then, now = trial.compile_info or CompileInfo(), kernel.info
    same = (then.registers, then.spill_bytes) == (now.registers, now.spill_bytes)
    text = f"{now.compiler}: {now.registers} registers, {now.spill_bytes} bytes spilled"
    if same:
        return Finding("compile", f"{text}, as recorded.", None)
    return Finding(
        "compile", f"{text}; recorded were {then.registers} and {then.spill_bytes} with {then.compiler}.", None
    )


def _validation_finding(trial: Trial, evaluation: Evaluation) -> Finding:
    """Right or wrong, and on which inputs: each process on a device draws their seed anew."""
    report, then = evaluation.validation, trial.validation
    if report and report.passed and evaluation.state in (TrialState.COMPLETE, TrialState.ESTIMATED):
        seed = f"inputs of seed {report.seed}"
        if then and then.seed is not None:
            seed += ", as recorded" if then.seed == report.seed else f" (recorded was {then.seed})"
        place = "the interpreter" if report.backend == "interpreter" else "this GPU"
        return Finding("answers", f"Right in all {len(report.checks)} cases on {place}, {seed}.", True)
    return Finding("answers", f"{evaluation.state}: {evaluation.reason}", False)


def _cost_finding(trial: Trial, evaluation: Evaluation, same_code: bool) -> list[Finding]:
    """Another evoattn may have another cost model."""
    if evaluation.relative_cost is None or trial.relative_cost is None:
        return []
    change = evaluation.relative_cost / trial.relative_cost - 1
    sentence = (
        f"Relative cost {evaluation.relative_cost:.6g}, recorded {trial.relative_cost:.6g}; an estimate, never timed."
    )
    return [Finding("cost", sentence, abs(change) <= COST_TOLERANCE or (False if same_code else None))]


def _time_finding(trial: Trial, evaluation: Evaluation) -> list[Finding]:
    then, now = trial.timing, evaluation.timing
    if then is None or now is None:
        return []
    spreads = [(t.quantile_us(0.9) - t.quantile_us(0.1)) / t.median_us for t in (then, now)]
    tolerance = max(TIME_TOLERANCE, *spreads)
    change = now.median_us / then.median_us - 1
    within = abs(change) <= tolerance
    verdict = "within" if within else "outside"
    times = f"{now.median_us:.2f} µs, recorded {then.median_us:.2f} µs"
    sentence = f"{times}: {change:+.1%}, {verdict} the noise of ±{tolerance:.1%}."
    return [Finding("time", sentence, within)]


def _on_device(
    problem: AttentionProblem,
    spec: gpus.GpuSpec,
    study: Study,
    trial: Trial,
    config: KernelConfig,
    kernel: CompiledKernel,
) -> Evaluation:
    """The whole evaluation on the device, in a process that may die."""
    require_device(trial, spec)
    worker = Worker(DeviceHandler, (problem, spec, study.options.get("cache", "warm")))
    try:
        task = Evaluate(BuiltKernel(registry.lookup(trial.family), config, spec, kernel), None)
        outcome = worker.ask(task, DEVICE_SECONDS)
    finally:
        worker.stop()
    if outcome.ending is not Ending.RESULT:
        return failed(outcome, "device", kernel.info)
    evaluation: Evaluation = outcome.value
    return evaluation
