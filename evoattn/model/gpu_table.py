"""The GPUs that evoattn knows, a row per card, and the rates of their architectures.

Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (limits) and "Arithmetic
Instructions" (fp32 and exp2 rates); NVIDIA's data sheets and white papers as each row names them (SMs, boost clocks,
matrix rates, memory, L2). Matrix rates are those with fp32 accumulation: a GeForce card has half of what its
workstation sister has."""

from dataclasses import dataclass

from evoattn.model.gpu_spec import GpuSpec

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
