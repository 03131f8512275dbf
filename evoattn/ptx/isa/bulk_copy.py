"""cp.async.bulk.tensor (sm_90): the tensor copy engine moves boxes between global and shared memory, one thread asking for each.

A copy is carried out when it is asked for, which is as early as a device may do it; that nobody looks too early, or overwrites what is
not yet read, is for `async_races.py` to see.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from evoattn.ptx.errors import AsyncFault, MemoryFault, unsupported
from evoattn.ptx.isa.dispatch import Fields, instruction
from evoattn.ptx.memory.address_space import PARAMETER_WINDOW
from evoattn.ptx.memory.tensor_map import BYTES, ELEMENT_BYTES, TiledMap, decode
from evoattn.ptx.program.dtypes import parse_type
from evoattn.ptx.program.kernel import Instruction
from evoattn.ptx.program.operands import split_operands, vector_parts
from evoattn.ptx.program.threads import WARP, ActiveThreads
from evoattn.ptx.races.detector import READ, WRITE
from evoattn.ptx.races.global_accesses import bytes_of
from evoattn.ptx.state.context import Context
from evoattn.ptx.state.mbarriers import mbarriers_of

_CHUNK, _ROW = 16, 128
"""Bytes: what swizzling moves in one piece, and the alignment of a box that is not swizzled (PTX ISA, tensor swizzling)."""
_S32, _U64 = parse_type("s32"), parse_type("u64")


@lru_cache(maxsize=256)
def swizzled_chunks(count: int, swizzle_bytes: int) -> np.ndarray:
    """Where the 16-byte chunks of a box go, counted from its start.

    Bits 4 … of the byte address are XORed with bits 7 …: one bit for a swizzle of 32 bytes, two for 64, three for 128.
    """
    chunk = np.arange(count)
    return chunk if not swizzle_bytes else chunk ^ (chunk >> 3 & swizzle_bytes // _CHUNK - 1)


class TensorMaps:
    """The tensor maps among a kernel's parameters, by where they lie."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._found: dict[int, tuple[TiledMap, np.ndarray]] = {}

    def at(self, address: int, ins: Instruction) -> tuple[TiledMap, np.ndarray]:
        """The map at a generic address or one of parameter space, and the tensor in memory, outermost dimension first."""
        start = address - PARAMETER_WINDOW if address >= PARAMETER_WINDOW else address
        if start not in self._found:
            raw = self.context.parameters[start : start + BYTES].tobytes()
            found = decode(raw) if len(raw) == BYTES else None
            if found is None:
                raise AsyncFault(f"The address {address:#x} is of no tensor map among the parameters, in {ins}.")
            if found.swizzle_bytes and found.box[0] * ELEMENT_BYTES != found.swizzle_bytes:
                raise unsupported(ins, "a box narrower than its swizzle")
            self._found[start] = found, found.view(self.context.global_memory)
        return self._found[start]


def _maps(context: Context) -> TensorMaps:
    return context.cached("tensor maps", lambda: TensorMaps(context))


@dataclass(frozen=True)
class _Box:
    """One box to copy: where it is in shared memory, and the part of it that lies inside the tensor."""

    map: TiledMap
    chunks: np.ndarray
    granules: slice
    inside: tuple[slice, ...]
    """Of the box, outermost dimension first."""
    tensor_part: np.ndarray


