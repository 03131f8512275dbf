"""What a prepared call of the CUDA backend keeps: a driver is not needed for it."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from evoattn.backends import cuda
from evoattn.model.launch import Buffer, KernelLaunch

LAUNCHES = (KernelLaunch("values", (1, 1, 1), (128, 1, 1), 0, (Buffer("results"),)),)
COMPILED = SimpleNamespace(cubin=b"")


@pytest.fixture
def backend(monkeypatch):
    """Its launches say where their buffer lies."""
    made = object.__new__(cuda.CudaBackend)
    made.device, made._latest, made.launched = torch.device("cuda", 0), None, []

    def launch(function, one, arguments):
        return lambda stream: made.launched.append(int.from_bytes(arguments[0], "little"))

    module = SimpleNamespace(get_function=lambda name: None)
    monkeypatch.setattr(cuda, "DriverLaunch", launch)
    monkeypatch.setattr(made, "_module", lambda cubin: module)
    monkeypatch.setattr(made, "synchronize", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return made


def test_a_prepared_call_keeps_its_buffers_and_a_run_does_not(backend):
    results = torch.zeros(16)
    at, kept = results.data_ptr(), weakref.ref(results)
    call = backend.prepare(COMPILED, LAUNCHES, {"results": results})
    backend.run(COMPILED, LAUNCHES, {"results": results})
    del results
    gc.collect()
    assert kept() is not None
    call()
    assert backend.launched == [at, at]
    del call
    gc.collect()
    assert kept() is None
