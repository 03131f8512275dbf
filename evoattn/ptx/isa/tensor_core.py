"""Matrix instructions of a warp: ldmatrix, stmatrix, mma.sync. Layouts are those of the PTX ISA, "Matrix fragments for
mma"."""

import numpy as np

from evoattn.ptx.errors import DivergentCollective
from evoattn.ptx.isa.dispatch import Action, Fields, instruction
from evoattn.ptx.isa.eight_bits import VALUES
from evoattn.ptx.isa.half import FP16_VALUES
from evoattn.ptx.isa.locator import Locator
from evoattn.ptx.isa.warp import assign
from evoattn.ptx.isa.wgmma_sums import add_products
from evoattn.ptx.program.kernel import Instruction, Lanes, parse_type, vector_parts
from evoattn.ptx.program.threads import WARP, ActiveThreads
from evoattn.ptx.races.access import READ, WRITE
from evoattn.ptx.state.context import Context

_B32, _F32, _S32 = parse_type("b32"), parse_type("f32"), parse_type("s32")
BYTES = VALUES | {"s8": np.arange(256).astype(np.uint8).view(np.int8).astype(np.float32)}
"""float32 of each code of 8 bits."""
_MATRIX = r"\.sync\.aligned\.m8n8\.(?P<count>x1|x2|x4)(?P<trans>\.trans)?\.shared(?:::cta)?\.b16"


class MatrixRows:
    """The row addresses of ldmatrix and stmatrix: lanes 8i … 8i+7 give those of matrix i."""

    def __init__(self, context: Context, ins: Instruction, operand: str, matrices: int, kind: str) -> None:
        self.context, self.ins = context, ins
        self.gives_address = context.threads.lane < 8 * matrices
        self.all = matrices == 4
        self.locate = Locator(context, ins, operand, "shared", 16, kind, by_warp=True)

    def __call__(self, active: ActiveThreads) -> tuple[Lanes, ActiveThreads]:
        """Byte index of each row, and the threads that gave them. The whole warp counts as the one that accesses
        them."""
        self.context.require_whole_warps(active, self.ins)
        giving = active if self.all else active.where(self.gives_address)
        if giving is None:
            raise DivergentCollective(f"No thread that gives an address executes {self.ins}.")
        [(_, index, _)] = self.locate(giving)
        return index, giving


@instruction("ldmatrix", _MATRIX, kind="memory", pure=False)
def load_matrices(context: Context, ins: Instruction, fields: Fields) -> Action:
    """Lane l gets elements 2(l % 4) and 2(l % 4) + 1 of row l / 4 of each matrix, of its columns with `.trans`."""
    count = int(fields["count"][1])
    targets = [context.destination(o, _B32) for o in vector_parts(ins.operands[0])]
    rows = MatrixRows(context, ins, ins.operands[1], count, READ)
    warps = context.threads.warp_count
    lanes = np.zeros((warps, WARP, 8), np.uint16)
    # [warp, matrix, row, 16-bit element]; only the rows of active threads are ever written.
    flat = lanes.reshape(-1).view(np.complex128)

    def run(active: ActiveThreads) -> None:
        index, giving = rows(active)
        data = context.shared.elements(16).take(index >> 4)
        if giving.mask is None:
            flat[:] = data
        else:
            flat[giving.index] = data
        matrices = lanes.reshape(warps, 4, 8, 8)
        for i, target in enumerate(targets):
            matrix = matrices[:, i].transpose(0, 2, 1) if fields["trans"] else matrices[:, i]
            assign(target, np.ascontiguousarray(matrix).reshape(-1).view(np.uint32), active)

    return run


