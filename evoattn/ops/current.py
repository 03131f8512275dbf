"""The runtime behind the op in this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from evoattn.model.gpu import GpuSpec
from evoattn.model.paths import cubin_cache
from evoattn.model.problem import AttentionProblem
from evoattn.ops.choice import Picked
from evoattn.ops.platform import CudaPlatform, Platform
from evoattn.ops.runtime import Runtime

_runtime: Runtime | None = None
_lock = threading.Lock()


def _portfolio_pick(problem: AttentionProblem, gpu: GpuSpec) -> Picked | None:
    """`evoattn.portfolio.pick`, imported at the first call that a kernel could serve."""
    from evoattn.portfolio.pick import pick

    return pick(problem, gpu)


def runtime() -> Runtime:
    """The one runtime of the process; on the first call it looks for a CUDA device."""
    global _runtime
    if _runtime is None:
        with _lock:
            if _runtime is None:
                platform: Platform | None = CudaPlatform() if torch.cuda.is_available() else None
                _runtime = Runtime(platform, _portfolio_pick, cubin_cache() / "op")
    return _runtime


@contextlib.contextmanager
def use(other: Runtime) -> Iterator[Runtime]:
    """Put another runtime behind the op, in all threads, for the length of a block."""
    global _runtime
    before, _runtime = _runtime, other
    try:
        yield other
    finally:
        _runtime = before
