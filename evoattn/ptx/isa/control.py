"""Control flow: branches, exits and barriers, which the scheduler itself acts on; where straight runs of instructions
start and end, and which registers are still wanted where."""

import re
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

from evoattn.ptx.errors import UnsupportedInstruction, unsupported
from evoattn.ptx.isa.dispatch import Entry, Fields, instruction, lookup
from evoattn.ptx.program.kernel import Instruction, Kernel, Numbers, operand_registers, parse_type
from evoattn.ptx.state.context import Context, Ending


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


_POLL = re.compile(r"atom\b|ld\.(?:acquire|relaxed|volatile)\b")
_ACTS = re.compile(r"cp\.async\.bulk\.wait|mbarrier\.(?:init|inval|try_wait|test_wait)|fence\.|membar")
_ENDS_RUN = re.compile(r"(?:bra|ret|exit|trap)\b|(?:bar|barrier)\.(?!warp)|mbarrier\.(?:try|test)_wait\b")


@lru_cache(maxsize=4096)
def _ends_run(opcode: str) -> bool:
    return _ENDS_RUN.match(opcode) is not None


def ends_run(ins: Instruction) -> bool:
    """Whether the scheduler must act on this instruction: a branch, an exit, a wait at a barrier."""
    return _ends_run(ins.opcode)


@lru_cache(maxsize=4096)
def _acts(opcode: str) -> bool:
    return _ACTS.match(opcode) is not None


def acts(ins: Instruction) -> bool:
    """Whether a part of a warp that comes to this instruction alone has gone its own way: it makes barriers, fences or
    waits. Branches around arithmetic, accesses, copies and arrivals join again behind them: compilers see to it, and
    kernels rely on it."""
    return _acts(ins.opcode)


