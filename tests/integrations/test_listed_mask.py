"""Masks of models that no name says, as block lists: beside the models' own eager attention."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers.masking_utils import sdpa_mask

from evoattn.integrations import by_hand, listed_mask
from evoattn.integrations.transformers import attention_forward
from evoattn.ops import flex
from evoattn.ops.call import Call
from evoattn.ops.runtime import current
from evoattn.ops.torch_answer import NoKernel, by_formula

SIZES = dict(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
NAME, TOKENS = "evoattn_listed_of_a_test", 150


def llama4():
    more = dict(num_key_value_heads=1, head_dim=16, attention_chunk_size=40, num_local_experts=1)
    sizes = SIZES | more | dict(intermediate_size_mlp=32, num_hidden_layers=4, pad_token_id=0, bos_token_id=1)
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**sizes))


def modernbert():
    config = transformers.ModernBertConfig(**SIZES, local_attention=16, pad_token_id=0)
    return transformers.ModernBertForMaskedLM(config)


def gemma_both_ways():
    """As EmbeddingGemma: windows on both sides."""
    config = transformers.Gemma3TextConfig(**SIZES, num_key_value_heads=1, head_dim=16, sliding_window=32)
    config.use_bidirectional_attention = True
    return transformers.Gemma3ForCausalLM(config)


def paligemma():
    """Its prompts see all of themselves."""
    text = SIZES | dict(model_type="gemma", num_key_value_heads=1, head_dim=16)
    vision = dict(model_type="siglip_vision_model", hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    vision |= dict(num_attention_heads=2, image_size=16, patch_size=8, projection_dim=32)
    sizes = dict(image_token_index=1, hidden_size=32, projection_dim=32)
    config = transformers.PaliGemmaConfig(vision_config=vision, text_config=text, **sizes)
    return transformers.PaliGemmaForConditionalGeneration(config)


def answered(seen):
    """An attention function that has the calls that lists say answered by the formula."""

    def forward(module, query, key, value, mask, scaling=None, **_):
        if mask is None:
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)[None, None]
            mask = mask.tril() if module.is_causal else mask
        call = Call(query, key, value, scale=scaling, enable_gqa=True, return_lse=True)
        made = flex.calls(call, None, listed_mask.block_mask_of(mask))
        assert not isinstance(made, str), made
        one = made[0]()
        seen.append((one.blocks, one.causal, one.window, one.score and one.score.predicate))
        return by_formula(one)[0].transpose(1, 2).contiguous(), None

    return forward


class Answering:
    """In place of a runtime that has kernels, or has none."""

    device_type = "cpu"
    platform = SimpleNamespace(capturing=lambda: False, current_device=lambda: 0, spec=lambda number: None)

    def __init__(self, has_kernels):
        self.calls, self.has_kernels = [], has_kernels

    def attend(self, call):
        if not self.has_kernels:
            raise NoKernel("it is the test's")
        self.calls.append(call)
        return by_formula(call)[0]


@pytest.mark.parametrize("has_kernels", (True, False))
def test_attention_takes_lists_where_kernels_serve_them(has_kernels):
    """With sinks and a soft cap; the lists are made once, and again for a mask that was written to."""
    q, k, v = torch.randn(2, 4, 200, 16), *torch.randn(2, 2, 2, 200, 16)
    mask, sinks, module = torch.rand(2, 1, 200, 200) < 0.3, torch.randn(4), SimpleNamespace(is_causal=False)
    mask[1, 0, :130] = mask[0, 0, 5] = False
    mask[0, 0, :128, :128] = True
    with current.use(Answering(has_kernels)) as runtime:
        for turn in range(3):
            found, _ = attention_forward(module, q, k, v, mask, softcap=2.0, s_aux=sinks)
            exact = by_hand.attention(q, k, v, mask, 0.0, None, False, 2.0, sinks)
            sees = mask.any(-1)[:, 0]
            torch.testing.assert_close(found[sees], exact[sees])
            if turn == 1:
                mask[0, 0, 7, 9] ^= True
        few, _ = attention_forward(module, q[:, :, :9], k, v, mask[:, :, :9], softcap=2.0, s_aux=sinks)
    assert few.shape == (2, 9, 4, 16) and len(runtime.calls) == 3 * has_kernels
    if has_kernels:
        read = [call.score.tensors[0] for call in runtime.calls]
        assert read[0] is read[1] is not read[2] and runtime.calls[0].blocks.startswith("b:128x128")


def test_one_mask_for_all_batches_has_one_list():
    mask = torch.rand(1, 1, 200, 300) < 0.3
    for own, lists in ((mask.expand(2, 1, 200, 300), 1), (mask.repeat(2, 1, 1, 1), 2)):
        assert listed_mask.block_mask_of(own).kv_num_blocks.shape == (lists, 1, 2)


SIZES_OF_OTHERS = (
    (3, 1, 200, 200),
    (2, 4, 200, 200),
    (2, 2, 200, 200),
    (2, 200, 200),
    (2, 1, 200, 199),
    (2, 1, 199, 200),
)


@pytest.mark.parametrize("batch, shape", [(0, (0, 1, 200, 200)), *((2, shape) for shape in SIZES_OF_OTHERS)])
def test_an_empty_batch_and_masks_of_other_sizes_go_to_torch(batch, shape):
    q, mask = torch.randn(batch, 4, 200, 16), torch.ones(shape, dtype=torch.bool)
    with current.use(Answering(True)):
        assert listed_mask.attention(q, q, q, mask, None, 0.0, None) is None and not hasattr(mask, listed_mask.MARK)


@pytest.mark.parametrize("most", [200 * 200, 200 * 200 - 1])
def test_a_mask_of_more_elements_than_a_table_has_goes_to_torch(monkeypatch, most):
    """Those of one batch count, where all have the same."""
    monkeypatch.setattr(listed_mask, "MOST_ELEMENTS", most)
    q, mask = torch.randn(2, 4, 200, 16), torch.ones(1, 1, 200, 200, dtype=torch.bool).expand(2, 1, 200, 200)
    with current.use(Answering(True)):
        found = listed_mask.attention(q, q, q, mask, None, 0.0, None)
    assert (found is None) == (most < 200 * 200)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "padding"),
    [(make, padding) for make in (llama4, modernbert, gemma_both_ways) for padding in ("", "front", "middle")]
    + [(paligemma, "front")],
)
def test_logits_are_those_of_eager_attention(make, padding):
    seen: list = []
    torch.manual_seed(1)
    model = make().eval()
    ids = torch.randint(3, 50, (2, TOKENS))
    real = torch.ones(2, TOKENS, dtype=torch.long)
    if padding:
        real[1, slice(0, 20) if padding == "front" else slice(60, 90)] = 0
    transformers.AttentionInterface.register(NAME, answered(seen))
    transformers.AttentionMaskInterface.register(NAME, sdpa_mask)
    found, words = [], {}
    if make is paligemma:
        ids[:, 30:34] = 1
        of_prompt = (torch.arange(TOKENS) >= 90).long().expand(2, -1)
        words = {"token_type_ids": of_prompt, "pixel_values": torch.randn(2, 3, 16, 16)}
    for name in ("eager", NAME):
        model.set_attn_implementation({"": name, "text_config": name, "vision_config": "eager"} if words else name)
        with torch.no_grad():
            found.append(model(ids, attention_mask=real, **words).logits)
    assert any(blocks and predicate for blocks, _, _, predicate in seen)
    kept = real.bool()
    torch.testing.assert_close(found[1][kept], found[0][kept], atol=2e-5, rtol=2e-4)


def test_a_mask_that_has_its_lists_is_freed():
    mask = torch.ones(2, 1, 150, 150, dtype=torch.bool).tril()
    setattr(mask, listed_mask.MARK, (mask._version, listed_mask.block_mask_of(mask)))
    found = weakref.ref(mask)
    del mask
    gc.collect()
    assert found() is None
