"""The instructions on mbarriers (PTX ISA, mbarrier)."""

import numpy as np

from evoattn.ptx.errors import AsyncFault
from evoattn.ptx.isa.dispatch import Action, Fields, instruction
from evoattn.ptx.isa.locator import Locator
from evoattn.ptx.program.kernel import Instruction, Lanes, parse_type
from evoattn.ptx.program.threads import ActiveThreads
from evoattn.ptx.state.context import Context
from evoattn.ptx.state.mbarriers import BYTES, mbarriers_of
from evoattn.ptx.state.phase_waits import PhaseWait

_SPACE = r"(?:\.(?P<space>shared::cluster|shared)(?:::cta)?)?\.b64"
_OWN = r"(?:\.(?P<space>shared)(?:::cta)?)?\.b64"
"""Of the block's own alone."""
_ACQUIRE = r"(?:\.acquire\.(?P<scope>cta|cluster))?"
_U32, _U64, _PREDICATE = parse_type("u32"), parse_type("u64"), parse_type("pred")


class _Places:
    """Byte index in shared memory of the mbarrier that each active thread names."""

    def __init__(self, context: Context, ins: Instruction, operand: str, space: str) -> None:
        self.ins = ins
        self.locator = Locator(context, ins, operand, space, BYTES, None)

    def __call__(self, active: ActiveThreads) -> Lanes:
        located = self.locator(active)
        if len(located) > 1 or located[0][0] is not self.locator.context.shared:
            raise AsyncFault(f"An mbarrier outside shared memory is used in {self.ins}.")
        return located[0][1]


@instruction("mbarrier", r"\.init" + _OWN, kind="barrier", pure=False, writes=0)
def initialize(context: Context, ins: Instruction, fields: Fields) -> Action:
    barriers, places = mbarriers_of(context), _Places(context, ins, ins.operands[0], fields["space"])
    count = context.source(ins.operands[1], _U32)

    def run(active: ActiveThreads) -> None:
        for thread, index, number in zip(active.index.tolist(), places(active).tolist(), active.select(count).tolist()):
            barriers.make(index, number, thread, ins)

    return run


@instruction("mbarrier", r"\.inval" + _OWN, kind="barrier", pure=False, writes=0)
def invalidate(context: Context, ins: Instruction, fields: Fields) -> Action:
    barriers, places = mbarriers_of(context), _Places(context, ins, ins.operands[0], fields["space"])

    def run(active: ActiveThreads) -> None:
        for thread, index in zip(active.index.tolist(), places(active).tolist()):
            barriers.remove(index, thread, ins)

    return run


@instruction(
    "mbarrier", r"\.arrive(?P<expect>\.expect_tx)?(?:\.release\.(?:cta|cluster))?" + _SPACE, kind="barrier", pure=False
)
def arrive(context: Context, ins: Instruction, fields: Fields) -> Action:
    """`arrive state, [mbarrier]{, count}`; `arrive.expect_tx state, [mbarrier], bytes` makes one arrival."""
    barriers, places = mbarriers_of(context), _Places(context, ins, ins.operands[1], fields["space"])
    state = None if ins.operands[0] == "_" else context.destination(ins.operands[0], _U64)
    number = context.source(ins.operands[2], _U32) if len(ins.operands) > 2 else np.asarray(1, np.uint32)
    one, none = np.asarray(1, np.uint32), np.asarray(0, np.uint32)

    def run(active: ActiveThreads) -> None:
        counts, sizes = (one, number) if fields["expect"] else (number, none)
        phases = barriers.arrive(places(active), active.select(counts), active.select(sizes), active, ins)
        if state is not None:
            state[active.index] = phases

    return run


@instruction("mbarrier", r"\.expect_tx(?:\.relaxed\.(?:cta|cluster))?" + _SPACE, kind="barrier", pure=False, writes=0)
def expect_bytes(context: Context, ins: Instruction, fields: Fields) -> Action:
    barriers, places = mbarriers_of(context), _Places(context, ins, ins.operands[0], fields["space"])
    number = context.source(ins.operands[1], _U32)

    def run(active: ActiveThreads) -> None:
        for thread, index, size in zip(active.index.tolist(), places(active).tolist(), active.select(number).tolist()):
            barrier = barriers.find(index, thread, ins)
            if barrier.order is not None:
                barrier.order.require_end(thread, ins)
            barriers.expect(barrier, size, ins)

    return run


@instruction(
    "mbarrier", r"\.(?P<mode>try_wait|test_wait)(?P<parity>\.parity)?" + _ACQUIRE + _OWN, kind="barrier", pure=False
)
def wait(context: Context, ins: Instruction, fields: Fields) -> PhaseWait:
    """A third operand, how long to suspend a thread, changes nothing here."""
    places = _Places(context, ins, ins.operands[1], fields["space"])
    phase = context.source(ins.operands[2], _U32 if fields["parity"] else _U64)
    target, of_cluster = context.destination(ins.operands[0], _PREDICATE), fields["scope"] == "cluster"
    return PhaseWait(ins, places, phase, target, of_cluster, fields["mode"] == "try_wait")
