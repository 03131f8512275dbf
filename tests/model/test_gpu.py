"""The device that a driver names is the row of the table that is meant, and no other."""

import json
from dataclasses import asdict, replace

import pytest

from evoattn.model.gpu import GPUS, MADE_ROW, DetectedDevice, GpuError, detect_devices, lookup
from evoattn.model.records import Study
from evoattn.search.request import choose_device


@pytest.mark.parametrize(
    "product, name",
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("Tesla T4", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX 4000", None),
    ],
)
def test_a_device_is_recognised_by_the_words_of_its_name(product, name):
    assert DetectedDevice(0, product, (8, 0), "13.0").spec == (GPUS[name] if name else None)


ATTRIBUTES = {75: 8, 76: 9, 16: 58, 97: 101376, 39: 1536, 38: 48 << 20, 13: 2040000, 36: 6251000, 37: 192}


class Driver:
    """libcuda on a machine with an L4 and a card that nobody knows; an attribute that it lacks is an error."""

    def cuInit(self, flags):
        return flags

    def cuDriverGetVersion(self, out):
        out._obj.value = 13010

    def cuDeviceGetCount(self, out):
        out._obj.value = 2
        return 0

    def cuDeviceGet(self, out, index):
        out._obj.value = 40 + index

    def cuDeviceGetName(self, name, size, device):
        name.value = b"NVIDIA L4" if device.value == 40 else b"NVIDIA X"

    def cuDeviceTotalMem_v2(self, out, device):
        out._obj.value = 24 << 30
        return int(device.value == 41)

    def cuDeviceGetUuid(self, raw, device):
        raw.raw = bytes(range(16))
        return int(device.value == 41)

    def cuDeviceGetAttribute(self, out, number, device):
        found = ATTRIBUTES.get(number) if device.value == 40 or number in (75, 76) else 0
        out._obj.value = found or 0
        return int(found is None)


def test_devices_are_what_the_driver_says(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda _: Driver())
    known, other = detect_devices()
    assert (known.index, known.product, known.capability, known.driver) == (0, "NVIDIA L4", (8, 9), "13.1")
    assert known.uuid == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    limits = {"sm_count": 58, "smem_per_block": 101376, "threads_per_sm": 1536, "l2_bytes": 48 << 20}
    rates = {"clock_khz": 2040000, "memory_khz": 6251000, "bus_bits": 192}
    assert known.limits == limits and known.rates == rates | {"memory_bytes": 24 << 30}
    assert other == DetectedDevice(1, "NVIDIA X", (8, 9), "13.1") and not other.limits and not other.rates
    monkeypatch.setattr(Driver, "cuInit", lambda *_: 100)
    assert detect_devices() == []


def device(**limits: int) -> DetectedDevice:
    return DetectedDevice(0, "NVIDIA H100 80GB HBM3", (9, 0), "13.0", limits=limits)


