"""The GPUs that evoattn knows by name, and which of them is in this machine."""

import ctypes
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from uuid import UUID

from evoattn.model.errors import unknown
from evoattn.model.gpu_table import ARCHITECTURES, GB, GEFORCE_SHARE, MB, Card, played
from evoattn.model.gpu_table import GPUS as GPUS
from evoattn.model.gpu_table import MAX_GRID_YZ as MAX_GRID_YZ
from evoattn.model.gpu_table import GpuError as GpuError
from evoattn.model.gpu_table import GpuSpec as GpuSpec

MADE_ROW = (
    "This card is not in evoattn's table: its row is made of what its driver says, and the rates of its architecture "
    "are taken from the nearest one that is."
)


def _plain(name: str) -> str:
    """Letters and digits of a GPU's name, without its maker and brand: `NVIDIA GeForce RTX 4090` is `rtx4090`."""
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())


SISTERS = frozenset(("ti", "super", "laptop", "mobile", "max", "d"))
"""A word of these makes a name that of another card: an RTX 3090 Ti is no RTX 3090."""


def row_of(product: str) -> GpuSpec | None:
    """The table's row of the card that a driver calls `product`, such as `NVIDIA A100-SXM4-80GB`; None if it has none.

    It is the row with most words of the name: that card is both an A100 and an A100 80GB."""
    words = set(re.split(r"[^a-z0-9]+", re.sub(r"(\d) gb\b", r"\1gb", product.lower())))
    rows = [spec for spec in GPUS.values() if words.issuperset(spec.product.lower().split())]
    return None if words & SISTERS else max(rows, key=lambda spec: len(spec.product.split()), default=None)


TOO_OLD = {
    "v100": "sm_70",
    "titanv": "sm_70",
    "t4": "sm_75",
    "rtx20": "sm_75",
    "gtx16": "sm_75",
    "p100": "sm_60",
    "p40": "sm_61",
    "gtx10": "sm_61",
}
"""Cards before Ampere by a part of their names, as in NVIDIA's list at developer.nvidia.com/cuda-gpus."""


def lookup(name: str) -> GpuSpec:
    """The spec called `name`, or that of a card by its maker's or its driver's name: `rtx4090`, `RTX 4090`, `H100 SXM`,
    `NVIDIA H100 80GB HBM3`.

    Raises `GpuError` on an unknown one."""
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    for spec in GPUS.values():
        if _plain(name) in (_plain(spec.name), _plain(spec.product)):
            return spec
    if row := row_of(name):
        return row
    if arch := next((arch for old, arch in TOO_OLD.items() if old in _plain(name)), None):
        raise GpuError(f"The GPU {name} is {arch}, which is too old: evoattn's kernels need Ampere (sm_80) or newer.")
    raise GpuError(unknown("GPU", name, sorted(GPUS), "evoattn gpus"))


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
    rates: Mapping[str, int] = field(default_factory=dict, hash=False)
    """What the driver says beside: `clock_khz`, `memory_khz`, `bus_bits`, `memory_bytes`."""

    @property
    def spec(self) -> GpuSpec | None:
        """The table row for this device with the device's own limits; of a card that is not in the table, a row made
        of what its driver says. None if that is not enough, or the card older than sm_80.

        A card of fewer SMs than the table's (a MIG slice) has its own number here."""
        row = row_of(self.product)
        spec = row.with_limits(self.limits) if row else self._made_row()
        return spec and played(spec)

    def _made_row(self) -> GpuSpec | None:
        nearest = max((known for known in ARCHITECTURES if known <= self.capability), default=None)
        if nearest is None or not {*self.limits, *self.rates} >= _NEEDED:
            return None
        limits, rates = self.limits, self.rates
        card = Card(
            "-".join(self.product.lower().removeprefix("nvidia ").removeprefix("geforce ").split()),
            self.product,
            nearest,
            limits["sm_count"],
            rates["clock_khz"] / 1e6,
            2 * rates["memory_khz"] * rates["bus_bits"] / 8e6,  # two transfers per clock
            rates["memory_bytes"] / GB,
            limits["l2_bytes"] / MB,
            "the card's driver",
            GEFORCE_SHARE if "GeForce" in self.product else 1.0,
            MADE_ROW,
        )
        spec = card.spec.with_limits(limits)
        major, minor = self.capability
        return spec if nearest == self.capability else replace(spec, arch=f"sm_{major}{minor}")

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
_RATES = {"clock_khz": 13, "memory_khz": 36, "bus_bits": 37}
"""CUdevice_attribute of each of `DetectedDevice.rates`."""
_NEEDED = {"sm_count", "l2_bytes", "clock_khz", "memory_khz", "bus_bits", "memory_bytes"}
"""What a row is made of."""


def detect_devices() -> list[DetectedDevice]:
    """CUDA devices that the driver shows, in its order; an empty list where there is no driver or no device.

    Asks libcuda by ctypes, which creates no context, so that a search's parent process stays free of CUDA state."""
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
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetName(name, 256, device)
        limits, rates = (
            {name: value for name, number in table.items() if (value := _attribute(cuda, number, device)) > 0}
            for table in (_LIMITS, _RATES)
        )
        memory = ctypes.c_size_t()
        if cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device) == 0:
            rates["memory_bytes"] = memory.value
        driver = f"{version.value // 1000}.{version.value % 1000 // 10}"
        raw = ctypes.create_string_buffer(16)
        uuid = f"GPU-{UUID(bytes=raw.raw)}" if cuda.cuDeviceGetUuid(raw, device) == 0 else ""
        capability = _attribute(cuda, _CAPABILITY_MAJOR, device), _attribute(cuda, _CAPABILITY_MINOR, device)
        devices.append(DetectedDevice(index, name.value.decode(), capability, driver, uuid, limits, rates))
    return devices


def _attribute(cuda: ctypes.CDLL, number: int, device: ctypes.c_int) -> int:
    """A CUdevice_attribute; 0 where the driver does not know it."""
    value = ctypes.c_int()
    return value.value if cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0 else 0
