"""The device that a driver names is the row of the table that is meant, and no other."""

import pytest

from evoattn.model.gpu import GPUS, DetectedDevice


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
    assert DetectedDevice(0, product, (8, 0), "13.0").spec is (GPUS[name] if name else None)
