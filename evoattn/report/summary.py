"""Storage → `StudySummary`."""

from __future__ import annotations

from evoattn.families import registry
from evoattn.model import gpu
from evoattn.model.gpu import GpuError, GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Study, Timing, Trial
from evoattn.model.space import KernelConfig
from evoattn.report.analysis import group_failures, is_positive, lineage, progress, rank_cost_model, value_of
from evoattn.report.data import BaselineRow, LeaderboardRow, Roof, StartingConfig, StudySummary
from evoattn.report.genes import gene_values, improvements
from evoattn.report.importance import importance_of
from evoattn.samplers.base import STARTING
from evoattn.storage import Storage
from evoattn.timing import ranking

MAX_REASONS = 10_000
"""Different failure sentences that are read before those alike but for their numbers are put together."""

FINALISTS = 100
"""More than any final has."""


def summarise(storage: Storage, study: Study, limit: int = 20) -> StudySummary:
    """All that a report says about `study`, with the best `limit` trials. Raises `StorageError` where the database fails."""
    problem = AttentionProblem(**study.problem)
    spec = _spec(study)
    trials = {trial.number: trial for trial in storage.iter_trials(study)}
    competitors = {} if study.offline else storage.baselines(study)
    ranked = storage.leaderboard(study, max(limit, FINALISTS))
    leaders = ranked[:limit]
    timed = {} if study.offline else {t.number: t.timing for t in ranked if t.timing}
    ratios = ranking.against_leader(timed, leaders[0].number) if leaders and leaders[0].number in timed else {}
    course = progress(study, trials.values())
    return StudySummary(
        study=study.name,
        kind="estimated" if study.offline else "measured",
        problem=study.problem,
        problem_text=problem.describe(),
        gpu=study.gpu,
        arch=study.arch,
        sampler=study.sampler,
        seed=study.seed,
        families=study.families,
        versions=study.versions,
        created_at=study.created_at,
        flops=problem.flops,
        bytes=problem.bytes,
        fits_l2=spec and problem.bytes <= spec.l2_bytes,
        counts={
            state.value: count for state, count in sorted(storage.counts(study).items(), key=lambda item: -item[1])
        },
        leaderboard=tuple(
            _row(rank, trial, problem, spec, competitors, study.offline) for rank, trial in enumerate(leaders, 1)
        ),
        baselines=() if study.offline else _baselines(storage, study, problem),
        failures=group_failures(storage.failures(study, MAX_REASONS)),
        progress=course,
        importances=_importances(study, trials),
        cost_model=None if study.offline else rank_cost_model(trials.values()),
        lineage=lineage(leaders[0] if leaders else None, trials, study.offline),
        improvements=improvements(course, trials, study.offline),
        genes=gene_values(trials.values(), study.offline),
        roofs=() if study.offline or spec is None else _roofs(problem, spec),
        final={str(number): {"median": r.median, "low": r.low, "high": r.high} for number, r in ratios.items()},
        starting=None if study.offline else _starting(ranked),
    )


def _spec(study: Study) -> GpuSpec | None:
    """The table row of the study's GPU; None if this version does not know it."""
    try:
        return gpu.lookup(study.gpu)
    except GpuError:
        return None


def _tflops(problem: AttentionProblem, timing: Timing) -> float:
    return problem.flops / timing.median_us / 1e6


def _row(
    rank: int,
    trial: Trial,
    problem: AttentionProblem,
    spec: GpuSpec | None,
    competitors: dict[str, list[Timing]],
    offline: bool,
) -> LeaderboardRow:
    timing, info = trial.timing, trial.compile_info
    if offline or (timing and not is_positive(timing.median_us)):
        timing = None
    tflops = _tflops(problem, timing) if timing else None
    return LeaderboardRow(
        rank=rank,
        trial=trial.number,
        family=trial.family,
        config=trial.config,
        state=trial.state.value,
        operator=trial.operator,
        median_us=timing and timing.median_us,
        p10_us=timing and timing.quantile_us(0.1),
        p90_us=timing and timing.quantile_us(0.9),
        stage=str(timing.protocol.get("stage", "")) if timing else "",
        tflops=tflops,
        peak_share=tflops / spec.peak_tflops(problem.dtype) if tflops and spec else None,
        speedups={
            name: t.median_us / timing.median_us
            for name, ts in competitors.items()
            for t in ts
            if timing and t.interleaved_with(timing)
        },
        relative_cost=trial.relative_cost,
        registers=info and info.registers,
        spill_bytes=info and info.spill_bytes,
        smem_bytes=_smem_bytes(trial, problem),
    )


