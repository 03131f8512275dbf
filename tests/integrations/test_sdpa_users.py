"""Libraries that call `torch.nn.functional.scaled_dot_product_attention`: a block of `evoattn.sdpa` serves them as they
are, and `evoattn.capture` sees what they ask for."""

import pytest
import torch

import evoattn

NEAR = dict(atol=0.05, rtol=0.03)
"""What bf16 rounding of the attention outputs can do to such a model."""


@torch.no_grad()
def require_served(device, model, inputs, calls):
    """The same answers as torch's, by `calls` launches; returns what was recorded."""
    with evoattn.capture() as shapes:
        expected = model(**inputs)[0]
    assert not device.launches
    with evoattn.sdpa():
        model(**inputs)  # loads and checks the kernels
        before = len(device.launches)
        answer = model(**inputs)[0]
        assert len(device.launches) - before == calls
    assert torch.allclose(answer.float(), expected.float(), **NEAR)
    assert sum(entry.count for entry in shapes.entries) == calls
    return shapes


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_a_diffusers_transformer(device):
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=64, in_channels=4, num_layers=2, sample_size=8, norm_num_groups=8
    )
    inputs = dict(hidden_states=noise(1, 4, 8, 8), timestep=torch.tensor([3]), class_labels=torch.tensor([1]))
    shapes = require_served(device, model.bfloat16().eval(), dict(**inputs, return_dict=False), 2)
    assert [p.describe() for p in shapes] == ["B=1 H=2 S=16 D=64 bf16 full bshd"]


def test_a_diffusers_unet_with_cross_attention(device):
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(  # attention_head_dim is its name for the number of heads
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(64, 128), layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=64, attention_head_dim=1, norm_num_groups=8,
    )  # fmt: skip
    inputs = dict(sample=noise(1, 4, 8, 8), timestep=torch.tensor(3), encoder_hidden_states=noise(1, 7, 64))
    shapes = require_served(device, model.bfloat16().eval(), dict(**inputs, return_dict=False), 8)
    assert {p.seqlen_k for p in shapes} >= {7, 64}


def test_a_timm_vision_transformer(device):
    timm = pytest.importorskip("timm", exc_type=ImportError)
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2).bfloat16().eval()
    assert len(list(require_served(device, model, dict(x=noise(1, 3, 64, 64)), 2))) == 1
