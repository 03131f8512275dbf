"""A fake device behind the op, for the tests of this folder."""

import pytest

from evoattn.ops.runtime import current
from tests.ops.fake_device import FakeDevice, fake_runtime


@pytest.fixture
def device(tmp_path):
    fake = FakeDevice()
    with current.use(fake_runtime(fake, tmp_path)):
        yield fake
