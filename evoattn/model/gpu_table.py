"""What evoattn knows of a GPU, a row per card, and the rates of their architectures.

Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (limits) and "Arithmetic
Instructions" (fp32 and exp2 rates); NVIDIA's data sheets and white papers as each row names them (SMs, boost clocks,
matrix rates, memory, L2). Matrix rates are those with fp32 accumulation: a GeForce card has half of what its
workstation sister has."""

from __future__ import annotations

import math
import os
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


KB, MB, GB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Architecture:
    """What all cards of one compute capability have in common."""

    arch: str
    smem_per_block: int
    smem_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int
    tensor_flops_per_clock: int
    """Of data-center and workstation cards."""
    fp32_lanes: int
    l2_bytes_per_clock: float
    """Of 8.0 a third less than the 5,120 bytes per clock of the A100 white paper; of 9.0 and 8.9 about what others
    measured (Chips and Cheese: 5.5 TB/s on an H100 PCIe, 5 TB/s on an RTX 4090); of the others assumed to be as
    those."""
    mma_sync_share: float = 1.0
    exp2_per_clock: int = 16


ARCHITECTURES: dict[tuple[int, int], Architecture] = {
    (8, 0): Architecture("sm_80", 163 * KB, 164 * KB, 2048, 32, 2048, 64, 32),
    (8, 6): Architecture("sm_86", 99 * KB, 100 * KB, 1536, 16, 1024, 128, 16),
    (8, 9): Architecture("sm_89", 99 * KB, 100 * KB, 1536, 24, 1024, 128, 16),
    # 62 %: what the best mma.sync kernels reach of wgmma's rate, measured on an H100.
    (9, 0): Architecture("sm_90a", 227 * KB, 228 * KB, 2048, 32, 4096, 128, 28, 0.62),
    # Nobody here has measured mma.sync on a B200: a quarter is the A100's rate.
    (10, 0): Architecture("sm_100", 227 * KB, 228 * KB, 2048, 32, 8192, 128, 28, 0.25),
    (12, 0): Architecture("sm_120", 99 * KB, 100 * KB, 1536, 24, 1024, 128, 16),
}
"""By compute capability."""

NO_TCGEN05 = (
    "evoattn has no kernels of tcgen05 and tensor memory yet: on this card its kernels use mma.sync, at a part of the "
    "matrix rate that nobody measured."
)
GEFORCE_SHARE = 0.5
"""Of the matrix rate with fp32 accumulation, on GeForce cards."""


@dataclass(frozen=True)
class Card:
    """A row of the table: what a card does not have in common with others of its compute capability."""

    name: str
    product: str
    capability: tuple[int, int]
    sm_count: int
    clock_ghz: float
    dram_gb_per_s: float
    dram_gib: float
    l2_mb: float
    source: str
    matrix_share: float = 1.0
    """Of the architecture's matrix rate."""
    note: str = ""

    @property
    def spec(self) -> GpuSpec:
        """All of the card. Raises `KeyError` on a capability that is not in `ARCHITECTURES`."""
        of = ARCHITECTURES[self.capability]
        return GpuSpec(
            self.name,
            self.product,
            of.arch,
            self.sm_count,
            of.smem_per_block,
            of.smem_per_sm,
            of.threads_per_sm,
            of.blocks_per_sm,
            self.clock_ghz,
            int(of.tensor_flops_per_clock * self.matrix_share),
            of.mma_sync_share,
            of.fp32_lanes,
            self.dram_gb_per_s,
            int(self.l2_mb * MB),
            int(self.dram_gib * GB),
            of.l2_bytes_per_clock,
            of.exp2_per_clock,
            source=self.source,
            note=self.note,
        )


