"""cp.async: copies from global to shared memory that land when their thread waits for them.

Groups are counted for each thread, so that warps may run apart. From issue to landing the destination holds poison."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from evoattn.ptx.errors import MemoryFault, unsupported
from evoattn.ptx.isa.dispatch import Action, Fields, instruction
from evoattn.ptx.isa.locator import Locator
from evoattn.ptx.memory.address_space import as_elements
from evoattn.ptx.program.kernel import Instruction, Lanes, Mask, Numbers, group_count, parse_type
from evoattn.ptx.program.threads import ActiveThreads
from evoattn.ptx.races.access import COPY, READ
from evoattn.ptx.state.context import Context

_PREFETCH = r"(?:\.L2::(?:64B|128B|256B))?"


@dataclass
class _Copy:
    """Copies issued by one instruction; `group` is the number of groups that each thread had committed then."""

    threads: Numbers
    group: Numbers
    index: Numbers
    size: int
    values: Lanes


class AsyncCopies:
    """Copies in flight of one machine."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.committed = np.zeros(
            context.count, np.int64
        )  # replaced, never changed: copies keep the one of their issue
        self.in_flight: list[_Copy] = []
        self.everyone = np.arange(context.count)

    def issue(self, index: Numbers, size: int, values: Lanes, active: ActiveThreads) -> None:
        threads = self.everyone if active.mask is None else active.index
        group = self.committed if active.mask is None else self.committed[threads]
        self.in_flight.append(_Copy(threads, group, index, size, values))
        self.context.shared.elements(size)[index // size] = as_elements(
            np.full(size // 2, self.context.poison, np.uint16), size
        )[0]

    def commit(self, active: ActiveThreads) -> None:
        self.committed = self.committed + (1 if active.mask is None else active.mask)

    def wait(self, active: ActiveThreads, pending: int | None) -> None:
        """Land what these threads issued, but for their newest `pending` groups; None lands also what is not
        committed."""
        limit = self.committed - pending if pending is not None else np.full(self.context.count, np.iinfo(np.int64).max)
        if active.mask is not None:
            limit = np.where(active.mask, limit, -1)
        left: list[_Copy] = []
        landing: list[_Copy] = []
        known: dict[tuple[int, int], Mask | bool] = {}
        for copy in self.in_flight:
            key = (id(copy.threads), id(copy.group))
            if key not in known:
                over: Mask = copy.group < limit[copy.threads]
                known[key] = True if over.all() else over if over.any() else False
            done = known[key]
            if isinstance(done, bool):
                (landing if done else left).append(copy)
            else:
                for part, chosen in ((landing, done), (left, ~done)):
                    part.append(
                        _Copy(
                            copy.threads[chosen], copy.group[chosen], copy.index[chosen], copy.size, copy.values[chosen]
                        )
                    )
        self.in_flight = left
        for copy in landing:
            self.context.shared.elements(copy.size)[copy.index // copy.size] = copy.values
        if landing and self.context.races is not None:
            self.context.races.shared.land([(copy.index, copy.size, copy.threads) for copy in landing])


def _copies(context: Context) -> AsyncCopies:
    return context.cached("async copies", lambda: AsyncCopies(context))


@instruction(
    "cp", r"\.async\.(?P<cache>ca|cg)\.shared(?:::cta)?\.global" + _PREFETCH, kind="memory", pure=False, writes=0
)
def copy(context: Context, ins: Instruction, fields: Fields) -> Action:
    """`cp.async [destination], [source], size{, valid bytes}`: what is not valid is not read, and zero in shared
    memory.

    A predicate in place of the valid bytes means: if true, write zeros and read nothing. Raises `MemoryFault` for more
    valid bytes than the size (PTX ISA: the behaviour is undefined)."""
    size = int(ins.operands[2], 0)
    if size not in ((16,) if fields["cache"] == "cg" else (4, 8, 16)):
        raise unsupported(ins, f"{size} bytes")
    destination = Locator(context, ins, ins.operands[0], "shared", size, COPY)
    source = Locator(context, ins, ins.operands[1], "global", size, READ)
    valid = _valid_bytes(context, ins, size)
    copies = _copies(context)

    def run(active: ActiveThreads) -> None:
        [(_, target, _)] = destination(active)
        if context.traffic is not None:
            context.traffic.copied_bytes += len(target) * size
        count = None if valid is None else valid()
        if count is not None and (active.select(count) > size).any():
            raise MemoryFault(f"More bytes to read than the {size} of the copy, in {ins}.")
        if count is None or (active.select(count) == size).all():
            [(memory, index, _)] = source(active)
            values = memory.elements(size).take(index // size)
        else:
            values = _read_partly(context, ins, count, size, active)
        copies.issue(target, size, values, active)

    return run


def _valid_bytes(context: Context, ins: Instruction, size: int) -> Callable[[], Lanes] | None:
    """A callable that gives each thread's number of bytes to read, or None for always all."""
    if len(ins.operands) < 4:
        return None
    operand = ins.operands[3]
    declared = context.kernel.registers.get(operand.lstrip("!"))
    if declared is not None and declared.kind == "pred":
        ignore = context.source(operand.lstrip("!"), declared)
        negated = operand.startswith("!")
        return lambda: np.where(~ignore if negated else ignore, 0, size)
    count = context.source(operand, parse_type("u32"))
    return lambda: count


def _read_partly(context: Context, ins: Instruction, count: Lanes, size: int, active: ActiveThreads) -> Lanes:
    """Of each thread's `size` bytes the first `count` (uint32 over threads, or 0-d) as they are in global memory, the
    others zero."""
    octets = np.zeros((context.count, size), np.uint8)
    count = np.broadcast_to(count, (context.count,))
    for number in np.unique(active.select(count)):
        part = active.where(count == number)
        if number == 0 or part is None:
            continue
        [(_, first, _)] = Locator(context, ins, ins.operands[1], "global", 1, None)(part)
        memory = context.global_memory
        memory.check_range(first, int(number), part, ins)
        if context.races is not None:
            context.races.grid.access(
                READ, (first[:, None] + np.arange(number)).ravel(), 1, np.repeat(part.index, number), ins
            )
        octets[part.index, :number] = memory.data[first[:, None] + np.arange(number)]
    return as_elements(octets[active.index].reshape(-1), size)


@instruction("cp", r"\.async\.commit_group", kind="other", pure=False, writes=0)
def commit(context: Context, ins: Instruction, fields: Fields) -> Action:
    return _copies(context).commit


@instruction("cp", r"\.async\.(?:wait_group|wait_all)", kind="other", pure=False, writes=0)
def wait(context: Context, ins: Instruction, fields: Fields) -> Action:
    pending = group_count(ins.operands[0]) if ins.operands else None
    copies = _copies(context)
    return lambda active: copies.wait(active, pending)
