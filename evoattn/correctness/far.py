"""Problems whose strides pass 2^31 elements, without the memory for them: every row of Q, K, V, O and the bias lies in
2^32 bytes of addresses of its own.

A kernel that computes an offset in 32 bits is right on every problem that fits a test. Here its rows are elsewhere: the
interpreter keeps the rows of such tensors as close together as ever, and knows where each belongs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from evoattn.families.built import BuiltKernel
from evoattn.model.launch import KernelLaunch
from evoattn.model.problem import AttentionProblem

_SPAN = 1 << 32
"""Bytes."""
_APART = {"q": (5, 3, 1), "k": (5, 3, 1), "v": (7, 4, 1), "o": (7, 4, 1), "bias": (5, 3, 1)}
"""Spans from one batch, one head, one row to the next: coprime, so that no wrong index lands on another's place, and
not the same of K and V, nor of Q and O. Of K and V with keys in use batches stay whole rows apart, as tensor maps that
slide have them."""
_STRIDE_LIMIT = 1 << 40
"""Bytes, of a tensor map (CUDA driver API, cuTensorMapEncodeTiled)."""
_UNIT = 16
"""Bytes that lie together."""


def _apart(problem: AttentionProblem, tensor: str, batch_rows: int) -> tuple[int, int, int]:
    """`_APART` of a tensor whose batches lie `batch_rows` rows apart. Where there is one batch, nothing lies so far on:
    `batch_rows` rows could be more than the 2^40 bytes of a tensor map's stride."""
    batch, head, row = _APART["k" if tensor == "v" and problem.shared_kv else tensor]
    several = tensor in "kv" and problem.seqused and problem.shape(tensor)[0] > 1
    return (batch_rows * row if several else batch), head, row


@dataclass(frozen=True)
class FarProblem(AttentionProblem):
    """As told to the launches: only the strides are others."""

    def strides(self, tensor: str) -> tuple[int, int, int, int]:
        """Those of the compact tensor, and whole spans more; 0 stays 0."""
        *compact, last = super().strides(tensor)
        spans = (apart * _SPAN // self.element_bytes for apart in _apart(self, tensor, compact[0] // compact[2]))
        batch, head, row = (stride and stride + span for stride, span in zip(compact, spans, strict=True))
        return batch, head, row, last


@dataclass(frozen=True)
class FarKernel(BuiltKernel):
    """A kernel whose launches are told of far tensors, whatever the problem."""

    def launches(self, problem: AttentionProblem) -> tuple[KernelLaunch, ...]:
        """The launches of the problem with the strides of `FarProblem`."""
        return super().launches(FarProblem(**{f.name: getattr(problem, f.name) for f in fields(problem)}))


def can_be_far(problem: AttentionProblem) -> bool:
    """Whether rows are whole units, and all strides less than those that no tensor map has."""
    far = FarProblem(**{f.name: getattr(problem, f.name) for f in fields(problem)})
    if max(max(far.strides(tensor)) for tensor in "qkvo") * problem.element_bytes >= _STRIDE_LIMIT:
        return False
    return problem.head_dim * problem.element_bytes % _UNIT == problem.head_dim_v * problem.element_bytes % _UNIT == 0


def far_places(problem: AttentionProblem) -> dict[str, NDArray[np.uint16]]:
    """By tensor, for each unit of its compact memory: the span that it lies in, `[bytes / 16]`."""
    places = {}
    shapes: dict[str, tuple[int, ...]] = {tensor: problem.shape(tensor) for tensor in (*problem.tensors, "o")}
    if problem.bias:
        shapes["bias"] = problem.term_shapes["bias"]
    for tensor, shape in shapes.items():
        strides = problem.strides(tensor)
        units = shape[3] * problem.element_bytes // _UNIT
        spans = np.zeros(int(np.prod(shape[:3])) * units, np.uint16)
        rows = [stride * problem.element_bytes // _UNIT * spans.itemsize for stride in strides[:3]]
        view = np.ndarray((*shape[:3], units), np.uint16, spans.data, 0, (*rows, spans.itemsize))
        counts = np.indices(shape[:3])
        apart = _apart(problem, tensor, strides[0] // strides[2])
        view[...] = sum(count * spans_apart for count, spans_apart in zip(counts, apart, strict=True))[..., None]
        places[tensor] = spans
    return places
