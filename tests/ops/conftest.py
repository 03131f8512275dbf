"""A fake device behind the op, for the tests of this folder."""

import pytest
from fake_device import FakeDevice, fake_runtime

from evoattn.ops import current


@pytest.fixture
def device(tmp_path):
    fake = FakeDevice()
    with current.use(fake_runtime(fake, tmp_path)):
        yield fake