class _Boxes:
    """The operands of one instruction: `[map, {coordinates}]` and an address in shared memory."""

    def __init__(self, context: Context, ins: Instruction, map_operand: str, shared_operand: str, rank: int) -> None:
        self.context, self.ins, self.maps = context, ins, _maps(context)
        map_address, coordinates = split_operands(map_operand.strip("[] "))
        self.map_address = context.source(map_address, _U64)
        self.coordinates = [context.source(c, _S32) for c in vector_parts(coordinates)]
        if len(self.coordinates) != rank:
            raise unsupported(ins, f"{len(self.coordinates)} coordinates")
        self.shared_address = context.address(shared_operand)

    def __call__(self, active: ActiveThreads) -> list[tuple[int, _Box]]:
        """(thread, its box) of each active thread."""
        places = active.select(self.shared_address.base).astype(np.int64) + self.shared_address.offset
        columns = [active.select(c).tolist() for c in self.coordinates]
        maps = active.select(self.map_address).tolist()
        return [
            (thread, self._box(thread, self.maps.at(address, self.ins), place, where))
            for thread, address, place, *where in zip(active.index.tolist(), maps, places.tolist(), *columns)
        ]

    def _box(self, thread: int, found: tuple[TiledMap, np.ndarray], place: int, where: list[int]) -> _Box:
        tiled, tensor = found
        shared = self.context.shared
        if len(where) != len(tiled.shape):
            raise AsyncFault(
                f"A tensor map of {len(tiled.shape)} dimensions is used with {len(where)} coordinates in {self.ins}."
            )
        alignment = 8 * tiled.swizzle_bytes or _ROW
        if place % alignment:
            raise AsyncFault(
                f"{self.context.threads.describe(thread)} has a box at byte {place} of shared memory, no multiple of {alignment} as a "
                f"swizzle of {tiled.swizzle_bytes} bytes needs, in {self.ins}."
            )
        size = tiled.box_bytes
        if place < 0 or place + size > shared.limit:
            raise MemoryFault(
                f"{self.context.threads.describe(thread)} has a box of {size} bytes at byte {place} of shared memory, outside its "
                f"{shared.limit} bytes, in {self.ins}."
            )
        start = int(shared.base[thread]) + place
        shift = 0 if self.context.races is None else self.context.races.shift
        # Part of the box inside the tensor, a dimension at a time.
        lows = [min(max(-c, 0), side) for c, side in zip(where, tiled.box)]
        highs = [max(min(n - c, side), low) for c, n, side, low in zip(where, tiled.shape, tiled.box, lows)]
        inside = tuple(slice(low, high) for low, high in zip(lows, highs))[::-1]
        part = tensor[tuple(slice(max(c + low, 0), max(c + high, 0)) for c, low, high in zip(where, lows, highs))[::-1]]
        chunks = start // _CHUNK + swizzled_chunks(size // _CHUNK, tiled.swizzle_bytes)
        return _Box(tiled, chunks, slice(start >> shift, start + size >> shift), inside, part)

    def count(self, box: _Box, copied_bytes: int) -> None:
        """Tell the counters."""
        traffic = self.context.traffic
        if traffic is not None:
            traffic.tensor_copy(box.map.box_bytes, box.tensor_part.nbytes, copied_bytes)


def _tell_global(context: Context, kind: str, box: _Box, thread: int, ins: Instruction) -> None:
    """The race detector, of the part of a box that lies inside the tensor."""
    if context.global_races is None or not box.tensor_part.size:
        return
    index = bytes_of(box.tensor_part[(slice(1),) * box.tensor_part.ndim], context.global_memory)
    if kind == WRITE or context.global_races.watches(int(index[0])):
        index = bytes_of(box.tensor_part, context.global_memory)
    context.global_races.access(kind, index, ELEMENT_BYTES, np.full(len(index), thread), ins)


_RANK = r"\.async\.bulk\.tensor\.(?P<rank>[1-5])d"
_LOAD = _RANK + r"\.shared::(?:cluster|cta)\.global(?:\.tile)?\.mbarrier::complete_tx::bytes(?:\.L2::cache_hint)?"
_STORE = _RANK + r"\.global\.shared::cta(?:\.tile)?\.bulk_group"


@instruction("cp", _LOAD, kind="memory", pure=False, writes=0)
def load(context: Context, ins: Instruction, fields: Fields):
    """`[destination], [map, {coordinates}], [mbarrier]{, cache policy}`; outside the tensor are zeros, which count as copied too."""
    boxes = _Boxes(context, ins, ins.operands[1], ins.operands[0], int(fields["rank"]))
    barrier_address, barriers, async_races = (
        context.address(ins.operands[2]),
        mbarriers_of(context),
        context.async_races,
    )

    def run(active: ActiveThreads) -> None:
        places = active.select(barrier_address.base).astype(np.int64) + barrier_address.offset
        for (thread, box), offset in zip(boxes(active), places.tolist()):
            index = int(context.shared.base[thread]) + offset
            barrier = barriers.find(index, thread, ins)
            agent = 0
            if async_races is not None:
                block = int(context.threads.block_of[thread])
                agent = async_races.copies(block, offset)
                if not barrier.fenced:
                    context.races.report(
                        ins,
                        f"the tensor copy engine uses the mbarrier at byte {offset} with no fence after its initialization",
                    )
                async_races.write(agent, thread, box.granules, ins, block)
            _tell_global(context, READ, box, thread, ins)
            tile = np.zeros(box.map.box[::-1], np.uint16)
            tile[box.inside] = box.tensor_part
            context.shared.elements(_CHUNK)[box.chunks] = tile.reshape(-1).view(np.complex128)
            boxes.count(box, box.map.box_bytes)
            barriers.complete(index, barrier, box.map.box_bytes, agent)

    return run


