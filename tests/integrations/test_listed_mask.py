"""Masks of models that no name says, as block lists: beside the models' own eager attention. Mask tensors that hide
what a causal mask or a window hides, and padding on one side, run a kernel; the logits are eager's. Mask tensors that
hide what a causal mask or a window hides, and padding on one side, run a kernel; the logits are eager's."""

import pytest

transformers = pytest.importorskip("transformers")
import gc
import weakref
from types import SimpleNamespace

import torch
from transformers.masking_utils import sdpa_mask

from evoattn.integrations import by_hand, listed_mask
from evoattn.integrations.mask_kinds import mark
from evoattn.integrations.padded_batch import MARK
from evoattn.integrations.transformers import NAME, attention_forward
from evoattn.ops import flex
from evoattn.ops.call import Call
from evoattn.ops.runtime import current
from evoattn.ops.torch_answer import NoKernel, by_formula
from tests.integrations.test_transformers import TINY, TWO, close, gemma3, llama, mistral, padding

SIZES = dict(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
LISTED_NAME, TOKENS = "evoattn_listed_of_a_test", 150


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
    transformers.AttentionInterface.register(LISTED_NAME, answered(seen))
    transformers.AttentionMaskInterface.register(LISTED_NAME, sdpa_mask)
    found, words = [], {}
    if make is paligemma:
        ids[:, 30:34] = 1
        of_prompt = (torch.arange(TOKENS) >= 90).long().expand(2, -1)
        words = {"token_type_ids": of_prompt, "pixel_values": torch.randn(2, 3, 16, 16)}
    for name in ("eager", LISTED_NAME):
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


PADDINGS = {"none": None, "ones": padding(), "left": padding(*range(9)), "right": padding(*range(30, 48))}


def marked_modernbert():
    """A layer that sees all keys, and two that see 8 on either side; they hand 9 to their attention."""
    sizes = TINY | dict(num_hidden_layers=3)
    config = transformers.ModernBertConfig(**sizes, local_attention=16, pad_token_id=0)
    return transformers.ModernBertForMaskedLM, config


def phimoe():
    """Its masks have windows, of which its layers do not tell."""
    sizes = TINY | dict(num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1, pad_token_id=0)
    return transformers.PhimoeForCausalLM, transformers.PhimoeConfig(**sizes, sliding_window=8)


def splinter():
    """An encoder for which transformers has no fused attention."""
    return transformers.SplinterModel, transformers.SplinterConfig(**TINY)


def switch():
    """A decoder and cross attention of that kind, which add position biases; its encoder makes its masks itself."""
    sizes = dict(vocab_size=99, d_model=256, d_kv=64, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4)
    sizes |= dict(num_experts=2, num_sparse_encoder_layers=0, num_sparse_decoder_layers=0, pad_token_id=0)
    config = transformers.SwitchTransformersConfig(**sizes, decoder_start_token_id=0)
    return transformers.SwitchTransformersForConditionalGeneration, config


def embedding_gemma():
    """Gemma 3 as an encoder: functions of its own make the masks, one with a window of 8 on either side."""
    sizes = TINY | dict(num_key_value_heads=2, head_dim=64, use_bidirectional_attention=True, sliding_window=16)
    layers = ["sliding_attention", "full_attention"]
    return transformers.Gemma3TextModel, transformers.Gemma3TextConfig(**sizes, layer_types=layers)


def build(make, implementation):
    kind, config, *_ = make()
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation=implementation, dtype=torch.bfloat16).eval()
    for name, weights in model.named_parameters():  # of large scores, so that what is seen matters
        weights.mul_(4 if any(part in name for part in ("q_proj", "k_proj", "Wqkv", "query.w", "key.w")) else 1)
    return model


@pytest.mark.parametrize("make, served", [(splinter, 2), (switch, 4), (embedding_gemma, 2)])
@pytest.mark.parametrize("name", ["none", "ones"])
@pytest.mark.filterwarnings("ignore:evoattn. transformers has no fused:RuntimeWarning")
def test_masks_of_eager_run_the_kernel(model_device, make, served, name):
    words = dict(input_ids=TWO, attention_mask=PADDINGS[name])
    words |= dict(decoder_input_ids=TWO[:, :20]) if make is switch else {}
    expected = build(make, "eager")(**words)[0]
    ours = build(make, NAME)
    ours(**words)  # loads and checks the kernels
    before = len(model_device.launches)
    assert close(ours(**words)[0], expected)
    assert len(model_device.launches) - before == served


@pytest.mark.parametrize("make, layers", [(marked_modernbert, 3), (phimoe, 2)], ids=["marked_modernbert", "phimoe"])
@pytest.mark.parametrize("name", PADDINGS)
def test_windows_of_the_mask_run_the_kernel(model_device, make, layers, name):
    """In all layers but ModernBERT's first where there is padding. That one sees all keys: padding behind them makes
    keys in use, which only `CacheDevice` has, and padding in front takes a mask."""
    mask = PADDINGS[name]
    real = torch.ones(2, 48, dtype=torch.bool) if mask is None else mask == 1
    expected = build(make, "eager")(input_ids=TWO, attention_mask=mask).logits
    ours = build(make, NAME)
    ours(input_ids=TWO, attention_mask=mask)  # loads and checks the kernels
    before = len(model_device.launches)
    with torch.inference_mode():
        found = ours(input_ids=TWO, attention_mask=mask).logits
    assert len(model_device.launches) - before == layers - (make is marked_modernbert and name in ("left", "right"))
    assert close(found[real], expected[real])
    ours.config.sliding_window = None if make is phimoe else 100
    for one in ours.modules():
        one.sliding_window = None
    assert not close(ours(input_ids=TWO, attention_mask=mask).logits[real], expected[real]), "the window matters"


