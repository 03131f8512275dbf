"""Registers of wgmma products under way: until the warpgroup waits, nobody may touch its accumulators or write its A
operand (PTX ISA, wgmma.mma_async). The next product of the same accumulators may follow at once."""

from functools import lru_cache

from evoattn.ptx.isa.flow import Flow, flow_of
from evoattn.ptx.program.kernel import Kernel
from evoattn.ptx.program.operands import operand_registers

_Group = tuple[frozenset[int], int]
"""Bits of each product's accumulators, bits of all A operands."""
_State = tuple[_Group, ...]
"""Groups that have not been waited for, oldest first; the last one is open."""
_NOTHING: _Group = (frozenset(), 0)


@lru_cache(maxsize=16)
def _found_out(kernel: Kernel) -> tuple[dict[tuple[int, int, _State], int | None], dict[int, tuple[int, int]]]:
    """What `_walk` and `_bits` have answered for this kernel, on whatever machine."""
    return {}, {}


class RegistersInFlight:
    """What each warpgroup has under way, by its first warp; a warpgroup with nothing has no state."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.flow = kernel, flow_of(kernel)
        self.states: dict[int, _State] = {}
        self._known, self._operands = _found_out(kernel)

    def issue(self, lead: int, pc: int) -> None:
        self.states[lead] = self._issued(self.states.get(lead, (_NOTHING,)), pc)

    def commit(self, lead: int) -> None:
        self.states[lead] = (*self.states.get(lead, (_NOTHING,)), _NOTHING)

    def retire(self, lead: int, pending: int) -> None:
        """All but the newest `pending` committed groups are done."""
        self.states[lead] = self._retired(self.states.get(lead, (_NOTHING,)), pending)
        if self.states[lead] == (_NOTHING,):
            del self.states[lead]

    def touched_in_flight(self, lead: int, start: int, end: int) -> int | None:
        """The first pc of a straight run, `start` ≤ pc < `end`, at which this warpgroup would touch what is under way,
        or None."""
        key = start, end, self.states.get(lead, (_NOTHING,))
        if key not in self._known:
            self._known[key] = self._walk(*key)
        return self._known[key]

    def _walk(self, start: int, end: int, state: _State) -> int | None:
        for pc in range(start, end):
            ins = self.kernel.instructions[pc]
            accumulating = 0
            reading = 0
            for accumulators, operands in state:
                for bits in accumulators:
                    accumulating |= bits
                reading |= operands
            if ins.opcode.startswith("wgmma.mma_async"):
                d, a = self._bits(pc)
                continued = any(d in accumulators for accumulators, _ in state)
                if a & accumulating or d & reading or (d & accumulating and not continued):
                    return pc
                state = self._issued(state, pc)
            elif ins.opcode.startswith("wgmma.commit_group"):
                state = (*state, _NOTHING)
            elif ins.opcode.startswith("wgmma.wait_group"):
                state = self._retired(state, int(ins.operands[0], 0))
            elif self.flow.reads[pc] & accumulating or self.flow.writes[pc] & (accumulating | reading):
                return pc
        return None

    def _issued(self, state: _State, pc: int) -> _State:
        d, a = self._bits(pc)
        accumulators, operands = state[-1]
        return (*state[:-1], (accumulators | {d}, operands | a))

    @staticmethod
    def _retired(state: _State, pending: int) -> _State:
        return state[max(len(state) - 1 - pending, 0) :]

    def _bits(self, pc: int) -> tuple[int, int]:
        """Registers of a product's accumulators, and of its A operand (none of them where that is a descriptor)."""
        if pc not in self._operands:
            d, a = self.kernel.instructions[pc].operands[:2]
            flow: Flow = self.flow
            both = [flow.bits(operand_registers(o, self.kernel)) if o.startswith("{") else 0 for o in (d, a)]
            self._operands[pc] = both[0], both[1]
        return self._operands[pc]
