"""Runs one kernel launch on the CPU."""

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

import evoattn.ptx.isa.table  # noqa: F401  fills the table of instructions
from evoattn.ptx.errors import ImpossibleLaunch, PtxError, UnsupportedInstruction
from evoattn.ptx.isa.control import Flow, flow_of
from evoattn.ptx.machine.counters import Counters, count_instructions
from evoattn.ptx.machine.scheduler import Scheduler
from evoattn.ptx.memory.global_buffers import GlobalMemory
from evoattn.ptx.program.kernel import Kernel, Numbers
from evoattn.ptx.program.threads import WARP, Threads
from evoattn.ptx.races.global_accesses import GlobalRaces
from evoattn.ptx.races.grid_dependency import Touched
from evoattn.ptx.state.context import Context, RunOptions

MAX_THREADS_A_BLOCK, MAX_CLUSTER_BLOCKS = 1024, 16
MAX_SMEM_BYTES = 232448
"""Most shared memory that a block may have on any GPU (sm_90: 227 KiB; CUDA C++ Programming Guide, compute
capabilities)."""
_BATCH_THREADS, _BATCH_SMEM_BYTES = 4096, 32 << 20
"""Blocks are run together up to these sizes, which keep the arrays in the CPU's caches."""


_watched: WeakKeyDictionary[Kernel, frozenset[str]] = WeakKeyDictionary()
"""Names of the buffers that a launch of the kernel was seen to read and to write."""


@dataclass(frozen=True)
class Execution:
    """What came of a launch. `faults` has one sentence for each; counters are zero where not asked for."""

    faults: tuple[str, ...]
    counters: Counters
    steps: int
    """Instructions executed, each once for all threads that ran it together."""
    touched: Touched = field(default_factory=Touched)
    """What a launch under the race detector read and wrote."""


