"""Loads and stores in every space; fences."""

from collections.abc import Callable
from functools import partial

import numpy as np

from evoattn.ptx.errors import unsupported
from evoattn.ptx.isa.dispatch import Action, Fields, Operation, instruction
from evoattn.ptx.isa.locator import Locator
from evoattn.ptx.memory.address_space import as_elements
from evoattn.ptx.program.kernel import Instruction, Lanes, Numbers, parse_type, vector_parts
from evoattn.ptx.program.threads import ActiveThreads
from evoattn.ptx.races.access import READ, WRITE
from evoattn.ptx.races.watch import Races
from evoattn.ptx.state.context import Context

_ORDER = r"(?:\.volatile|\.(?:relaxed|acquire|release)\.(?:cta|cluster|gpu|sys)|\.weak)?"
_SPACE = r"(?:\.(?P<space>global|shared::cluster|shared|local))?(?:::cta)?"
_EVICTION = (
    r"(?:\.L1::(?:no_allocate|evict_normal|evict_unchanged|evict_first|evict_last))?(?:\.L2::(?:64B|128B|256B))?"
)
_CACHE = r"(?:\.(?:ca|cg|cs|lu|cv|wb|wt))?(?:\.nc)?" + _EVICTION
_TYPE = r"(?:\.v(?P<vector>2|4))?\.(?P<type>[bus](?:8|16|32|64)|f32|f64)"


@instruction("ld", r"\.param" + r"(?:\.v(?P<vector>2|4))?\.(?P<type>[bus](?:8|16|32|64)|f32|f64)", kind="other")
def load_parameter(context: Context, ins: Instruction, fields: Fields) -> Operation:
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

    def run() -> None:
        for target, value in zip(targets, values):
            target.fill(value)

    return partial(targets[0].fill, values[0]) if len(targets) == 1 else run


@instruction("ld", _ORDER + _SPACE + _CACHE + _TYPE, kind="memory", pure=False)
def load(context: Context, ins: Instruction, fields: Fields) -> Action:
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
            columns = values.view(kind.dtype).reshape(-1, vector).T
            for target, column in zip(targets, columns):
                if part.mask is None:
                    np.copyto(target, column)
                else:
                    target[part.index] = column

    return run


@instruction("st", _ORDER + _SPACE + _CACHE + _TYPE, kind="memory", pure=False, writes=0)
def store(context: Context, ins: Instruction, fields: Fields) -> Action:
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
                _check_collision(context, context.races, ins, at, size, values, part)

    return run


def _check_collision(
    context: Context, races: Races, ins: Instruction, at: Numbers, size: int, values: Lanes, active: ActiveThreads
) -> None:
    """Several threads may write one place by one instruction if they write the same value."""
    word = min(size, 8)
    kept = context.shared.elements(size)[at].view(f"u{word}")
    lost = kept != values.view(f"u{word}")
    if lost.any():
        thread = int(np.flatnonzero(lost)[0]) * word // size
        races.shared.collide(int(active.index[thread]), ins)


@instruction("membar", r"\.(?P<scope>cta|gl|sys)", kind="other", pure=False, writes=0)
@instruction("fence", r"(?:\.(?:sc|acq_rel))?\.(?P<scope>cta|cluster|gpu|sys)", kind="other", pure=False, writes=0)
def order_memory(context: Context, ins: Instruction, fields: Fields) -> Callable[[ActiveThreads], None]:
    """The machine completes every access at once; a fence alone orders no two threads, but makes a release or an
    acquire of an atomic."""
    races = context.races
    if races is None or fields["scope"] in ("cta", "cluster"):
        return lambda active: None

    def run(active: ActiveThreads) -> None:
        races.synchronize()
        races.grid.order_of_blocks.fence(active, context.alive)

    return run


@instruction("prefetch", r"(?:\.global)?\.L[12]", kind="other", pure=False, writes=0)
def prefetch(context: Context, ins: Instruction, fields: Fields) -> Callable[[ActiveThreads], None]:
    """There is no cache to fill."""
    return lambda active: None
