"""cp.async.bulk and cp.reduce.async.bulk (sm_90): plain bytes between global and shared memory, one thread asking.

As in `bulk_copy.py`, a copy is carried out when it is asked for; a sum too, or late (`TensorStores`)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from evoattn.ptx.errors import AsyncFault, MemoryFault
from evoattn.ptx.isa.bulk_copy import tensor_stores
from evoattn.ptx.isa.dispatch import Action, Fields, instruction
from evoattn.ptx.program.kernel import Instruction, parse_type
from evoattn.ptx.program.threads import WARP, ActiveThreads
from evoattn.ptx.races.access import READ, WRITE
from evoattn.ptx.state.context import Context
from evoattn.ptx.state.mbarriers import mbarriers_of

PIECE = 16
"""Bytes: addresses and sizes are multiples of it (PTX ISA, cp.async.bulk)."""
FLOAT_BYTES = 4
_U32 = parse_type("u32")
_LOAD = r"\.async\.bulk\.shared::(?:cluster|cta)\.global\.mbarrier::complete_tx::bytes(?:\.L2::cache_hint)?"
_REDUCE = r"\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group(?:\.L2::cache_hint)?\.add\.f32"


_STORE = r"\.async\.bulk\.global\.shared::cta\.bulk_group(?:\.L2::cache_hint)?"


@dataclass(frozen=True)
class _Bytes:
    """What one thread moves: places in the arenas of shared and global memory, and how many bytes."""

    shared: int
    granules: slice
    in_global: int
    size: int


class _Moves:
    """The operands of one instruction: an address in shared memory, one in global memory, a size."""

    def __init__(
        self, context: Context, ins: Instruction, shared_operand: str, global_operand: str, size_operand: str
    ) -> None:
        self.context, self.ins = context, ins
        self.shared, self.in_global = context.address(shared_operand), context.address(global_operand)
        self.size = context.source(size_operand, _U32)

    def __call__(self, active: ActiveThreads) -> Iterator[tuple[int, _Bytes]]:
        """(thread, what it moves) of each active thread. Raises `AsyncFault` and `MemoryFault`."""
        places = (active.select(self.shared.base).astype(np.int64) + self.shared.offset).tolist()
        sizes = active.select(self.size).tolist()
        base, offset = active.select(self.in_global.base), self.in_global.offset
        firsts = self.context.global_memory.locate(base, offset, PIECE, active, self.ins).tolist()
        for i, (thread, place, size) in enumerate(zip(active.index.tolist(), places, sizes)):
            yield thread, self._moved(thread, place, firsts[i], size)

    def _moved(self, thread: int, place: int, first: int, size: int) -> _Bytes:
        shared, memory, who = self.context.shared, self.context.global_memory, self.context.threads.describe(thread)
        if size % PIECE or place % PIECE:
            raise AsyncFault(
                f"{who} moves {size} bytes at byte {place - shared.first} of shared memory: neither may be other than "
                f"a multiple of {PIECE}, in {self.ins}."
            )
        if place < shared.first or place + size > shared.limit:
            raise MemoryFault(
                f"{who} moves {size} bytes at byte {place - shared.first} of shared memory, outside its "
                f"{shared.limit - shared.first} bytes, in {self.ins}."
            )
        if outside := memory.place_outside(first, size):
            raise MemoryFault(f"{who} moves {size} bytes of global memory, which end {outside}, in {self.ins}.")
        start = int(shared.base[thread]) + place
        shift = 0 if self.context.races is None else self.context.races.shared.shift
        return _Bytes(start, slice(start >> shift, start + size >> shift), first, size)

    def count(self, moved: _Bytes, copied_bytes: int) -> None:
        """Tell the counters."""
        if self.context.traffic is not None:
            self.context.traffic.tensor_copy(moved.size, moved.size, copied_bytes)


def _floats(moved: _Bytes) -> np.ndarray:
    """Where the floats of what is moved begin in global memory."""
    return np.arange(moved.in_global, moved.in_global + moved.size, FLOAT_BYTES)


@instruction("cp", _LOAD, kind="memory", pure=False, writes=0)
def load(context: Context, ins: Instruction, fields: Fields) -> Action:
    """`[destination], [source], size, [mbarrier]{, cache policy}`."""
    moves = _Moves(context, ins, ins.operands[0], ins.operands[1], ins.operands[2])
    barrier_address, barriers, races = context.address(ins.operands[3]), mbarriers_of(context), context.races

    def run(active: ActiveThreads) -> None:
        places = active.select(barrier_address.base).astype(np.int64) + barrier_address.offset
        for (thread, moved), offset in zip(moves(active), places.tolist()):
            barrier = barriers.find(int(context.shared.base[thread]) + offset, thread, ins)
            agent = 0
            if races is not None and barrier.order is not None:
                block = int(context.threads.block_of[thread])
                agent = races.proxy.copies(block, barrier.offset)
                races.proxy.write(agent, thread, moved.granules, ins, block)
                barrier.order.require_end(thread, ins)
            if races is not None:
                index = _floats(moved)
                races.grid.access(READ, index, FLOAT_BYTES, np.full(len(index), thread), ins)
            shared = context.shared.elements(1)
            source = context.global_memory.data[moved.in_global : moved.in_global + moved.size]
            shared[moved.shared : moved.shared + moved.size] = source
            moves.count(moved, moved.size)
            barriers.complete(barrier, moved.size, agent)

    return run


def _from_shared(context: Context, ins: Instruction, adds: bool) -> Action:
    """Floats to global memory, where they are added or replace what is there."""
    moves = _Moves(context, ins, ins.operands[1], ins.operands[0], ins.operands[2])
    stores, races = tensor_stores(context), context.races

    def run(active: ActiveThreads) -> None:
        for thread, moved in moves(active):
            if races is not None:
                races.proxy.read(races.proxy.stores(thread // WARP), np.array([thread]), moved.granules, ins)
                index, by = _floats(moved), np.full(moved.size // FLOAT_BYTES, thread)
                if adds:
                    races.grid.strong(True, index, FLOAT_BYTES, by, ins)
                else:
                    races.grid.access(WRITE, index, FLOAT_BYTES, by, ins)
            floats = slice(moved.in_global // FLOAT_BYTES, (moved.in_global + moved.size) // FLOAT_BYTES)
            to = context.global_memory.elements(FLOAT_BYTES)[floats].view(np.float32)
            given = context.shared.elements(1)[moved.shared : moved.shared + moved.size].view(np.float32).copy()
            moves.count(moved, 0)
            stores.issue(thread, ins, partial(np.add, to, given, out=to) if adds else partial(np.copyto, to, given))

    return run


@instruction("cp", _REDUCE, kind="memory", pure=False, writes=0)
def reduce(context: Context, ins: Instruction, fields: Fields) -> Action:
    """`[destination], [source], size{, cache policy}`: each float is added atomically, as `red.relaxed.gpu` does."""
    return _from_shared(context, ins, adds=True)


@instruction("cp", _STORE, kind="memory", pure=False, writes=0)
def store(context: Context, ins: Instruction, fields: Fields) -> Action:
    """`[destination], [source], size{, cache policy}`."""
    return _from_shared(context, ins, adds=False)
