"""One mbarrier (sm_90)."""

from dataclasses import dataclass

from evoattn.ptx.program.kernel import Mask
from evoattn.ptx.races.happens_before import Knowledge
from evoattn.ptx.races.phases import Phases


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
