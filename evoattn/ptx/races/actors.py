"""Names of those who access shared memory: threads, warps acting as one, agents of the asynchronous proxy."""

from collections.abc import Sequence

from evoattn.ptx.program.threads import Threads
from evoattn.ptx.races.happens_before import HappensBefore


class Actors:
    """Of one machine; `agents` has the name of each agent of a cluster, and may be changed."""

    def __init__(self, threads: Threads, order: HappensBefore, agents: Sequence[str]) -> None:
        self.threads, self.order, self.agents = threads, order, list(agents)

    def name_of_column(self, column: int) -> str:
        """The reader that a column of the table of reads stands for."""
        if column >= self.threads.cluster_warps:
            return self.agents[column - self.threads.cluster_warps]
        rank, warp = divmod(column, self.threads.block_warps)
        return f"warp {warp}" + (f" of rank {rank}" if self.threads.cluster > 1 else "")

    def name(self, actor: int) -> str:
        """An actor; `HappensBefore` says which numbers are whose."""
        if actor >= self.order.first_agent:
            return self.agents[actor - self.order.first_agent]
        if actor >= self.threads.count:
            return self.name_of_column((actor - self.threads.count) % self.threads.cluster_warps)
        rank = f" of rank {self.threads.block_of[actor] % self.threads.cluster}" if self.threads.cluster > 1 else ""
        return f"thread {self.threads.in_block[actor]}{rank}"

    def block_of(self, actor: int) -> int:
        """The number in the grid of an actor's block."""
        return int(self.order.warp_of[actor]) // self.threads.block_warps + self.threads.first_block
