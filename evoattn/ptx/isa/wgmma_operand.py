"""Operands of wgmma in shared memory, as matrices."""

import numpy as np

from evoattn.ptx.errors import AsyncFault, MemoryFault
from evoattn.ptx.isa.eight_bits import VALUES
from evoattn.ptx.isa.half import to_float32
from evoattn.ptx.memory.matrix_descriptor import CHUNK, operand_chunks
from evoattn.ptx.program.arrays import Lanes, Numbers
from evoattn.ptx.program.dtypes import parse_type
from evoattn.ptx.program.kernel import Instruction
from evoattn.ptx.state.context import Context

_U64 = parse_type("u64")


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

        The warpgroups are given by their first threads. Raises `AsyncFault` and `MemoryFault`.
        """
        shared = self.context.shared
        given = self.descriptor[lead_threads] if self.descriptor.ndim else self.descriptor
        descriptors = np.broadcast_to(given, lead_threads.shape).tolist()
        chunks = np.stack([self._chunks(d, thread) for d, thread in zip(descriptors, lead_threads.tolist())])
        chunks += (shared.base[lead_threads] // CHUNK)[:, None, None]
        elements = shared.elements(CHUNK).take(chunks)
        if self.kind in VALUES:
            return VALUES[self.kind].take(elements.view(np.uint8)), chunks
        return to_float32(elements.view(np.uint16), self.kind.removesuffix("16")), chunks

    def _chunks(self, descriptor: int, thread: int) -> Lanes:
        chunks = operand_chunks(descriptor, self.side, self.transposed)
        if chunks is None:
            raise AsyncFault(f"The matrix descriptor {descriptor:#x} has a base offset or unknown bits in {self.ins}.")
        shared, lowest, highest = self.context.shared, int(chunks.min()) * CHUNK, int(chunks.max()) * CHUNK
        if lowest < shared.first or highest + CHUNK > shared.limit:
            place = lowest if lowest < shared.first else highest
            raise MemoryFault(
                f"The warpgroup of {self.context.threads.describe(thread)} reads {shared.outside(place, CHUNK)} bytes, "
                f"in {self.ins}."
            )
        return chunks
