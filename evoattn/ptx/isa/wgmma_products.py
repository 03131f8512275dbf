"""wgmma products under way, by groups; their accumulators, kept as matrices meanwhile; who may touch their registers;
and wgmma.fence.

Until the warpgroup waits, nobody may touch a product's accumulators or write its A operand (PTX ISA, wgmma.mma_async).
The next product of the same accumulators may follow at once.

The first product of a kernel needs a fence before it, and so does one after threads have written to its registers (PTX
ISA, wgmma.fence). Copies after the fence of what was written before it do not count, nor constants: ptxas makes of both
what it likes. A product's own writes to its accumulators need none before the next of the same shape. Descriptors are
no registers of a product."""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from evoattn.ptx.errors import AsyncFault, MemoryFault
from evoattn.ptx.isa.control import Flow, flow_of
from evoattn.ptx.isa.eight_bits import VALUES
from evoattn.ptx.isa.half import to_float32
from evoattn.ptx.isa.wgmma_sums import Floats, add_products
from evoattn.ptx.program.kernel import Instruction, Kernel, Lanes, Mask, Numbers, operand_registers, parse_type
from evoattn.ptx.program.threads import WARP, ActiveThreads
from evoattn.ptx.races.async_proxy import CHUNK, WARPGROUP_WARPS
from evoattn.ptx.state.context import Context

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


_F32, _B32 = parse_type("f32"), parse_type("b32")


