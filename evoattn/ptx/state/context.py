"""What instructions work on: registers, memories, and those who watch them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar, cast

import numpy as np

from evoattn.ptx.errors import DivergentCollective
from evoattn.ptx.memory.address_space import RESERVED_SMEM, BankedMemory
from evoattn.ptx.memory.global_buffers import GlobalMemory
from evoattn.ptx.memory.traffic import Traffic
from evoattn.ptx.program.kernel import Instruction, Kernel, Lanes, Mask, Numbers
from evoattn.ptx.program.threads import WARP, ActiveThreads, Threads
from evoattn.ptx.races.access import shared_granule
from evoattn.ptx.races.async_proxy import WARPGROUP_WARPS, AsyncRaces, agent_names
from evoattn.ptx.races.global_accesses import GlobalRaces
from evoattn.ptx.races.happens_before import Knowledge
from evoattn.ptx.races.phases import Phases
from evoattn.ptx.races.shared_accesses import SharedRaces
from evoattn.ptx.races.watch import Races, RemoteAccesses
from evoattn.ptx.state.registers import Binder


@dataclass
class Mbarrier:
    """One in the memory of one block. What is handed over is empty where races are not looked for."""

    index: int
    """Of its first byte in the machine's shared memory."""
    offset: int
    """Of its first byte in its block's."""
    count: int
    pending: int
    maker: int
    made_at: int
    known_by: Mask
    """Bool over threads: those that are known to come after the initialization."""
    handed_over: Knowledge
    """By those that arrived in this phase."""
    known: Knowledge
    """What those learn who see that the last phase has ended."""
    cluster_over: Knowledge
    """As `handed_over`, by other blocks and stores for the cluster: what only a wait of cluster scope acquires."""
    cluster_known: Knowledge
    tx_bytes: int = 0
    phase: int = 0
    order: Phases | None = None
    fenced: bool = False
    fenced_for_cluster: bool = False
    announced: bool = False
    """A relaxed arrival at the cluster's barrier came after that fence."""
    told_cluster: bool = False
    """And the barrier was complete."""


T = TypeVar("T")
POISON = 0x7FFE
"""Fills shared memory before it is written, if the launch asks for nothing else: a NaN in every float type, and neither
the one that hardware computes (0x7FFF…) nor bytes of 0xFF, with which callers like to mark what was never written."""
DEFAULT_STEP_LIMIT = 1_000_000
"""Instructions of one batch of blocks: some seconds. Right kernels take 273,000 at most in the cases that we know."""


@dataclass(frozen=True)
class RunOptions:
    """What a run looks for, and how it provokes it: as `run_launch` says of each."""

    detect_races: bool = True
    count: bool = True
    step_limit: int = DEFAULT_STEP_LIMIT
    poison: int = POISON
    late_blocks: bool = False


class NotConverged(Exception):
    """A warp-wide instruction met by a part of a warp, `partial` (bool over threads): the scheduler lets that part wait
    for the rest."""

    def __init__(self, ins: Instruction, partial: Mask) -> None:
        super().__init__(str(ins))
        self.ins, self.partial = ins, partial


@lru_cache(maxsize=16)
def _is_asynchronous(kernel: Kernel) -> bool:
    """Whether others than threads may access its shared memory: bulk copies and matrix products."""
    return any(ins.opcode.startswith(("mbarrier.", "cp.async.bulk.", "wgmma.")) for ins in kernel.instructions)


