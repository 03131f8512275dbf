"""Storage → `StudySummary`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evoattn.model.gpu import GpuError, GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Study, Timing, Trial, is_positive
from evoattn.report.analysis import (
    Results,
    group_failures,
    lineage,
    progress,
    rank_cost_model,
    right_trials,
)
from evoattn.report.counters import counters_table
from evoattn.report.data import StudySummary
from evoattn.report.genes import gene_values, improvements
from evoattn.report.importance import importance_of
from evoattn.report.leaderboard import leaderboard_row, tflops
from evoattn.report.parameters import Importance
from evoattn.report.roofs import roofs
from evoattn.report.rows import BaselineRow, LeaderboardRow, StartingConfig
from evoattn.report.samples import family_samples
from evoattn.report.winner import make_winner
from evoattn.samplers.base import STARTING
from evoattn.storage import Storage
from evoattn.timing import ranking

MAX_REASONS = 10_000
"""Different failure sentences that are read before those alike but for their numbers are put together."""

FINALISTS = 100
"""More than any final has."""


def summarise(storage: Storage, study: Study, limit: int = 20) -> StudySummary:
    """All that a report says about `study`, with the best `limit` trials. Raises `StorageError` where the database
    fails."""
    problem = AttentionProblem(**study.problem)
    spec = _spec(study)
    trials = {trial.number: trial for trial in storage.iter_trials(study)}
    peers = {} if study.offline else storage.peers(study)
    ranked = storage.leaderboard(study, max(limit, FINALISTS))
    leader = ranked[0] if ranked else None
    timed = {} if study.offline else {t.number: t.timing for t in ranked if t.timing}
    ratios = ranking.against_leader(timed, leader.number) if leader and leader.number in timed else {}
    course = progress(study, trials.values())

    def row(rank: int, trial: Trial) -> LeaderboardRow:
        return leaderboard_row(rank, trial, problem, spec, peers, study.offline)

    rows = tuple(row(rank, trial) for rank, trial in enumerate(ranked[:limit], 1))
    results = right_trials(trials.values())
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
        progress=course,
        importances=_importances(study, results),
        cost_model=None if study.offline else rank_cost_model(trials.values()),
        lineage=lineage(leader, trials),
        improvements=improvements(course, trials),
        genes=gene_values(results),
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
    leaders = {trial.family for trial in ranked}
    best = {  # read again: `iter_trials` leaves the compiler's report out
        family: found[0][0] if family in leaders else storage.trial(found[0][0].number)
        for family, found in results.items()
    }
    place = {trial.number: n for n, trial in enumerate(ranked)}
    for trial in reversed(ranked):
        if trial.family in best:
            best[trial.family] = trial
    last = len(ranked)
    return sorted(best.values(), key=lambda t: (place.get(t.number, last), results[t.family][0][1]))


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


def _importances(study: Study, results: Results) -> tuple[Importance, ...]:
    right = {family: results.get(family, []) for family in study.families}
    return tuple(importance_of(family, [(t.config, value) for t, value in found]) for family, found in right.items())
