"""Accumulators of wgmma, kept as matrices while products are under way."""

import numpy as np

from evoattn.ptx.program.arrays import Mask, Numbers
from evoattn.ptx.program.dtypes import parse_type
from evoattn.ptx.program.threads import WARP
from evoattn.ptx.state.context import Context

_F32 = parse_type("f32")


class Accumulators:
    """The accumulators of one list of registers in all warps: `matrix` `[warp, 16, columns]` while products are under
    way.

    With g = lane / 4 and t = lane % 4, register i has row g + 8 · (i / 2 % 2) and column 8 · (i / 4) + 2t + i % 2 (PTX
    ISA, wgmma m64nNk16).
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

    def read(self, warps: Numbers) -> None:
        """Registers → matrices of these warps."""
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
        for row, register in zip(self._flat, self.registers):
            if mask is None:
                np.copyto(register, row)
            else:
                np.copyto(register, row, where=mask)
