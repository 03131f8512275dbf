"""What evoattn knows of one GPU: limits, peak rates and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from evoattn.model.dtype import DTYPES
from evoattn.model.errors import WrongUse
from evoattn.model.hashes import kept_hash

MAX_GRID_YZ = 65535
"""Largest y and z of a grid (CUDA C++ Programming Guide, technical specifications)."""

GPU_ROW = "gpu_row"
"""Among the options of a study: the row of a card that is not in evoattn's table."""


class GpuError(WrongUse):
    """A GPU that is unknown or not here: its message is one sentence that says what to do."""


@kept_hash
@dataclass(frozen=True)
class GpuSpec:
    """Limits and peak rates of one GPU. Rates are per clock and SM; clocks are the boost clock of the data sheet.

    `gpu_table.py` has the rows, and where their numbers come from."""

    name: str
    product: str
    """What the driver calls it: a device matches when its name contains these words."""
    arch: str
    """Target of the compiler, e.g. `sm_89`; `sm_90a` has the Hopper-only instructions."""
    sm_count: int
    smem_per_block: int
    """Bytes of dynamic shared memory per block may opt in to."""
    smem_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int
    boost_clock_ghz: float
    tensor_flops_per_clock: int
    """Dense fp16 or bf16 FLOP with fp32 accumulation per clock and SM."""
    mma_sync_share: float
    """Share of that rate which `mma.sync` reaches: 1, except on Hopper and B200, where it takes `wgmma` or `tcgen05`
    to reach all of it."""
    fp32_lanes: int
    dram_gb_per_s: float
    l2_bytes: int
    dram_bytes: int
    """Memory of the card."""
    l2_bytes_per_clock: float
    """Bytes per clock and SM that L2 gives when all SMs read at once."""
    exp2_per_clock: int = 16
    registers_per_sm: int = 65536
    smem_reserved_per_block: int = 1024
    source: str = ""
    """Where the card's own numbers come from."""
    note: str = ""
    """What is not known of this card, or what evoattn cannot use of it yet."""

    def with_limits(self, limits: Mapping[str, int]) -> GpuSpec:
        """A copy with other limits, by the names of the fields."""
        changes: dict[str, Any] = dict(limits)
        return replace(self, **changes)

    def is_like(self, other: GpuSpec | None) -> bool:
        """Whether `other` is the same model with as many SMs, so that launches and times can be compared."""
        return other is not None and (self.name, self.sm_count) == (other.name, other.sm_count)

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, e.g. `(8, 9)`."""
        digits = self.arch.removeprefix("sm_").rstrip("a")
        return int(digits[:-1]), int(digits[-1])

    def peak_tflops(self, dtype: str) -> float:
        """Dense peak in TFLOP/s for `fp16`, `bf16` (tensor cores), 8 bits (twice as many) or `fp32` (CUDA cores, two
        FLOP per lane)."""
        element = DTYPES[dtype]
        per_clock = self.tensor_flops_per_clock * 2 // element.bytes if element.on_tensor_cores else self.fp32_lanes * 2
        return per_clock * self.sm_count * self.boost_clock_ghz / 1e3

    def floor_us(self, flops: int, bytes_moved: int, dtype: str) -> float:
        """Roofline floor in µs: no correct kernel is faster. Data that fits in L2 is not charged to DRAM."""
        compute = flops / (self.peak_tflops(dtype) * 1e6)
        memory = 0.0 if bytes_moved <= self.l2_bytes else bytes_moved / (self.dram_gb_per_s * 1e3)
        return max(compute, memory)

    def block_limits(self, registers: int, threads: int, smem_bytes: int) -> dict[str, int]:
        """Blocks that each resource of one SM allows at once: `registers`, `shared memory`, `threads`, `blocks`.

        `registers` are per thread (0 leaves them out), `threads` and `smem_bytes` per block. Registers are given to a
        warp in units of 256, from four register files; shared memory in units of 128 bytes after
        `smem_reserved_per_block` (CUDA occupancy calculator)."""
        warps = math.ceil(threads / 32)
        limits = {}
        if registers:
            registers_per_warp = math.ceil(registers * 32 / 256) * 256
            limits["registers"] = 4 * (self.registers_per_sm // 4 // registers_per_warp) // warps
        footprint = math.ceil((smem_bytes + self.smem_reserved_per_block) / 128) * 128
        limits["shared memory"] = self.smem_per_sm // footprint
        return limits | {"threads": self.threads_per_sm // (warps * 32), "blocks": self.blocks_per_sm}

    def blocks_resident(self, registers: int, threads: int, smem_bytes: int) -> int:
        """Blocks that fit on one SM at once, 0 if not even one does: the least of `block_limits`."""
        return min(self.block_limits(registers, threads, smem_bytes).values())


def restored(row: object, name: str) -> GpuSpec | None:
    """The spec called `name` that `dataclasses.asdict` made `row` of; None if it is not one. A database may hold
    anything."""
    if not isinstance(row, dict) or row.keys() != {f.name for f in fields(GpuSpec)} or row["name"] != name:
        return None
    for field in fields(GpuSpec):
        value = row[field.name]
        if field.type == "str":
            fits = isinstance(value, str)
        else:
            fits = isinstance(value, (int, float) if field.type == "float" else int) and 0 < value < 1 << 48
        if not fits or isinstance(value, bool):
            return None
    return GpuSpec(**row)
