"""Threads that poll memory in vain, and blocks that begin late, for which they may be waiting."""

from evoattn.ptx.errors import Deadlock
from evoattn.ptx.isa.flow import Flow
from evoattn.ptx.program.arrays import Mask
from evoattn.ptx.program.kernel import Instruction
from evoattn.ptx.state.context import Context

MAX_POLLS_IN_VAIN = 1000
"""Runs of polling loops, one after another with no other in between, after which they are taken to be endless."""
LATE_POLLS, LATE_COUNTED_POLLS = 10, 5000
"""The same, after which late blocks begin; the second of loops that count, which are to give up first
(`templates/flash_wgmma/sum_parts.cuh` looks 4,096 times)."""


def _hands_over(ins: Instruction) -> bool:
    """Whether it may tell other clusters something: atomics on shared memory do not."""
    return ins.opcode.split(".")[0] in ("atom", "red") and ".shared" not in ins.opcode


class Polls:
    """What one execution has polled in vain, and who has yet to begin."""

    def __init__(self, context: Context, flow: Flow, late: bool) -> None:
        """`late`: of the clusters of a kernel that hands something over between blocks every third one begins last."""
        self.context, self.flow = context, flow
        self._in_vain = 0
        threads = context.threads
        self._late: Mask | None = None
        if late and threads.block_count > threads.cluster and any(map(_hands_over, context.kernel.instructions)):
            self._late = context.alive & (threads.block_of // threads.cluster % 3 == 0)

    def first(self) -> Mask:
        """Who begins at once."""
        return self.context.alive if self._late is None else self.context.alive & ~self._late

    def begin(self) -> list[tuple[int, Mask]]:
        """The late blocks and the pc at which they begin, as nobody else can go on; empty if they have begun."""
        late, self._late, self._in_vain = self._late, None, 0
        return [] if late is None else [(0, late)]

    def count(self, pc: int) -> list[tuple[int, Mask]]:
        """Told of each run, returns the late blocks when the others have polled for long. Raises `Deadlock` when all
        who are left have polled in vain."""
        self._in_vain = self._in_vain + 1 if pc in self.flow.polls else 0
        if self._late is not None:
            return self.begin() if self._in_vain > self._patience(pc) else []
        if self._in_vain > MAX_POLLS_IN_VAIN:
            raise Deadlock(
                f"{self.context.kernel.name} is deadlocked: threads poll from {self.context.kernel.instructions[pc]} "
                "on, and all others wait or have ended."
            )
        return []

    def _patience(self, pc: int) -> int:
        if pc not in self.flow.polls:
            return LATE_POLLS
        loop = self.context.kernel.instructions[pc : self.flow.end_of_run(pc)]
        return LATE_COUNTED_POLLS if any(ins.opcode.startswith(("add.", "sub.")) for ins in loop) else LATE_POLLS
