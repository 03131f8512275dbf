"""cp.async.bulk.tensor (sm_90): the tensor copy engine moves boxes between global and shared memory, one thread asking
for each.

A copy is carried out when it is asked for, which is as early as a device may do it; that nobody looks too early, or
overwrites what is not yet read, is for `async_proxy.py` to see."""

import numpy as np

from evoattn.ptx.isa.dispatch import Action, Fields, instruction
from evoattn.ptx.isa.tensor_boxes import CHUNK, Boxes, tell_global, tensor_maps
from evoattn.ptx.isa.tensor_stores import tensor_stores
from evoattn.ptx.program.dtypes import parse_type
from evoattn.ptx.program.kernel import Instruction
from evoattn.ptx.program.operands import group_count
from evoattn.ptx.program.threads import WARP, ActiveThreads
from evoattn.ptx.races.access import READ, WRITE
from evoattn.ptx.state.context import Context
from evoattn.ptx.state.mbarriers import mbarriers_of

_U64 = parse_type("u64")
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
