"""Atomic read-modify-write in global and shared memory; threads take their turns in order of their index.

They race with weak accesses of global memory only, and order blocks as `global_order.py` says; those of shared memory
are not checked."""

from collections.abc import Callable
from typing import Any

import numpy as np

from evoattn.ptx.errors import unsupported
from evoattn.ptx.isa.dispatch import Action, Fields, instruction
from evoattn.ptx.isa.half import from_float, to_float32
from evoattn.ptx.isa.locator import Locator
from evoattn.ptx.program.kernel import Instruction, parse_type, vector_parts
from evoattn.ptx.program.threads import ActiveThreads
from evoattn.ptx.races.watch import Races
from evoattn.ptx.state.context import Context

_SCOPE = (
    r"(?:\.(?P<order>relaxed|acquire|release|acq_rel))?(?:\.(?P<scope>cta|cluster|gpu|sys))?"
    r"(?:\.(?P<space>global|shared))?(?:::cta)?"
)
_TYPES = {
    "add": ("u32", "s32", "u64", "f32", "f64", "f16", "bf16", "f16x2", "bf16x2"),
    "min": ("u32", "s32", "u64", "s64"),
    "max": ("u32", "s32", "u64", "s64"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
    "exch": ("b32", "b64"),
    "cas": ("b32", "b64", "b16"),
}


def _add_halves(old: Any, value: Any, kind: str) -> Any:
    both = [to_float32(np.atleast_1d(x).view(np.uint16), kind) for x in (old, value)]
    return from_float(both[0] + both[1], kind).view(old.dtype)[0]


_UPDATE: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, v: old + v,
    "min": lambda old, v: min(old, v),
    "max": lambda old, v: max(old, v),
    "exch": lambda old, v: v,
    "and": lambda old, v: old & v,
    "or": lambda old, v: old | v,
    "xor": lambda old, v: old ^ v,
    "inc": lambda old, v: old.dtype.type(0) if old >= v else old + old.dtype.type(1),
    "dec": lambda old, v: v if old == 0 or old > v else old - old.dtype.type(1),
}


def _tell(races: Races, place: int, thread: int, *, reads: bool, acquires: bool, releases: bool) -> None:
    """What an atomic of the grid on a byte of the arena does to the order of blocks."""
    races.synchronize()
    if reads:
        races.grid.order_of_blocks.observe(thread, place, acquires)
    races.grid.order_of_blocks.publish(thread, place, releases, continues=True)


@instruction(
    "red", r"(?:\.relaxed\.gpu)?\.global\.add(?:\.v(?P<vector>2|4))?\.f32", kind="memory", pure=False, writes=0
)
def add_floats(context: Context, ins: Instruction, fields: Fields) -> Action:
    """Floats added to global memory: the form that kernels sum by, and the only one of vectors, whose elements are
    atomic one by one."""
    kind, vector = parse_type("f32"), int(fields["vector"] or 1)
    sources = [context.source(o, kind) for o in vector_parts(ins.operands[1])]
    if len(sources) != vector:
        raise unsupported(ins, f"{len(sources)} values for {vector} places")
    locate = Locator(context, ins, ins.operands[0], "global", 4 * vector, None)
    races = context.races

    def run(active: ActiveThreads) -> None:
        for memory, index, part in locate(active):
            if races is not None:
                races.grid.strong(True, index, 4 * vector, part.index, ins)
                if races.grid.grid_warps:
                    for place, thread in zip(index.tolist(), part.index.tolist()):
                        _tell(races, place, thread, reads=False, acquires=False, releases=False)
            cells = memory.elements(4).view(np.float32)
            for i, source in enumerate(sources):
                np.add.at(cells, (index >> 2) + i, part.select(source))

    return run


@instruction(
    "atom", _SCOPE + r"\.(?P<action>[a-z]+)(?P<noftz>\.noftz)?\.(?P<type>[busf]+\d+(?:x2)?)", kind="memory", pure=False
)
@instruction(
    "red",
    _SCOPE + r"\.(?P<action>[a-z]+)(?P<noftz>\.noftz)?\.(?P<type>[busf]+\d+(?:x2)?)",
    kind="memory",
    pure=False,
    writes=0,
)
def atomic(context: Context, ins: Instruction, fields: Fields) -> Action:
    action, kind = fields["action"], parse_type(fields["type"])
    returns = fields["op"] == "atom"
    if fields["type"] not in _TYPES.get(action, ()) or (not returns and action in ("exch", "cas")):
        raise unsupported(ins, f"{fields['op']}.{action} of .{fields['type']}")
    address, *values = ins.operands[1:] if returns else ins.operands
    sources = [context.source(v, kind) for v in values]
    target = context.destination(ins.operands[0], kind) if returns else None
    size = kind.bits // 8
    locate = Locator(context, ins, address, fields["space"], size, None)

    def update(old: Any, thread: int) -> Any:
        operand = [s[thread] if s.ndim else s[()] for s in sources]
        if action == "cas":
            return operand[1] if old == operand[0] else old
        if kind.is_half:
            return _add_halves(old, operand[0], kind.kind)
        return _UPDATE[action](old, operand[0])

    races = context.races
    in_grid = fields["scope"] not in ("cta", "cluster")
    acquires, releases = (
        returns and fields["order"] in ("acquire", "acq_rel"),
        fields["order"] in ("release", "acq_rel"),
    )

    def run(active: ActiveThreads) -> None:
        for memory, index, part in locate(active):
            is_global = memory is context.global_memory
            if races is not None and is_global:
                races.grid.strong(True, index, size, part.index, ins)
            cells = memory.elements(size).view(kind.dtype)
            for cell, thread in zip(index // size, part.index):
                if races is not None and races.grid.grid_warps and in_grid and is_global:
                    place = int(cell) * size
                    _tell(races, place, int(thread), reads=returns, acquires=acquires, releases=releases)
                old = cells[cell]
                cells[cell] = update(old, thread)
                if target is not None:
                    target[thread] = old

    return run
