"""Calls that want gradients, after their kind was decided: what both passes still look at, and what they leave out."""

import pytest
import torch

import evoattn
from evoattn.ops.runtime import current
from tests.ops.fake_backward import TrainingDevice, training_runtime
from tests.ops.fake_device import tensors
from tests.ops.test_training import gradients, leaves, require_near


@pytest.fixture
def device(tmp_path):
    fake = TrainingDevice()
    with current.use(training_runtime(fake, tmp_path)):
        yield fake


def test_each_call_has_a_log_sum_exp_of_its_own(device):
    """Made like that of a first call, which may have been one of inference mode."""
    q, k, v = tensors()
    with torch.inference_mode():
        first = [evoattn.attention(q, k, v, enable_gqa=True, return_lse=True, strict=True)[1] for _ in range(2)]
    mine, _ = leaves(q, k, v)
    device.is_capturing = True
    others = [evoattn.attention(*mine, enable_gqa=True, return_lse=True)[1] for _ in range(2)]
    device.is_capturing = False
    others += [evoattn.attention(*mine, enable_gqa=True, return_lse=True, strict=True)[1] for _ in range(2)]
    for lse in first + others:
        torch.testing.assert_close(lse, first[0].clone())
        assert lse.is_contiguous() and lse.dtype == torch.float32
    assert len({lse.data_ptr() for lse in first + others}) == 6
    others[3].sum().backward()


@pytest.mark.parametrize("which", range(4))
def test_what_comes_back_may_lie_otherwise(device, which):
    """As views do that `torch.autograd.graph.save_on_cpu` packs away: a kernel would read them by other strides."""
    mine, _ = leaves(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors()))
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor.contiguous() if len(packed) == which + 1 else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        out = evoattn.attention(*mine, enable_gqa=True, strict=True)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    grad = torch.empty_like(out).copy_(grad)
    assert packed[which].stride() != packed[which].contiguous().stride()
    found = torch.autograd.grad(out, mine, grad)
    double = [t.detach().double().requires_grad_() for t in mine]
    require_near(found, gradients(evoattn.attention, double, {"enable_gqa": True}, grad.double()))
    assert len(device.backwards) == 1


def test_autocast_leaves_what_has_its_dtype_as_it_is(device, monkeypatch):
    mine, _ = leaves(*tensors())
    monkeypatch.setattr("evoattn.ops.call.autocast", None)
    with torch.autocast("cpu", dtype=torch.float16):
        evoattn.attention(*mine, enable_gqa=True, strict=True).sum().backward()
    assert len(device.backwards) == 1


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("which", [*range(4), None])
def test_what_comes_back_may_have_another_dtype(device, which, lse):
    """A kernel would read it by the dtype of the forward pass, past its end perhaps; torch takes it or raises."""
    mine, _ = leaves(*tensors())
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor.bfloat16() if which in (len(packed) - 1, None) else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        out = evoattn.attention(*mine, enable_gqa=True, strict=True, return_lse=lse)
    out, *_ = out if lse else (out,)
    grad = torch.ones_like(out)
    if which in (0, 1, 2):
        with pytest.raises(RuntimeError, match="same dtype"):
            torch.autograd.grad(out, mine, grad)
        return
    found = torch.autograd.grad(out, mine, grad)
    double = [t.detach().double().requires_grad_() for t in mine]
    expected = gradients(evoattn.attention, double, {"enable_gqa": True}, grad.double())
    for one, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), exact, atol=0.06, rtol=0.02)
    assert not device.backwards