@dataclass(frozen=True)
class Shape:
    """How many threads are launched, and how they lie together."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_smem_bytes: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    """In blocks."""
    together: int = 1
    """Neighbouring blocks that wait for one another."""

    def check(self, kernel: Kernel) -> None:
        """Raises `ImpossibleLaunch`, or `UnsupportedInstruction` for clusters that the interpreter does not know."""
        grid, block, cluster = self.grid, self.block, self.cluster
        if min(*grid, *block) < 1 or int(np.prod(block)) > MAX_THREADS_A_BLOCK:
            raise ImpossibleLaunch(f"A block of {block} threads in a grid of {grid} blocks cannot be launched.")
        if kernel.max_threads is not None and int(np.prod(block)) > kernel.max_threads:
            raise ImpossibleLaunch(
                f"A block of {block} threads is over the {kernel.max_threads} of the launch bounds of {kernel.name}."
            )
        if (
            min(cluster) < 1
            or any(blocks % size for blocks, size in zip(grid, cluster))
            or int(np.prod(cluster)) > MAX_CLUSTER_BLOCKS
        ):
            raise ImpossibleLaunch(f"A grid of {grid} blocks cannot be launched in clusters of {cluster}.")
        smem_bytes = kernel.static_smem_bytes + self.dynamic_smem_bytes
        if smem_bytes > MAX_SMEM_BYTES:
            raise ImpossibleLaunch(
                f"{kernel.name} asks for {smem_bytes} bytes of shared memory; no GPU gives a block over "
                f"{MAX_SMEM_BYTES}."
            )
        if cluster[1:] != (1, 1):
            raise UnsupportedInstruction(
                f"Clusters of {cluster} blocks, not along x alone, are outside the interpreter's whitelist."
            )


class Machine:
    """One launch of `kernel`. `run` executes it, changing `memory`."""

    def __init__(
        self,
        kernel: Kernel,
        memory: GlobalMemory,
        params: Sequence[object],
        shape: Shape,
        options: RunOptions,
        before: Touched | None,
    ) -> None:
        """`params` are NumPy scalars, arrays or bytes, one per kernel parameter, of exactly its size. `before` is what
        earlier launches touched that may not have ended when this one begins; None if they have.

        Raises `ImpossibleLaunch`, or `UnsupportedInstruction` if the kernel has an instruction outside the whitelist.
        """
        shape.check(kernel)
        self.kernel, self.memory, self.shape, self.options, self.before = kernel, memory, shape, options, before
        self.cluster = shape.cluster[0]
        self._together = math.lcm(self.cluster, shape.together)
        self.parameters = _pack(kernel, params)
        self.flow: Flow = flow_of(kernel)

    def run(self) -> Execution:
        """Run the whole grid. Faults stop the batch of blocks they are in, and the rest is not run.

        A launch that turns out to read and write the same buffer is run again with its reads watched (`GlobalRaces`).
        """
        if self.options.detect_races and self.flow.undefined:
            return Execution((self.flow.undefined,), Counters(), 0)
        blocks = int(np.prod(self.shape.grid))
        smem = self.kernel.dynamic_offset + self.shape.dynamic_smem_bytes
        block_threads = -(-int(np.prod(self.shape.block)) // WARP) * WARP
        at_once = max(1, min(blocks, _BATCH_THREADS // block_threads, _BATCH_SMEM_BYTES // max(smem, 1)))
        at_once = max(at_once // self._together, 1) * self._together
        while True:
            self.memory.load()
            watched = self.memory.numbers_of(_watched.get(self.kernel, frozenset()))
            grid_warps = blocks * block_threads // WARP
            races = None
            if self.options.detect_races:
                races = GlobalRaces(self.kernel, self.memory, grid_warps, watched, self.before)
            execution = self._run_once(at_once, races)
            if execution.faults or races is None or not races.unwatched:
                break
            names = frozenset(self.memory.name_of(i) for i in races.unwatched | watched)
            _watched[self.kernel] = names
        self.memory.store()
        return execution

    def _run_once(self, at_once: int, races: GlobalRaces | None) -> Execution:
        blocks = int(np.prod(self.shape.grid))
        faults: list[str] = []
        counters, steps = Counters(), 0
        for first in range(0, blocks, at_once):
            threads = Threads(self.shape.grid, self.shape.block, first, min(at_once, blocks - first), self.cluster)
            with _without_collector():
                faults, counted, taken = self._run_blocks(threads, races)
            counters, steps = counters + counted, steps + taken
            if faults:
                break
        if not faults and races is not None and races.dependency is not None:
            faults += races.dependency.faults(self.kernel.name)
        return Execution(tuple(faults), counters, steps, Touched() if races is None else races.touched)

    def _run_blocks(self, threads: Threads, races: GlobalRaces | None) -> tuple[list[str], Counters, int]:
        """Blocks that run together: their faults, what they did, the instructions executed."""
        context = Context(
            self.kernel, threads, self.memory, self.parameters, self.shape.dynamic_smem_bytes, races, self.options
        )
        late_blocks = self.options.late_blocks and threads.first_block == 0
        scheduler = Scheduler(context, self.flow, self.options.step_limit, late_blocks)
        faults: list[str] = []
        try:
            scheduler.run()
        except UnsupportedInstruction:
            raise
        except PtxError as error:
            faults.append(str(error))
        if len(wrong := context.shared.before_first()):
            faults.append(f"Block {threads.first_block + int(wrong[0])} writes shared memory that is the system's.")
        if context.races is not None:
            faults += context.races.faults()
            context.races.grid.detach()
        counters = Counters()
        if context.traffic is not None:
            counters = count_instructions(self.flow, scheduler.executions(), context.traffic)
        context.release()
        return faults, counters, scheduler.steps


@contextmanager
def _without_collector() -> Iterator[None]:
    """A machine's 10^5 objects live as long as it does: Python's collector of cycles would only look at them again and
    again, for a third of the time. The interpreter is a library of its own, and has no pause of evoattn's."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _pack(kernel: Kernel, params: Sequence[object]) -> Numbers:
    """The parameter space, uint8, padded so that every type can be read from it."""
    if len(params) != len(kernel.parameters):
        raise ImpossibleLaunch(f"{kernel.name} takes {len(kernel.parameters)} arguments, not {len(params)}.")
    space = np.zeros(-(-kernel.parameter_bytes // 16) * 16, np.uint8)
    for parameter, value in zip(kernel.parameters, params):
        raw = value if isinstance(value, bytes) else np.asarray(value).tobytes()
        if len(raw) != parameter.size:
            raise ImpossibleLaunch(f"The parameter {parameter.name} has {parameter.size} bytes, not {len(raw)}.")
        space[parameter.offset : parameter.offset + parameter.size] = np.frombuffer(raw, np.uint8)
    return space