@instruction("stmatrix", _MATRIX, kind="memory", pure=False, writes=0)
def store_matrices(context: Context, ins: Instruction, fields: Fields) -> Action:
    """The inverse of ldmatrix."""
    count = int(fields["count"][1])
    sources = [context.source(o, _B32) for o in vector_parts(ins.operands[1])]
    rows = MatrixRows(context, ins, ins.operands[0], count, WRITE)
    warps = context.threads.warp_count
    lanes = np.zeros((warps, 4, 8, 8), np.uint16)

    def run(active: ActiveThreads) -> None:
        index, giving = rows(active)
        for i, source in enumerate(sources):
            matrix = (
                np.ascontiguousarray(np.broadcast_to(source, (context.count,))).view(np.uint16).reshape(warps, 8, 8)
            )
            lanes[:, i] = matrix.transpose(0, 2, 1) if fields["trans"] else matrix
        values = lanes.reshape(-1).view(np.complex128)
        context.shared.elements(16)[index >> 4] = values if giving.mask is None else values[giving.index]

    return run


def _unpack(bits: Lanes, kind: str, out: Lanes) -> None:
    """Registers `[n, threads]` uint32 → `[n, threads, 2]` float32 (`[n, threads]` for tf32, 4 of 8 bits)."""
    if kind == "f16":
        FP16_VALUES.take(bits.view(np.uint16).reshape(out.shape), out=out, mode="clip")
    elif kind in BYTES:
        BYTES[kind].take(bits.view(np.uint8).reshape(out.shape), out=out, mode="clip")
    elif kind == "bf16":
        raw = out.view(np.uint32)
        np.left_shift(bits, np.uint32(16), raw[..., 0])
        np.bitwise_and(bits, np.uint32(0xFFFF0000), raw[..., 1])
    else:
        np.bitwise_and(bits, np.uint32(0xFFFFE000), out.view(np.uint32))


