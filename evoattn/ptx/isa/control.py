"""Branches, exits and barriers: what the scheduler itself acts on."""

from dataclasses import dataclass

from evoattn.ptx.errors import unsupported
from evoattn.ptx.isa.dispatch import Fields, instruction
from evoattn.ptx.program.arrays import Numbers
from evoattn.ptx.program.dtypes import parse_type
from evoattn.ptx.program.kernel import Instruction
from evoattn.ptx.state.context import Context
from evoattn.ptx.state.ending import Ending


@dataclass(frozen=True)
class Branch(Ending):
    """To the label in the instruction's operand."""


@dataclass(frozen=True)
class Exit(Ending):
    """The threads are done."""


@dataclass(frozen=True)
class Trap(Ending):
    """The program says that it failed."""


@dataclass(frozen=True)
class BarrierArrival(Ending):
    """At barrier `number` (over threads, or 0-d) of `expected` threads, None for the whole block.

    `waits` is false for `bar.arrive`."""

    ins: Instruction

    number: Numbers
    expected: int | None
    waits: bool


@instruction("bra", r"(?:\.uni)?", kind="branch", pure=False, writes=0)
def branch(context: Context, ins: Instruction, fields: Fields) -> Branch:
    return Branch()


@instruction("ret", r"(?:\.uni)?", kind="branch", pure=False, writes=0)
@instruction("exit", kind="branch", pure=False, writes=0)
def leave(context: Context, ins: Instruction, fields: Fields) -> Exit:
    return Exit()


@instruction("trap", kind="branch", pure=False, writes=0)
def trap(context: Context, ins: Instruction, fields: Fields) -> Trap:
    return Trap()


@instruction("bar", r"(?:\.cta)?\.(?P<mode>sync|arrive)", kind="barrier", pure=False, writes=0)
@instruction("barrier", r"(?:\.cta)?\.(?P<mode>sync|arrive)(?:\.aligned)?", kind="barrier", pure=False, writes=0)
def barrier(context: Context, ins: Instruction, fields: Fields) -> BarrierArrival:
    number = context.source(ins.operands[0], parse_type("u32"))
    expected = None
    if len(ins.operands) > 1:
        if ins.operands[1] in context.kernel.registers:
            raise unsupported(ins, "a thread count in a register")
        expected = int(ins.operands[1], 0)
    return BarrierArrival(ins, number, expected, fields["mode"] == "sync")
