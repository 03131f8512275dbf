"""Torch's flash attention replaced by evoattn: on the CPU's dispatch key, where torch has none of its own."""

import pytest
import torch

from evoattn.integrations.torch_flash import NAME, Replaced, register
from tests.ops.fake_device import near, reference, tensors

OP = torch.ops.aten._scaled_dot_product_flash_attention


class Original:
    """Stands for torch's kernel: says that it was asked."""

    def __init__(self):
        self.asked = []

    def call_boxed(self, keys, query, key, value, dropout_p, is_causal, return_debug_mask, scale=None):
        self.asked.append((dropout_p, is_causal, scale))
        lse, state = torch.zeros(query.shape[:3]), torch.zeros(2, dtype=torch.uint64)
        return query, lse, None, None, query.shape[2], key.shape[2], state, state[0], torch.empty(0)


@pytest.fixture
def original():
    torchs = Original()
    replaced = Replaced(torchs, "CPU")
    yield torchs
    replaced.remove()
    with pytest.raises(NotImplementedError):
        OP(*tensors())


def test_a_kernel_gives_output_and_log_sum_exp(device, original):
    q, k, v = tensors(seqlen_q=45)
    out, lse, *_, max_q, max_k, state, unused, debug = OP(q, k, v, 0.0, True, scale=0.2)
    assert near(out, reference(q, k, v, is_causal=True, scale=0.2))
    scores = q.float() @ k.float().repeat_interleave(2, 1).transpose(-1, -2) * 0.2
    seen = torch.ones(45, 45, dtype=torch.bool).tril()
    assert torch.allclose(lse, scores.masked_fill(~seen, -torch.inf).logsumexp(-1), atol=1e-3)
    assert (max_q, max_k, state.shape, unused.shape, debug.numel()) == (45, 45, (2,), (), 0)
    assert debug.dtype == q.dtype
    assert device.launches and not original.asked


def test_what_no_kernel_serves_is_torchs(device, original):
    q, k, v = tensors(kv_heads=4)
    assert OP(q, k, v, 0.5)[0] is not None
    OP(q.double(), k.double(), v.double(), scale=0.3)
    assert original.asked == [(0.5, False, None), (0.0, False, 0.3)]
    assert not device.launches


def test_inputs_that_want_gradients_reach_the_kernel(device, original):
    q, k, v = (t.requires_grad_() for t in tensors(kv_heads=4))
    out, *_ = OP(q, k, v)
    assert device.launches and out.requires_grad and "Flash" in type(out.grad_fn).__name__


def test_torch_knows_the_name():
    from torch.nn.attention import list_flash_attention_impls

    register()
    assert NAME in list_flash_attention_impls()


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="of a build of torch without CUDA")
def test_a_build_without_cuda_says_so():
    register()
    with pytest.raises(RuntimeError, match="no flash attention for CUDA"):
        torch.nn.attention.activate_flash_attention_impl(NAME)