class Accumulators:
    """The accumulators of one list of registers in all warps: `matrix` `[warp, 16, columns]` while products are under
    way.

    With g = lane / 4 and t = lane % 4, number i has row g + 8 · (i / 2 % 2) and column 8 · (i / 4) + 2t + i % 2 (PTX
    ISA, wgmma m64nNk16). Of `halves` a register has two, in fp16."""

    def __init__(self, context: Context, names: tuple[str, ...], halves: bool) -> None:
        warps, columns = context.threads.warp_count, (4 if halves else 2) * len(names)
        self.registers = [context.destination(name, _B32 if halves else _F32) for name in names]
        self.halves = halves
        self.matrix = np.zeros((warps, 16, columns), np.float32)
        # [column block, row half, e, warp, g, t] → [warp, row half, g, column block, t, e]
        self._flat = np.zeros((columns // 2, context.count), np.float32)
        self._by_warp = self._flat.reshape(columns // 8, 2, 2, warps, 8, 4).transpose(3, 1, 4, 0, 5, 2)
        self._matrix = self.matrix.reshape(warps, 2, 8, columns // 8, 4, 2)
        self.groups: dict[int, int] = {}
        """By the first warp of a warpgroup with products under way: the number of the newest group that has one."""

    def read(self, warps: Numbers) -> None:
        """Registers → matrices of these warps."""
        if self.halves:
            for i, register in enumerate(self.registers):
                self._flat[2 * i : 2 * i + 2] = register.view(np.float16).reshape(-1, 2).T
        else:
            for row, register in zip(self._flat, self.registers):
                row[:] = register
        self._matrix[warps] = self._by_warp[warps]

    def write(self, warps: Numbers) -> None:
        """Matrices → registers of these warps."""
        mask: Mask | None = None
        if len(warps) == len(self.matrix):
            np.copyto(self._by_warp, self._matrix)
        else:
            self._by_warp[warps] = self._matrix[warps]
            by_warp = np.zeros((len(self.matrix), WARP), np.bool_)
            by_warp[warps] = True
            mask = by_warp.ravel()
        for row, register in zip(_packed(self._flat) if self.halves else self._flat, self.registers):
            if mask is None:
                np.copyto(register, row)
            else:
                np.copyto(register, row, where=mask)


def _packed(rows: Lanes) -> Lanes:
    """Each two rows of fp32 as one of pairs of fp16."""
    pairs = np.stack([rows[::2], rows[1::2]], -1).astype(np.float16)
    return pairs.view(np.uint32)[..., 0]


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


@dataclass
class _Groups:
    """Groups of one warpgroup that have not been waited for. The newest, `committed + len(times)`, is open."""

    retired: int = 0
    times: list[int] = field(default_factory=list)
    """Of the committed ones, oldest first: when they were."""

    @property
    def open(self) -> int:
        return self.retired + len(self.times)


class MatrixProducts:
    """Products under way of one machine."""

    def __init__(self, context: Context) -> None:
        self.context, self.threads = context, context.threads
        self._accumulators: dict[tuple[str, ...], Accumulators] = {}
        self._groups: dict[int, _Groups] = {}
        self.registers, self.unfenced = RegistersInFlight(context.kernel), UnfencedWrites(context.kernel)
        if context.races is not None:
            context.before_run.append(self._check_registers)

    def accumulators(self, names: tuple[str, ...], halves: bool) -> Accumulators:
        if names not in self._accumulators:
            self._accumulators[names] = Accumulators(self.context, names, halves)
        return self._accumulators[names]

    def groups(self, lead: int) -> _Groups:
        """Of the warpgroup whose first warp is `lead`."""
        return self._groups.setdefault(lead, _Groups())

    def accumulate(self, accumulators: Accumulators, leads: Numbers, product: NDArray[np.float32], keep: Mask) -> None:
        """D = product + (D where `keep`, by warpgroup); `product` is `[warpgroup, 64, columns]`."""
        warps = self._begin(accumulators, leads, keep)
        product = product.reshape(len(warps), 16, -1)
        if keep.all():
            product += accumulators.matrix[warps]
        elif keep.any():
            kept = np.repeat(keep, WARPGROUP_WARPS)
            product[kept] += accumulators.matrix[warps[kept]]
        accumulators.matrix[warps] = product

    def accumulate_cut(
        self, accumulators: Accumulators, leads: Numbers, a: tuple[Floats, str], b: tuple[Floats, str], keep: Mask
    ) -> None:
        """The same of numbers of 8 bits beside their types, A `[warpgroup, 64, 32]` and B `[warpgroup, columns, 32]`:
        see `wgmma_sums`."""
        warps = self._begin(accumulators, leads, keep)
        before = accumulators.matrix[warps].reshape(len(leads), 4 * 16, -1)
        after = add_products(np.where(np.broadcast_to(keep, leads.shape)[:, None, None], before, np.float32(0)), a, b)
        if accumulators.halves:
            after = after.astype(np.float16).astype(np.float32)
        accumulators.matrix[warps] = after.reshape(len(warps), 16, -1)

    def _begin(self, accumulators: Accumulators, leads: Numbers, keep: Mask) -> Numbers:
        """The warps of these warpgroups, whose accumulators, if they are kept, have been read and are under way."""
        fresh = np.array([lead not in accumulators.groups for lead in leads.tolist()])
        if (fresh & keep).any():
            accumulators.read(warps_of(leads[fresh & keep]))
        for lead in leads.tolist():
            accumulators.groups[lead] = self.groups(lead).open
        return warps_of(leads)

    def commit(self, active: ActiveThreads) -> None:
        order = None if self.context.races is None else self.context.races.synchronize()
        for lead in active.warpgroups.tolist():
            self.groups(lead).times.append(0 if order is None else order.now)
            self.registers.commit(lead)
        if order is not None:
            order.now += 1

    def wait(self, active: ActiveThreads, pending: int) -> None:
        for lead in active.warpgroups.tolist():
            groups = self.groups(lead)
            done = len(groups.times) - pending
            if done <= 0:
                continue
            if self.context.races is not None:
                agent = self.context.races.proxy.products(lead)
                self.context.races.synchronize().learn(
                    np.arange(lead, lead + WARPGROUP_WARPS), agent, groups.times[done - 1]
                )
            del groups.times[:done]
            groups.retired += done
            self.registers.retire(lead, pending)
        retired = {lead: self.groups(lead).retired for lead in active.warpgroups.tolist()}
        for accumulators in self._accumulators.values():
            landed = [lead for lead, number in retired.items() if accumulators.groups.get(lead, number) < number]
            if landed:
                accumulators.write(warps_of(np.array(landed)))
                for lead in landed:
                    del accumulators.groups[lead]

    def _check_registers(self, start: int, end: int, active: ActiveThreads) -> None:
        for lead in active.warpgroups.tolist():
            pc = self.registers.touched_in_flight(lead, start, end)
            if pc is not None:
                raise AsyncFault(
                    f"The warpgroup of {self.threads.describe(lead * WARP)} touches registers of a wgmma that it has "
                    "not waited for in "
                    f"{self.context.kernel.instructions[pc]}."
                )
            pc = self.unfenced.run(lead, start, end)
            if pc is not None:
                raise AsyncFault(
                    f"The warpgroup of {self.threads.describe(lead * WARP)} issues its first product, or one whose "
                    f"registers it has written, with no wgmma.fence before {self.context.kernel.instructions[pc]}."
                )


def warps_of(leads: Numbers) -> Numbers:
    """All warps of the warpgroups that have these first warps."""
    return (leads[:, None] + np.arange(WARPGROUP_WARPS)).ravel()


def matrix_products(context: Context) -> MatrixProducts:
    return context.cached("matrix products", lambda: MatrixProducts(context))


DEPTH = 16
_SWIZZLED_CHUNKS = {0: 1, 1: 8, 2: 4, 3: 2}
"""Chunks of a swizzled row, by the layout type in bits 62 and 63; 1 for none."""
_U64 = parse_type("u64")
_KNOWN_BITS = 0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 3 << 62


@lru_cache(maxsize=1024)
def operand_chunks(descriptor: int, side: int, transposed: bool) -> tuple[Numbers, int, int] | None:
    """Number of each 16-byte chunk of an operand from the start of the block's memory: `[side, 2]`, or transposed `[16,
    side / 8]`; the least and the greatest of them.

    `side` is M or N. Transposed means that M or N is contiguous. None for a descriptor with a base offset or unknown
    bits. With w chunks in a swizzled row, the leading offset L and the stride S, chunk c of row r lies (K-major) at row
    r % 8 of w chunks plus S · (r / 8), without swizzle c at c · L; (M- or N-major) chunk c of depth k at row k % 8 of w
    chunks plus c % w plus L · (c / w) plus S · (k / 8), without swizzle with L and S exchanged. Bits 4 … of the address
    are then XORed with bits 7 …: one for a swizzle of 32 bytes, two for 64, three for 128."""
    if descriptor & ~_KNOWN_BITS:
        return None
    start, leading, stride = (descriptor >> shift & 0x3FFF for shift in (0, 16, 32))  # in chunks
    wide = _SWIZZLED_CHUNKS[descriptor >> 62]
    if not transposed:
        row, chunk = np.arange(side)[:, None], np.arange(2)[None, :]
        at = row % 8 * wide + row // 8 * stride + chunk * (leading if wide == 1 else 1)
    else:
        depth, chunk = np.arange(DEPTH)[:, None], np.arange(side // 8)[None, :]
        over, along = (leading, stride) if wide > 1 else (stride, leading)
        at = depth % 8 * wide + depth // 8 * along + chunk % wide + chunk // wide * over
    at += start
    at ^= at >> 3 & wide - 1
    return at, int(at.min()), int(at.max())


class SharedOperand:
    """One operand of one instruction, given by a descriptor."""

    def __init__(
        self, context: Context, ins: Instruction, operand: str, side: int, transposed: bool, kind: str
    ) -> None:
        """`kind` is the type of its elements."""
        self.context, self.ins, self.side, self.transposed, self.kind = context, ins, side, transposed, kind
        self.descriptor = context.source(operand, _U64)

    def __call__(self, lead_threads: Numbers) -> tuple[Lanes, Lanes]:
        """(float32 `[warpgroup, side, 16]`, transposed `[warpgroup, 16, side]`, of 8 bits 32 in place of 16; chunks of
        `shared.data`, `[warpgroup, …]`).

        The warpgroups are given by their first threads. Raises `AsyncFault` and `MemoryFault`."""
        shared = self.context.shared
        given = self.descriptor[lead_threads] if self.descriptor.ndim else self.descriptor
        base = (shared.base[lead_threads] // CHUNK)[:, None, None]
        if not given.ndim or not np.count_nonzero(given != given[0]):  # as in most kernels
            chunks = self._chunks(int(given.flat[0]), int(lead_threads[0])) + base
        else:
            chunks = np.stack([self._chunks(d, thread) for d, thread in zip(given.tolist(), lead_threads.tolist())])
            chunks += base
        elements = shared.elements(CHUNK).take(chunks)
        if self.kind in VALUES:
            return VALUES[self.kind].take(elements.view(np.uint8)), chunks
        return to_float32(elements.view(np.uint16), self.kind.removesuffix("16")), chunks

    def _chunks(self, descriptor: int, thread: int) -> Lanes:
        found = operand_chunks(descriptor, self.side, self.transposed)
        if found is None:
            raise AsyncFault(f"The matrix descriptor {descriptor:#x} has a base offset or unknown bits in {self.ins}.")
        chunks, least, greatest = found
        shared, lowest, highest = self.context.shared, least * CHUNK, greatest * CHUNK
        if lowest < shared.first or highest + CHUNK > shared.limit:
            place = lowest if lowest < shared.first else highest
            raise MemoryFault(
                f"The warpgroup of {self.context.threads.describe(thread)} reads {shared.outside(place, CHUNK)} bytes, "
                f"in {self.ins}."
            )
        return chunks
