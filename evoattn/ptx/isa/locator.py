"""Where an instruction's addresses lie, in which memory; and who is told of the accesses."""

import numpy as np

from evoattn.ptx.errors import MemoryFault
from evoattn.ptx.memory.address_space import LOCAL_WINDOW, PARAMETER_WINDOW, SHARED_WINDOW, WINDOW_SHIFT, BankedMemory
from evoattn.ptx.memory.global_buffers import GlobalMemory
from evoattn.ptx.program.kernel import Instruction, Lanes, Numbers
from evoattn.ptx.program.threads import ActiveThreads
from evoattn.ptx.races.access import WRITE
from evoattn.ptx.races.watch import Races
from evoattn.ptx.state.context import Context

Located = list[tuple[BankedMemory | GlobalMemory, Lanes, ActiveThreads]]
"""Memory, byte index of each access, its threads."""


class Locator:
    """Turns the addresses of one instruction into places in memories, and tells the watchers."""

    def __init__(
        self,
        context: Context,
        ins: Instruction,
        operand: str,
        space: str,
        size: int,
        kind: str | None,
        by_warp: bool = False,
    ) -> None:
        """`kind` is READ, WRITE or COPY; None keeps the access from the race detectors. `by_warp`: each warp accesses
        as one."""
        self.context, self.ins, self.size, self.kind, self.by_warp = context, ins, size, kind, by_warp
        self.address = context.address(operand)
        memories: dict[str, BankedMemory | GlobalMemory] = {
            "shared": context.shared,
            "shared::cluster": context.shared,
            "local": context.local,
            "param": context.parameter_memory,
            "global": context.global_memory,
        }
        self.space = space
        self.memory = memories.get(space)
        self.memories = memories

    def __call__(self, active: ActiveThreads, displacement: Numbers | None = None) -> Located:
        """`displacement` (bytes, over all threads) is added to the addresses."""
        base = self.address.base
        if displacement is not None:
            base = base + displacement.astype(base.dtype)
        if base.ndim and active.mask is not None:
            base = base[active.index]
        if self.memory is not None:
            return [(self.memory, self._locate(self.space, base, active), active)]
        return self._generic(base, active)

    def _locate(self, space: str, base: Lanes, active: ActiveThreads) -> Lanes:
        if space == "shared::cluster":
            index = self.context.shared.locate_in_cluster(base, self.address.offset, self.size, active, self.ins)
            self.context.remote.note(index, self.kind, active, self.ins)
        else:
            index = self.memories[space].locate(base, self.address.offset, self.size, active, self.ins)
        if space.startswith("shared"):
            if self.context.races is not None and self.kind is not None:
                self.context.races.shared.access(self.kind, index, self.size, active, self.ins, self.by_warp)
            if self.context.traffic is not None:
                self.context.traffic.shared(self.context.shared, index, self.size, active)
        elif space == "global":
            if self.context.races is not None and self.kind is not None:
                self._tell_global(self.context.races, self.kind, index, active)
            if self.context.traffic is not None:
                self.context.traffic.global_access(index, self.size, active)
        return index

    def _tell_global(self, races: Races, kind: str, index: Numbers, active: ActiveThreads) -> None:
        words = self.ins.opcode.split(".")
        if words[0] not in ("ld", "st") or not {"volatile", "relaxed", "acquire", "release"} & set(words):
            races.grid.access(kind, index, self.size, active.index, self.ins)
            return
        races.grid.strong(kind == WRITE, index, self.size, active.index, self.ins)
        if not races.grid.grid_warps:
            return
        races.synchronize()
        wide = bool({"gpu", "sys"} & set(words))
        for thread, place in zip(active.index.tolist(), index.tolist()):
            if kind == WRITE:
                races.grid.order_of_blocks.publish(thread, place, "release" in words and wide, False)
            else:
                races.grid.order_of_blocks.observe(thread, place, "acquire" in words and wide)

    def _generic(self, base: Lanes, active: ActiveThreads) -> Located:
        """By the window that each generic address lies in."""
        base = np.broadcast_to(base, (len(active),)).astype(np.uint64)
        window = base >> WINDOW_SHIFT
        starts = {"global": 0, "shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAMETER_WINDOW}
        located: Located = []
        for number, (space, start) in enumerate(starts.items()):
            inside = window == number
            if not inside.any():
                continue
            whole = inside.all()
            part = active
            if not whole:
                mask = np.zeros(self.context.count, np.bool_)
                mask[active.index[inside]] = True
                part = ActiveThreads(self.context.threads, mask)
            index = self._locate(
                "shared::cluster" if space == "shared" and self.context.threads.cluster > 1 else space,
                (base if whole else base[inside]) - np.uint64(start),
                part,
            )
            located.append((self.memories[space], index, part))
        if int(window.max()) >= len(starts):
            raise MemoryFault(f"An address outside every memory is accessed in {self.ins}.")
        return located
