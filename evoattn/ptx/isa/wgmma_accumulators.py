"""Accumulators of wgmma, kept as matrices while products are under way."""

import numpy as np

from evoattn.ptx.program.arrays import Lanes, Mask, Numbers
from evoattn.ptx.program.dtypes import parse_type
from evoattn.ptx.program.threads import WARP
from evoattn.ptx.state.context import Context

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
