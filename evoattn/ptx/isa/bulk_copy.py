"""cp.async.bulk.tensor (sm_90): the tensor copy engine moves boxes between global and shared memory, one thread asking
for each.

A copy is carried out when it is asked for, which is as early as a device may do it; that nobody looks too early, or
overwrites what is not yet read, is for `async_proxy.py` to see.

Sums in global memory a device adds up between the asking and the end of its thread's wait for them. Here that is at
once, or, with `late_blocks`, as late as may be: a block that tells others too early has its sums behind theirs then,
and bits differ."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from evoattn.ptx.errors import AsyncFault, MemoryFault, unsupported
from evoattn.ptx.isa.dispatch import Action, Fields, instruction
from evoattn.ptx.memory.address_space import PARAMETER_WINDOW
from evoattn.ptx.memory.tensor_map import BYTES, ELEMENT_BYTES, TiledMap, decode
from evoattn.ptx.program.kernel import (
    Instruction,
    Lanes,
    Numbers,
    group_count,
    parse_type,
    split_operands,
    vector_parts,
)
from evoattn.ptx.program.threads import WARP, ActiveThreads
from evoattn.ptx.races.access import READ, WRITE
from evoattn.ptx.races.global_accesses import bytes_of
from evoattn.ptx.state.context import Context
from evoattn.ptx.state.mbarriers import mbarriers_of

CHUNK, _ROW = 16, 128
"""Bytes: what swizzling moves in one piece, and the alignment of a box that is not swizzled (PTX ISA, tensor
swizzling)."""
_S32, _U64 = parse_type("s32"), parse_type("u64")


@lru_cache(maxsize=256)
def swizzled_chunks(count: int, swizzle_bytes: int) -> Lanes:
    """Where the 16-byte chunks of a box go, counted from its start.

    Bits 4 … of the byte address are XORed with bits 7 …: one bit for a swizzle of 32 bytes, two for 64, three for 128.
    """
    chunk = np.arange(count)
    return chunk if not swizzle_bytes else chunk ^ (chunk >> 3 & swizzle_bytes // CHUNK - 1)


class TensorMaps:
    """The tensor maps among a kernel's parameters, by where they lie."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._found: dict[int, tuple[TiledMap, Lanes | None]] = {}

    def at(self, address: int, ins: Instruction) -> tuple[TiledMap, Lanes | None]:
        """The map at a generic address or one of parameter space, and the tensor in memory, outermost dimension first;
        None of one that may reach outside of its buffer."""
        start = address - PARAMETER_WINDOW if address >= PARAMETER_WINDOW else address
        if start not in self._found:
            raw = self.context.parameters[start : start + BYTES].tobytes()
            found = decode(raw) if len(raw) == BYTES else None
            if found is None:
                raise AsyncFault(f"The address {address:#x} is of no tensor map among the parameters, in {ins}.")
            if found.swizzle_bytes and found.box[0] * ELEMENT_BYTES != found.swizzle_bytes:
                raise unsupported(ins, "a box narrower than its swizzle")
            self._found[start] = found, found.view(self.context.global_memory) if found.bounded else None
        return self._found[start]


def tensor_maps(context: Context) -> TensorMaps:
    return context.cached("tensor maps", lambda: TensorMaps(context))


@dataclass(frozen=True)
class Box:
    """One box to copy: where it is in shared memory, and the part of it that lies inside the tensor."""

    map: TiledMap
    chunks: Numbers
    granules: slice
    inside: tuple[slice, ...]
    """Of the box, outermost dimension first."""
    tensor_part: Lanes


