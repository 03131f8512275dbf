"""Operands of wgmma in shared memory, as matrices: what their 64-bit descriptors say (PTX ISA, "Matrix Descriptor
Format"), and what lies there."""

from functools import lru_cache

import numpy as np

from evoattn.ptx.errors import AsyncFault, MemoryFault
from evoattn.ptx.isa.eight_bits import VALUES
from evoattn.ptx.isa.half import to_float32
from evoattn.ptx.program.kernel import Instruction, Lanes, Numbers, parse_type
from evoattn.ptx.state.context import Context

DEPTH = 16
CHUNK = 16
"""Bytes, eight elements: what swizzling moves in one piece."""
_SWIZZLED_CHUNKS = {0: 1, 1: 8, 2: 4, 3: 2}
"""Chunks of a swizzled row, by the layout type in bits 62 and 63; 1 for none."""
_U64 = parse_type("u64")
_KNOWN_BITS = 0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 3 << 62


@lru_cache(maxsize=1024)
def operand_chunks(descriptor: int, side: int, transposed: bool) -> Numbers | None:
    """Number of each 16-byte chunk of an operand from the start of the block's memory: `[side, 2]`, or transposed `[16,
    side / 8]`.

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
    return at ^ (at >> 3 & wide - 1)


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
