"""The runtime of the tests that need a GPU."""

import pytest
import torch

from evoattn.backends.platform import CudaPlatform
from evoattn.ops.runtime import Runtime, current
from tests.ops.stand_in import stand_in


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def runtime(folder):
    """The stand-in rule behind the op, and a cache of this run's own."""
    with current.use(Runtime(CudaPlatform(), stand_in, folder)) as ours, torch.no_grad():
        torch.compiler.reset()
        yield ours
