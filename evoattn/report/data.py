"""The summary of a study: all that the table, the JSON and the page say, computed once."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from evoattn.report.counters import CountersTable
from evoattn.report.parameters import FamilySample, GeneValue, Importance
from evoattn.report.rows import (
    Ancestor,
    BaselineRow,
    CostModelRank,
    FailureGroup,
    Improvement,
    LeaderboardRow,
    Progress,
    Roof,
    StartingConfig,
    Winner,
)
from evoattn.timing.peers.labels import peer_label
from evoattn.timing.ranking import Ratio


@dataclass(frozen=True)
class StudySummary:
    """A study's result. `render_json` prints exactly these fields, under these names; a null is something that is not
    known.

    `kind` is `measured` or `estimated`. An estimated (offline) study has no times, no TFLOP/s, no speedups and no
    roofline anywhere, and measured and estimated trials never share a leaderboard.
    """

    study: str
    kind: str
    problem: dict[str, Any]
    problem_text: str
    gpu: str
    arch: str
    sampler: str
    seed: int
    families: tuple[str, ...]
    versions: dict[str, str]
    """Names and versions as recorded when the study was made, the device and its driver among them."""
    created_at: str
    flops: int
    bytes: int
    """Fewest bytes through device memory."""
    fits_l2: bool | None
    counts: dict[str, int]
    """Trials by state."""
    winner: Winner | None
    """None while no candidate is right."""
    leaderboard: tuple[LeaderboardRow, ...]
    best_of_families: tuple[LeaderboardRow, ...]
    """The best of each family, best first; `rank` is that among the families."""
    right_by_family: dict[str, int]
    """Right trials by family; families without one are left out."""
    baselines: tuple[BaselineRow, ...]
    failures: tuple[FailureGroup, ...]
    progress: Progress
    importances: tuple[Importance, ...]
    cost_model: CostModelRank | None
    """None below 10 trials with both an estimate and a time."""
    lineage: tuple[Ancestor, ...]
    """The best trial and its ancestors, youngest first."""
    improvements: tuple[Improvement, ...]
    """Each new best, in the order found."""
    genes: tuple[GeneValue, ...]
    samples: tuple[FamilySample, ...]
    roofs: tuple[Roof, ...]
    final: dict[str, dict[str, float]]
    """By trial, every finalist but the leader: `median`, `low` and `high` of its time over the leader's in the rounds
    of the final (`evoattn.timing.ranking.Ratio`, which says whether they tie)."""
    starting: StartingConfig | None
    counters: CountersTable | None
    """Hardware counters of the best trial beside those of a peer; None where `evoattn profile` has not read any."""

    @property
    def trials(self) -> int:
        """Trials recorded, of whatever state."""
        return sum(self.counts.values())

    @property
    def provenance(self) -> str:
        """One line: where the numbers come from."""
        device = self.versions.get("device")
        driver = self.versions.get("driver", "driver unknown")
        where = f"{device} ({driver})" if device else f"{self.gpu} ({self.arch}), compiled for, not run on"
        skipped = ("device", "driver")
        rest = ", ".join(f"{name} {version}" for name, version in self.versions.items() if name not in skipped)
        return f"{where}; sampler {self.sampler}, seed {self.seed}; {rest}; {self.created_at}"

    @property
    def verdict(self) -> str:
        """What the final says of the leader and the next; empty without one."""
        if not self.final or not self.leaderboard:
            return ""
        tied = [number for number, ratio in self.final.items() if Ratio(**ratio).tie]
        who = f"Trial {self.leaderboard[0].trial}"
        if tied:
            rivals = f"trial{'s' * (len(tied) > 1)} {', '.join(tied)}"
            return f"{who} ties with {rivals}: the rounds of the final do not tell them apart (sign test, 95 %)."
        second, ratio = min(self.final.items(), key=lambda item: item[1]["median"])
        return (
            f"{who} is ahead of all other finalists beyond the noise (sign test over the final's rounds, 95 %); "
            f"trial {second} takes {ratio['median'] - 1:+.1%} ({ratio['low'] - 1:+.1%} to {ratio['high'] - 1:+.1%})."
        )

    @property
    def peer_verdict(self) -> str:
        """The winner beside the fastest peer of its final; empty where no peer took turns with it."""
        peer = self.winner.peer if self.winner else None
        if peer is None:
            return ""
        name = f"{peer_label(peer.backend)} ({peer.median_us:.2f} µs), the fastest peer"
        if peer.tie:
            return f"{peer.speedup:.2f} × as fast as {name}: a tie."
        return f"{peer.speedup:.2f} × as fast as {name}{'' if peer.speedup >= 1 else ', which stays ahead'}."

    @property
    def search_gain(self) -> str:
        """What the search gained over what it began with, measured in one final; empty where no starting config took
        part."""
        if self.starting is None:
            return ""
        ratio = self.final.get(str(self.starting.trial))
        tie = ", which its rounds do not tell from nothing" if ratio and Ratio(**ratio).tie else ""
        return (
            f"The best starting config, trial {self.starting.trial}, takes {self.starting.median_us:.2f} µs in the "
            f"same final: the search gained {self.starting.gain:.1%}{tie}."
        )

    @property
    def notice(self) -> str:
        """What a reader must know before the numbers; empty if nothing."""
        if self.kind == "estimated":
            return (
                f"No {self.gpu.upper()} took part: every trial was compiled for it, run on the PTX interpreter and "
                "ranked by the cost model. The relative cost orders candidates within this study; it is not a time, "
                "and nothing here was measured."
            )
        return ""


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def render_json(summary: StudySummary) -> str:
    """The fields of `StudySummary` as JSON, with a line break at the end."""
    said = {name: getattr(summary, name) for name in ("trials", "notice", "verdict", "peer_verdict", "search_gain")}
    return json.dumps(_finite(asdict(summary) | said), indent=1, ensure_ascii=False) + "\n"
