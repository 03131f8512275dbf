"""Models that choose among attention classes of their own by the name of the implementation: they run what transformers
chooses for them, and say so."""

import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")
from evoattn.integrations.transformers import NAME, register
from evoattn.ops.runtime import current
from tests.ops.fake_device import fake_runtime

TOKENS = torch.arange(3, 43).reshape(2, 20)
SIZES = dict(vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)


def falcon():
    return transformers.FalconForCausalLM, transformers.FalconConfig(**SIZES), "sdpa"


def gpt_j():
    sizes = dict(vocab_size=99, n_embd=64, n_layer=2, n_head=4, n_positions=64, rotary_dim=8)
    return transformers.GPTJForCausalLM, transformers.GPTJConfig(**sizes), "eager"


def git():
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32)
    return transformers.GitForCausalLM, transformers.GitConfig(vision_config=vision, **SIZES), "eager"


class Tuned(transformers.FalconModel):
    """A user's own."""


def own():
    return Tuned, transformers.FalconConfig(**SIZES), "sdpa"


def of(make, implementation):
    kind, config, _ = make()
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation=implementation, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.15 if parameter.dim() > 1 else 0.5)
    return model


@pytest.fixture
def registered(tmp_path):
    for _ in range(2):  # which is as once
        register()
    with current.use(fake_runtime(None, tmp_path)), torch.no_grad():
        yield


@pytest.mark.filterwarnings("ignore:evoattn:RuntimeWarning")
@pytest.mark.parametrize("make", [falcon, gpt_j, git, own], ids=lambda make: make.__name__)
def test_they_run_what_transformers_chooses(registered, make):
    with pytest.warns(RuntimeWarning, match="has attention classes of its own") as said:
        model = of(make, NAME)
    assert {f'attn_implementation="{make()[2]}"' in str(one.message) for one in said} == {True}
    assert (".enable() serves" in str(said[0].message)) == (make()[2] == "sdpa")
    assert model.config._attn_implementation == make()[2]
    theirs = of(make, make()[2])(input_ids=TOKENS)[0]
    torch.testing.assert_close(model(input_ids=TOKENS)[0], theirs)
    model.set_attn_implementation(NAME)
    torch.testing.assert_close(model(input_ids=TOKENS)[0], theirs)


def test_a_model_beside_them_keeps_the_name(registered):
    """The image encoder of SAM chooses a class, and nothing else of it does."""
    small = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8)
    config = transformers.SamConfig(
        vision_config=small | dict(mlp_dim=32, output_channels=16, global_attn_indexes=[0]),
        prompt_encoder_config=dict(hidden_size=16, image_size=32, patch_size=8),
        mask_decoder_config=dict(hidden_size=16, num_attention_heads=2, mlp_dim=16, iou_head_hidden_dim=16),
    )
    with pytest.warns(RuntimeWarning, match="SamVisionEncoder has attention classes of its own") as said:
        model = transformers.SamModel._from_config(config, attn_implementation=NAME)
    assert len(said) == 1
    assert model.vision_encoder.config._attn_implementation == "sdpa"
    assert model.mask_decoder.transformer.config._attn_implementation == NAME


def test_a_model_without_such_classes_is_left_alone(registered):
    config = transformers.LlamaConfig(**SIZES, intermediate_size=32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=NAME)
    assert model.config._attn_implementation == NAME
