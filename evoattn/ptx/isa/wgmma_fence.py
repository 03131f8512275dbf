"""wgmma.fence: the first product of a kernel needs one before it, and so does one after threads have written to its
registers (PTX ISA, wgmma.fence).

Copies after the fence of what was written before it do not count, nor constants: ptxas makes of both what it likes. A
product's own writes to its accumulators need none before the next of the same shape. Descriptors are no registers of a
product."""

from functools import lru_cache

from evoattn.ptx.isa.flow import flow_of
from evoattn.ptx.program.kernel import Kernel
from evoattn.ptx.program.operands import operand_registers


class UnfencedWrites:
    """Registers that each warpgroup, by its first warp, has written since its last fence; a set is the bits of an
    int."""

    def __init__(self, kernel: Kernel) -> None:
        self._runs = _runs_of(kernel)
        self._dirty: dict[int, int] = {}

    def run(self, lead: int, start: int, end: int) -> int | None:
        """The warpgroup executes `start` ≤ pc < `end`: the first pc of a product of registers that lack a fence, or
        None."""
        self._dirty[lead], wrong = self._runs.after(start, end, self._dirty.get(lead, self._runs.never))
        return wrong


class _Runs:
    """What straight runs of one kernel leave without a fence; the same for all its machines."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.flow = kernel, flow_of(kernel)
        self._products = {
            pc: self._bits([o for o in ins.operands[:2] if o.startswith("{")])
            for pc, ins in enumerate(kernel.instructions)
            if ins.opcode.startswith("wgmma.mma_async")
        }
        self._watched = self._sources_of_products()
        self.never = 1 << len(kernel.registers)
        """Stands among the registers for: no fence yet."""
        self._known: dict[tuple[int, int, int], tuple[int, int | None]] = {}

    def after(self, start: int, end: int, dirty: int) -> tuple[int, int | None]:
        """(what lacks a fence after the run, the first pc of a product of such registers)."""
        key = start, end, dirty
        if key not in self._known:
            self._known[key] = self._walk(*key)
        return self._known[key]

    def _walk(self, start: int, end: int, dirty: int) -> tuple[int, int | None]:
        wrong = None
        for pc in range(start, end):
            ins = self.kernel.instructions[pc]
            if pc in self._products:
                if wrong is None and (self._products[pc] | self.never) & dirty:
                    wrong = pc
            elif ins.opcode.startswith("wgmma.fence"):
                dirty = 0
            elif written := self.flow.writes[pc] & self._watched:
                moved = ins.opcode.startswith("mov.") and not self._bits(ins.operands[1:]) & dirty
                if not moved:
                    dirty |= written
                elif not ins.predicate:
                    dirty &= ~written
        return dirty, wrong

    def _bits(self, operands: list[str] | tuple[str, ...]) -> int:
        return self.flow.bits([name for o in operands for name in operand_registers(o, self.kernel)])

    def _sources_of_products(self) -> int:
        """Registers of products, and what is copied into them."""
        watched, before = 0, -1
        for bits in self._products.values():
            watched |= bits
        moves = [
            (self.flow.writes[pc], self._bits(ins.operands[1:]))
            for pc, ins in enumerate(self.kernel.instructions)
            if ins.opcode.startswith("mov.")
        ]
        while watched != before:
            before = watched
            for written, sources in moves:
                if written & watched:
                    watched |= sources
        return watched


@lru_cache(maxsize=16)
def _runs_of(kernel: Kernel) -> _Runs:
    return _Runs(kernel)
