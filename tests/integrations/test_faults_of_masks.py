"""Faults that once passed the tests: steps and padded batches that lose what their masks or models say."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
from evoattn.integrations.padded_batch import MARK
from evoattn.integrations.static_cache import filled_places, kernel_serves
from evoattn.integrations.transformers import NAME, attention_forward, register
from evoattn.ops.runtime import current
from tests.integrations.test_padded_batch import LEFT, RIGHT
from tests.integrations.test_transformers import llama
from tests.ops.fake_device import CacheDevice, FakeDevice, fake_runtime, split_kv_pick

STEP = dict(batch_size=2, q_length=1, kv_length=64, q_offset=torch.tensor(20), dtype=torch.bfloat16)


def test_padding_of_numbers_is_no_padding_of_a_step(tmp_path):
    register()
    made, config = transformers.AttentionMaskInterface()[NAME], llama()[1]
    padding = torch.ones(2, 21, dtype=torch.bool)
    padding[1, :7] = False
    with current.use(fake_runtime(CacheDevice(), tmp_path, split_kv_pick)):
        assert made(**STEP, attention_mask=padding, config=config).dtype == torch.int32
        assert made(**STEP, attention_mask=padding.long(), config=config).shape == (2, 1, 1, 64)


def test_gradients_pass_through_a_step(tmp_path):
    register()
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 1
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 64, generator=generator).requires_grad_() for n in (1, 32, 32))
    with current.use(fake_runtime(CacheDevice(), tmp_path, split_kv_pick)):
        places = filled_places(2, 1, torch.tensor(20))
        ours, _ = attention_forward(module, q, k, v, places)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :21], v[:, :, :21]).transpose(1, 2)
        given = [torch.autograd.grad(answer.square().sum(), (q, k, v)) for answer in (ours, theirs)]
    for one, other in zip(*given, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("padding", [LEFT, RIGHT], ids=["left", "right"])
def test_a_padded_batch_keeps_its_soft_cap(model_device, padding):
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 1
    q = 3 * torch.randn(2, 4, 48, 64, generator=torch.Generator().manual_seed(0)).half()
    words = dict(batch_size=2, q_length=48, kv_length=48, attention_mask=padding.bool())
    mask = transformers.AttentionMaskInterface()[NAME](**words)
    ours, _ = attention_forward(module, q, q, q, mask, softcap=2.0)
    assert model_device.launches, "packed sequences"
    scores = 2.0 * torch.tanh(q.double() @ q.double().mT / 8 / 2.0)
    expected = (scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num() @ q.double()).transpose(1, 2)
    torch.testing.assert_close(ours[padding == 1].double(), expected[padding == 1], atol=1e-2, rtol=1e-2)


def test_a_mask_of_keys_that_do_not_end_with_the_queries_says_nothing(tmp_path):
    register()
    made = transformers.AttentionMaskInterface()[NAME]
    words = dict(batch_size=2, q_length=48, kv_length=48, attention_mask=torch.ones(2, 68, dtype=torch.bool))
    words["attention_mask"][1, :30] = False
    with current.use(fake_runtime(FakeDevice(), tmp_path)):
        assert hasattr(made(**words, q_offset=20, kv_offset=20), MARK)
        assert not hasattr(made(**words, q_offset=0, kv_offset=20), MARK)


def test_a_kernel_without_a_bias_serves_no_step_with_padding(tmp_path):
    pick = lambda problem, gpu: None if problem.bias else split_kv_pick(problem, gpu)
    step = llama()[1], 2, 1, 64, torch.bfloat16, torch.device("cpu")
    with current.use(fake_runtime(CacheDevice(), tmp_path, pick)):
        assert kernel_serves(*step) and not kernel_serves(*step, padded=True) and kernel_serves(*step)
