"""diffusers' dispatcher: the function that it calls, and the name in its registry where it is there."""

import enum
import sys
from types import SimpleNamespace

import pytest
import torch

from evoattn.integrations import diffusers as adapter
from tests.integrations.flash_attn_formula import Asked, drawn

HEADS, DIM = 4, 64
ROWS, KEYS = 7, 12


def tensors(dtype=torch.float32):
    shapes = [(2, ROWS, HEADS, DIM), (2, KEYS, HEADS, DIM), (2, KEYS, HEADS, DIM)]
    return [drawn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def near(one, other, atol=1e-5):
    return torch.allclose(one.double(), other.double(), atol=atol)


def test_outputs_and_sums():
    q, k, v = tensors()
    out, sums = adapter.attend(q, k, v, scale=0.2, return_lse=True)
    for b in range(2):
        expected, lse = Asked(0.2).of(q[b], k[b], v[b])
        assert near(out[b], expected) and near(sums[b], lse.T)
    assert near(adapter.attend(q, k, v, scale=0.2), out)
    assert near(
        adapter.attend(q, k[:, :ROWS], v[:, :ROWS], is_causal=True)[0],
        Asked(causal=True).of(q[0], k[0, :ROWS], v[0, :ROWS])[0],
    )


@pytest.mark.parametrize("dims", [2, 4])
def test_masks_hide_keys(dims):
    q, k, v = tensors()
    mask = torch.arange(KEYS) < torch.tensor([[5], [12]])
    out = adapter.attend(q, k, v, mask if dims == 2 else mask[:, None, None])
    for b, count in enumerate((5, 12)):
        assert near(out[b], Asked().of(q[b], k[b, :count], v[b, :count])[0])


def test_heads_share_keys_where_that_is_asked_for():
    q, k, v = tensors()
    out = adapter.attend(q, k[:, :, ::2], v[:, :, ::2], enable_gqa=True)
    shared = [one[0, :, ::2].repeat_interleave(2, dim=1) for one in (k, v)]
    assert near(out[0], Asked().of(q[0], *shared)[0])
    with pytest.raises((RuntimeError, ValueError)):
        adapter.attend(q, k[:, :, ::2], v[:, :, ::2])


def test_a_kernel_reads_the_tensors_as_they_lie(device):
    q, k, v = tensors(torch.float16)
    adapter.attend(q, k, v)
    device.launches.clear()
    out = adapter.attend(q, k, v)
    (launch,) = device.launches
    assert launch.addresses[:3] == (q.data_ptr(), k.data_ptr(), v.data_ptr())
    assert near(out[1], Asked().of(q[1], k[1], v[1])[0], 4e-3)


def test_context_parallelism_is_refused():
    with pytest.raises(ValueError, match="context parallelism"):
        adapter.attend(*tensors(), _parallel_config=object())


def test_the_registry_has_its_name_once_with_checks(monkeypatch):
    names, kept = enum.Enum("Names", {"NATIVE": "native"}, type=str), {}
    registry = SimpleNamespace(register=lambda name, constraints: lambda call: kept.update({name: (call, constraints)}))
    dispatch = SimpleNamespace(AttentionBackendName=names, _AttentionBackendRegistry=registry)
    dispatch._check_device, dispatch._check_shape = "device", "shape"
    for module in ("diffusers", "diffusers.models"):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(attention_dispatch=dispatch))
    for _ in range(2):
        adapter.register()
    assert kept == {names("evoattn"): (adapter.attend, ["device", "shape"])}
    assert [one.value for one in names] == ["native", "evoattn"]


def test_the_engine_takes_it():
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
    adapter.register()
    adapter.register()
    names = dispatch.AttentionBackendName
    assert names("evoattn").value == "evoattn" and [one.value for one in names].count("evoattn") == 1
    q, k, v = tensors()
    with dispatch.attention_backend("evoattn"):
        out = dispatch.dispatch_attention_fn(q, k, v, scale=0.2)
    assert near(out[0], Asked(0.2).of(q[0], k[0], v[0])[0])
    assert dispatch._AttentionBackendRegistry.get_active_backend()[0] != names("evoattn")
