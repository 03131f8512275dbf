"""A fake device behind the op, for the tests of this folder."""

import pytest
import torch

from tests.ops.conftest import device as device


@pytest.fixture
def model_device(device):
    """For transformers' models with `attn_implementation="evoattn"`."""
    from evoattn.integrations.transformers import register  # here: not every test of the folder needs transformers

    register()
    with torch.no_grad():
        yield device
