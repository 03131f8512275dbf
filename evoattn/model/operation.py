"""What is computed of a problem: named inputs and outputs, the work, and where its reference stands."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from evoattn.model.dtype import DTYPES

_BYTES = {"int32": 4} | {dtype.torch: dtype.bytes for dtype in DTYPES.values()}


class TensorSpec(NamedTuple):
    """One input or output of an operation."""

    name: str
    """As launches name its buffer."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    dtype: str
    """Its name in `torch`."""

    @property
    def bytes(self) -> int:
        """Of all elements."""
        return math.prod(self.shape) * _BYTES[self.dtype]


def contiguous(name: str, shape: tuple[int, ...], dtype: str) -> TensorSpec:
    """A tensor whose last dimension is the fastest, without gaps."""
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return TensorSpec(name, shape, strides, dtype)


@dataclass(frozen=True)
class Operation:
    """One row of `OPERATIONS`. Its functions take an `AttentionProblem` whose `op` is its name."""

    name: str
    inputs: Callable[[Any], tuple[TensorSpec, ...]]
    outputs: Callable[[Any], tuple[TensorSpec, ...]]
    """The first is the one that the error of a trial is of."""
    flops: Callable[[Any], int]
    """Floating-point operations."""
    bytes: Callable[[Any], int]
    """Fewest bytes through device memory."""
    proof: str
    """The module that makes its inputs, its float64 reference with its tolerance, and its small cases: a
    `correctness.cases.Proof`. A name, since the model imports no torch."""
    why_not: Callable[[Any], str] = lambda problem: ""
    """One sentence if the fields of a problem cannot be, else empty."""


OPERATIONS: dict[str, Operation] = {}
"""By the field `op` of a problem; `model/problem.py` has the row of the forward pass."""
