"""Models that call attention in ways of their own: without the interface, with windows in the mask or in the call
alone, with keys that an indexer selects. Logits are eager's, in float32 and without a device. Models that choose among
attention classes of their own by the name of the implementation: they run what transformers chooses for them, and say
so. Models that choose among attention classes of their own by the name of the implementation: they run what
transformers chooses for them, and say so."""

import pytest

transformers = pytest.importorskip("transformers")
import warnings

import torch

from evoattn.integrations import model_code, own_attention
from evoattn.integrations.transformers import NAME, attention_forward, register
from evoattn.ops.runtime import current
from tests.ops.fake_device import CacheDevice, fake_runtime, split_kv_pick

SIZES = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99, max_position_embeddings=64)
LLAMA = SIZES | dict(num_key_value_heads=2, head_dim=16, intermediate_size=32, pad_token_id=0)
EXPERTS = dict(num_local_experts=2, num_experts=2, num_experts_per_tok=1)
TOKENS = torch.arange(3, 43).reshape(2, 20)


def padded(side):
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, slice(0, 7) if side == "left" else slice(13, 20)] = 0
    return mask


def bloom():
    return transformers.BloomForCausalLM, transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=99)


def megatron_bert():
    config = transformers.MegatronBertConfig(**SIZES, intermediate_size=32)
    return transformers.MegatronBertForMaskedLM, config


def pegasus_x():
    """Layers of its decoder do not say that they are causal."""
    sizes = dict(d_model=64, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
    config = transformers.PegasusXConfig(**sizes, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=99)
    return transformers.PegasusXForConditionalGeneration, config


def umt5():
    """Nor do those of its decoder."""
    config = transformers.UMT5Config(d_model=64, d_kv=16, d_ff=32, num_layers=2, num_heads=4, vocab_size=99)
    return transformers.UMT5ForConditionalGeneration, config


def phimoe():
    """Its masks have windows, of which its layers do not tell."""
    return transformers.PhimoeForCausalLM, transformers.PhimoeConfig(**LLAMA, **EXPERTS, sliding_window=8)


def olmoe():
    """Its layers hand on a window, which its masks lack."""
    config = transformers.OlmoeConfig(**(LLAMA | EXPERTS))
    config.sliding_window = 8
    return transformers.OlmoeForCausalLM, config


def gemma2():
    sizes = dict(sliding_window=8, attn_logit_softcapping=2.0, query_pre_attn_scalar=4)
    return transformers.Gemma2ForCausalLM, transformers.Gemma2Config(**LLAMA, **sizes)


def deepseek_v32():
    sizes = dict(SIZES, intermediate_size=32, num_key_value_heads=4, first_k_dense_replace=2, index_n_heads=2)
    sizes |= dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
    config = transformers.DeepseekV32Config(**sizes, index_head_dim=16, index_topk=4, n_group=1, topk_group=1)
    return transformers.DeepseekV32ForCausalLM, config


def minimax_m3(blocks=1):
    """An indexer of a layer selects blocks of 4 keys."""
    sizes = LLAMA | dict(head_dim=32, rotary_dim=16, layer_types=["full_attention", "minimax_m3_sparse"])
    sizes |= dict(mlp_layer_types=["dense", "dense"], dense_intermediate_size=32, num_local_experts=2)
    sizes |= dict(
        index_n_heads=2, index_head_dim=16, index_block_size=4, index_topk_blocks=blocks, index_local_blocks=1
    )
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as code

    return code.MiniMaxM3VLTextModel, transformers.MiniMaxM3VLTextConfig(**sizes)


def doge():
    """It adds to its masks, and has no causal mask where it is given none."""
    return transformers.DogeForCausalLM, transformers.DogeConfig(**LLAMA)


def gemma():
    """PaliGemma's decoder, whose layers say that they are not causal, as its prefixes are not."""
    return transformers.GemmaForCausalLM, transformers.GemmaConfig(**LLAMA, use_bidirectional_attention=True)


def of_both(make, tmp_path, call):
    """What `call` makes of the model with eager's and with evoattn's attention; parameters are large enough that
    attention matters."""
    register()
    kind, config = make()
    answers = []
    with current.use(fake_runtime(None, tmp_path)), torch.no_grad():
        for implementation in ("eager", NAME):
            model = kind._from_config(config, attn_implementation=implementation, dtype=torch.float32).eval()
            torch.manual_seed(1)
            for parameter in model.parameters():
                parameter.normal_(std=0.15 if parameter.dim() > 1 else 0.5)
            answers.append(call(model))
    assert answers[0].isfinite().all() and answers[0].std() > 1e-2
    return answers


def same(answers):
    torch.testing.assert_close(answers[1], answers[0], atol=1e-4, rtol=1e-4)


MODELS = [bloom, megatron_bert, phimoe, olmoe, gemma2, deepseek_v32, minimax_m3, doge, gemma]


@pytest.mark.filterwarnings("ignore:evoattn. transformers has no fused:RuntimeWarning")
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("side", ["", "left", "right"])
def test_logits_are_eagers(tmp_path, make, side):
    real = padded(side).bool() if side else torch.ones(2, 20, dtype=torch.bool)
    inputs = {"attention_mask": padded(side)} if side else {}
    same(of_both(make, tmp_path, lambda model: model(input_ids=TOKENS, **inputs)[0][real]))


@pytest.mark.filterwarnings("ignore:evoattn. transformers has no fused:RuntimeWarning")
def test_masks_are_there_where_layers_do_not_say_what_they_are(tmp_path):
    words = dict(input_ids=TOKENS, decoder_input_ids=TOKENS[:, :9])
    same(of_both(pegasus_x, tmp_path, lambda model: model(**words).logits))
    same(of_both(umt5, tmp_path, lambda model: model(**words).logits))
    splinter = transformers.SplinterModel, transformers.SplinterConfig(**SIZES, intermediate_size=32)
    same(of_both(lambda: splinter, tmp_path, lambda model: model(input_ids=TOKENS).last_hidden_state))


@pytest.mark.filterwarnings("ignore:evoattn. transformers has no fused:RuntimeWarning")
def test_models_with_their_own_attention_get_no_mask_where_eager_has_none(tmp_path):
    """Theirs would be as wide as a cache that they do not use."""

    def call(model):
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        return model(input_ids=TOKENS, past_key_values=cache).logits

    config = transformers.RoFormerConfig(**SIZES, embedding_size=64, intermediate_size=32)
    same(of_both(lambda: (transformers.RoFormerForCausalLM, config), tmp_path, call))


@pytest.mark.parametrize("with_mask", [False, True])
def test_a_model_that_reads_its_masks_gets_them_over_a_static_cache_too(tmp_path, with_mask):
    """Its indexer selects among the keys that the mask shows."""
    register()
    kind, config = deepseek_v32()
    config.head_dim = config.qk_rope_head_dim = 64  # of which there is a kernel
    config.qk_head_dim, config.index_head_dim = config.qk_nope_head_dim + 64, 128

    def steps(implementation):
        torch.manual_seed(1)
        model = kind._from_config(config, attn_implementation=implementation, dtype=torch.bfloat16).eval()
        for parameter in model.parameters():
            parameter.normal_(std=0.15 if parameter.dim() > 1 else 0.5)
        cache = transformers.StaticCache(config=config, max_cache_len=64)
        found = []
        for begin, end in ((0, 20), (0, 1), (1, 2)):
            seen = {"attention_mask": torch.ones(2, 20 * bool(found) + end, dtype=torch.long)} if with_mask else {}
            found.append(model(input_ids=TOKENS[:, begin:end], past_key_values=cache, **seen).logits)
        return torch.cat(found[1:], dim=1)

    with current.use(fake_runtime(CacheDevice(), tmp_path, split_kv_pick)), torch.no_grad():
        torch.testing.assert_close(steps(NAME), steps("eager"), atol=0.1, rtol=0)


def test_windows_are_those_of_the_mask(tmp_path):
    """Else phimoe's window, or the lack of one in olmoe, would make no difference above."""
    for make, window in ((phimoe, 8), (olmoe, None)):

        def set_window(model, window):
            model.config.sliding_window = window
            return model(input_ids=TOKENS).logits

        with_window = of_both(make, tmp_path, lambda model: set_window(model, 8))
        without = of_both(make, tmp_path, lambda model: set_window(model, None))
        assert torch.allclose(with_window[0], without[0], atol=1e-4) == (window is None)
        same(with_window)


def test_a_model_without_the_interface_is_told_of_once(tmp_path):
    model_code._takes_attention.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            of_both(bloom, tmp_path, lambda model: model(input_ids=TOKENS).logits)
    ours = [str(one.message) for one in said if "evoattn" in str(one.message)]
    assert len(ours) == 1 and "has no fused attention for all of Bloom" in ours[0]


def test_position_biases_over_an_empty_static_cache(tmp_path):
    """They have a column for each place of the cache, as Inkling makes them."""
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 2
    query, key, bias = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 32, 16), torch.randn(1, 4, 9, 32)
    with current.use(fake_runtime(None, tmp_path)):
        found, _ = attention_forward(module, query, key, key, None, position_bias=bias)
        expected, _ = attention_forward(module, query, key[:, :, :9], key[:, :, :9], None, position_bias=bias[..., :9])
    torch.testing.assert_close(found, expected)


