"""Mask tensors that hide what a causal mask or a window hides, and padding on one side, run a kernel; the logits are
eager's."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
from evoattn.integrations.mask_kinds import mark
from evoattn.integrations.padded_batch import MARK
from evoattn.integrations.transformers import NAME
from tests.integrations.test_transformers import TINY, TWO, close, gemma3, llama, mistral, padding

PADDINGS = {"none": None, "ones": padding(), "left": padding(*range(9)), "right": padding(*range(30, 48))}


def modernbert():
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


@pytest.mark.parametrize("make, served", [(splinter, 2), (switch, 4)], ids=["splinter", "switch"])
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


@pytest.mark.parametrize("make, layers", [(modernbert, 3), (phimoe, 2)], ids=["modernbert", "phimoe"])
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
    assert len(model_device.launches) - before == layers - (make is modernbert and name in ("left", "right"))
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


@pytest.mark.parametrize("name", ["none", "ones"])
def test_masks_of_functions_of_a_model_s_own_run_the_kernel(model_device, name):
    words = dict(input_ids=TWO, attention_mask=PADDINGS[name])
    expected = build(embedding_gemma, "eager")(**words)[0]
    ours = build(embedding_gemma, NAME)
    ours(**words)  # loads and checks the kernels
    before = len(model_device.launches)
    assert close(ours(**words)[0], expected)
    assert len(model_device.launches) - before == 2


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