class Context(Binder):
    """Everything of one machine that a prepared instruction may touch."""

    def __init__(
        self,
        kernel: Kernel,
        threads: Threads,
        memory: GlobalMemory,
        parameters: Lanes,
        dynamic_smem_bytes: int,
        global_races: GlobalRaces | None,
        options: RunOptions,
    ) -> None:
        """Races are looked for if `global_races` is given."""
        self.poison, self.late_blocks = options.poison, options.late_blocks
        symbols = dict(kernel.shared) | dict.fromkeys(kernel.dynamic_symbols, kernel.dynamic_offset)
        symbols = {name: RESERVED_SMEM + offset for name, offset in symbols.items()}
        super().__init__(kernel, threads, symbols, parameters)
        smem_bytes = kernel.dynamic_offset + dynamic_smem_bytes if kernel.dynamic_symbols else kernel.static_smem_bytes
        everybody = np.arange(threads.count)
        self.global_memory = memory
        self.shared = BankedMemory(
            "shared", threads, threads.block_of, threads.block_count, smem_bytes, options.poison, RESERVED_SMEM
        )
        self.local = BankedMemory(
            "local", threads, everybody, threads.count if kernel.local_bytes else 1, kernel.local_bytes, 0
        )
        self.parameter_memory = BankedMemory(
            "parameter", threads, np.zeros(threads.count, np.int64), 1, len(parameters), 0
        )
        self.parameter_memory.data[: len(parameters)] = parameters
        agents, readers = agent_names(threads) if _is_asynchronous(kernel) else ([], 0)
        self.races: Races | None = None
        if global_races is not None:
            shared = SharedRaces(threads, self.shared, shared_granule(kernel), agents, readers, global_races.grid_warps)
            self.races = Races(shared, AsyncRaces(shared), global_races)
            global_races.attach(threads, shared.order)
        self.at_exit: list[Callable[[ActiveThreads], None]] = []
        """Called when threads exit, before they are gone."""
        self.before_run: list[Callable[[int, int, ActiveThreads], None]] = []
        """Called before threads execute a straight run of instructions, with the pcs of its start and end."""
        self.at_phase_end: list[Callable[[Mbarrier], None]] = []
        """Called with each mbarrier whose phase has ended."""
        self.apart: Mask | None = None
        """By warp: a part of it has gone its own way, and nothing has brought its threads together since; None if no
        warp has."""
        self.traffic = Traffic() if options.count else None
        self.alive = threads.exists.copy()
        self.alive_version = 0
        self.partly_gone = False
        """Whether of some warp a part of the threads has exited."""
        self.remote = RemoteAccesses(threads, self.shared.stride, self.alive, self.races.shared if self.races else None)
        self._cached: dict[object, object] = {}

    def cached(self, key: object, make: Callable[[], T]) -> T:
        """What a group of instructions shares on this machine, made by the first that asks for it."""
        if key not in self._cached:
            self._cached[key] = make()
        return cast(T, self._cached[key])  # every key is asked for with one `make` alone

    def release(self) -> None:
        """The machine has ended: nobody is told of anything any more. What refers to itself through this context is
        freed at once."""
        self._cached.clear()
        self.before_run.clear()
        self.at_exit.clear()
        self.at_phase_end.clear()

    def require_whole_warps(self, active: ActiveThreads, ins: Instruction, members: Numbers | None = None) -> None:
        """Raise `NotConverged` unless every warp with an active thread has all its threads that are left active.

        `members` (uint32, over threads or 0-d) is the member mask: only the threads that it names need be there. Of an
        `.aligned` instruction threads that have exited are missed too (PTX ISA, mma, ldmatrix and wmma).
        Raises `DivergentCollective` where `.aligned` asks for more than that all of them come."""
        if self.apart is not None:
            self.require_together(active, ins)
        if self.partly_gone and ".aligned" in ins.opcode:
            self.require_every_lane(active, ins)
        if active.all or active.whole_warps_at == self.alive_version:
            return
        missing = self.alive.reshape(-1, WARP) & ~active.by_warp
        missing &= active.by_warp.any(1, keepdims=True)
        if members is not None and missing.any():
            wanted = np.broadcast_to(members, (self.count,)).reshape(-1, WARP)
            named = np.bitwise_or.reduce(np.where(active.by_warp, wanted, np.uint32(0)), axis=1)
            missing &= (named[:, None] >> np.arange(WARP, dtype=np.uint32) & np.uint32(1)).astype(np.bool_)
        elif members is None and not missing.any():
            active.whole_warps_at = self.alive_version
        if missing.any():
            partial = active.by_warp & missing.any(1, keepdims=True)
            raise NotConverged(ins, partial.ravel())

    def require_every_lane(self, active: ActiveThreads, ins: Instruction) -> None:
        """As `require_whole_warps`, where threads that have exited are missed too."""
        self.require_together(active, ins)
        missing = self.threads.exists.reshape(-1, WARP) & ~active.by_warp
        missing &= active.by_warp.any(1, keepdims=True)
        if missing.any():
            partial = active.by_warp & missing.any(1, keepdims=True)
            raise NotConverged(ins, partial.ravel())

    def require_whole_warpgroups(self, active: ActiveThreads, ins: Instruction) -> None:
        """Raise `NotConverged` unless all threads of every warpgroup with an active thread are active.

        A warpgroup is four warps from a multiple of four on in their block."""
        if self.apart is not None:
            self.require_together(active, ins)
        if (active.all and self.threads.block_warps % WARPGROUP_WARPS == 0) or active.whole_warpgroups:
            return
        first = self.threads.in_block // (WARP * WARPGROUP_WARPS)
        group = self.threads.block_of * (int(first[-1]) + 1) + first
        members = np.bincount(group, active.full_mask, minlength=int(group[-1]) + 1)
        partial = active.full_mask & (members != WARP * WARPGROUP_WARPS)[group]
        if partial.any():
            raise NotConverged(ins, partial)
        active.whole_warpgroups = True

    def leave(self, active: ActiveThreads) -> None:
        """These threads exit."""
        self.alive &= active.inactive
        self.alive_version += 1
        left = self.alive.reshape(-1, WARP)
        self.partly_gone = bool((left.any(1) & (left != self.threads.exists.reshape(-1, WARP)).any(1)).any())

    def go_apart(self, active: ActiveThreads) -> None:
        """These threads do something that others of their warps do not do with them."""
        missing: Mask = self.alive.reshape(-1, WARP) & ~active.by_warp
        partial = np.logical_and(active.by_warp.any(1), missing.any(1))
        if partial.any():
            if self.apart is not None:
                partial |= self.apart
            self.apart = partial

    def come_together(self, warps: Numbers) -> None:
        """All threads that are left of these warps have met."""
        if self.apart is not None:
            self.apart[warps] = False
            if not self.apart.any():
                self.apart = None

    def require_together(self, active: ActiveThreads, ins: Instruction) -> None:
        """Raise `DivergentCollective` if `.aligned` finds a warp apart: where the paths of its threads join, a GPU may
        let them go on one after another (PTX ISA, barrier and mma: all threads must execute the same instruction)."""
        if self.apart is None or ".aligned" not in ins.opcode:
            return
        wrong = active.warps[self.apart[active.warps]]
        if len(wrong):
            raise DivergentCollective(
                f"Some threads of the warp of {self.threads.describe(int(wrong[0]) * WARP)} went their own way, and "
                f"nothing (bar.warp.sync) has brought them together again before {ins}."
            )


class Ending:
    """An instruction that the scheduler itself acts on: a branch, an exit, a wait. Each kind is a class of its own."""
