"""wgmma (sm_90a): matrix products of a warpgroup that run beside its threads.

A product is carried out when it is issued, which is as early as a device may do it, but its accumulators change only
when the warpgroup waits for its group. Until then they are kept as matrices, so that a chain of products costs no
shuffling of registers; that nobody touches the registers meanwhile is for `wgmma_products.py` to see, and that nobody
overwrites the operands in shared memory for `async_proxy.py`."""

import numpy as np

from evoattn.ptx.errors import AsyncFault, unsupported
from evoattn.ptx.isa.dispatch import Action, Fields, instruction
from evoattn.ptx.isa.tensor_core import Fragments
from evoattn.ptx.isa.wgmma_products import SharedOperand, matrix_products, warps_of
from evoattn.ptx.program.kernel import Instruction, Lanes, Numbers, group_count, parse_type, vector_parts
from evoattn.ptx.program.threads import WARP, ActiveThreads
from evoattn.ptx.races.async_proxy import WARPGROUP_WARPS
from evoattn.ptx.state.context import Context

ROWS = 64
_B32, _F32, _PREDICATE = parse_type("b32"), parse_type("f32"), parse_type("pred")


def _uniform(values: Lanes, threads: Numbers, what: str, ins: Instruction) -> None:
    """Raise `AsyncFault` unless all threads `[warpgroup, 128]` of a warpgroup agree."""
    if values.ndim and (values[threads] != values[threads[:, :1]]).any():
        raise AsyncFault(f"The threads of a warpgroup give different {what} in {ins}.")


_PRODUCT = r"\.mma_async\.sync\.aligned\.m64n(?P<columns>\d+)k(?P<depth>16)\.f32\.(?P<type>f16|bf16)\.(?P=type)"
_OF_8_BITS = (
    r"\.mma_async\.sync\.aligned\.m64n(?P<columns>\d+)k(?P<depth>32)\.(?P<sums>f32|f16)"
    r"\.(?P<type>e4m3|e5m2)\.(?P<of_b>e4m3|e5m2)"
)


@instruction("wgmma", _PRODUCT, kind="tensor", pure=False, writes=0)
@instruction("wgmma", _OF_8_BITS, kind="tensor", pure=False, writes=0)
def multiply(context: Context, ins: Instruction, fields: Fields) -> Action:
    """`D, A, B, scale-d, scale-a, scale-b{, transpose-a}, transpose-b`: D = A·B + (D if scale-d), accumulated in
    float32. Of 8 bits there is no transposing, fewer bits of the sum are kept (`wgmma_sums.py`), and D may be pairs of
    fp16, to which each sum is rounded.

    A is four registers per thread (as of mma.sync of the same depth, a warp its own 16 rows) or a descriptor, and only
    a descriptor can be transposed. D counts as read, for it may be."""
    columns, kind, depth = int(fields["columns"]), fields["type"], int(fields["depth"])
    transposes = depth == 16
    in_registers = ins.operands[1].startswith("{")
    names, flags = vector_parts(ins.operands[0]), ins.operands[4:]
    wanted = 4 - in_registers if transposes else 2
    halves = fields.get("sums") == "f16"
    count = columns // (4 if halves else 2)
    if columns % 8 or not 8 <= columns <= 256 or len(names) != count or len(flags) != wanted:
        raise unsupported(ins, "its shape or operands")
    sign = np.float32(int(flags[0]) * int(flags[1]))
    if {flags[0], flags[1]} - {"1", "-1"} or set(flags[2:]) - {"0", "1"}:
        raise unsupported(ins, "an immediate")
    products = matrix_products(context)
    accumulators, scale_d = products.accumulators(names, halves), context.source(ins.operands[3], _PREDICATE)
    transposed_b = transposes and flags[-1] == "1"
    of_b = fields.get("of_b") or kind
    b_operand = SharedOperand(context, ins, ins.operands[2], columns, transposed_b, of_b)
    if in_registers:
        fragments = context.cached(("mma", depth, kind), lambda: Fragments(context, depth, kind))
        a_registers = [context.source(o, _B32) for o in vector_parts(ins.operands[1])]
    else:
        a_operand = SharedOperand(context, ins, ins.operands[1], ROWS, transposes and flags[2] == "1", kind)

    def tell(leads: Numbers, chunks: Numbers) -> None:
        """The watchers, of one operand in shared memory."""
        if context.races is not None:
            context.races.proxy.read_by_products(leads, chunks.reshape(len(leads), -1), ins)
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
            a = fragments.a[warps_of(leads)].reshape(len(leads), ROWS, depth)
        else:
            _uniform(a_operand.descriptor, members, "descriptors", ins)
            a, chunks = a_operand(lead_threads)
            a = a.transpose(0, 2, 1) if a_operand.transposed else a
            tell(leads, chunks)
        b, chunks = b_operand(lead_threads)
        tell(leads, chunks)
        keep = scale_d[lead_threads] if scale_d.ndim else np.broadcast_to(scale_d, leads.shape)
        if not transposes:
            products.accumulate_cut(accumulators, leads, (a if sign > 0 else -a, kind), (b, of_b), keep)
        else:
            product = np.matmul(a, b if transposed_b else b.transpose(0, 2, 1))
            if sign < 0:
                np.negative(product, product)
            products.accumulate(accumulators, leads, product, keep)
        for lead in leads.tolist():
            products.registers.issue(lead, ins.index)

    return run


@instruction("wgmma", r"\.fence\.sync\.aligned", kind="other", pure=False, writes=0)
def fence(context: Context, ins: Instruction, fields: Fields) -> Action:
    """Orders registers between threads and products; a machine that reads them at issue has nothing to do (see
    `wgmma_products.py`)."""
    return lambda active: context.require_whole_warpgroups(active, ins)


@instruction("wgmma", r"\.commit_group\.sync\.aligned", kind="other", pure=False, writes=0)
def commit(context: Context, ins: Instruction, fields: Fields) -> Action:
    products = matrix_products(context)

    def run(active: ActiveThreads) -> None:
        context.require_whole_warpgroups(active, ins)
        products.commit(active)

    return run


@instruction("wgmma", r"\.wait_group\.sync\.aligned", kind="other", pure=False, writes=0)
def wait(context: Context, ins: Instruction, fields: Fields) -> Action:
    products, pending = matrix_products(context), group_count(ins.operands[0])

    def run(active: ActiveThreads) -> None:
        context.require_whole_warpgroups(active, ins)
        products.wait(active, pending)

    return run
