"""What a prepared call of the CUDA backend keeps: a driver is not needed for it; and what the driver is given for a
launch, as cuda.h of CUDA 13.0 lays it out (offsetof by gcc on x86-64)."""

import ctypes
import gc
import struct
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from evoattn.backends import cuda
from evoattn.backends.base import LaunchError
from evoattn.backends.driver_launch import DriverLaunch, LaunchAttribute, LaunchConfig
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


LAUNCH = KernelLaunch("values", (3, 4, 5), (128, 2, 1), 70000, (), overlaps=True)
OFFSETS = {
    "grid_x": 0,
    "grid_y": 4,
    "grid_z": 8,
    "block_x": 12,
    "block_y": 16,
    "block_z": 20,
    "smem_bytes": 24,
    "stream": 32,
    "attributes": 40,
    "attribute_count": 48,
}


def test_layout():
    assert (
        ctypes.sizeof(LaunchConfig) == 56 and {name: getattr(LaunchConfig, name).offset for name in OFFSETS} == OFFSETS
    )
    assert ctypes.sizeof(LaunchAttribute) == 72 and (LaunchAttribute.id.offset, LaunchAttribute.value.offset) == (0, 8)


def test_what_the_driver_reads():
    seen = []

    def launch(config, function, parameters, extra):
        attribute = config.attributes[0]
        assert parameters[2] % 64 == 0
        values = [ctypes.string_at(parameters[i], size) for i, size in enumerate((8, 4, 128))]
        grid, block = ([getattr(config, f"{what}_{axis}") for axis in "xyz"] for what in ("grid", "block"))
        overlap = attribute.id, attribute.value.programmatic_stream_serialization_allowed
        seen.append(
            (grid, block, config.smem_bytes, config.stream, config.attribute_count, overlap, function, values, extra)
        )
        return 0

    arguments = [(1 << 40).to_bytes(8, "little"), struct.pack("f", 0.5), bytes(range(128))]
    for overlaps, streams in ((True, (77, 78)), (False, (79,))):
        enqueue = DriverLaunch(SimpleNamespace(ptr=0x1234), replace(LAUNCH, overlaps=overlaps), arguments, launch)
        for stream in streams:
            enqueue(stream)
    assert seen == [
        ([3, 4, 5], [128, 2, 1], 70000, stream, count, (6, 1), 0x1234, arguments, None)
        for stream, count in ((77, 1), (78, 1), (79, 0))
    ]


def test_a_refusal_is_a_sentence():
    with pytest.raises(LaunchError, match=r"^The launch of values failed \(CUDA error 1\)\.$"):
        DriverLaunch(SimpleNamespace(ptr=0), LAUNCH, (), lambda *_: 1)(0)
