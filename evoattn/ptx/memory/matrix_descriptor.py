"""Operands of wgmma in shared memory: what their 64-bit descriptors say (PTX ISA, "Matrix Descriptor Format")."""

from functools import lru_cache

import numpy as np

from evoattn.ptx.program.arrays import Numbers

DEPTH = 16
CHUNK = 16
"""Bytes, eight elements: what swizzling moves in one piece."""
_SWIZZLECHUNKS = {0: 1, 1: 8, 2: 4, 3: 2}
"""Chunks of a swizzled row, by the layout type in bits 62 and 63; 1 for none."""
_KNOWN_BITS = 0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 3 << 62


@lru_cache(maxsize=1024)
def operand_chunks(descriptor: int, side: int, transposed: bool) -> Numbers | None:
    """Number of each 16-byte chunk of an operand from the start of the block's memory: `[side, 2]`, or transposed `[16,
    side / 8]`.

    `side` is M or N. Transposed means that M or N is contiguous. None for a descriptor with a base offset or unknown
    bits. With w chunks in a swizzled row, the leading offset L and the stride S, chunk c of row r lies (K-major) at row
    r % 8 of w chunks plus S · (r / 8), without swizzle c at c · L; (M- or N-major) chunk c of depth k at row k % 8 of w
    chunks plus c % w plus L · (c / w) plus S · (k / 8), without swizzle with L and S exchanged. Bits 4 … of the address
    are then XORed with bits 7 …: one for a swizzle of 32 bytes, two for 64, three for 128.
    """
    if descriptor & ~_KNOWN_BITS:
        return None
    start, leading, stride = (descriptor >> shift & 0x3FFF for shift in (0, 16, 32))  # in chunks
    wide = _SWIZZLECHUNKS[descriptor >> 62]
    if not transposed:
        row, chunk = np.arange(side)[:, None], np.arange(2)[None, :]
        at = row % 8 * wide + row // 8 * stride + chunk * (leading if wide == 1 else 1)
    else:
        depth, chunk = np.arange(DEPTH)[:, None], np.arange(side // 8)[None, :]
        over, along = (leading, stride) if wide > 1 else (stride, leading)
        at = depth % 8 * wide + depth // 8 * along + chunk % wide + chunk // wide * over
    at += start
    return at ^ (at >> 3 & wide - 1)
