"""The runtime behind the op in this process."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import torch

from evoattn.model import collector, forks
from evoattn.model.gpu import GpuSpec
from evoattn.model.paths import cubin_cache
from evoattn.model.problem import AttentionProblem
from evoattn.ops.choice import Picked
from evoattn.ops.platform import CudaPlatform, Platform
from evoattn.ops.race import CudaClock, Race
from evoattn.ops.runtime import Runtime
from evoattn.portfolio.climb import ClimbCache
from evoattn.portfolio.pick import lasting_pick, next_picks
from evoattn.portfolio.wins import Races, Wins

_runtime: Runtime | None = None
_wins: Wins | None = None
_climbs: ClimbCache | None = None
_lock = forks.Lock()
FOLDER = "op"
"""In the user's cache of compiled kernels."""


def wins() -> Wins:
    """The user's own finds."""
    global _wins
    if _wins is None:
        _wins = Wins()
    return _wins


def climbs() -> ClimbCache:
    """What picks came to, in earlier processes too: beside the compiled kernels."""
    global _climbs
    if _climbs is None:
        _climbs = ClimbCache(cubin_cache() / FOLDER)
    return _climbs


def best_known(problem: AttentionProblem, gpu: GpuSpec) -> Picked | None:
    """The user's own find for exactly this problem, else the portfolio's pick."""
    with collector.paused():
        return wins().find(problem, gpu) or lasting_pick(problem, gpu, climbs())


def find_platform(make: Callable[[], Platform] = CudaPlatform) -> Platform | None:
    """The CUDA device side; None, with a warning, where torch has a GPU but the driver is not NVIDIA's or too old, and
    in the child of a process that has used CUDA."""
    try:
        platform = make()
        return None if platform.lost_in_fork() else platform
    except (OSError, AttributeError) as error:
        warnings.warn(f"evoattn: no kernel can run here, SDPA does: {error}.", RuntimeWarning, stacklevel=2)
        return None


def runtime() -> Runtime:
    """The one runtime of the process; on the first call it looks for a CUDA device."""
    global _runtime
    if _runtime is None:
        with _lock:
            if _runtime is None:
                platform = find_platform() if torch.cuda.is_available() else None
                race = Race(Races(), CudaClock()) if platform else None
                _runtime = Runtime(platform, best_known, cubin_cache() / FOLDER, others=next_picks, race=race)
    return _runtime


def forget() -> None:
    """Have the runtime, if there is one, ask anew which kernel runs: a search has found another."""
    if _runtime is not None:
        _runtime.forget()


@contextlib.contextmanager
def use(other: Runtime, finds: Wins | None = None) -> Iterator[Runtime]:
    """Put another runtime, and another file of wins if given, behind the op, in all threads, for the length of a
    block.
    """
    global _runtime, _wins
    before = _runtime, _wins
    _runtime, _wins = other, finds or _wins
    try:
        yield other
    finally:
        _runtime, _wins = before