class Boxes:
    """The operands of one instruction: `[map, {coordinates}]` and an address in shared memory."""

    def __init__(self, context: Context, ins: Instruction, map_operand: str, shared_operand: str, rank: int) -> None:
        self.context, self.ins, self.maps = context, ins, tensor_maps(context)
        map_address, coordinates = split_operands(map_operand.strip("[] "))
        self.map_address = context.source(map_address, _U64)
        self.coordinates = [context.source(c, _S32) for c in vector_parts(coordinates)]
        if len(self.coordinates) != rank:
            raise unsupported(ins, f"{len(self.coordinates)} coordinates")
        self.shared_address = context.address(shared_operand)

    def __call__(self, active: ActiveThreads) -> list[tuple[int, Box]]:
        """(thread, its box) of each active thread."""
        places = active.select(self.shared_address.base).astype(np.int64) + self.shared_address.offset
        columns = [active.select(c).tolist() for c in self.coordinates]
        maps = active.select(self.map_address).tolist()
        return [
            (thread, self._box(thread, self.maps.at(address, self.ins), place, where))
            for thread, address, place, *where in zip(active.index.tolist(), maps, places.tolist(), *columns)
        ]

    def _box(self, thread: int, found: tuple[TiledMap, Lanes | None], place: int, where: list[int]) -> Box:
        tiled, tensor = found
        shared = self.context.shared
        if len(where) != len(tiled.shape):
            raise AsyncFault(
                f"A tensor map of {len(tiled.shape)} dimensions is used with {len(where)} coordinates in {self.ins}."
            )
        alignment = 8 * tiled.swizzle_bytes or _ROW
        if place % alignment:
            raise AsyncFault(
                f"{self.context.threads.describe(thread)} has a box at byte {place - shared.first} of shared memory, "
                f"no multiple of {alignment} as a swizzle of {tiled.swizzle_bytes} bytes needs, in {self.ins}."
            )
        size = tiled.box_bytes
        if place < shared.first or place + size > shared.limit:
            raise MemoryFault(
                f"{self.context.threads.describe(thread)} has a box of {size} bytes at byte {place - shared.first} of "
                f"shared memory, outside its {shared.limit - shared.first} bytes, in {self.ins}."
            )
        start = int(shared.base[thread]) + place
        shift = 0 if self.context.races is None else self.context.races.shared.shift
        # Part of the box inside the tensor, a dimension at a time.
        lows = [min(max(-c, 0), side) for c, side in zip(where, tiled.box)]
        highs = [max(min(n - c, side), low) for c, n, side, low in zip(where, tiled.shape, tiled.box, lows)]
        inside = tuple(slice(low, high) for low, high in zip(lows, highs))[::-1]
        slices = tuple(slice(max(c + low, 0), max(c + high, 0)) for c, low, high in zip(where, lows, highs))[::-1]
        part = tiled.part(self.context.global_memory, slices) if tensor is None else tensor[slices]
        chunks = start // CHUNK + swizzled_chunks(size // CHUNK, tiled.swizzle_bytes)
        return Box(tiled, chunks, slice(start >> shift, start + size >> shift), inside, part)

    def count(self, box: Box, copied_bytes: int) -> None:
        """Tell the counters."""
        traffic = self.context.traffic
        if traffic is not None:
            traffic.tensor_copy(box.map.box_bytes, box.tensor_part.nbytes, copied_bytes)


def tell_global(context: Context, kind: str, box: Box, thread: int, ins: Instruction) -> None:
    """The race detector, of the part of a box that lies inside the tensor."""
    if context.races is None or not box.tensor_part.size:
        return
    index = bytes_of(box.tensor_part[(slice(1),) * box.tensor_part.ndim], context.global_memory)
    if kind == WRITE or context.races.grid.watches(int(index[0])):
        index = bytes_of(box.tensor_part, context.global_memory)
    context.races.grid.access(kind, index, ELEMENT_BYTES, np.full(len(index), thread), ins)


LATE = 3
"""Every third block adds up late: of sums of two, bits are the same in either order."""


@dataclass
class _StoreGroups:
    """Of one thread: the times of its groups whose shared memory it has not yet waited for, whether one is open, how
    many it has ended, and sums that are not yet added up, each with its group."""

    committed: list[int] = field(default_factory=list)
    open: bool = False
    ended: int = 0
    sums: list[tuple[int, Callable[[], None]]] = field(default_factory=list)

    def add_up(self, groups: int | None = None) -> None:
        """The sums of the first so many groups, or all."""
        while self.sums and (groups is None or self.sums[0][0] < groups):
            self.sums.pop(0)[1]()


class TensorStores:
    """Tensor stores of one machine that may still read shared memory, by thread."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.groups: dict[int, _StoreGroups] = {}
        self._last: Instruction | None = None
        context.at_exit.append(self._leave)

    def issue(self, thread: int, ins: Instruction, add: Callable[[], None] | None = None) -> None:
        """A thread asks for a store, or for a sum, which `add` carries out."""
        groups = self.groups.setdefault(thread, _StoreGroups())
        groups.open = True
        if add is not None and self._is_late(thread):
            groups.sums.append((groups.ended, add))
        elif add is not None:
            add()
        self._last = ins

    def _is_late(self, thread: int) -> bool:
        return self.context.late_blocks and int(self.context.threads.block_of[thread]) % LATE == 0

    def commit(self, active: ActiveThreads) -> None:
        order = None if self.context.races is None else self.context.races.synchronize()
        for thread in active.index.tolist():
            groups = self.groups.setdefault(thread, _StoreGroups())
            groups.committed.append(0 if order is None else order.now)
            groups.open = False
            groups.ended += 1
        if order is not None:
            order.now += 1

    def wait(self, active: ActiveThreads, pending: int, whole: bool) -> None:
        """For all groups but the newest `pending`: until they are done, `whole`, or have read."""
        for thread in active.index.tolist():
            groups = self.groups.get(thread)
            if groups is not None and whole:
                groups.add_up(groups.ended - pending)
            if groups is None or len(groups.committed) <= pending:
                continue
            last = groups.committed[len(groups.committed) - pending - 1]
            del groups.committed[: len(groups.committed) - pending]
            if self.context.races is not None:
                races, warp = self.context.races, thread // WARP
                left = self.context.alive.reshape(-1, WARP)[warp]
                races.synchronize().learn_alone(thread, left, races.proxy.stores(warp), last)

    def _leave(self, active: ActiveThreads) -> None:
        """Sums are added up; shared memory may be another block's as soon as a block has exited."""
        races = self.context.races
        for thread, groups in self.groups.items():
            if not active.full_mask[thread]:
                continue
            groups.add_up()
            if races is not None and self._last is not None and (groups.open or groups.committed):
                who = self.context.threads.describe(thread)
                races.shared.report(self._last, f"{who} exits before its tensor store has read its memory")


