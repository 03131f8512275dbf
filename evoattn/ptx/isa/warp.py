"""Exchange between the threads of a warp."""

from collections.abc import Callable

import numpy as np

from evoattn.ptx.errors import DivergentCollective, unsupported
from evoattn.ptx.isa.dispatch import Action, Fields, instruction
from evoattn.ptx.program.kernel import Instruction, Lanes, Mask, Numbers, parse_type
from evoattn.ptx.program.threads import WARP, ActiveThreads
from evoattn.ptx.state.context import Context

_U32, _B32, _PREDICATE = parse_type("u32"), parse_type("b32"), parse_type("pred")
_EVERYBODY = 0xFFFFFFFF
_REDUCE = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def assign(target: Lanes, values: Lanes, active: ActiveThreads) -> None:
    """Write the active threads' elements of `values` (over all threads)."""
    if active.mask is None:
        np.copyto(target, values)
    else:
        np.copyto(target, values, where=active.mask)


def _members(context: Context, ins: Instruction, operand: str) -> Lanes | None:
    """A member mask for `require_whole_warps`; None if it names all threads."""
    mask = context.source(operand, _U32)
    return None if mask.ndim == 0 and mask == _EVERYBODY else mask


def _meet(context: Context, active: ActiveThreads, ins: Instruction, members: Lanes | None) -> None:
    """The members wait for each other; None are all threads of their warps. These go on together.

    Raises `DivergentCollective` for a thread whose mask does not name it (PTX ISA: the behaviour is undefined)."""
    if members is not None:
        named = active.select(members) >> context.threads.lane[active.index].astype(np.uint32) & 1
        if not named.all():
            thread = context.threads.describe(int(active.index[named.argmin()]))
            raise DivergentCollective(f"The member mask of {thread} does not name the thread itself, in {ins}.")
    context.require_whole_warps(active, ins, members)
    if context.apart is not None and (members is None or (active.select(members) == _EVERYBODY).all()):
        context.come_together(active.warps)


@instruction("shfl", r"\.sync\.(?P<mode>up|down|bfly|idx)\.b32", kind="shuffle", pure=False)
def shuffle(context: Context, ins: Instruction, fields: Fields) -> Action:
    """`shfl d|p, a, b, c, members`: c has the segment mask in bits 8-12 and the clamp in bits 0-4 (PTX ISA,
    shfl.sync)."""
    mode = fields["mode"]
    d, *p = (o.strip() for o in ins.operands[0].split("|"))
    target = context.destination(d, _B32)
    valid_target = context.destination(p[0], _PREDICATE) if p else None
    value, distance, bounds = (context.source(o, kind) for o, kind in zip(ins.operands[1:4], (_B32, _U32, _U32)))
    members = _members(context, ins, ins.operands[4])
    lane = context.threads.lane
    first = context.threads.warp_of * WARP

    def sources() -> tuple[Lanes, Lanes]:
        b, c = distance.astype(np.int64) & 31, bounds.astype(np.int64)
        segment, clamp = c >> 8 & 31, c & 31
        highest, lowest = (lane & segment) | (clamp & ~segment), lane & segment
        if mode == "up":
            j = lane - b
            valid = j >= highest
        else:
            j = {"down": lane + b, "bfly": lane ^ b, "idx": lowest | (b & ~segment)}[mode]
            valid = j <= highest
        return first + np.where(valid, j, lane), valid

    constant = sources() if distance.ndim == 0 and bounds.ndim == 0 else None

    def run(active: ActiveThreads) -> None:
        _meet(context, active, ins, members)
        source, valid = constant or sources()
        values = value.take(source) if value.ndim else np.broadcast_to(value, target.shape)
        assign(target, values, active)
        if valid_target is not None:
            assign(valid_target, valid, active)

    return run


def _source_predicate(context: Context, operand: str) -> Callable[[], Mask]:
    predicate: Mask = context.source(operand.lstrip("!"), _PREDICATE)
    return (lambda: ~predicate) if operand.startswith("!") else (lambda: predicate)


def _companions(active: ActiveThreads, members: Numbers) -> Lanes:
    """`[warp, lane, other lane]` bool: the active threads that each lane's member mask names. One row per warp if the
    mask is constant."""
    lanes = active.by_warp[:, None, :]
    masks = members.reshape(-1, WARP)[:, :, None] if members.ndim else members
    return lanes & (masks >> np.arange(WARP, dtype=np.uint32) & np.uint32(1)).astype(np.bool_)


def _pack(lanes: Mask) -> Lanes:
    """Bool `[…, 32]` → uint32 `[…]`, lane 0 the lowest bit."""
    bits = np.where(lanes, np.uint32(1) << np.arange(WARP, dtype=np.uint32), np.uint32(0))
    packed: Lanes = np.bitwise_or.reduce(bits, axis=-1)
    return packed


