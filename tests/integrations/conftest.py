"""A fake device behind the op, for the tests of this folder."""

import pytest
import torch

from evoattn.ops.runtime import current
from tests.ops.fake_device import FakeDevice, fake_runtime


@pytest.fixture
def device(tmp_path):
    fake = FakeDevice()
    with current.use(fake_runtime(fake, tmp_path)):
        yield fake


@pytest.fixture
def model_device(device):
    """For transformers' models with `attn_implementation="evoattn"`."""
    from evoattn.integrations.transformers import register  # here: not every test of the folder needs transformers

    register()
    with torch.no_grad():
        yield device
