"""The summary of a study and the records in it: all that the table, the JSON and the page say."""

import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from evoattn.peers.labels import peer_label
from evoattn.timing.ranking import Ratio


@dataclass(frozen=True)
class Importance:
    """How much each parameter of one family tells the best tenth of its trials from all: shares that add up to 1, by
    PED-ANOVA."""

    family: str
    trials: int
    """Right trials of the family."""
    shares: dict[str, float]
    """Largest first; empty where `why_not` says why."""
    why_not: str


@dataclass(frozen=True)
class GeneValue:
    """One value of one parameter among the right trials of its family. Times are in µs, or relative costs."""

    family: str
    gene: str
    value: Any
    trials: int
    best: float
    median: float
    top_share: float
    """Among the best twentieth, 0 to 1."""
    share: float
    """Among all."""
    effect: float | None
    """Median of its time over the best other value's where all else is equal: under 1 it is faster."""
    pairs: int
    tells: bool
    """Whether the trials say anything of this value: a paired effect, or a share among enough of the best that is not
    by chance."""


@dataclass(frozen=True)
class FamilySample:
    """Right trials of one family, best first, with their parameters: all of them, or the best and an even sample of
    the rest."""

    family: str
    values: dict[str, tuple[Any, ...]]
    """The values seen of each parameter, in order."""
    trial: list[int]
    value: list[float]
    """µs or relative cost."""
    columns: dict[str, list[int | None]]
    """Per parameter and trial: the index in `values`; None where the trial lacks the parameter."""


@dataclass(frozen=True)
class LaunchOccupancy:
    """How many blocks of one launch fit on one SM at once, and which resource limits them."""

    kernel: str
    grid_blocks: int
    threads: int
    """Per block."""
    smem_bytes: int
    """Static and dynamic, per block. Static shared memory is the most of all kernels in the source, as are the
    registers."""
    limits: dict[str, int]
    """Blocks per SM that each resource allows: `registers`, `shared memory`, `threads`, `blocks`
    (`GpuSpec.block_limits`)."""
    blocks_per_sm: int
    """The least of `limits`."""
    limited_by: tuple[str, ...]
    """The resources that allow no more."""
    occupancy: float
    """Resident threads over the threads that an SM can hold, 0 to 1."""


@dataclass(frozen=True)
class LeaderboardRow:
    """One candidate. Times are in µs per call; None, as all that follows from them, for a trial that was never
    timed."""

    rank: int
    trial: int
    family: str
    config: dict[str, Any]
    state: str
    operator: str
    median_us: float | None
    p10_us: float | None
    p90_us: float | None
    stage: str
    """Of the timing: `screen`, `repeat` or `final`; empty if never timed."""
    tflops: float | None
    """Useful TFLOP/s: the FLOP of the visible query-key pairs over the median."""
    peak_share: float | None
    """Of the GPU's dense peak for the dtype, 0 to 1."""
    speedups: dict[str, float]
    """By peer: its median over ours. Only where both were timed in finals, which run interleaved."""
    relative_cost: float | None
    """The cost model's estimate, for ranking only."""
    registers: int | None
    spill_bytes: int | None
    smem_bytes: int | None
    """Static and dynamic shared memory of a block, the most over the launches."""
    launches: tuple[LaunchOccupancy, ...]
    """Empty where the launches or the compiler's report are not known."""
    energy_mj: float | None = None
    """Millijoules of the whole board per call, from its final; None where that was not measured."""


@dataclass(frozen=True)
class BaselineRow:
    """One peer: times in µs of its last final (else of its last timing), or the sentence with which it refused."""

    backend: str
    """Its name in `baselines.PEERS`."""
    median_us: float | None
    p10_us: float | None
    p90_us: float | None
    stage: str
    tflops: float | None
    refusal: str


@dataclass(frozen=True)
class FailureGroup:
    """Failures of one state whose reasons differ only in numbers."""

    state: str
    reason: str
    """The most frequent of the group's sentences."""
    count: int
    variants: int
    """Different sentences in the group."""


MAX_POINTS = 1500
"""Candidates drawn in the progress plot: each is a node of the page, and more of them only cover each other."""


