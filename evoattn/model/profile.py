"""What hardware counters say of one call."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelCounters:
    """One kernel that a call launched.

    `counters` holds the words of `evoattn.profiling.ncu` and their values: shares of a peak in percent, sizes in
    their unit."""

    kernel: str
    us: float
    """Its time under the profiler in µs. Clocks are left as they are, but each kernel runs alone: no result to rank
    by."""
    counters: dict[str, float]


@dataclass(frozen=True)
class Profile:
    """One call of a trial's kernel, or of a peer in its study."""

    peer: str
    """Empty for the trial's own kernel."""
    tool: str
    """E.g. `ncu 2025.3.1.0`."""
    cache: str
    """`warm`: the call before it left its inputs in L2; `cold`: caches were flushed."""
    kernels: tuple[KernelCounters, ...]
    created_at: str = ""