@pytest.mark.parametrize(
    "written, name",
    [
        ("L4", "l4"),
        ("NVIDIA L4", "l4"),
        ("RTX 4090", "rtx4090"),
        ("rtx-4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("A100 80GB", "a100-80gb"),
        ("H100 PCIe", "h100-pcie"),
        ("RTX 6000 Ada", "rtx6000ada"),
        ("H100 SXM", "h100"),
        ("nvidia h100 80gb hbm3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("A100-SXM4", "a100"),
        ("A100 PCIe 80 GB", "a100-80gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"),
    ],
)
def test_a_gpu_is_known_as_its_maker_writes_it(written, name):
    assert lookup(written) is GPUS[name]


@pytest.mark.parametrize(
    "written", ["RTX 4090 Ti", "RTX 4080 SUPER", "H20", "H100X", "", "4090", "NVIDIA", "RTX", "PCIe"]
)
def test_a_gpu_is_not_taken_for_one_of_a_like_name(written):
    with pytest.raises(GpuError, match="Unknown GPU"):
        lookup(written)


def test_a_device_has_its_own_number_of_sms():
    here = device(sm_count=114, l2_bytes=50 << 20)
    assert here.spec.sm_count == 114 and here.spec.name == "h100"
    assert here.describe() == "NVIDIA H100 80GB HBM3 (114 SMs)"
    assert here.spec.peak_tflops("fp16") == pytest.approx(GPUS["h100"].peak_tflops("fp16") * 114 / 132)
    assert device().spec == GPUS["h100"] and device().describe() == "NVIDIA H100 80GB HBM3"
    assert not here.spec.is_like(GPUS["h100"]) and here.spec.is_like(device(sm_count=114).spec)


@pytest.mark.parametrize(
    "recorded, count", [(114, 114), (None, 132), ("many", 132), (-1, 132), (True, 132), (1 << 40, 132)]
)
def test_a_study_has_the_sms_that_it_recorded(recorded, count):
    options = {} if recorded is None else {"sm_count": recorded}
    study = Study(1, "s", {}, "h100", "sm_90a", False, "genetic", 0, (), {}, options)
    assert study.spec.sm_count == count


ADA_LIMITS = {"sm_count": 48, "l2_bytes": 48 << 20, "smem_per_block": 101376, "smem_per_sm": 102400}
ADA_RATES = {"clock_khz": 2175000, "memory_khz": 9001000, "bus_bits": 160, "memory_bytes": 20 << 30}


def test_a_card_that_is_not_in_the_table_gets_a_row_of_what_its_driver_says():
    """An RTX 4000 Ada: 360 GB/s and 107 TFLOP/s by its data sheet."""
    product = "NVIDIA RTX 4000 Ada Generation"
    spec = DetectedDevice(0, product, (8, 9), "13.0", limits=ADA_LIMITS, rates=ADA_RATES).spec
    assert spec.name == "rtx-4000-ada-generation" and spec.arch == "sm_89" and spec.note == MADE_ROW
    assert spec.dram_gb_per_s == pytest.approx(360, rel=0.01) and spec.dram_bytes == 20 << 30
    assert spec.peak_tflops("fp16") == pytest.approx(107, rel=0.01) and spec.l2_bytes == 48 << 20
    assert DetectedDevice(0, product, (8, 9), "13.0", limits=ADA_LIMITS).spec is None, "its clocks are not known"
    assert DetectedDevice(0, "Tesla T4", (7, 5), "13.0", limits=ADA_LIMITS, rates=ADA_RATES).spec is None
    geforce = DetectedDevice(0, "NVIDIA GeForce RTX 4070", (8, 9), "13.0", limits=ADA_LIMITS, rates=ADA_RATES).spec
    assert geforce.name == "rtx-4070" and geforce.peak_tflops("fp16") == pytest.approx(107 / 2, rel=0.01)
    thor = DetectedDevice(0, "NVIDIA Thor", (11, 0), "13.0", limits=ADA_LIMITS, rates=ADA_RATES).spec
    assert thor.arch == "sm_110" and thor.capability == (11, 0)


def test_a_study_restores_the_row_of_a_card_that_is_not_in_the_table():
    spec = replace(GPUS["l4"], name="odd", sm_count=40, dram_gb_per_s=300.5)

    def study(row):
        return Study(1, "s", {}, "odd", "sm_89", False, "genetic", 0, (), {}, {"sm_count": 40, "gpu_row": row})

    row = json.loads(json.dumps(asdict(spec)))
    assert study(row).spec == spec
    for bad in (None, {}, row | {"sm_count": -1}, row | {"sm_count": "4"}, row | {"name": "l4"}, row | {"more": 1}):
        with pytest.raises(GpuError):
            assert study(bad).spec


DATA_SHEETS = {  # dense fp16 TFLOP/s with fp32 accumulation
    "a100": 312, "a30": 165, "a40": 149.7, "a10": 125, "a6000": 154.8, "rtx3090": 71, "l4": 121, "l40": 181,
    "l40s": 362, "rtx6000ada": 364, "rtx4080": 97.5, "rtx4090": 165.2, "h100": 989, "h200": 989, "gh200": 990,
    "b200": 2250, "rtx5080": 112.6, "rtx5090": 209.5, "rtxpro6000": 503.8,
}  # fmt: skip


def test_matrix_rates_of_the_table_are_those_of_the_data_sheets():
    for name, tflops in DATA_SHEETS.items():
        assert GPUS[name].peak_tflops("fp16") == pytest.approx(tflops, rel=0.015), name
    assert all(spec.source for spec in GPUS.values()) and "tcgen05" in GPUS["b200"].note


def test_an_offline_search_is_for_any_gpu_beside_the_one_that_is_here():
    device = DetectedDevice(0, "NVIDIA H100 80GB HBM3", (9, 0), "13.0", limits={"sm_count": 60})
    assert choose_device("l4", [device], offline=True) == (GPUS["l4"], None)
    assert choose_device("auto", [device], offline=True) == (device.spec, None)
    assert choose_device("H100", [device], offline=True) == (device.spec, None)
    assert choose_device("H100", [device]) == (device.spec, device) and device.spec.sm_count == 60
    with pytest.raises(GpuError, match="name a GPU"):
        choose_device("auto", [], offline=True)


@pytest.mark.parametrize(
    "registers, threads, smem_bytes, blocks",
    [
        (0, 128, 0, 16),  # threads
        (32, 32, 0, 32),  # blocks
        (168, 384, 1024, 1),  # registers: a warp takes 5376 of 65536, in four parts
        (64, 128, 74 * 1024, 3),  # 75 KiB of 228
        (64, 128, 227 * 1024, 1),
        (255, 1024, 0, 0),
    ],
)
def test_how_many_blocks_fit_on_an_sm(registers, threads, smem_bytes, blocks):
    assert GPUS["h100"].blocks_resident(registers, threads, smem_bytes) == blocks