def tensor_stores(context: Context) -> TensorStores:
    return context.cached("tensor stores", lambda: TensorStores(context))


_RANK = r"\.async\.bulk\.tensor\.(?P<rank>[1-5])d"
_LOAD = _RANK + r"\.shared::(?:cluster|cta)\.global(?:\.tile)?\.mbarrier::complete_tx::bytes(?:\.L2::cache_hint)?"
_STORE = _RANK + r"\.global\.shared::cta(?:\.tile)?\.bulk_group"


@instruction("cp", _LOAD, kind="memory", pure=False, writes=0)
def load(context: Context, ins: Instruction, fields: Fields) -> Action:
    """`[destination], [map, {coordinates}], [mbarrier]{, cache policy}`; outside the tensor are zeros, which count as
    copied too."""
    boxes = Boxes(context, ins, ins.operands[1], ins.operands[0], int(fields["rank"]))
    barrier_address, barriers, races = context.address(ins.operands[2]), mbarriers_of(context), context.races

    def run(active: ActiveThreads) -> None:
        places = active.select(barrier_address.base).astype(np.int64) + barrier_address.offset
        for (thread, box), offset in zip(boxes(active), places.tolist()):
            index = int(context.shared.base[thread]) + offset
            barrier = barriers.find(index, thread, ins)
            agent = 0
            if races is not None and barrier.order is not None:
                block = int(context.threads.block_of[thread])
                agent = races.proxy.copies(block, barrier.offset)
                if not barrier.fenced:
                    races.shared.report(
                        ins,
                        f"the tensor copy engine uses the mbarrier at byte {barrier.offset} with no fence after its "
                        "initialization",
                    )
                races.proxy.write(agent, thread, box.granules, ins, block)
                barrier.order.require_end(thread, ins)
            tell_global(context, READ, box, thread, ins)
            tile = np.zeros(box.map.box[::-1], np.uint16)
            tile[box.inside] = box.tensor_part
            context.shared.elements(CHUNK)[box.chunks] = tile.reshape(-1).view(np.complex128)
            boxes.count(box, box.map.box_bytes)
            barriers.complete(barrier, box.map.box_bytes, agent)

    return run


@instruction("cp", _STORE, kind="memory", pure=False, writes=0)
def store(context: Context, ins: Instruction, fields: Fields) -> Action:
    """`[map, {coordinates}], [source]`. What lies outside the tensor is not written."""
    boxes = Boxes(context, ins, ins.operands[0], ins.operands[1], int(fields["rank"]))
    stores, races = tensor_stores(context), context.races

    def run(active: ActiveThreads) -> None:
        for thread, box in boxes(active):
            if races is not None:
                races.proxy.read(races.proxy.stores(thread // WARP), np.array([thread]), box.granules, ins)
            tile = context.shared.elements(CHUNK)[box.chunks].view(np.uint16).reshape(box.map.box[::-1])
            tell_global(context, WRITE, box, thread, ins)
            box.tensor_part[...] = tile[box.inside]
            boxes.count(box, 0)
            stores.issue(thread, ins)

    return run


@instruction("cp", r"\.async\.bulk\.commit_group", kind="other", pure=False, writes=0)
def commit(context: Context, ins: Instruction, fields: Fields) -> Action:
    return tensor_stores(context).commit


@instruction("cp", r"\.async\.bulk\.wait_group(?P<read>\.read)?", kind="other", pure=False, writes=0)
def wait(context: Context, ins: Instruction, fields: Fields) -> Action:
    """With `.read` sums may still be added up later; stores are done when they are asked for."""
    stores, pending, whole = tensor_stores(context), group_count(ins.operands[0]), not fields["read"]
    return lambda active: stores.wait(active, pending, whole)


@instruction("prefetch", r"\.tensormap", kind="other", pure=False, writes=0)
def prefetch(context: Context, ins: Instruction, fields: Fields) -> Action:
    maps, address = tensor_maps(context), context.source(ins.operands[0].strip("[] "), _U64)

    def run(active: ActiveThreads) -> None:
        for value in np.unique(active.select(address)).tolist():
            maps.at(value, ins)

    return run
