"""The parts of a summary, as plain records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
    """Its name in `baselines.PEERS`; `evoattn.timing.peers.labels` has the full one."""
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