@dataclass
class _StoreGroups:
    """Tensor stores of one thread whose shared memory it has not yet waited for: the times of its groups, and whether one is open."""

    committed: list[int] = field(default_factory=list)
    open: bool = False


class TensorStores:
    """Tensor stores of one machine that may still read shared memory, by thread."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.groups: dict[int, _StoreGroups] = {}
        self._last: Instruction | None = None
        if context.races is not None:
            context.at_exit.append(self._leave)

    def issue(self, thread: int, ins: Instruction) -> None:
        self.groups.setdefault(thread, _StoreGroups()).open = True
        self._last = ins

    def commit(self, active: ActiveThreads) -> None:
        order = None if self.context.races is None else self.context.races.synchronize()
        for thread in active.index.tolist():
            groups = self.groups.setdefault(thread, _StoreGroups())
            groups.committed.append(0 if order is None else order.now)
            groups.open = False
        if order is not None:
            order.now += 1

    def wait(self, active: ActiveThreads, pending: int) -> None:
        for thread in active.index.tolist():
            groups = self.groups.get(thread)
            if groups is None or len(groups.committed) <= pending:
                continue
            last = groups.committed[len(groups.committed) - pending - 1]
            del groups.committed[: len(groups.committed) - pending]
            if self.context.races is not None:
                warp = thread // WARP
                self.context.races.synchronize().learn(np.array([warp]), self.context.async_races.stores(warp), last)

    def _leave(self, active: ActiveThreads) -> None:
        """Shared memory may be another block's as soon as a block has exited."""
        for thread, groups in self.groups.items():
            if (groups.open or groups.committed) and active.full_mask[thread]:
                who = self.context.threads.describe(thread)
                self.context.races.report(self._last, f"{who} exits before its tensor store has read its memory")


def _stores(context: Context) -> TensorStores:
    return context.cached("tensor stores", lambda: TensorStores(context))


@instruction("cp", _STORE, kind="memory", pure=False, writes=0)
def store(context: Context, ins: Instruction, fields: Fields):
    """`[map, {coordinates}], [source]`. What lies outside the tensor is not written."""
    boxes = _Boxes(context, ins, ins.operands[0], ins.operands[1], int(fields["rank"]))
    stores, async_races = _stores(context), context.async_races

    def run(active: ActiveThreads) -> None:
        for thread, box in boxes(active):
            if async_races is not None:
                async_races.read(async_races.stores(thread // WARP), np.array([thread]), box.granules, ins)
            tile = context.shared.elements(_CHUNK)[box.chunks].view(np.uint16).reshape(box.map.box[::-1])
            _tell_global(context, WRITE, box, thread, ins)
            box.tensor_part[...] = tile[box.inside]
            boxes.count(box, 0)
            stores.issue(thread, ins)

    return run


@instruction("cp", r"\.async\.bulk\.commit_group", kind="other", pure=False, writes=0)
def commit(context: Context, ins: Instruction, fields: Fields):
    return _stores(context).commit


@instruction("cp", r"\.async\.bulk\.wait_group(?:\.read)?", kind="other", pure=False, writes=0)
def wait(context: Context, ins: Instruction, fields: Fields):
    """With and without `.read` are the same here: the machine has written global memory by then."""
    stores, pending = _stores(context), int(ins.operands[0], 0)
    return lambda active: stores.wait(active, pending)


@instruction("prefetch", r"\.tensormap", kind="other", pure=False, writes=0)
def prefetch(context: Context, ins: Instruction, fields: Fields):
    maps, address = _maps(context), context.source(ins.operands[0].strip("[] "), _U64)

    def run(active: ActiveThreads) -> None:
        for value in np.unique(active.select(address)).tolist():
            maps.at(value, ins)

    return run
