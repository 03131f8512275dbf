"""The summary of a study, computed once from what is recorded."""

from collections.abc import Mapping, Sequence

from evoattn.families import registry
from evoattn.model.collector import paused
from evoattn.model.gpu import GpuError, GpuSpec
from evoattn.model.launch import KernelLaunch
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompileInfo, Study, Timing, Trial, is_positive
from evoattn.model.space import KernelConfig
from evoattn.report.analysis import (
    Column,
    Results,
    by_family,
    columns_of,
    family_samples,
    gene_values,
    group_failures,
    importance_of,
    improvements,
    lineage,
    progress,
    rank_cost_model,
    right_trials,
)
from evoattn.report.data import (
    BaselineRow,
    Importance,
    LaunchOccupancy,
    LeaderboardRow,
    Roof,
    StartingConfig,
    StudySummary,
)
from evoattn.report.show import counters_table
from evoattn.report.winner import make_winner
from evoattn.samplers.base import STARTING
from evoattn.storage import Storage
from evoattn.timing import ranking
from evoattn.timing.protocol import ENERGY


def roofs(problem: AttentionProblem, spec: GpuSpec) -> tuple[Roof, ...]:
    """What bounds the problem on the GPU, in TFLOP/s at its boost clock.

    Matrix and CUDA-core peaks, `mma.sync` where it reaches less than `wgmma`; the exponentials: one for each
    4·head_dim FLOP, `exp2_per_clock` per clock and SM; DRAM: the problem's fewest bytes."""
    intensity = problem.flops / problem.bytes
    clocks = spec.sm_count * spec.boost_clock_ghz / 1e3  # SM clocks in 1e12 per second
    exponentials = 4 * problem.head_dim * spec.exp2_per_clock * clocks
    found = [Roof("DRAM", intensity * spec.dram_gb_per_s / 1e3, spec.dram_gb_per_s)]
    if problem.element.on_tensor_cores:
        matrix = spec.peak_tflops(problem.dtype)
        found.append(Roof(f"tensor cores, {problem.dtype}", matrix, None))
        if spec.mma_sync_share < 1:
            found.append(Roof("tensor cores by mma.sync", matrix * spec.mma_sync_share, None))
    found.append(Roof("CUDA cores, fp32", spec.peak_tflops("fp32"), None))
    found.append(Roof(f"exponentials at head_dim {problem.head_dim}", exponentials, None))
    return tuple(found)


def tflops(problem: AttentionProblem, timing: Timing) -> float:
    """Useful TFLOP/s at the median: the FLOP of the visible query-key pairs over the time."""
    return problem.flops / timing.median_us / 1e6


def leaderboard_row(
    rank: int,
    trial: Trial,
    problem: AttentionProblem,
    spec: GpuSpec | None,
    peers: Mapping[str, Sequence[Timing]],
    offline: bool,
) -> LeaderboardRow:
    """The row of `trial`; `peers` are the timings of each, `spec` is None for a GPU that this version does not know."""
    info = trial.compile_info
    launches = launch_occupancies(trial, problem, spec)
    timing = None if offline else trial.timing
    if timing and not is_positive(timing.median_us):
        timing = None
    rate = tflops(problem, timing) if timing else None
    return LeaderboardRow(
        rank=rank,
        trial=trial.number,
        family=trial.family,
        config=trial.config,
        state=trial.state.value,
        operator=trial.operator,
        median_us=timing.median_us if timing else None,
        p10_us=timing.quantile_us(0.1) if timing else None,
        p90_us=timing.quantile_us(0.9) if timing else None,
        stage=str(timing.protocol.get("stage", "")) if timing else "",
        tflops=rate,
        peak_share=rate / spec.peak_tflops(problem.dtype) if rate and spec else None,
        speedups=_speedups(timing, peers) if timing else {},
        relative_cost=trial.relative_cost,
        registers=info.registers if info else None,
        spill_bytes=info.spill_bytes if info else None,
        smem_bytes=max((launch.smem_bytes for launch in launches), default=None),
        launches=launches,
        energy_mj=_energy(timing) if timing else None,
    )


def _energy(timing: Timing) -> float | None:
    energy = timing.protocol.get(ENERGY)
    return float(energy) if isinstance(energy, (int, float)) and is_positive(energy) else None


def _speedups(timing: Timing, peers: Mapping[str, Sequence[Timing]]) -> dict[str, float]:
    """By peer: its median over ours, where both were timed in turns."""
    pairs = ((name, peer) for name, timings in peers.items() for peer in timings)
    return {name: peer.median_us / timing.median_us for name, peer in pairs if peer.interleaved_with(timing)}


def launch_occupancies(trial: Trial, problem: AttentionProblem, spec: GpuSpec | None) -> tuple[LaunchOccupancy, ...]:
    """The occupancy of each launch, in order; empty where the record is not of this version's families or was never
    compiled."""
    if trial.compile_info is None or spec is None:
        return ()
    try:
        launches = registry.lookup(trial.family).launches(problem, KernelConfig(trial.family, trial.config), spec)
        return tuple(_occupancy(launch, trial.compile_info, spec) for launch in launches)
    except (LookupError, TypeError, ValueError, ArithmeticError):
        return ()


def _occupancy(launch: KernelLaunch, info: CompileInfo, spec: GpuSpec) -> LaunchOccupancy:
    smem_bytes = info.static_smem_bytes + launch.smem_bytes
    limits = spec.block_limits(info.registers, launch.threads, smem_bytes)
    blocks = min(limits.values())
    return LaunchOccupancy(
        kernel=launch.kernel,
        grid_blocks=launch.grid[0] * launch.grid[1] * launch.grid[2],
        threads=launch.threads,
        smem_bytes=smem_bytes,
        limits=limits,
        blocks_per_sm=blocks,
        limited_by=tuple(name for name, limit in limits.items() if limit == blocks),
        occupancy=blocks * launch.threads / spec.threads_per_sm,
    )


