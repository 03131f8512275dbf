"""wmma m16n16k16: 16×16 matrices loaded, multiplied and stored by a warp.

The PTX ISA leaves the order of elements in these fragments open. Here it is that of mma.sync m16n8k16, as on sm_80 and
newer: A is one of its A fragments, B and the accumulator two of its B and C fragments side by side; fp16 A and B
fragments hold everything twice. Memory is read and written in pieces of 16 bytes, as ldmatrix does it, and each warp
counts as one that accesses."""

from collections.abc import Iterator

import numpy as np

from evoattn.ptx.isa.dispatch import Action, Fields, instruction
from evoattn.ptx.isa.locator import Located, Locator
from evoattn.ptx.isa.tensor_core import Fragments
from evoattn.ptx.isa.warp import assign
from evoattn.ptx.program.kernel import Instruction, Lanes, parse_type, vector_parts
from evoattn.ptx.program.threads import WARP, ActiveThreads
from evoattn.ptx.races.access import READ, WRITE
from evoattn.ptx.state.context import Context

_SIDE, _PIECE = 16, 16
_B32, _F32, _U32 = parse_type("b32"), parse_type("f32"), parse_type("u32")
_SHAPE = r"\.sync\.aligned\.(?P<layout>row|col)\.m16n16k16"
_MMA = r"\.mma\.sync\.aligned\.(?:row|col)\.(?:row|col)\.m16n16k16"
_SPACE = r"(?:\.(?P<space>shared|global))?(?:::cta)?"


