"""What a user takes home: the best candidate, how sure it is, where it came from, and how to have it again."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from evoattn.cost.explanation import sentences
from evoattn.model.errors import WrongUse
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Study, Timing, Trial, is_positive
from evoattn.model.space import KernelConfig, spelling
from evoattn.report.data import LeaderboardRow, Origin, PeerRatio, Winner
from evoattn.samplers.base import STARTING
from evoattn.storage import Storage
from evoattn.timing import ranking
from evoattn.timing.ranking import Ratio

STARTING_CONFIGS = 100
"""More than any search space has."""


def make_winner(
    storage: Storage,
    study: Study,
    leader: Trial,
    row: LeaderboardRow,
    peers: Mapping[str, Sequence[Timing]],
    final: Mapping[int, Ratio],
) -> Winner:
    """`leader` leads the leaderboard of `study`; `final` are the other finalists' times over its own, by trial.

    Raises `StorageError` where the database fails."""
    source = _source(storage, leader)
    return Winner(
        row=row,
        settings={name: spelling(value) for name, value in leader.config.items()},
        peer=None if study.offline else fastest_peer(leader.timing, peers),
        tied_with=tuple(number for number, ratio in final.items() if ratio.tie),
        origin=_origin(storage, study, leader, source),
        source=source,
        source_hash=leader.source_hash or "",
        estimate=_estimate(study, leader) if study.offline else (),
    )


def _estimate(study: Study, leader: Trial) -> tuple[str, ...]:
    """What the cost model says of it; nothing of a study that today's version cannot read."""
    try:
        problem, config = AttentionProblem(**study.problem), KernelConfig(leader.family, leader.config)
        registers = leader.compile_info.registers if leader.compile_info else 0
        return sentences(problem, config, study.spec, registers)
    except (WrongUse, TypeError):
        return ()


def fastest_peer(timing: Timing | None, peers: Mapping[str, Sequence[Timing]]) -> PeerRatio | None:
    """The fastest of the peers that were timed in turns with `timing`; None without one."""
    if timing is None or not is_positive(timing.median_us):
        return None
    beside = [(t.median_us, name, t) for name, ts in peers.items() for t in ts if t.interleaved_with(timing)]
    beside = [entry for entry in beside if is_positive(entry[0])]
    if not beside:
        return None
    median_us, name, peer = min(beside, key=lambda entry: entry[:2])
    ratio = ranking.compare(peer, timing)
    return PeerRatio(name, median_us, median_us / timing.median_us, ratio.tie if ratio else None)


def _source(storage: Storage, trial: Trial) -> str:
    return storage.source(trial.source_hash) if trial.source_hash else ""


def _origin(storage: Storage, study: Study, leader: Trial, source: str) -> Origin | None:
    """The starting config that the winner beat: one of its family before others, one of its final before others, then
    the fastest."""
    if leader.operator == STARTING:
        return None
    starting = storage.leaderboard(study, STARTING_CONFIGS, operator=STARTING)
    if not starting:
        return None

    def order(trial: Trial) -> tuple[bool, bool, float]:
        return trial.family != leader.family, not _in_one_final(trial, leader), trial.value or float("inf")

    best = min(starting, key=order)
    ours, theirs = leader.value, best.value
    changes: dict[str, tuple[Any, Any]] = {}
    diff = ""
    if best.family == leader.family:
        changes = {n: (best.config.get(n), v) for n, v in leader.config.items() if best.config.get(n) != v}
        diff = source_diff(_source(storage, best), source, f"trial {best.number}", f"trial {leader.number}")
    return Origin(
        trial=best.number,
        family=best.family,
        value=theirs,
        gain=1 - ours / theirs if ours is not None and theirs is not None else None,
        in_final=_in_one_final(best, leader),
        changes=changes,
        source_diff=diff,
    )


def _in_one_final(one: Trial, other: Trial) -> bool:
    mine, theirs = one.timing, other.timing
    return mine is not None and theirs is not None and mine.interleaved_with(theirs)


def source_diff(old: str, new: str, old_name: str, new_name: str) -> str:
    """Unified diff with three lines of context; empty where a source is missing or both are the same."""
    if not old or not new:
        return ""
    return "\n".join(difflib.unified_diff(old.splitlines(), new.splitlines(), old_name, new_name, lineterm=""))
