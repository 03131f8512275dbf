"""A card that is not in the table is probed; what is no bandwidth is passed over."""

from dataclasses import replace

import pytest

from evoattn.evaluation.bandwidth import CopyProbe, probed
from evoattn.evaluation.process import Handler
from evoattn.model.gpu import GPUS, MADE_ROW, DetectedDevice, detect_devices

SPEC = replace(GPUS["l4"], name="odd", note=MADE_ROW)
DEVICE = DetectedDevice(0, "Odd", (8, 9), "13.0")


class Answers(Handler):
    """A stand-in for a card: `index` is what it answers."""

    def __init__(self, index: int) -> None:
        self._answer = float(index)

    def __call__(self, task: int) -> float:
        assert task == min(16 * SPEC.l2_bytes, int(0.2 * SPEC.dram_bytes))
        return self._answer


class Dies(Answers):
    def __call__(self, task: int) -> float:
        raise MemoryError


@pytest.mark.slow
@pytest.mark.parametrize("answer, taken", ((250, True), (50, False), (500, False)))
def test_a_plausible_answer_is_taken(answer, taken):
    found = probed(SPEC, replace(DEVICE, index=answer), Answers)
    assert found == (replace(SPEC, dram_gb_per_s=250.0) if taken else SPEC)


@pytest.mark.slow
def test_a_probe_that_fails_changes_nothing():
    assert probed(SPEC, DEVICE, Dies) == SPEC


def test_a_card_of_the_table_is_not_probed():
    assert probed(GPUS["l4"], DEVICE, Dies) is GPUS["l4"]


@pytest.mark.device
@pytest.mark.skipif(not detect_devices(), reason="there is no CUDA device here")
def test_the_device_here_copies_about_as_fast_as_its_data_sheet_says():
    device = detect_devices()[0]
    assert device.spec is not None
    measured = CopyProbe(device.index)(1 << 30)
    assert 0.6 < measured / device.spec.dram_gb_per_s < 1.05