def _starting(ranked: list[Trial]) -> StartingConfig | None:
    """The best starting config beside the leader `ranked[0]` in its final; None without one."""
    for trial in ranked:
        leader = ranked[0].timing
        in_final = trial.timing.protocol.get("stage") == "final" and trial.timing.interleaved_with(leader)
        if trial.operator == STARTING and in_final and is_positive(trial.timing.median_us):
            return StartingConfig(trial.number, trial.timing.median_us, 1 - leader.median_us / trial.timing.median_us)
    return None


def _smem_bytes(trial: Trial, problem: AttentionProblem) -> int | None:
    """Static and dynamic shared memory; None where the record is not of this version's families."""
    if trial.compile_info is None:
        return None
    try:
        launches = registry.lookup(trial.family).launches(problem, KernelConfig(trial.family, trial.config))
    except (LookupError, TypeError, ValueError, ArithmeticError):
        return None
    return trial.compile_info.static_smem_bytes + max(launch.smem_bytes for launch in launches)


def _baselines(storage: Storage, study: Study, problem: AttentionProblem) -> tuple[BaselineRow, ...]:
    rows = []
    for name, timings in storage.baselines(study).items():
        t = timings[-1]
        if not is_positive(t.median_us):
            continue
        stage = str(t.protocol.get("stage", ""))
        rows.append(
            BaselineRow(name, t.median_us, t.quantile_us(0.1), t.quantile_us(0.9), stage, _tflops(problem, t), "")
        )
    timed = {row.backend for row in rows}
    rows += [
        BaselineRow(name, None, None, None, "", None, text)
        for name, text in storage.refusals(study).items()
        if name not in timed
    ]
    return tuple(sorted(rows, key=lambda row: (row.median_us is None, row.median_us or 0.0, row.backend)))


def _importances(study: Study, trials: dict[int, Trial]):
    results = {family: [] for family in study.families}
    for trial in trials.values():
        value = value_of(trial, study.offline)
        if value is not None and trial.family in results:
            results[trial.family].append((trial.config, value))
    return tuple(importance_of(family, found) for family, found in results.items())


def _roofs(problem: AttentionProblem, spec: GpuSpec) -> tuple[Roof, ...]:
    """What bounds the problem on the GPU, in TFLOP/s at its boost clock.

    Matrix and CUDA-core peaks, `mma.sync` where it reaches less than `wgmma`; the exponentials: one for each 4·head_dim FLOP, at
    `exp2_per_clock` a SM; DRAM: the problem's fewest bytes.
    """
    intensity = problem.flops / problem.bytes
    clocks = spec.sm_count * spec.boost_clock_ghz / 1e3  # tera SM-clocks a second
    cuda_cores = Roof("CUDA cores, fp32", spec.peak_tflops("fp32"), None)
    roofs = [Roof("DRAM", intensity * spec.dram_gb_per_s / 1e3, spec.dram_gb_per_s)]
    if problem.dtype == "fp32":
        roofs.append(cuda_cores)
    else:
        matrix = spec.peak_tflops(problem.dtype)
        roofs.append(Roof(f"tensor cores, {problem.dtype}", matrix, None))
        if spec.mma_sync_share < 1:
            roofs.append(Roof("tensor cores by mma.sync", matrix * spec.mma_sync_share, None))
        roofs.append(cuda_cores)
    roofs.append(
        Roof(f"exponentials at head_dim {problem.head_dim}", 4 * problem.head_dim * spec.exp2_per_clock * clocks, None)
    )
    return tuple(roofs)