@pytest.mark.parametrize("make", [llama, lambda: mistral(16), lambda: gemma3(16)], ids=["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("with_mask", [False, True])
def test_more_tokens_over_a_growing_cache_run_the_kernel(model_device, make, with_mask):
    """As the next words of a chat, or drafts of several tokens that a model checks at once."""
    steps = [(0, 20), (20, 27), (27, 28), (28, 47), (47, 48)]

    def logits(implementation, count):
        model, cache, found = build(make, implementation), transformers.DynamicCache(config=make()[1]), []
        for begin, end in steps:
            mask = torch.ones(2, end, dtype=torch.long) if with_mask else None
            before = len(model_device.launches)
            found.append(model(input_ids=TWO[:, begin:end], attention_mask=mask, past_key_values=cache).logits)
            assert len(model_device.launches) - before == count
        return torch.cat(found, dim=1)

    expected = logits("eager", 0)
    model = build(make, NAME)
    model.generate(TWO[:, :20], max_new_tokens=3, pad_token_id=0)  # loads and checks the kernels
    cache = transformers.DynamicCache(config=make()[1])
    for begin, end in steps:
        model(input_ids=TWO[:, begin:end], past_key_values=cache)
    assert close(logits(NAME, 2), expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_what_a_mask_holds(model_device, dtype):
    """Of any function, by every element."""
    seen = {
        (False, None): lambda q, k: q >= q,
        (True, None): lambda q, k: k <= q,
        (True, (15, -1)): lambda q, k: (k <= q) & (k > q - 16),
        (False, (15, 15)): lambda q, k: abs(q - k) < 16,
        (False, (16, 16)): lambda q, k: abs(q - k) <= 16,
        None: lambda q, k: (k <= q) & (k > q - 15),
    }
    places = torch.arange(48)
    some = torch.ones(2, 48, dtype=torch.bool)
    some[1, 40:] = False
    for expected, function in seen.items():
        for shown_keys, queries in ((None, 48), (some, 48), (None, 5)):
            shown = function(places[-queries:, None], places[None]).expand(2, 1, -1, -1).expand(-1, -1, queries, 48)
            shown = shown if shown_keys is None else shown & shown_keys[:, None, None]
            made = shown if dtype == torch.bool else torch.zeros(shown.shape).masked_fill(~shown, -3e38)
            mark(made, shown_keys, lambda *_: True, 48 - queries, 0, None, 16)
            said = getattr(made, MARK, None)
            assert (said and (said.causal, said.window)) == expected
            wrong = made.clone()
            wrong[1, 0, -1, -9] = ~wrong[1, 0, -1, -9] if dtype == torch.bool else -1.0
            mark(wrong, shown_keys, lambda *_: True, 48 - queries, 0, None, 16)
            assert not hasattr(wrong, MARK)


def test_what_a_mask_says(model_device):
    """Of one without padding nothing but the keys that each query sees; of one whose last query is not of the last key
    nothing at all."""
    from transformers.masking_utils import sliding_window_bidirectional_mask_function as beside
    from transformers.masking_utils import sliding_window_causal_mask_function as window

    made = transformers.AttentionMaskInterface()[NAME]
    ones = torch.ones(2, 48, dtype=torch.bool)
    words = dict(batch_size=2, q_length=8, kv_length=48, q_offset=40, local_size=16)
    for function, causal, sides in ((window(16), True, (15, -1)), (beside(16), False, (16, 16))):
        for seen in (None, ones):
            skip = dict(allow_is_causal_skip=causal, allow_is_bidirectional_skip=not causal)
            said = getattr(made(**words, mask_function=function, attention_mask=seen, **skip), MARK)
            assert (said.causal, said.window, said.starts, said.lengths) == (causal, sides, None, None)
    assert not hasattr(made(**words, mask_function=window(15)), MARK)
    assert not hasattr(made(**words | dict(q_offset=39), mask_function=window(16)), MARK)
    some = ones.clone()
    some[1, :9] = False
    assert not hasattr(made(**words, mask_function=window(16), attention_mask=some), MARK)


def test_a_mask_that_batches_share_in_memory_is_of_one():
    """As sdpa_mask expands it: its blocks are counted once."""
    mask = torch.ones(1, 1, 256, 256, dtype=torch.bool).tril()
    for given, batches in ((mask, 1), (mask.expand(3, -1, -1, -1), 1), (mask.repeat(3, 1, 1, 1), 3)):
        assert listed_mask.block_mask_of(given).kv_num_blocks.shape[0] == batches