class Fragments:
    """Fragments of all warps ⇄ matrices `[warp, row, column]`, by transposing axes alone.

    With g = lane / 4 and t = lane % 4, and e the element within a register, register i has of A row g + 8·(i % 2) and
    column 2t + e + 8·(i / 2), of B row 2t + e + 8i and column g, of C row g + 8·(i / 2) and column 2t + i % 2. tf32 has
    one element per register: t stands for 2t + e, and 4 for 8 along the depth; of 8 bits there are four: 4t + e and 16.
    """

    def __init__(self, context: Context, depth: int, kind: str) -> None:
        warps = context.threads.warp_count
        self.kind = kind
        elements = 1 if kind == "tf32" else 4 if kind in BYTES else 2
        chunk = 4 * elements
        self.a_registers, self.b_registers = 2 * (depth // chunk), depth // chunk
        self.a_bits = np.zeros((self.a_registers, context.count), np.uint32)
        self.b_bits = np.zeros((self.b_registers, context.count), np.uint32)
        tail = (context.count,) if elements == 1 else (context.count, elements)
        self.a_values = np.zeros((self.a_registers, *tail), np.float32)
        self.b_values = np.zeros((self.b_registers, *tail), np.float32)
        # [column block, row half, warp, g, t, e] → [warp, row half, g, column block, t, e]
        self.a_view = self.a_values.reshape(depth // chunk, 2, warps, 8, 4, elements).transpose(2, 1, 3, 0, 4, 5)
        self.a_matrix = np.zeros(self.a_view.shape, np.float32)
        # [row block, warp, g, t, e] → [warp, g (column), row block, t, e]
        self.b_view = self.b_values.reshape(depth // chunk, warps, 8, 4, elements).transpose(1, 2, 0, 3, 4)
        self.b_matrix = np.zeros(self.b_view.shape, np.float32)
        self.a = self.a_matrix.reshape(warps, 16, depth)
        self.b = self.b_matrix.reshape(warps, 8, depth).transpose(0, 2, 1)
        self.product = np.zeros((warps, 16, 8), np.float32)
        # [warp, row half, g, t, i % 2] → one view per register, [warp, g, t]
        split = self.product.reshape(warps, 2, 8, 4, 2)
        self.products = [split[:, i // 2, :, :, i % 2] for i in range(4)]

    def load_a(self, registers: list[Lanes]) -> None:
        for row, register in zip(self.a_bits, registers):
            row[:] = register
        _unpack(self.a_bits, self.kind, self.a_values)
        np.copyto(self.a_matrix, self.a_view)

    def load_b(self, registers: list[Lanes]) -> None:
        for row, register in zip(self.b_bits, registers):
            row[:] = register
        _unpack(self.b_bits, self.kind, self.b_values)
        np.copyto(self.b_matrix, self.b_view)


@instruction(
    "mma",
    r"\.sync\.aligned\.m16n8k(?P<depth>16|8)\.row\.col\.f32\.(?P<type>f16|bf16)\.(?P=type)\.f32",
    kind="tensor",
    pure=False,
)
@instruction(
    "mma",
    r"\.sync\.aligned\.m16n8k(?P<depth>32)\.row\.col\.f32\.(?P<type>e4m3|e5m2)\.(?P=type)\.f32",
    kind="tensor",
    pure=False,
)
@instruction(
    "mma", r"\.sync\.aligned\.m16n8k(?P<depth>8|4)\.row\.col\.f32\.(?P<type>tf32)\.tf32\.f32", kind="tensor", pure=False
)
def multiply_matrices(context: Context, ins: Instruction, fields: Fields) -> Action:
    """D = A·B + C with 16 rows and 8 columns, accumulated in float32 (hardware's order of additions is not
    specified). Of 8 bits fewer bits of the sum are kept: as Hopper's wgmma does (`wgmma_sums.py`), which other cards
    were not compared with."""
    kind = fields["type"]
    fragments = context.cached(
        ("mma", int(fields["depth"]), fields["type"]), lambda: Fragments(context, int(fields["depth"]), fields["type"])
    )
    targets = [context.destination(o, _F32) for o in vector_parts(ins.operands[0])]
    a, b = ([context.source(o, _B32) for o in vector_parts(operand)] for operand in ins.operands[1:3])
    c = [context.source(o, _F32) for o in vector_parts(ins.operands[3])]
    shape = (context.threads.warp_count, 8, 4)
    views = [
        (p, s.reshape(shape) if s.ndim else s, t.reshape(shape)) for p, s, t in zip(fragments.products, c, targets)
    ]

    nothing = np.zeros((), np.float32)
    totals = [(p, nothing if kind in VALUES else addend, target) for p, addend, target in views]

    def run(active: ActiveThreads) -> None:
        context.require_whole_warps(active, ins)
        fragments.load_a(a)
        fragments.load_b(b)
        if kind in VALUES:  # the product has what is added, too
            for product, addend, _ in views:
                np.copyto(product, addend)
            b_rows = fragments.b.transpose(0, 2, 1)
            np.copyto(fragments.product, add_products(fragments.product.copy(), (fragments.a, kind), (b_rows, kind)))
        else:
            np.matmul(fragments.a, fragments.b, fragments.product)
        if active.mask is None:
            for product, addend, target in totals:
                np.add(product, addend, target)
        else:
            mask = active.mask.reshape(shape)
            for product, addend, target in totals:
                np.copyto(target, product + addend, where=mask)

    return run


@instruction("mma", r"\.sync\.aligned\.m16n8k32\.row\.col\.s32\.(?P<type>s8)\.s8\.s32", kind="tensor", pure=False)
def multiply_whole_numbers(context: Context, ins: Instruction, fields: Fields) -> Action:
    """D = A·B + C with 16 rows and 8 columns, exactly: 32 products are below 2^24, as float32 has them."""
    fragments = context.cached(("mma", 32, fields["type"]), lambda: Fragments(context, 32, fields["type"]))
    targets = [context.destination(o, _S32) for o in vector_parts(ins.operands[0])]
    a, b = ([context.source(o, _B32) for o in vector_parts(operand)] for operand in ins.operands[1:3])
    c = [context.source(o, _S32) for o in vector_parts(ins.operands[3])]
    shape = (context.threads.warp_count, 8, 4)

    def run(active: ActiveThreads) -> None:
        context.require_whole_warps(active, ins)
        fragments.load_a(a)
        fragments.load_b(b)
        np.matmul(fragments.a, fragments.b, fragments.product)
        made = [p.astype(np.int32) + (s.reshape(shape) if s.ndim else s) for p, s in zip(fragments.products, c)]
        for target, total in zip(targets, made):
            assign(target, np.ascontiguousarray(total).reshape(-1), active)

    return run