def test_a_config_of_layers_that_differ_has_no_window():
    config = transformers.AutoConfig.for_model("neomme")
    with pytest.raises(RuntimeError, match="per-layer"):
        _ = config.sliding_window
    assert model_code.window_of(config) is None and model_code.window_of(None) is None
    assert model_code.window_of(transformers.MistralConfig(sliding_window=8)) == 8


def test_code_that_is_not_known_keeps_its_mask_tensors():
    assert model_code.takes_attention(type(None)) and not model_code.hands_on_windows(type(None))
    config = transformers.MistralForCausalLM.config_class()
    assert model_code.takes_attention(type(config)) and model_code.hands_on_windows(type(config))


OWN_SIZES = dict(vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)


def falcon():
    return transformers.FalconForCausalLM, transformers.FalconConfig(**OWN_SIZES), "sdpa"


def gpt_j():
    sizes = dict(vocab_size=99, n_embd=64, n_layer=2, n_head=4, n_positions=64, rotary_dim=8)
    return transformers.GPTJForCausalLM, transformers.GPTJConfig(**sizes), "eager"


def git():
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32)
    return transformers.GitForCausalLM, transformers.GitConfig(vision_config=vision, **OWN_SIZES), "eager"


class Tuned(transformers.FalconModel):
    """A user's own."""


def own():
    return Tuned, transformers.FalconConfig(**OWN_SIZES), "sdpa"


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


def test_a_class_whose_code_cannot_be_read_chooses_none():
    made = type("Made", (transformers.FalconModel,), {"__module__": transformers.FalconModel.__module__})
    assert own_attention._reads_a_table(transformers.FalconModel) and not own_attention._reads_a_table(made)


def test_a_model_without_such_classes_is_left_alone(registered):
    config = transformers.LlamaConfig(**OWN_SIZES, intermediate_size=32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=NAME)
    assert model.config._attn_implementation == NAME
