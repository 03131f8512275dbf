"""`with evoattn.capture() as shapes`: the calls of attention in a block, written down as they are made."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from evoattn.ops import asked
from evoattn.ops.ordinary import WATCHED, is_ordinary
from evoattn.ops.shapes import TIMED_CALLS, Shapes, Span


class _Thread(threading.local):
    """The shapes that this thread records, the innermost block's last."""

    def __init__(self) -> None:
        self.shapes: list[Shapes] = []


thread = _Thread()


def recorders() -> list[Shapes]:
    """Of this thread; empty outside of all blocks, and while code is compiled."""
    return thread.shapes if not torch.compiler.is_compiling() else []


@contextlib.contextmanager
def recording(shapes: Shapes) -> Iterator[Shapes]:
    """Calls of this thread are added to `shapes`."""
    thread.shapes.append(shapes)
    try:
        yield shapes
    finally:
        thread.shapes.remove(shapes)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Calls of this thread are not written down: they are parts of one that was."""
    kept, thread.shapes = thread.shapes, []
    try:
        yield
    finally:
        thread.shapes = kept


def miss(reason: str) -> None:
    """Write down a call that no kernel could serve."""
    for shapes in thread.shapes:
        shapes.miss(reason)


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    causal: str,
    enable_gqa: bool,
    lse: bool,
    fields: Mapping[str, Any],
) -> asked.StridedProblem | str:
    """As `asked.problem_of`, in the dtype that autocast gives."""
    if not is_ordinary(query, key, value):
        return WATCHED
    kind = query.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (torch.empty_like(t, dtype=dtype, device="meta") for t in (query, key, value))
    strides = asked.out_like(query, value, "meta").stride()
    return asked.problem_of(
        query, key, value, strides, fields, is_causal=is_causal, causal=causal, enable_gqa=enable_gqa, lse=lse
    )


@contextlib.contextmanager
def call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    causal: str,
    enable_gqa: bool,
    lse: bool,
    fields: Mapping[str, Any] = asked.PLAIN,
) -> Iterator[None]:
    """Write down a call, and on a GPU time what runs inside of the block by CUDA events. `fields` are those of a
    variant."""
    timed: list[list[Span]] = []
    if all(isinstance(tensor, Tensor) for tensor in (query, key, value)):
        try:
            problem = _problem(query, key, value, is_causal, causal, enable_gqa, lse, fields)
        except RuntimeError:  # nested or sparse tensors, which the call itself may take
            problem = asked.NOT_STRIDED
        for shapes in thread.shapes:
            if isinstance(problem, str):
                shapes.miss(problem)
                continue
            entry = shapes.add(problem.packed)
            if len(entry.spans) < TIMED_CALLS:
                timed.append(entry.spans)
    if not timed or not query.is_cuda or torch.cuda.is_current_stream_capturing():
        yield
        return
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(torch.cuda.current_stream(query.device))
    yield
    end.record(torch.cuda.current_stream(query.device))
    for spans in timed:
        spans.append((begin, end))