class _Tile:
    """The 16×16 matrix of each warp in memory, as lines (rows or columns) of `item`-byte elements whose distance is an
    operand."""

    def __init__(
        self, context: Context, ins: Instruction, address: str, distance: str | None, space: str, item: int, kind: str
    ) -> None:
        self.context, self.ins, self.item = context, ins, item
        self.locate = Locator(context, ins, address, space, _PIECE, kind, by_warp=True)
        self.distance = context.source(distance, _U32) if distance else np.asarray(_SIDE, np.uint32)
        self.lines = np.zeros((context.threads.warp_count, _SIDE, _SIDE * item), np.uint8)
        self.pieces = _SIDE * item // _PIECE
        # Pieces of a line lie side by side; lane l and pass p take line l % 16 and piece l / 16 + 2p.
        self.by_lane = self.lines.reshape(-1, _SIDE, self.pieces // 2, 2, _PIECE).transpose(2, 0, 3, 1, 4)

    def _passes(self, active: ActiveThreads) -> Iterator[tuple[int, Located]]:
        self.context.require_whole_warps(active, self.ins)
        lane = self.context.threads.lane
        start = (lane % _SIDE) * self.distance.astype(np.int64) * self.item + lane // _SIDE * _PIECE
        for number in range(self.pieces // 2):
            yield number, self.locate(active, start + number * 2 * _PIECE)

    def load(self, active: ActiveThreads) -> Lanes:
        """`[warp, line, element]` as unsigned integers; only active warps' lines are current."""
        for number, located in self._passes(active):
            view = self.by_lane[number]
            for memory, index, part in located:
                octets = memory.elements(_PIECE).take(index >> 4).view(np.uint8).reshape(-1, 2, _SIDE, _PIECE)
                view[part.warps] = octets
        return self.lines.view(f"u{self.item}")

    def store(self, lines: Lanes, active: ActiveThreads) -> None:
        np.copyto(self.lines, np.ascontiguousarray(lines).view(np.uint8).reshape(self.lines.shape))
        for number, located in self._passes(active):
            view = self.by_lane[number]
            for memory, index, part in located:
                memory.elements(_PIECE)[index >> 4] = (
                    np.ascontiguousarray(view[part.warps]).reshape(-1).view(np.complex128)
                )


def _quarters(matrix: Lanes) -> Lanes:
    """`[warp, 16, 16]` → `[warp, row half, g, column half, t, e]`."""
    return matrix.reshape(-1, 2, 8, 2, 4, 2)


@instruction("wmma", rf"\.load\.(?P<matrix>a|b){_SHAPE}{_SPACE}\.(?:f16|bf16)", kind="memory", pure=False)
def load_operand(context: Context, ins: Instruction, fields: Fields) -> Action:
    targets = [context.destination(o, _B32) for o in vector_parts(ins.operands[0])]
    tile = _Tile(
        context, ins, ins.operands[1], ins.operands[2] if len(ins.operands) > 2 else None, fields["space"], 2, READ
    )
    # A is kept by rows and B by columns: the depth runs along the second axis.
    transposed = (fields["matrix"] == "a") != (fields["layout"] == "row")
    order = [(i % 2, i // 2) if fields["matrix"] == "a" else (i // 2, i % 2) for i in range(4)]

    def run(active: ActiveThreads) -> None:
        matrix = tile.load(active)
        parts = _quarters(np.ascontiguousarray(matrix.transpose(0, 2, 1)) if transposed else matrix)
        for i, target in enumerate(targets):
            outer, inner = order[i % 4]
            assign(target, np.ascontiguousarray(parts[:, outer, :, inner]).reshape(-1).view(np.uint32), active)

    return run


def _accumulator_views(matrix: Lanes) -> list[Lanes]:
    """Views `[warp, g, t]` of `[warp, 16, 16]`, one per register."""
    parts = _quarters(matrix)
    return [parts[:, i % 4 // 2, :, i // 4, :, i % 2] for i in range(8)]


@instruction("wmma", rf"\.load\.c{_SHAPE}{_SPACE}\.f32", kind="memory", pure=False)
def load_accumulator(context: Context, ins: Instruction, fields: Fields) -> Action:
    targets = [context.destination(o, _B32) for o in vector_parts(ins.operands[0])]
    tile = _Tile(
        context, ins, ins.operands[1], ins.operands[2] if len(ins.operands) > 2 else None, fields["space"], 4, READ
    )

    def run(active: ActiveThreads) -> None:
        matrix = tile.load(active)
        views = _accumulator_views(
            np.ascontiguousarray(matrix.transpose(0, 2, 1)) if fields["layout"] == "col" else matrix
        )
        for target, view in zip(targets, views):
            assign(target, view.reshape(-1), active)

    return run


@instruction("wmma", rf"\.store\.d{_SHAPE}{_SPACE}\.f32", kind="memory", pure=False, writes=0)
def store_accumulator(context: Context, ins: Instruction, fields: Fields) -> Action:
    sources = [context.source(o, _B32) for o in vector_parts(ins.operands[1])]
    tile = _Tile(
        context, ins, ins.operands[0], ins.operands[2] if len(ins.operands) > 2 else None, fields["space"], 4, WRITE
    )
    matrix = np.zeros((context.threads.warp_count, _SIDE, _SIDE), np.uint32)
    views = _accumulator_views(matrix)

    def run(active: ActiveThreads) -> None:
        for view, source in zip(views, sources):
            view[...] = np.broadcast_to(source, (context.count,)).reshape(-1, 8, WARP // 8)
        tile.store(matrix.transpose(0, 2, 1) if fields["layout"] == "col" else matrix, active)

    return run


@instruction("wmma", _MMA + r"\.f32\.f32", kind="tensor", pure=False)
@instruction("wmma", _MMA + r"\.f32\.(?P<type>bf16)\.bf16\.f32", kind="tensor", pure=False)
def multiply(context: Context, ins: Instruction, fields: Fields) -> Action:
    """D = A·B + C. The layouts were taken care of by the loads."""
    kind = fields.get("type") or "f16"
    fragments = context.cached(("mma", "16", kind), lambda: Fragments(context, 16, kind))
    targets = [context.destination(o, _F32) for o in vector_parts(ins.operands[0])]
    a, b = ([context.source(o, _B32) for o in vector_parts(operand)] for operand in ins.operands[1:3])
    c = [context.source(o, _F32) for o in vector_parts(ins.operands[3])]
    shape = (context.threads.warp_count, 8, 4)

    def run(active: ActiveThreads) -> None:
        context.require_whole_warps(active, ins)
        fragments.load_a(a[:4])
        results = []
        for half in (0, 1):
            fragments.load_b(b[2 * half : 2 * half + 2])
            np.matmul(fragments.a, fragments.b, fragments.product)
            addends = c[4 * half : 4 * half + 4]
            results += [
                p + np.broadcast_to(s, (context.count,)).reshape(shape) for p, s in zip(fragments.products, addends)
            ]
        for target, result in zip(targets, results):
            assign(target, result.reshape(-1), active)

    return run
