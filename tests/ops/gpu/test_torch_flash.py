"""evoattn as torch's flash attention on a GPU: forward, and torch's gradients out of its log-sum-exp."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from evoattn.integrations.torch_flash import NAME, register
from tests.ops.gpu.gpu_problems import ON_A_GPU

pytestmark = [
    *ON_A_GPU,
    pytest.mark.skipif(not hasattr(attention, "activate_flash_attention_impl"), reason="this torch cannot replace it"),
]


def step(q, k, v, causal):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return [out, *torch.autograd.grad(out.float().square().mean(), (q, k, v))]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_training(runtime, causal, head_dim):
    made = torch.Generator("cuda").manual_seed(1)
    q, k, v = (
        torch.randn(2, 500, 8, head_dim, device="cuda", dtype=torch.bfloat16, generator=made).transpose(1, 2)
        for _ in range(3)
    )
    with torch.enable_grad():
        q, k, v = (t.requires_grad_() for t in (q, k, v))
        theirs = step(q, k, v, causal)
        register()
        attention.activate_flash_attention_impl(NAME)
        try:
            ours = step(q, k, v, causal)
        finally:
            attention.restore_flash_attention_impl()
    assert runtime._kernels, "a kernel served it"
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.stride() == other.stride()
        assert torch.allclose(mine.float(), other.float(), atol=2e-2 * float(other.abs().max()), rtol=2e-2)