@dataclass(frozen=True)
class Progress:
    """Every right candidate in the order tried, as columns of one length, and the improvements among them."""

    quantity: str
    """`median_us`, or `relative_cost` in an offline study."""
    trial: list[int]
    elapsed_s: list[float]
    """Since the study was made; pauses between resumed runs count."""
    family: list[str]
    value: list[float]
    improvements: list[int]
    """Indices into the columns at which the best so far became better."""
    configs: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By trial, of the points that the page draws (`drawn`); not in the JSON."""

    def drawn(self) -> list[int]:
        """Indices to draw: all improvements, and of the others an even sample of `MAX_POINTS` at most."""
        count = len(self.value)
        stride = max(1, -(-count // MAX_POINTS))
        return sorted({*range(0, count, stride), *self.improvements})


@dataclass(frozen=True)
class CostModelRank:
    """Spearman correlation of the cost model's estimates with the measured medians, over all `trials` that have
    both."""

    correlation: float
    trials: int


@dataclass(frozen=True)
class Ancestor:
    """A trial in the lineage of the best: how it was bred, what came out, and which genes it has anew against its best
    parent."""

    trial: int
    family: str
    state: str
    operator: str
    parents: tuple[int, ...]
    value: float | None
    """µs or relative cost, whichever `Progress.quantity` says."""
    changes: dict[str, tuple[Any, Any]]
    """Parameter: (value in the best parent, value here)."""


@dataclass(frozen=True)
class Improvement:
    """A trial that was the best when it came."""

    elapsed_s: float
    gain: float | None
    """Share of the value of the best before it that it saved; None for the first."""
    found: Ancestor


@dataclass(frozen=True)
class StartingConfig:
    """The best starting config in the final that the leader comes from."""

    trial: int
    median_us: float
    gain: float
    """Share of its time that the leader saves; 0 where it leads itself."""


@dataclass(frozen=True)
class PeerRatio:
    """The fastest peer of the final from which the winner's time comes."""

    backend: str
    """Its name in `baselines.PEERS`; `evoattn.peers.labels` has the full one."""
    median_us: float
    speedup: float
    """Its median over the winner's: over 1 the winner is faster."""
    tie: bool | None
    """Whether the rounds of the final do not tell the two apart; None if they were too few to say."""


@dataclass(frozen=True)
class Origin:
    """The best starting config of the winner's family (else of any family), and what sets the winner apart from it."""

    trial: int
    family: str
    value: float | None
    """µs or relative cost."""
    gain: float | None
    """Share of its value that the winner saves."""
    in_final: bool
    """Whether both were timed in turns in one final."""
    changes: dict[str, tuple[Any, Any]]
    """Parameter: (value there, value in the winner). Empty between two families."""
    source_diff: str
    """Unified diff of the two sources; empty between two families, or where a source is not recorded."""


@dataclass(frozen=True)
class Winner:
    """What a user takes home: the best candidate, how sure it is, and how to have it again."""

    row: LeaderboardRow
    settings: dict[str, str]
    """Each parameter as `--set NAME=VALUE` and `evoattn try` take it."""
    peer: PeerRatio | None
    """None where no peer was timed in the winner's final."""
    tied_with: tuple[int, ...]
    """Finalists that the rounds of the final do not tell from it."""
    origin: Origin | None
    """None where the winner is itself that starting config, or no starting config was right."""
    source: str
    """CUDA source as recorded; empty if there is none."""
    source_hash: str
    estimate: tuple[str, ...] = ()
    """Of an offline study: what bounds the kernel, how its score splits, and how far such first choices have been."""


@dataclass(frozen=True)
class Roof:
    """One limit of the GPU for the problem, in TFLOP/s; `per_intensity` roofs rise with the FLOP a byte up to the
    peak."""

    name: str
    tflops: float
    """At the problem's arithmetic intensity for the DRAM roof, everywhere else for the others."""
    gb_per_s: float | None
    """Set for the DRAM roof."""


@dataclass(frozen=True)
class CountersTable:
    """A column per kernel; None where a GPU lacks the counter."""

    columns: tuple[str, ...]
    kernels: tuple[str, ...]
    """The name of each column's kernel."""
    rows: tuple[tuple[str, tuple[float | None, ...]], ...]
    note: str


@dataclass(frozen=True)
class StudySummary:
    """A study's result. `render_json` prints exactly these fields, under these names; a null is something that is not
    known.

    `kind` is `measured` or `estimated`. An estimated (offline) study has no times, no TFLOP/s, no speedups and no
    roofline anywhere, and measured and estimated trials never share a leaderboard."""

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
    summary = replace(summary, progress=replace(summary.progress, configs={}))
    return json.dumps(_finite(asdict(summary) | said), indent=1, ensure_ascii=False) + "\n"
