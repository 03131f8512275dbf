"""wgmma (sm_90a): matrix products of a warpgroup that run beside its threads.

A product is carried out when it is issued, which is as early as a device may do it, but its accumulators change only when the warpgroup
waits for its group. Until then they are kept as matrices, so that a chain of products costs no shuffling of registers; that nobody
touches the registers meanwhile is for `wgmma_registers.py` to see, and that nobody overwrites the operands in shared memory for
`async_races.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from evoattn.ptx.errors import AsyncFault, unsupported
from evoattn.ptx.isa.dispatch import Fields, instruction
from evoattn.ptx.isa.tensor_core import Fragments
from evoattn.ptx.isa.wgmma_fence import UnfencedWrites
from evoattn.ptx.isa.wgmma_operand import SharedOperand
from evoattn.ptx.isa.wgmma_registers import RegistersInFlight
from evoattn.ptx.memory.matrix_descriptor import DEPTH
from evoattn.ptx.program.dtypes import parse_type
from evoattn.ptx.program.kernel import Instruction
from evoattn.ptx.program.operands import vector_parts
from evoattn.ptx.program.threads import WARP, ActiveThreads
from evoattn.ptx.races.async_proxy import WARPGROUP_WARPS
from evoattn.ptx.state.context import Context

ROWS = 64
_B32, _F32, _PREDICATE = parse_type("b32"), parse_type("f32"), parse_type("pred")


class Accumulators:
    """The accumulators of one list of registers in all warps: `matrix` `[warp, 16, columns]` while products are under way.

    With g = lane / 4 and t = lane % 4, register i has row g + 8 · (i / 2 % 2) and column 8 · (i / 4) + 2t + i % 2 (PTX ISA, wgmma
    m64nNk16).
    """

    def __init__(self, context: Context, names: tuple[str, ...]) -> None:
        warps, columns = context.threads.warp_count, 2 * len(names)
        self.registers = [context.destination(name, _F32) for name in names]
        self.matrix = np.zeros((warps, 16, columns), np.float32)
        # [column block, row half, e, warp, g, t] → [warp, row half, g, column block, t, e]
        self._flat = np.zeros((len(names), context.count), np.float32)
        self._by_warp = self._flat.reshape(columns // 8, 2, 2, warps, 8, 4).transpose(3, 1, 4, 0, 5, 2)
        self._matrix = self.matrix.reshape(warps, 2, 8, columns // 8, 4, 2)
        self.groups: dict[int, int] = {}
        """By the first warp of a warpgroup with products under way: the number of the newest group that has one."""

    def read(self, warps: np.ndarray) -> None:
        """Registers → matrices of these warps."""
        for row, register in zip(self._flat, self.registers):
            row[:] = register
        self._matrix[warps] = self._by_warp[warps]

    def write(self, warps: np.ndarray) -> None:
        """Matrices → registers of these warps."""
        mask = None
        if len(warps) == len(self.matrix):
            np.copyto(self._by_warp, self._matrix)
        else:
            self._by_warp[warps] = self._matrix[warps]
            mask = np.zeros((len(self.matrix), WARP), np.bool_)
            mask[warps] = True
            mask = mask.ravel()
        for row, register in zip(self._flat, self.registers):
            if mask is None:
                np.copyto(register, row)
            else:
                np.copyto(register, row, where=mask)


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

    def accumulators(self, names: tuple[str, ...]) -> Accumulators:
        if names not in self._accumulators:
            self._accumulators[names] = Accumulators(self.context, names)
        return self._accumulators[names]

    def groups(self, lead: int) -> _Groups:
        """Of the warpgroup whose first warp is `lead`."""
        return self._groups.setdefault(lead, _Groups())

    def accumulate(self, accumulators: Accumulators, leads: np.ndarray, product: np.ndarray, keep: np.ndarray) -> None:
        """D = product + (D where `keep`, by warpgroup); `product` is `[warpgroup, 64, columns]`."""
        fresh = np.array([lead not in accumulators.groups for lead in leads.tolist()])
        if (fresh & keep).any():
            accumulators.read(_warps_of(leads[fresh & keep]))
        for lead in leads.tolist():
            accumulators.groups[lead] = self.groups(lead).open
        warps = _warps_of(leads)
        product = product.reshape(len(warps), 16, -1)
        if keep.all():
            product += accumulators.matrix[warps]
        elif keep.any():
            kept = np.repeat(keep, WARPGROUP_WARPS)
            product[kept] += accumulators.matrix[warps[kept]]
        accumulators.matrix[warps] = product

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
            if self.context.async_races is not None:
                agent = self.context.async_races.products(lead)
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
                accumulators.write(_warps_of(np.array(landed)))
                for lead in landed:
                    del accumulators.groups[lead]

    def _check_registers(self, start: int, end: int, active: ActiveThreads) -> None:
        for lead in active.warpgroups.tolist():
            pc = self.registers.touched_in_flight(lead, start, end)
            if pc is not None:
                raise AsyncFault(
                    f"The warpgroup of {self.threads.describe(lead * WARP)} touches registers of a wgmma that it has not waited for in "
                    f"{self.context.kernel.instructions[pc]}."
                )
            pc = self.unfenced.run(lead, start, end)
            if pc is not None:
                raise AsyncFault(
                    f"The warpgroup of {self.threads.describe(lead * WARP)} has written registers of a product with no wgmma.fence before "
                    f"{self.context.kernel.instructions[pc]}."
                )


def _warps_of(leads: np.ndarray) -> np.ndarray:
    return (leads[:, None] + np.arange(WARPGROUP_WARPS)).ravel()


def _products(context: Context) -> MatrixProducts:
    return context.cached("matrix products", lambda: MatrixProducts(context))


def _uniform(values: np.ndarray, threads: np.ndarray, what: str, ins: Instruction) -> None:
    """Raise `AsyncFault` unless all threads `[warpgroup, 128]` of a warpgroup agree."""
    if values.ndim and (values[threads] != values[threads[:, :1]]).any():
        raise AsyncFault(f"The threads of a warpgroup give different {what} in {ins}.")


_PRODUCT = r"\.mma_async\.sync\.aligned\.m64n(?P<columns>\d+)k16\.f32\.(?P<type>f16|bf16)\.(?P=type)"


@instruction("wgmma", _PRODUCT, kind="tensor", pure=False, writes=0)
def multiply(context: Context, ins: Instruction, fields: Fields):
    """`D, A, B, scale-d, scale-a, scale-b{, transpose-a}, transpose-b`: D = A·B + (D if scale-d), accumulated in float32.

    A is four registers a thread (as of mma.sync m16n8k16, a warp its own 16 rows) or a descriptor, and only a descriptor can be
    transposed. D counts as read, for it may be.
    """
    columns, kind = int(fields["columns"]), fields["type"][:-2]
    in_registers = ins.operands[1].startswith("{")
    names, flags = vector_parts(ins.operands[0]), ins.operands[4:]
    if columns % 8 or not 8 <= columns <= 256 or len(names) != columns // 2 or len(flags) != 4 - in_registers:
        raise unsupported(ins, "its shape or operands")
    sign = np.float32(int(flags[0]) * int(flags[1]))
    if {flags[0], flags[1]} - {"1", "-1"} or set(flags[2:]) - {"0", "1"}:
        raise unsupported(ins, "an immediate")
    products, threads = _products(context), context.threads
    accumulators, scale_d = products.accumulators(names), context.source(ins.operands[3], _PREDICATE)
    transposed_b = flags[-1] == "1"
    b_operand = SharedOperand(context, ins, ins.operands[2], columns, transposed_b, kind)
    if in_registers:
        fragments = context.cached(("mma", "16", fields["type"]), lambda: Fragments(context, DEPTH, fields["type"]))
        a_registers = [context.source(o, _B32) for o in vector_parts(ins.operands[1])]
    else:
        a_operand = SharedOperand(context, ins, ins.operands[1], ROWS, flags[2] == "1", kind)

    def tell(leads: np.ndarray, chunks: np.ndarray) -> None:
        """The watchers, of one operand in shared memory."""
        if context.async_races is not None:
            shift = 4 - context.races.shift
            for lead, part in zip(leads.tolist(), chunks):
                granules = (
                    part.ravel() if not shift else ((part.ravel() << shift)[:, None] + np.arange(1 << shift)).ravel()
                )
                issuers = threads.count + np.arange(lead, lead + WARPGROUP_WARPS)
                context.async_races.read(context.async_races.products(lead), issuers, granules, ins)
        if context.traffic is not None:
            context.traffic.shared_rows(chunks.size * 16)

    def run(active: ActiveThreads) -> None:
        context.require_whole_warpgroups(active, ins)
        leads = active.warpgroups
        lead_threads = leads * WARP
        members = lead_threads[:, None] + np.arange(WARPGROUP_WARPS * WARP)
        _uniform(b_operand.descriptor, members, "descriptors", ins)
        _uniform(scale_d, members, "scale-d", ins)
        if in_registers:
            fragments.load_a(a_registers)
            a = fragments.a[_warps_of(leads)].reshape(len(leads), ROWS, DEPTH)
        else:
            _uniform(a_operand.descriptor, members, "descriptors", ins)
            a, chunks = a_operand(lead_threads)
            a = a.transpose(0, 2, 1) if a_operand.transposed else a
            tell(leads, chunks)
        b, chunks = b_operand(lead_threads)
        tell(leads, chunks)
        product = np.matmul(a, b if transposed_b else b.transpose(0, 2, 1))
        if sign < 0:
            np.negative(product, product)
        keep = scale_d[lead_threads] if scale_d.ndim else np.broadcast_to(scale_d, leads.shape)
        products.accumulate(accumulators, leads, product, keep)
        for lead in leads.tolist():
            products.registers.issue(lead, ins.index)

    return run


@instruction("wgmma", r"\.fence\.sync\.aligned", kind="other", pure=False, writes=0)
def fence(context: Context, ins: Instruction, fields: Fields):
    """Orders registers between threads and products; a machine that reads them at issue has nothing to do (see `wgmma_fence.py`)."""
    return lambda active: context.require_whole_warpgroups(active, ins)


@instruction("wgmma", r"\.commit_group\.sync\.aligned", kind="other", pure=False, writes=0)
def commit(context: Context, ins: Instruction, fields: Fields):
    products = _products(context)

    def run(active: ActiveThreads) -> None:
        context.require_whole_warpgroups(active, ins)
        products.commit(active)

    return run


@instruction("wgmma", r"\.wait_group\.sync\.aligned", kind="other", pure=False, writes=0)
def wait(context: Context, ins: Instruction, fields: Fields):
    products, pending = _products(context), int(ins.operands[0], 0)

    def run(active: ActiveThreads) -> None:
        context.require_whole_warpgroups(active, ins)
        products.wait(active, pending)

    return run