MAX_REASONS = 10_000
"""Different failure sentences that are read before those alike but for their numbers are put together."""

FINALISTS = 100
"""More than any final has."""


@paused()
def summarise(storage: Storage, study: Study, limit: int = 20, course: bool = True) -> StudySummary:
    """All that a report says about `study`, with the best `limit` trials. Without `course` it leaves out what only all
    trials together say, so that none but the best is read: `best_of_families`, `right_by_family`, `progress`,
    `importances`, `cost_model`, `improvements`, `genes` and `samples` are empty, and `lineage` is the best alone.

    Raises `StorageError` where the database fails."""
    problem = AttentionProblem(**study.problem)
    spec = _spec(study)
    trials = {trial.number: trial for trial in storage.course(study)} if course else {}
    peers = {} if study.offline else storage.peers(study)
    ranked = storage.leaderboard(study, max(limit, FINALISTS))
    leader = ranked[0] if ranked else None
    timed = {} if study.offline else {t.number: t.timing for t in ranked if t.timing}
    ratios = ranking.against_leader(timed, leader.number) if leader and leader.number in timed else {}
    right = right_trials(study, trials.values())
    tried = progress(study, right)
    tried.configs.update((number, trials[number].config) for number in (tried.trial[i] for i in tried.drawn()))

    def row(rank: int, trial: Trial) -> LeaderboardRow:
        return leaderboard_row(rank, trial, problem, spec, peers, study.offline)

    rows = tuple(row(rank, trial) for rank, trial in enumerate(ranked[:limit], 1))
    results = by_family(right)
    columns = {family: columns_of([trial for trial, _ in found]) for family, found in results.items()}
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
        fits_l2=None if spec is None else problem.bytes <= spec.l2_bytes,
        counts={
            state.value: count for state, count in sorted(storage.counts(study).items(), key=lambda item: -item[1])
        },
        winner=make_winner(storage, study, leader, rows[0], peers, ratios) if leader else None,
        leaderboard=rows,
        best_of_families=tuple(row(n, trial) for n, trial in enumerate(_best_of_families(storage, ranked, results), 1)),
        right_by_family={family: len(found) for family, found in results.items()},
        baselines=() if study.offline else _baselines(peers, storage.refusals(study), problem),
        failures=group_failures(storage.failures(study, MAX_REASONS)),
        progress=tried,
        importances=_importances(study, results, columns),
        cost_model=None if study.offline else rank_cost_model(trials.values()),
        lineage=lineage(leader, trials),
        improvements=improvements(tried, trials),
        genes=gene_values(results, columns),
        samples=family_samples(results),
        roofs=() if study.offline or spec is None else roofs(problem, spec),
        final={str(number): {"median": r.median, "low": r.low, "high": r.high} for number, r in ratios.items()},
        starting=None if study.offline else _starting(ranked),
        counters=counters_table(storage, study, leader) if leader else None,
    )


def _spec(study: Study) -> GpuSpec | None:
    """The table row of the study's GPU; None if this version does not know it."""
    try:
        return study.spec
    except GpuError:
        return None


def _best_of_families(storage: Storage, ranked: Sequence[Trial], results: Results) -> list[Trial]:
    """The best trial of each family, best first; a finalist stands before a time that was taken alone."""
    leaders = {trial.family: trial for trial in reversed(ranked)}
    best = [leaders.get(family) or storage.trial(found[0][0].number) for family, found in results.items()]
    place = {trial.number: n for n, trial in enumerate(ranked)}
    last = len(ranked)
    return sorted(best, key=lambda t: (place.get(t.number, last), results[t.family][0][1]))


def _starting(ranked: Sequence[Trial]) -> StartingConfig | None:
    """The best starting config beside the leader `ranked[0]` in its final; None without one."""
    leader = ranked[0].timing if ranked else None
    for trial in ranked:
        timing = trial.timing
        if leader is None or timing is None or trial.operator != STARTING:
            continue
        in_final = timing.protocol.get("stage") == "final" and timing.interleaved_with(leader)
        if in_final and is_positive(timing.median_us):
            return StartingConfig(trial.number, timing.median_us, 1 - leader.median_us / timing.median_us)
    return None


def _baselines(
    peers: Mapping[str, Sequence[Timing]], refusals: Mapping[str, str], problem: AttentionProblem
) -> tuple[BaselineRow, ...]:
    """The fastest first, those that refused last."""
    rows = []
    for name, timings in peers.items():
        t = timings[-1]
        if is_positive(t.median_us):
            stage = str(t.protocol.get("stage", ""))
            low, high = t.quantile_us(0.1), t.quantile_us(0.9)
            rows.append(BaselineRow(name, t.median_us, low, high, stage, tflops(problem, t), ""))
    timed = {row.backend for row in rows}
    refused = {name: text for name, text in refusals.items() if name not in timed}
    rows += [BaselineRow(name, None, None, None, "", None, text) for name, text in refused.items()]
    return tuple(sorted(rows, key=lambda row: (row.median_us is None, row.median_us or 0.0, row.backend)))


def _importances(study: Study, results: Results, columns: Mapping[str, dict[str, Column]]) -> tuple[Importance, ...]:
    return tuple(
        importance_of(family, [value for _, value in results.get(family, [])], columns.get(family, {}))
        for family in study.families
    )
