"""Launches that may begin before those before them have ended (sm_90): what a thread touches before it has waited for
them.

A thread must itself have executed `griddepcontrol.wait` before it reads or writes a buffer that an earlier launch
writes, or writes one that an earlier launch reads: that another thread has, and met it at a barrier, does not count,
which asks for more than a device does and costs a kernel one instruction per thread. What an earlier launch writes is
not read-only for all of this one's life: `ld.global.nc` (a load through `const T* __restrict__`) must not read it, not
even after the wait (PTX ISA, ld). `griddepcontrol.launch_dependents` makes nothing visible. Some thread of every such
launch waits: a launch that does not may end before the one before it, and the next would wait for the wrong one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evoattn.ptx.memory.global_buffers import GlobalMemory
from evoattn.ptx.program.kernel import Instruction, Numbers
from evoattn.ptx.program.threads import ActiveThreads, Threads


@dataclass(frozen=True)
class Touched:
    """Numbers of the buffers that launches read and wrote."""

    read: frozenset[int] = frozenset()
    written: frozenset[int] = frozenset()

    def __or__(self, other: Touched) -> Touched:
        return Touched(self.read | other.read, self.written | other.written)


class GridDependency:
    """Checks a launch that overlaps earlier ones for early accesses. `found` has a sentence for each, by pc."""

    def __init__(self, memory: GlobalMemory, before: Touched) -> None:
        self.memory, self.before = memory, before
        self.found: dict[int, str] = {}
        self.somebody_waited = False

    def attach(self, threads: Threads) -> None:
        """These blocks run now."""
        self.threads = threads
        self._waited = np.zeros(threads.count, np.bool_)

    def wait(self, active: ActiveThreads) -> None:
        self._waited |= active.full_mask
        self.somebody_waited = True

    def access(self, writes: bool, index: Numbers, threads: Numbers, ins: Instruction) -> None:
        """Accesses at `index` of the arena, one per thread of the machine."""
        read_only = "nc" in ins.opcode.split(".")
        early = ~self._waited[threads] | read_only
        if not early.any():
            return
        index, threads = index[early], threads[early]
        buffers = self.memory.buffers_at(index)
        for buffer in np.unique(buffers).tolist():
            if buffer in self.before.written or (writes and buffer in self.before.read):
                at = int(np.flatnonzero(buffers == buffer)[0])
                did, does = (
                    "writes" if does_write else "reads" for does_write in (buffer in self.before.written, writes)
                )
                when = (
                    "as if nobody wrote it (.nc), which is so only after the end of"
                    if read_only
                    else "before it has waited (griddepcontrol.wait) for"
                )
                self.found.setdefault(
                    ins.index,
                    (
                        f"{self.threads.describe(int(threads[at]))} {does} global memory "
                        f"{self.memory.describe(int(index[at]))}, {when} an "
                        f"earlier launch that {did} this buffer, in {ins}."
                    ),
                )

    def faults(self, kernel: str) -> list[str]:
        """Sentences, once all blocks have run."""
        if self.found or self.somebody_waited:
            return [text for _, text in sorted(self.found.items())]
        return [
            f"No thread of {kernel} executes griddepcontrol.wait, so that it may end before the launch before it has."
        ]
