"""Loads and stores in every space; fences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from evoattn.ptx.errors import MemoryFault, unsupported
from evoattn.ptx.isa.dispatch import Fields, instruction
from evoattn.ptx.memory.address_space import (
    LOCAL_WINDOW,
    PARAMETER_WINDOW,
    SHARED_WINDOW,
    WINDOW_SHIFT,
    BankedMemory,
    as_elements,
)
from evoattn.ptx.memory.global_buffers import GlobalMemory
from evoattn.ptx.program.dtypes import parse_type
from evoattn.ptx.program.kernel import Instruction
from evoattn.ptx.program.operands import vector_parts
from evoattn.ptx.program.threads import ActiveThreads
from evoattn.ptx.races.detector import READ, WRITE
from evoattn.ptx.state.context import Context

_ORDER = r"(?:\.volatile|\.(?:relaxed|acquire|release)\.(?:cta|cluster|gpu|sys)|\.weak)?"
_SPACE = r"(?:\.(?P<space>global|shared::cluster|shared|local))?(?:::cta)?"
_EVICTION = (
    r"(?:\.L1::(?:no_allocate|evict_normal|evict_unchanged|evict_first|evict_last))?(?:\.L2::(?:64B|128B|256B))?"
)
_CACHE = r"(?:\.(?:ca|cg|cs|lu|cv|wb|wt))?(?:\.nc)?" + _EVICTION
_TYPE = r"(?:\.v(?P<vector>2|4))?\.(?P<type>[bus](?:8|16|32|64)|f32|f64)"

Located = list[tuple[BankedMemory | GlobalMemory, np.ndarray, ActiveThreads]]
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
        """`kind` is READ, WRITE or COPY; None keeps the access from the race detectors. `by_warp`: each warp accesses as one."""
        self.context, self.ins, self.size, self.kind, self.by_warp = context, ins, size, kind, by_warp
        self.address = context.address(operand)
        memories = {
            "shared": context.shared,
            "shared::cluster": context.shared,
            "local": context.local,
            "param": context.parameter_memory,
            "global": context.global_memory,
        }
        self.space = space
        self.memory = memories.get(space)
        self.memories = memories

    def __call__(self, active: ActiveThreads, displacement: np.ndarray | None = None) -> Located:
        """`displacement` (bytes, over all threads) is added to the addresses."""
        base = self.address.base
        if displacement is not None:
            base = base + displacement.astype(base.dtype)
        if base.ndim and active.mask is not None:
            base = base[active.index]
        if self.memory is not None:
            return [(self.memory, self._locate(self.space, base, active), active)]
        return self._generic(base, active)

    def _locate(self, space: str, base: np.ndarray, active: ActiveThreads) -> np.ndarray:
        if space == "shared::cluster":
            index = self.context.shared.locate_in_cluster(base, self.address.offset, self.size, active, self.ins)
            self.context.remote.note(index, self.kind, active, self.ins)
        else:
            index = self.memories[space].locate(base, self.address.offset, self.size, active, self.ins)
        if space.startswith("shared"):
            if self.context.races is not None and self.kind is not None:
                self.context.races.access(self.kind, index, self.size, active, self.ins, self.by_warp)
            if self.context.traffic is not None:
                self.context.traffic.shared(self.context.shared, index, self.size, active)
        elif space == "global":
            if self.context.global_races is not None and self.kind is not None:
                self._tell_global(index, active)
            if self.context.traffic is not None:
                self.context.traffic.global_access(index, self.size, active)
        return index

    def _tell_global(self, index: np.ndarray, active: ActiveThreads) -> None:
        races = self.context.global_races
        words = self.ins.opcode.split(".")
        if words[0] not in ("ld", "st") or not {"volatile", "relaxed", "acquire", "release"} & set(words):
            races.access(self.kind, index, self.size, active.index, self.ins)
            return
        races.strong(self.kind == WRITE, index, self.size, active.index, self.ins)
        if not races.grid_warps:
            return
        self.context.races.synchronize()
        wide = bool({"gpu", "sys"} & set(words))
        for thread, place in zip(active.index.tolist(), index.tolist()):
            if self.kind == WRITE:
                races.order_of_blocks.publish(thread, place, "release" in words and wide, False)
            else:
                races.order_of_blocks.observe(thread, place, "acquire" in words and wide)

    def _generic(self, base: np.ndarray, active: ActiveThreads) -> Located:
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


@instruction("ld", r"\.param" + r"(?:\.v(?P<vector>2|4))?\.(?P<type>[bus](?:8|16|32|64)|f32|f64)", kind="other")
def load_parameter(context: Context, ins: Instruction, fields: Fields):
    """Parameters are the same for all threads, so that a fixed address is read once, before the start."""
    kind = parse_type(fields["type"])
    targets = [context.destination(o, kind) for o in vector_parts(ins.operands[0])]
    name, _, offset = ins.operands[1].strip("[] ").partition("+")
    parameter = next((p for p in context.kernel.parameters if p.name == name.strip()), None)
    if parameter is None:
        raise unsupported(ins, "a parameter address in a register")
    start = parameter.offset + int(offset or "0", 0)
    size = kind.bits // 8
    if start + size * len(targets) > len(context.parameters):
        raise unsupported(ins, "an address outside the parameters")
    values = context.parameters[start : start + size * len(targets)].copy().view(kind.dtype)

    def run():
        for target, value in zip(targets, values):
            target.fill(value)

    return partial(targets[0].fill, values[0]) if len(targets) == 1 else run


@instruction("ld", _ORDER + _SPACE + _CACHE + _TYPE, kind="memory", pure=False)
def load(context: Context, ins: Instruction, fields: Fields):
    kind = parse_type(fields["type"])
    vector = int(fields["vector"] or 1)
    width = kind.bits // 8
    size = width * vector
    targets = [context.destination(o, kind) for o in vector_parts(ins.operands[0])]
    locate = Locator(context, ins, ins.operands[1], fields["space"], size, READ)
    shift = size.bit_length() - 1

    def run(active: ActiveThreads) -> None:
        for memory, index, part in locate(active):
            values = memory.elements(size).take(index >> shift)
            if vector == 1:
                columns = (values.view(kind.dtype),)
            else:
                columns = values.view(kind.dtype).reshape(-1, vector).T
            for target, column in zip(targets, columns):
                if part.mask is None:
                    np.copyto(target, column)
                else:
                    target[part.index] = column

    return run


@instruction("st", _ORDER + _SPACE + _CACHE + _TYPE, kind="memory", pure=False, writes=0)
def store(context: Context, ins: Instruction, fields: Fields):
    kind = parse_type("b" + fields["type"][1:])
    vector = int(fields["vector"] or 1)
    size = kind.bits // 8 * vector
    sources = [context.source(o, kind) for o in vector_parts(ins.operands[1])]
    locate = Locator(context, ins, ins.operands[0], fields["space"], size, WRITE)
    shift = size.bit_length() - 1

    def run(active: ActiveThreads) -> None:
        for memory, index, part in locate(active):
            if vector == 1:
                values = np.ascontiguousarray(part.select(sources[0]))
            else:
                values = np.empty((len(part), vector), kind.dtype)
                for i, source in enumerate(sources):
                    values[:, i] = part.select(source)
                values = as_elements(values.reshape(-1), size)
            at = index >> shift
            memory.elements(size)[at] = values
            if context.races is not None and memory is context.shared:
                _check_collision(context, ins, at, size, values, part)

    return run


def _check_collision(
    context: Context, ins: Instruction, at: np.ndarray, size: int, values: np.ndarray, active: ActiveThreads
) -> None:
    """Several threads may write one place by one instruction if they write the same value."""
    word = min(size, 8)
    kept = context.shared.elements(size)[at].view(f"u{word}")
    lost = kept != values.view(f"u{word}")
    if lost.any():
        thread = int(np.flatnonzero(lost)[0]) * word // size
        context.races.collide(int(active.index[thread]), ins)


@instruction("membar", r"\.(?P<scope>cta|gl|sys)", kind="other", pure=False, writes=0)
@instruction("fence", r"(?:\.(?:sc|acq_rel))?\.(?P<scope>cta|cluster|gpu|sys)", kind="other", pure=False, writes=0)
def order_memory(context: Context, ins: Instruction, fields: Fields) -> Callable[[ActiveThreads], None]:
    """The machine completes every access at once; a fence alone orders no two threads, but makes a release or an acquire of an atomic."""
    races = context.global_races
    if races is None or fields["scope"] in ("cta", "cluster"):
        return lambda active: None

    def run(active: ActiveThreads) -> None:
        context.races.synchronize()
        races.order_of_blocks.fence(active, context.alive)

    return run


@instruction("prefetch", r"(?:\.global)?\.L[12]", kind="other", pure=False, writes=0)
def prefetch(context: Context, ins: Instruction, fields: Fields) -> Callable[[ActiveThreads], None]:
    """There is no cache to fill."""
    return lambda active: None
