"""Addresses in the shared memory of a cluster, and stores into it that complete on an mbarrier (sm_90)."""

import numpy as np

from evoattn.ptx.errors import AsyncFault
from evoattn.ptx.isa.dispatch import Action, Fields, instruction
from evoattn.ptx.isa.locator import Locator
from evoattn.ptx.memory.address_space import RANK_SHIFT, SHARED_WINDOW, as_elements
from evoattn.ptx.program.dtypes import parse_type
from evoattn.ptx.program.kernel import Instruction
from evoattn.ptx.program.operands import vector_parts
from evoattn.ptx.program.threads import WARP, ActiveThreads
from evoattn.ptx.state.context import Context
from evoattn.ptx.state.mbarriers import BYTES, mbarriers_of

_U32 = parse_type("u32")


@instruction("mapa", r"(?P<space>\.shared::cluster)?\.(?P<type>u32|u64)", kind="int", pure=False)
def map_address(context: Context, ins: Instruction, fields: Fields) -> Action:
    """`mapa d, address, rank`: what lies at this address of the own block, in the block of that rank; without a space
    all are generic."""
    kind = parse_type(fields["type"])
    target, address = context.destination(ins.operands[0], kind), context.source(ins.operands[1], kind)
    rank = context.source(ins.operands[2], _U32)
    window = 0 if fields["space"] else SHARED_WINDOW

    def run(active: ActiveThreads) -> None:
        own = active.select(address).astype(np.int64) - window
        if ((own < 0) | (own >= context.shared.limit)).any():
            raise AsyncFault(f"An address outside the block's shared memory is mapped in {ins}.")
        ranks = active.select(rank).astype(np.int64)
        if (ranks >= context.threads.cluster).any():
            raise AsyncFault(
                f"An address is mapped to rank {ranks.max()} in a cluster of {context.threads.cluster} blocks in {ins}."
            )
        target[active.index] = own + (ranks + 1 << RANK_SHIFT) + window

    return run


_STORE = (
    r"\.async(?:\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes"
    r"(?:\.v(?P<vector>2|4))?\.(?P<type>[bus](?:32|64)|f32|f64)"
)


@instruction("st", _STORE, kind="memory", pure=False, writes=0)
def store(context: Context, ins: Instruction, fields: Fields) -> Action:
    """`[destination], values, [mbarrier]`, both in one block of the cluster.

    The bytes are written when they are asked for, as early as a device may; that nobody reads them before the
    mbarrier's phase has ended is for `async_proxy.py` to see. A warp stores as one."""
    kind = parse_type("b" + fields["type"][1:])
    sources = [context.source(o, kind) for o in vector_parts(ins.operands[1])]
    size = kind.bits // 8 * len(sources)
    destination = Locator(context, ins, ins.operands[0], "shared::cluster", size, None)
    places = Locator(context, ins, ins.operands[2], "shared::cluster", BYTES, None)
    barriers, races, stride = mbarriers_of(context), context.races, context.shared.stride

    def run(active: ActiveThreads) -> None:
        [(memory, index, _)], [(_, barrier_at, _)] = destination(active), places(active)
        if (index // stride != barrier_at // stride).any():
            raise AsyncFault(f"The destination and the mbarrier lie in different blocks in {ins}.")
        keys = np.stack([active.index // WARP, barrier_at])
        for warp, at in np.unique(keys, axis=1).T.tolist():
            chosen = (keys[0] == warp) & (keys[1] == at)
            barrier = barriers.find(at, int(active.index[int(chosen.argmax())]), ins)
            agent = 0
            if races is not None:
                agent = races.proxy.copies(at // stride, context.shared.byte(at), "asynchronous stores")
                shift, count = races.shared.shift, max(size >> races.shared.shift, 1)
                granules = ((index[chosen] >> shift)[:, None] + np.arange(count)).ravel()
                races.proxy.write(agent, context.count + warp, granules, ins, at // stride, proxied=False)
            barriers.complete(barrier, size * int(np.count_nonzero(chosen)), agent, to_cluster=True)
        values = np.stack([active.select(s) for s in sources], axis=1)
        memory.elements(size)[index // size] = as_elements(np.ascontiguousarray(values).reshape(-1), size)

    return run