_AMPERE, _ADA = "NVIDIA Ampere GA102 white paper", "NVIDIA Ada white paper"
_BLACKWELL = "NVIDIA RTX Blackwell white paper"
_H100 = "NVIDIA H100 data sheet and white paper"
_ROWS = (
    Card("a10", "A10", (8, 6), 72, 1.695, 600, 24, 6, "NVIDIA A10 data sheet"),
    Card("a30", "A30", (8, 0), 56, 1.44, 933, 24, 24, "NVIDIA A30 data sheet"),
    Card("a40", "A40", (8, 6), 84, 1.74, 696, 48, 6, "NVIDIA A40 data sheet"),
    Card("a100", "A100", (8, 0), 108, 1.41, 1555, 40, 40, "NVIDIA A100 white paper"),
    Card("a100-80gb", "A100 80GB", (8, 0), 108, 1.41, 2039, 80, 40, "NVIDIA A100 80 GB data sheet (SXM)"),
    Card("a6000", "RTX A6000", (8, 6), 84, 1.8, 768, 48, 6, _AMPERE),
    Card("rtx3090", "RTX 3090", (8, 6), 82, 1.695, 936, 24, 6, _AMPERE, GEFORCE_SHARE),
    Card("l4", "L4", (8, 9), 58, 2.04, 300, 24, 48, "NVIDIA L4 data sheet"),
    Card("l40", "L40", (8, 9), 142, 2.49, 864, 48, 96, "NVIDIA L40 data sheet", 0.5),
    Card("l40s", "L40S", (8, 9), 142, 2.52, 864, 48, 96, "NVIDIA L40S data sheet"),
    Card("rtx6000ada", "RTX 6000 Ada", (8, 9), 142, 2.505, 960, 48, 96, _ADA),
    Card("rtx4080", "RTX 4080", (8, 9), 76, 2.505, 717, 16, 64, _ADA, GEFORCE_SHARE),
    Card("rtx4090", "RTX 4090", (8, 9), 128, 2.52, 1008, 24, 72, _ADA, GEFORCE_SHARE),
    Card("h100", "H100", (9, 0), 132, 1.83, 3350, 80, 50, _H100 + " (SXM)"),
    Card("h100-pcie", "H100 PCIe", (9, 0), 114, 1.755, 2039, 80, 50, _H100 + " (PCIe)"),
    Card("h100-nvl", "H100 NVL", (9, 0), 132, 1.785, 3938, 94, 50, "NVIDIA H100 NVL product brief"),
    Card("h200", "H200", (9, 0), 132, 1.83, 4800, 141, 60, "NVIDIA H200 data sheet; L2 as its driver says"),
    Card("gh200", "GH200", (9, 0), 132, 1.83, 4000, 96, 60, "NVIDIA GH200 data sheet (96 GB)"),
    Card("b200", "B200", (10, 0), 148, 1.85, 8000, 180, 126, "NVIDIA HGX B200 data sheet", note=NO_TCGEN05),
    Card("rtx5080", "RTX 5080", (12, 0), 84, 2.617, 960, 16, 64, _BLACKWELL, GEFORCE_SHARE),
    Card("rtx5090", "RTX 5090", (12, 0), 170, 2.407, 1792, 32, 96, _BLACKWELL, GEFORCE_SHARE),
    Card("rtxpro6000", "RTX PRO 6000", (12, 0), 188, 2.617, 1792, 96, 128, "NVIDIA RTX PRO Blackwell white paper"),
)

GPUS: dict[str, GpuSpec] = {card.name: card.spec for card in _ROWS}


VARIABLE = "EVOATTN_PLAY_CARD"
"""For tests alone: the GPU at hand plays another card, as far as that takes less than it has. `a100@sm_90a` has a GPU
that compiles for sm_90a offer the families and the shared memory of a block of an A100; `stranger@sm_90a` has it be a
card that nobody has seen. Either way nothing that was measured on it counts: the name of the played card is no row of
the table. Clocks, SMs and memory stay those of the GPU, on which kernels run."""
STRANGER, PLAYS = "stranger", "-as-"


def _wanted() -> tuple[str, str]:
    """The card that is played, and what the GPU compiles for; empty words where none is."""
    card, _, target = os.environ.get(VARIABLE, "").partition("@")
    return (card, target) if target and (card == STRANGER or card in GPUS) else ("", "")


def played(spec: GpuSpec) -> GpuSpec:
    """What the GPU at hand is taken for."""
    card, _ = _wanted()
    if not card:
        return spec
    name = f"{spec.name}{PLAYS}{card}"
    if card == STRANGER:
        return replace(spec, name=name)
    other = GPUS[card]
    return replace(spec, name=name, arch=other.arch, smem_per_block=min(spec.smem_per_block, other.smem_per_block))


def is_played(spec: GpuSpec) -> bool:
    """Whether lists that ship are hidden from it."""
    return PLAYS in spec.name


def target(arch: str) -> str:
    """What the compiler is told in place of `arch`: what the GPU at hand can load."""
    return _wanted()[1] or arch
