"""Counts passes through shared memory with bank conflicts, and sectors of global memory."""

import numpy as np

from evoattn.ptx.memory.address_space import BankedMemory
from evoattn.ptx.program.kernel import Numbers
from evoattn.ptx.program.threads import WARP, ActiveThreads

_BANKS, _SECTOR_BYTES = 32, 32


class Traffic:
    """Running totals over one machine."""

    def __init__(self) -> None:
        self.wavefronts = self.wavefronts_ideal = self.sectors = self.global_bytes = self.copied_bytes = 0
        self._known: dict[tuple[int, bytes, bytes | None], tuple[int, int]] = {}

    def shared(self, memory: BankedMemory, index: Numbers, size: int, active: ActiveThreads) -> None:
        """An access of `size` bytes at `index` by each active thread.

        4 bytes per bank, 32 banks; a warp's 8-byte accesses go in two phases of 16 threads, its 16-byte accesses (and
        ldmatrix) in four of 8 (CUDA C++ Best Practices Guide, "Shared Memory and Memory Banks"). A phase takes as many
        passes as its busiest bank has words."""
        offset = index - active.select(memory.base)
        key = (size, (offset - offset[0] // 128 * 128).tobytes(), None if active.all else active.full_mask.tobytes())
        if key not in self._known:
            self._known[key] = _wavefronts(offset, size, active)
        passes, ideal = self._known[key]
        self.wavefronts += passes
        self.wavefronts_ideal += ideal

    def global_access(self, index: Numbers, size: int, active: ActiveThreads) -> None:
        """An access of `size` bytes at arena `index` by each active thread."""
        self.sectors += len(np.unique(active.select(active.threads.warp_of) << 40 | index // _SECTOR_BYTES))
        self.global_bytes += len(index) * size

    def tensor_copy(self, box_bytes: int, global_bytes: int, copied_bytes: int) -> None:
        """The copy engine moved a box, `global_bytes` of it inside the tensor; `copied_bytes` of it into shared memory,
        or none."""
        self.shared_rows(box_bytes)
        self.sectors += -(-global_bytes // _SECTOR_BYTES)
        self.global_bytes += global_bytes
        self.copied_bytes += copied_bytes

    def shared_rows(self, size: int) -> None:
        """`size` bytes of shared memory accessed with no bank conflict."""
        passes = -(-size // (4 * _BANKS))
        self.wavefronts += passes
        self.wavefronts_ideal += passes


def _wavefronts(offset: Numbers, size: int, active: ActiveThreads) -> tuple[int, int]:
    phases = max(1, size // 4)
    lane, warp = active.select(active.threads.lane), active.select(active.threads.warp_of)
    phase = warp * phases + lane * phases // WARP
    words = (offset[:, None] >> 2) + np.arange(max(1, size // 4))
    different = np.unique((phase[:, None] << 40 | words).ravel())
    phase, bank = different >> 40, different & (_BANKS - 1)
    _, numbered = np.unique(phase, return_inverse=True)
    load = np.zeros((numbered[-1] + 1, _BANKS), np.int64)
    np.add.at(load, (numbered, bank), 1)
    return int(load.max(1).sum()), len(load)
