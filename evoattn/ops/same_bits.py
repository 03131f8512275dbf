"""The promise that a row has the same bits in every batch: who asks for it, and what is raised rather than break it.

Of torch's attention nothing is known that would keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class NoKernel(RuntimeError):
    """No kernel serves the call, and PyTorch's attention must not: `strict=True` or `batch_invariant=True` was said.
    The message is the reason."""


class Promise:
    """What `evoattn.enable` said of all calls of the process."""

    everywhere = False
    fp8: Callable[[Any, Any], Any] | None = None
    """`precision.in_eight_bits` where calls are to run in 8 bits."""


PROMISE = Promise()


def is_promised(batch_invariant: bool) -> bool:
    """Whether a call that says so, or not, is to keep the promise."""
    return batch_invariant or PROMISE.everywhere


BROKEN = "PyTorch's attention does not keep what batch_invariant=True promises"


def refuse(reason: str, strict: bool = False, batch_invariant: bool = False) -> None:
    """Raise `NoKernel` where torch would compute and the call, or `evoattn.enable`, has said that it must not. `reason`
    has no full stop."""
    if is_promised(batch_invariant):
        raise NoKernel(f"No kernel serves this call: {reason}. {BROKEN}.")
    if strict:
        raise NoKernel(f"No kernel serves this call: {reason}.")
