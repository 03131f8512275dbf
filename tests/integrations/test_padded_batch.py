"""Batches with padding: kernels take it as packed sequences or as keys that are not in use, and real tokens get the
logits of "sdpa". Faults that once passed the tests: steps and padded batches that lose what their masks or models
say."""

import pytest

transformers = pytest.importorskip("transformers")
import torch

from evoattn.integrations.padded_batch import MARK, padded_of
from evoattn.integrations.static_cache import filled_places, kernel_serves
from evoattn.integrations.transformers import NAME, attention_forward, register
from evoattn.ops.runtime import current
from tests.integrations.test_transformers import TWO, bert, build, close, gemma3, llama, mistral, padding, t5
from tests.ops.fake_device import CacheDevice, FakeDevice, fake_runtime, split_kv_pick

LEFT, RIGHT, MIDDLE, BOTH = padding(*range(9)), padding(*range(30, 48)), padding(20, 21), padding(0, 47)


def logits(make, implementation, mask, wrapped=lambda model: model):
    model, inputs = build(make, implementation)
    if make is bert:  # whose attention weights are all alike at its start
        for name, weights in model.named_parameters():
            weights.mul_(4 if ".attention." in name and "Norm" not in name else 1)
    inputs = dict.fromkeys(inputs, TWO)
    answer = wrapped(model)(**inputs, attention_mask=mask)
    return answer["logits"] if "logits" in answer else answer["last_hidden_state"]


@pytest.mark.parametrize("make", [llama, lambda: mistral(16), lambda: gemma3(16)], ids=["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("mask", [LEFT, RIGHT], ids=["left", "right"])
def test_prompts_are_packed_sequences(model_device, make, mask):
    expected = logits(make, "sdpa", mask)
    logits(make, NAME, mask)  # loads and checks the kernels
    before = len(model_device.launches)
    ours = logits(make, NAME, mask)
    assert len(model_device.launches) - before == 2
    assert close(ours[mask == 1], expected[mask == 1])
    plain = logits(make, "sdpa", None)
    assert mask is RIGHT or not torch.allclose(expected[1, 9:], plain[1, 9:], atol=0.1), "the mask is of consequence"


@pytest.mark.parametrize("mask", [MIDDLE, BOTH], ids=["middle", "both"])
def test_other_padding_is_sdpa_s(model_device, mask):
    assert torch.equal(logits(llama, NAME, mask), logits(llama, "sdpa", mask))
    assert not model_device.launches


@pytest.mark.parametrize("make, served", [(bert, 2), (t5, 4)], ids=["bert", "t5"])
def test_padded_sentences_are_keys_in_use(tmp_path, make, served):
    """Of T5 the encoder, and the cross attention to it, whose queries are as many as its keys; its decoder is plain."""
    register()
    fake = CacheDevice()
    with current.use(fake_runtime(fake, tmp_path, split_kv_pick)), torch.no_grad():
        expected = logits(make, "sdpa", RIGHT)
        logits(make, NAME, RIGHT)
        before = len(fake.launches)
        assert close(logits(make, NAME, RIGHT), expected)
        assert fake.launches[before:].count("split_kv") == served
        assert not torch.allclose(expected[1], logits(make, "sdpa", None)[1], atol=0.1), "the mask is of consequence"
        before = len(fake.launches)
        assert close(logits(make, NAME, LEFT), logits(make, "sdpa", LEFT))
        assert "split_kv" not in fake.launches[before:]


def test_a_mask_that_was_written_to_is_only_a_mask(tmp_path):
    register()
    made = transformers.AttentionMaskInterface()[NAME]
    words = dict(batch_size=2, q_length=48, kv_length=48, attention_mask=LEFT.bool())

    def of(mask, batch=2, queries=48):
        return padded_of(mask, torch.empty(batch, 4, queries, 64), torch.empty(batch, 2, 48, 64))

    device = FakeDevice()
    with current.use(fake_runtime(device, tmp_path)):
        mask = made(**words)
        device.is_capturing = True
        assert of(mask) is None and not hasattr(made(**words), MARK), "a graph reads the mask when replayed"
        device.is_capturing = False
        assert of(mask).starts.tolist() == [0, 48, 48, 57, 96] and of(mask).causal and of(mask).window is None
        assert of(mask, batch=4) is None and of(mask, queries=40) is None, "broadcast"
        assert of(mask.clone()) is None and of(mask[:, :, :4]) is None
        mask[0, 0, 5, 3] = False
        assert of(mask) is None
        with torch.inference_mode():
            mask = made(**words)
            assert of(mask).starts.tolist() == [0, 48, 48, 57, 96]
            mask[0, 0, 5, 3] = False
            assert of(mask) is None
        assert not hasattr(made(**words | dict(q_offset=3)), MARK), "queries that are not the first"
        assert not hasattr(made(**words, mask_function=lambda b, h, q, k: (k <= q) & (k != 20)), MARK), (
            "a mask of the model's own"
        )
    with current.use(fake_runtime(None, tmp_path)):
        assert not hasattr(made(**words), MARK), "nobody reads it"


@pytest.mark.parametrize("seen", [LEFT, RIGHT], ids=["left", "right"])
def test_a_layer_that_is_compiled_alone_takes_the_mask_as_any_other(model_device, seen):
    """Its mask is made outside of compiled code, and says there what it stands for."""
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 1
    query = torch.randn(2, 4, 48, 64, generator=torch.Generator().manual_seed(0))
    words = dict(batch_size=2, q_length=48, kv_length=48, attention_mask=seen.bool())
    mask = transformers.AttentionMaskInterface()[NAME](**words)
    assert hasattr(mask, MARK)
    layer = torch.compile(lambda q: attention_forward(module, q, q, q, mask)[0], backend="eager", fullgraph=True)
    expected = torch.nn.functional.scaled_dot_product_attention(query, query, query, mask).transpose(1, 2)
    torch.testing.assert_close(layer(query), expected)


@pytest.mark.parametrize("make", [llama, bert], ids=["llama", "bert"])
def test_a_whole_model_compiles_with_padding(model_device, make):
    """Within compiled code a mask cannot say what it stands for."""
    torch.compiler.reset()
    expected = logits(make, "sdpa", RIGHT)
    ours = logits(make, NAME, RIGHT, lambda model: torch.compile(model, backend="eager", fullgraph=True))
    assert close(ours[RIGHT == 1], expected[RIGHT == 1])


def test_training_with_padding_goes_through_sdpa(model_device):
    model, _ = build(llama, NAME)
    with torch.enable_grad():
        model.train()(input_ids=TWO, attention_mask=LEFT, labels=TWO).loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None
    assert not model_device.launches


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
