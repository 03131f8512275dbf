"""The device that a driver names is the row of the table that is meant, and no other."""

import pytest

from evoattn.model.gpu import GPUS, DetectedDevice
from evoattn.model.records import Study


@pytest.mark.parametrize(
    "product, name",
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("Tesla T4", None),
        ("NVIDIA RTX 4000", None),
    ],
)
def test_a_device_is_recognised_by_the_words_of_its_name(product, name):
    assert DetectedDevice(0, product, (8, 0), "13.0").spec == (GPUS[name] if name else None)


def device(**limits: int) -> DetectedDevice:
    return DetectedDevice(0, "NVIDIA H100 PCIe", (9, 0), "13.0", limits=limits)


def test_a_device_has_its_own_number_of_sms():
    here = device(sm_count=114, l2_bytes=50 << 20)
    assert here.spec.sm_count == 114 and here.spec.name == "h100" and here.describe() == "NVIDIA H100 PCIe (114 SMs)"
    assert here.spec.peak_tflops("fp16") == pytest.approx(GPUS["h100"].peak_tflops("fp16") * 114 / 132)
    assert device().spec == GPUS["h100"] and device().describe() == "NVIDIA H100 PCIe"
    assert not here.spec.is_like(GPUS["h100"]) and here.spec.is_like(device(sm_count=114).spec)


@pytest.mark.parametrize(
    "recorded, count", [(114, 114), (None, 132), ("many", 132), (-1, 132), (True, 132), (1 << 40, 132)]
)
def test_a_study_has_the_sms_that_it_recorded(recorded, count):
    options = {} if recorded is None else {"sm_count": recorded}
    study = Study(1, "s", {}, "h100", "sm_90a", False, "genetic", 0, (), {}, options)
    assert study.spec.sm_count == count
