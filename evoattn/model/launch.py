"""One launch of one kernel: its grid, its shared memory and its arguments."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal, NamedTuple

STATIC_SMEM_LIMIT = 48 * 1024
"""Bytes of dynamic shared memory that a kernel may have without opting in."""


class Scalar(NamedTuple):
    """A kernel argument passed by value. `name` is given where a caller may put another value in its place."""

    ctype: Literal["int32", "int64", "float32"]
    value: int | float
    name: str = ""


class Buffer(NamedTuple):
    """A kernel argument that is the device address of a buffer: `q`, `k`, `v`, `o`, or a name of the family's
    `workspace`."""

    name: str


NULL = Scalar("int64", 0)
"""A null pointer: the address of a buffer that a launch does not use."""


@dataclass(frozen=True)
class TensorMap:
    """A kernel argument that is a CUtensorMap by value (sm_90): boxes of a 16-bit buffer as the tensor copy engine
    moves them.

    `shape`, `box` in elements and `strides_bytes` (of every dimension but the innermost, whose stride is one element)
    count from the innermost dimension; at most five of them. What lies outside `shape` reads zero and is not written.
    `swizzle_bytes` is 0, 32, 64 or 128. With `wraps` most of `shape` lies outside of the buffer; boxes lie within it,
    as addresses wrap at 2^64 bytes (`evoattn.families.tensor_tiles.sliding_map`)."""

    buffer: str
    dtype: str
    """Of the table of dtypes: fp16 or bf16."""
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int = 128
    wraps: bool = False
    rows_at: int | None = None
    """The dimension of `shape` in place of which a call may put the rows that its buffer has, if they are fewer."""

    def with_rows(self, rows: int) -> TensorMap:
        """The same with so many in that dimension."""
        assert self.rows_at is not None
        made = object.__new__(TensorMap)  # without the checks of frozen fields, which take microseconds
        shape = *self.shape[: self.rows_at], rows, *self.shape[self.rows_at + 1 :]
        made.__dict__.update(self.__dict__, shape=shape)
        return made


KernelArg = Scalar | Buffer | TensorMap


def scratch_args(workspace: Container[str], *names: str) -> tuple[Buffer | Scalar, ...]:
    """The buffers of these names, `NULL` in place of those that a family's `workspace` has not."""
    return tuple(Buffer(name) if name in workspace else NULL for name in names)


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of one kernel.

    `grid`, `block` and `cluster` are in blocks, threads and blocks; `smem_bytes` is dynamic shared memory."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int
    args: tuple[KernelArg, ...]
    cluster: tuple[int, int, int] = (1, 1, 1)
    overlaps: bool = False
    """May begin before the launch before it has ended, and waits for it itself by `griddepcontrol.wait` (sm_90): see
    `templates/device/ptx/grid_dependency.cuh`. Never the first launch of a call, so that calls follow one another."""

    together: int = 1
    """How many neighbouring blocks wait for one another: for a while, fastest where they run at once and right where
    they do not (`templates/flash_wgmma/sum_parts.cuh`), or until others have come, where all of them surely run at once
    (`evoattn.families.backward_wgmma.resources.waits_ahead`). 1 where none waits, or only for blocks before it."""

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]