class Flow:
    """Made once per kernel. Registers are bits of an int; `live(pc)` has those whose value an execution from `pc` on
    may read."""

    def __init__(self, kernel: Kernel) -> None:
        """Raises `UnsupportedInstruction` on the first instruction outside the whitelist."""
        self.kernel = kernel
        self.entries: list[tuple[Entry, Fields]] = [lookup(ins) for ins in kernel.instructions]
        self.count = len(kernel.instructions)
        self._bit = {name: 1 << i for i, name in enumerate(kernel.registers)}
        self.written: list[tuple[str, ...]] = []
        self.writes: list[int] = []
        """As `written`, in bits."""
        self.reads: list[int] = []
        self._named: dict[str, list[str]] = {}
        self._kills: list[int] = []
        for ins, (entry, _) in zip(kernel.instructions, self.entries):
            self._note_registers(ins, entry)
        starts = {0, *kernel.labels.values()} | {i + 1 for i, ins in enumerate(kernel.instructions) if ends_run(ins)}
        self._starts = sorted(s for s in starts if s < self.count)
        self.polls = frozenset(start for start in self._starts if self._polls(start))
        """Where loops of one run begin that read memory until another thread has written there."""
        self.undefined = self._undefined_comparison()
        """A sentence on the first comparison of a register that no instruction writes; empty if there is none."""
        self.understood = False
        """Whether some machine has prepared every instruction: others then prepare those alone that they reach."""
        self._live_at_start = self._solve()
        self._live: dict[int, int] = {}

    def _undefined_comparison(self) -> str:
        """What is computed of an unwritten register shows (`registers.py`); what is decided by it need not."""
        written = 0
        for bits in self.writes:
            written |= bits
        for ins, reads in zip(self.kernel.instructions, self.reads):
            if (unknown := reads & ~written) and ins.opcode.startswith("setp."):
                name = next(name for name, bit in self._bit.items() if bit & unknown)
                return f"The register {name}, which no instruction writes, is compared in {ins}."
        return ""

    def _note_registers(self, ins: Instruction, entry: Entry) -> None:
        outputs = [name for o in ins.operands[: entry.writes] for name in self._registers_of(o)]
        inputs = [name for o in ins.operands[entry.writes :] for name in self._registers_of(o)]
        if ins.predicate:
            if ins.predicate[0] not in self.kernel.registers:
                raise UnsupportedInstruction(f"The predicate of {ins} is not declared.")
            inputs.append(ins.predicate[0])
        self.written.append(tuple(dict.fromkeys(outputs)))
        self.reads.append(self.bits(inputs))
        self.writes.append(self.bits(outputs))
        self._kills.append(0 if ins.predicate else self.writes[-1])

    def _registers_of(self, operand: str) -> list[str]:
        """Their names; operands recur."""
        names = self._named.get(operand)
        if names is None:
            names = self._named[operand] = operand_registers(operand, self.kernel)
        return names

    def bits(self, registers: list[str] | tuple[str, ...]) -> int:
        result = 0
        for name in registers:
            result |= self._bit[name]
        return result

    def target(self, ins: Instruction) -> int:
        """The pc that a branch goes to."""
        try:
            return self.kernel.labels[ins.operands[0]]
        except (KeyError, IndexError):
            raise UnsupportedInstruction(f"The target of {ins} is no label.") from None

    def end_of_run(self, pc: int) -> int:
        """The pc after the straight run from `pc`: that of a branch target, an instruction that ends the run, or the
        end."""
        following = bisect_right(self._starts, pc)
        limit = self._starts[following] if following < len(self._starts) else self.count
        return limit - 1 if ends_run(self.kernel.instructions[limit - 1]) else limit

    def _polls(self, start: int) -> bool:
        instructions, end = self.kernel.instructions, self.end_of_run(start)
        again = (
            end < self.count
            and instructions[end].opcode.split(".")[0] == "bra"
            and self.target(instructions[end]) == start
        )
        return again and any(_POLL.match(ins.opcode) for ins in instructions[start:end])

    def _successors(self, end: int) -> list[int]:
        """Where execution may go on after a run that ends before `end`."""
        if end >= self.count or not ends_run(self.kernel.instructions[end]):
            return [end]
        ins = self.kernel.instructions[end]
        word = ins.opcode.split(".")[0]
        if word == "bra":
            return [self.target(ins)] + ([end + 1] if ins.predicate else [])
        return [end + 1] if word in ("bar", "barrier", "mbarrier") or ins.predicate else []

    def _effect(self, start: int, end: int) -> tuple[int, int]:
        """(registers read before they are written, registers written) from `start` through what ends the run at
        `end`."""
        last = end + 1 if end < self.count and ends_run(self.kernel.instructions[end]) else end
        reads = kills = 0
        for i in range(last - 1, start - 1, -1):
            reads = (reads & ~self._kills[i]) | self.reads[i]
            kills |= self._kills[i]
        return reads, kills

    def _solve(self) -> dict[int, int]:
        """Registers live at the start of each run, by iteration to the fixed point."""
        runs = []
        for start in self._starts:
            end = self.end_of_run(start)
            runs.append((start, *self._effect(start, end), self._successors(end)))
        live = dict.fromkeys(self._starts, 0) | {self.count: 0}
        changed = True
        while changed:
            changed = False
            for start, reads, kills, successors in reversed(runs):
                after = 0
                for s in successors:
                    after |= live.get(s, 0)
                now = reads | (after & ~kills)
                if now != live[start]:
                    live[start], changed = now, True
        return live

    def live(self, pc: int) -> int:
        """Registers live at any pc."""
        if pc in self._live_at_start:
            return self._live_at_start[pc]
        if pc not in self._live:
            end = self.end_of_run(pc)
            after = 0
            for s in self._successors(end):
                after |= self._live_at_start.get(s, 0)
            reads, kills = self._effect(pc, end)
            self._live[pc] = reads | (after & ~kills)
        return self._live[pc]


@lru_cache(maxsize=16)
def flow_of(kernel: Kernel) -> Flow:
    """The kernel's flow, made on the first call. Raises `UnsupportedInstruction`."""
    return Flow(kernel)