def _by_lane(values: Lanes, count: int) -> Lanes:
    """`[warp, lane]`, or one column for all lanes of a warp, → one element per thread."""
    return np.broadcast_to(values, (count // WARP, WARP)).reshape(-1)


@instruction("vote", r"\.sync\.(?P<mode>all|any|uni|ballot)\.(?P<type>pred|b32)", kind="shuffle", pure=False)
def vote(context: Context, ins: Instruction, fields: Fields) -> Action:
    mode = fields["mode"]
    if (mode == "ballot") != (fields["type"] == "b32"):
        raise unsupported(ins, "the type does not fit the mode")
    target = context.destination(ins.operands[0], parse_type(fields["type"]))
    predicate, members = _source_predicate(context, ins.operands[1]), context.source(ins.operands[2], _U32)
    wanted = _members(context, ins, ins.operands[2])

    def run(active: ActiveThreads) -> None:
        _meet(context, active, ins, wanted)
        companions = _companions(active, members)
        yes = np.broadcast_to(predicate(), (context.count,)).reshape(-1, 1, WARP) & companions
        result: Lanes
        if mode == "ballot":
            result = _pack(yes)
        elif mode == "any":
            result = np.any(yes, axis=-1)
        else:
            result = np.all(yes == companions, axis=-1)
            if mode == "uni":
                result |= ~yes.any(-1)
        assign(target, _by_lane(result, context.count), active)

    return run


@instruction("match", r"\.(?P<mode>any|all)\.sync\.(?P<type>b32|b64)", kind="shuffle", pure=False)
def match(context: Context, ins: Instruction, fields: Fields) -> Action:
    """The lanes whose value equals this lane's (`any`), or all members if all are equal, else none (`all`)."""
    d, *p = (o.strip() for o in ins.operands[0].split("|"))
    target = context.destination(d, _B32)
    equal_target = context.destination(p[0], _PREDICATE) if p else None
    value, members = context.source(ins.operands[1], parse_type(fields["type"])), context.source(ins.operands[2], _U32)
    wanted = _members(context, ins, ins.operands[2])

    def run(active: ActiveThreads) -> None:
        _meet(context, active, ins, wanted)
        companions = _companions(active, members)
        values = np.broadcast_to(value, (context.count,)).reshape(-1, WARP)
        equal = (values[:, :, None] == values[:, None, :]) & companions
        same = _pack(equal)
        if fields["mode"] == "all":
            same = np.where((equal == companions).all(-1), same, np.uint32(0))
        assign(target, same.reshape(-1), active)
        if equal_target is not None:
            assign(equal_target, same.reshape(-1) != 0, active)

    return run


@instruction("activemask", r"\.b32", kind="shuffle", pure=False)
def active_mask(context: Context, ins: Instruction, fields: Fields) -> Action:
    target = context.destination(ins.operands[0], _B32)
    return lambda active: assign(target, np.repeat(_pack(active.by_warp), WARP), active)


@instruction("redux", r"\.sync\.(?P<action>add|min|max)\.(?P<type>u32|s32)", kind="shuffle", pure=False)
@instruction("redux", r"\.sync\.(?P<action>and|or|xor)\.(?P<type>b32)", kind="shuffle", pure=False)
def reduce(context: Context, ins: Instruction, fields: Fields) -> Action:
    kind = parse_type(fields["type"])
    target, value = context.destination(ins.operands[0], kind), context.source(ins.operands[1], kind)
    members, ufunc = context.source(ins.operands[2], _U32), _REDUCE[fields["action"]]
    wanted = _members(context, ins, ins.operands[2])
    limits = np.iinfo(kind.dtype)
    neutral = kind.dtype.type({"min": limits.max, "max": limits.min, "and": limits.max}.get(fields["action"], 0))

    def run(active: ActiveThreads) -> None:
        _meet(context, active, ins, wanted)
        values = np.broadcast_to(value, (context.count,)).reshape(-1, 1, WARP)
        result = ufunc.reduce(np.where(_companions(active, members), values, neutral), axis=-1, dtype=kind.dtype)
        assign(target, _by_lane(result, context.count), active)

    return run


@instruction("elect", r"\.sync", kind="shuffle", pure=False)
def elect(context: Context, ins: Instruction, fields: Fields) -> Action:
    """The lowest member lane is the leader."""
    d, p = (o.strip() for o in ins.operands[0].split("|"))
    target, chosen = context.destination(d, _B32), context.destination(p, _PREDICATE)
    members, wanted = context.source(ins.operands[1], _U32), _members(context, ins, ins.operands[1])

    def run(active: ActiveThreads) -> None:
        _meet(context, active, ins, wanted)
        leader = _by_lane(_companions(active, members).argmax(-1), context.count)
        assign(target, leader.astype(np.uint32), active)
        assign(chosen, leader == context.threads.lane, active)

    return run


@instruction("bar", r"\.warp\.sync", kind="shuffle", pure=False, writes=0)
def synchronize_warp(context: Context, ins: Instruction, fields: Fields) -> Action:
    """Orders memory between the threads of a warp that the mask names; nothing else in this module does."""
    members, wanted = context.source(ins.operands[0], _U32), _members(context, ins, ins.operands[0])

    def run(active: ActiveThreads) -> None:
        _meet(context, active, ins, wanted)
        if context.races is None:
            return
        companions = np.broadcast_to(_companions(active, members), (context.count // WARP, WARP, WARP))[active.warps]
        left = context.alive.reshape(-1, WARP)[active.warps]
        whole = (companions == left[:, None, :]).all((1, 2))
        clocks = context.races.synchronize()
        clocks.warp_sync(active.warps[whole])
        if not whole.all():
            apart = active.warps[~whole]
            clocks.warp_sync_in_parts(apart, companions[~whole] & active.by_warp[apart][:, :, None])

    return run
