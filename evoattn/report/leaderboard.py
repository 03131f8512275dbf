"""One candidate as a row: times, speedups over the peers, resources, occupancy of each launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evoattn.families import registry
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import KernelLaunch
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompileInfo, Timing, Trial, is_positive
from evoattn.model.space import KernelConfig
from evoattn.report.rows import LaunchOccupancy, LeaderboardRow
from evoattn.timing.protocol import ENERGY


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
