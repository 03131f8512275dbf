"""The GPUs that evoattn knows: limits and peaks of each, and which of them is in this machine."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from evoattn.model.dtype import DTYPES
from evoattn.model.errors import WrongUse

MAX_GRID_YZ = 65535
"""Largest y and z of a grid (CUDA C++ Programming Guide, technical specifications)."""


class GpuError(WrongUse):
    """A GPU that is unknown or not here: its message is one sentence that says what to do."""


@dataclass(frozen=True)
class GpuSpec:
    """Limits and peak rates of one GPU. Rates are per clock and SM; clocks are the boost clock of the data sheet.

    Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (limits) and
    "Arithmetic Instructions" (fp32 and exp2 rates); NVIDIA's data sheets and architecture white papers (clocks, matrix
    rates, DRAM, L2).
    """

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
    """Share of that rate which `mma.sync` reaches (1 except on Hopper, where only `wgmma` reaches it all)."""
    fp32_lanes: int
    dram_gb_per_s: float
    l2_bytes: int
    exp2_per_clock: int = 16
    registers_per_sm: int = 65536
    smem_reserved_per_block: int = 1024

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
        """Dense peak in TFLOP/s for `fp16`, `bf16` (tensor cores) or `fp32` (CUDA cores, two FLOP per lane)."""
        per_clock = self.tensor_flops_per_clock if DTYPES[dtype].on_tensor_cores else self.fp32_lanes * 2
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
        `smem_reserved_per_block` (CUDA occupancy calculator).
        """
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


GPUS: dict[str, GpuSpec] = {
    spec.name: spec
    for spec in (
        GpuSpec("a10", "A10", "sm_86", 72, 101376, 102400, 1536, 16, 1.695, 1024, 1.0, 128, 600, 6 << 20),
        GpuSpec("a100", "A100", "sm_80", 108, 166912, 167936, 2048, 32, 1.41, 2048, 1.0, 64, 1555, 40 << 20),
        GpuSpec("l4", "L4", "sm_89", 58, 101376, 102400, 1536, 24, 2.04, 1024, 1.0, 128, 300, 48 << 20),
        GpuSpec("l40s", "L40S", "sm_89", 142, 101376, 102400, 1536, 24, 2.52, 1024, 1.0, 128, 864, 96 << 20),
        GpuSpec("rtx4090", "RTX 4090", "sm_89", 128, 101376, 102400, 1536, 24, 2.52, 512, 1.0, 128, 1008, 72 << 20),
        GpuSpec("h100", "H100", "sm_90a", 132, 232448, 233472, 2048, 32, 1.83, 4096, 0.62, 128, 3350, 50 << 20),
        GpuSpec("h200", "H200", "sm_90a", 132, 232448, 233472, 2048, 32, 1.83, 4096, 0.62, 128, 4800, 50 << 20),
    )
}


def lookup(name: str) -> GpuSpec:
    """The spec called `name` (any case). Raises `GpuError` on an unknown one."""
    try:
        return GPUS[name.lower()]
    except KeyError:
        raise GpuError(f"Unknown GPU {name!r}; evoattn knows {', '.join(sorted(GPUS))} (see `evoattn gpus`).") from None


@dataclass(frozen=True)
class DetectedDevice:
    """A CUDA device in this machine, as its driver describes it."""

    index: int
    product: str
    capability: tuple[int, int]
    driver: str
    """CUDA version that the driver supports, e.g. `13.0`."""
    uuid: str = ""
    """As `nvidia-smi -L` prints it, `GPU-…`: which of several alike it is."""
    limits: Mapping[str, int] = field(default_factory=dict, hash=False)
    """What the driver says of this very device, by the names of `GpuSpec`'s fields."""

    @property
    def spec(self) -> GpuSpec | None:
        """The table row for this device with the device's own limits, or None if it is not in the table.

        A card of fewer SMs than the table's (an H100 PCIe, a MIG slice) has its own number here.
        """
        words = self.product.replace("-", " ").split()
        for spec in GPUS.values():
            if all(word in words for word in spec.product.split()):
                return spec.with_limits(self.limits)
        return None

    def describe(self) -> str:
        """For people, e.g. `NVIDIA H100 PCIe (114 SMs)`."""
        count = self.limits.get("sm_count")
        return f"{self.product} ({count} SMs)" if count else self.product


_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute, cuda.h
_LIMITS = {
    "sm_count": 16,
    "smem_per_block": 97,
    "smem_per_sm": 81,
    "smem_reserved_per_block": 111,
    "registers_per_sm": 82,
    "threads_per_sm": 39,
    "blocks_per_sm": 106,
    "l2_bytes": 38,
}
"""CUdevice_attribute of each limit in `GpuSpec`."""


def detect_devices() -> list[DetectedDevice]:
    """CUDA devices that the driver shows, in its order; an empty list where there is no driver or no device.

    Asks libcuda by ctypes, which creates no context, so that a search's parent process stays free of CUDA state.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    devices = []
    for index in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        major, minor = ctypes.c_int(), ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetName(name, 256, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
        limits = {}
        for field_name, attribute in _LIMITS.items():
            value = ctypes.c_int()
            if cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) == 0 and value.value > 0:
                limits[field_name] = value.value
        driver = f"{version.value // 1000}.{version.value % 1000 // 10}"
        raw = ctypes.create_string_buffer(16)
        uuid = f"GPU-{UUID(bytes=raw.raw)}" if cuda.cuDeviceGetUuid(raw, device) == 0 else ""
        capability = major.value, minor.value
        devices.append(DetectedDevice(index, name.value.decode(), capability, driver, uuid, limits))
    return devices
