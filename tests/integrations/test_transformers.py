"""Random-init models of transformers: "evoattn" gives the logits of "sdpa", by the kernel where there is no mask and
by torch elsewhere."""

import pytest
import torch

from evoattn.ops.runtime import current
from tests.ops.fake_device import fake_runtime

transformers = pytest.importorskip("transformers")
from evoattn.integrations.transformers import NAME, attention_forward, register

TINY = dict(
    hidden_size=256,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=99,
    max_position_embeddings=128,
)
TOKENS = torch.arange(3, 3 + 48).reshape(1, 48) % 99
TWO = torch.cat((TOKENS, TOKENS.flip(1)))
PIXELS = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
SPEECH = torch.randn(1, 80, 120, generator=torch.Generator().manual_seed(0))


def padding(*hidden):
    """The mask of TWO texts of which the second has hidden tokens."""
    mask = torch.ones(2, 48, dtype=torch.long)
    mask[1, list(hidden)] = 0
    return mask


def of_text(name, config="", **fields):
    """A model of text: its class, config and input."""
    made = getattr(transformers, config or f"{name}Config")(**TINY, **{"num_key_value_heads": 2, **fields})
    return getattr(transformers, f"{name}ForCausalLM"), made, dict(input_ids=TOKENS)


BOTH = dict(head_dim=64, layer_types=["sliding_attention", "full_attention"])


def llama(**others):
    return of_text("Llama", **others)


def qwen3():
    return of_text("Qwen3", head_dim=64)


def gemma3(window):
    return of_text("Gemma3", "Gemma3TextConfig", **BOTH, sliding_window=window)


def gpt_oss():
    return of_text("GptOss", **BOTH, sliding_window=16, num_local_experts=2, num_experts_per_tok=1)


def mistral(window):
    return of_text("Mistral", head_dim=64, sliding_window=window)


def deepseek():
    """Queries and keys of 64 columns, of which 16 are rotated, and values of 32."""
    ranks = dict(q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=48, v_head_dim=32)
    return of_text("DeepseekV3", **ranks, num_key_value_heads=4, first_k_dense_replace=2)


def vit():
    sizes = {name: size for name, size in TINY.items() if name not in ("vocab_size", "max_position_embeddings")}
    return (
        transformers.ViTModel,
        transformers.ViTConfig(**sizes, image_size=64, patch_size=8),
        dict(pixel_values=PIXELS),
    )


def whisper():
    config = transformers.WhisperConfig(
        **dict(vocab_size=99, d_model=256, num_mel_bins=80, max_source_positions=60, max_target_positions=64),
        **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
        **dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1),
    )
    return transformers.WhisperForConditionalGeneration, config, dict(input_features=SPEECH, decoder_input_ids=TOKENS)


def bert():
    return transformers.BertModel, transformers.BertConfig(**TINY), dict(input_ids=TOKENS)


def t5():
    config = transformers.T5Config(
        vocab_size=99, d_model=256, d_kv=64, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration, config, dict(input_ids=TOKENS, decoder_input_ids=TOKENS)


MODELS = {
    "llama": (llama, 2),
    "qwen3": (qwen3, 2),
    "gemma3, a window wider than the text": (lambda: gemma3(512), 2),
    "gemma3, a narrow window": (lambda: gemma3(16), 2),
    "mistral, a narrow window": (lambda: mistral(16), 2),
    "deepseek, values of another head_dim": (deepseek, 2),
    "vit": (vit, 2),
    "whisper": (whisper, 6),
    "bert": (bert, 2),
    "t5 has a position bias": (t5, 6),
}
"""Model and how many layers of it a kernel serves in one forward pass (cross attention counts)."""


def build(make, implementation):
    kind, config, inputs = make()
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation=implementation, dtype=torch.bfloat16).eval()
    inputs = {n: t.bfloat16() if t.is_floating_point() else t for n, t in inputs.items()}
    return model, inputs


def logits(make, implementation, **more):
    model, inputs = build(make, implementation)
    answer = model(**inputs, **more)
    return answer["logits"] if "logits" in answer else answer["last_hidden_state"]


def close(ours, theirs):
    """Within what bf16 rounding of the attention outputs can do to such a model."""
    return torch.allclose(ours.float(), theirs.float(), atol=0.06, rtol=0.03)


def near(ours, theirs):
    """Of four layers, whose scores are not scaled: "sdpa" is 0.14 away."""
    return torch.allclose(ours.float(), theirs.float(), atol=0.2)


@pytest.mark.parametrize("name", list(MODELS))
def test_the_logits_are_those_of_sdpa(model_device, name):
    make, served = MODELS[name]
    theirs = logits(make, "sdpa")
    logits(make, NAME)  # loads and checks the kernels
    before = len(model_device.launches)
    ours = logits(make, NAME)
    assert len(model_device.launches) - before == served
    assert close(ours, theirs)


@pytest.mark.parametrize(
    "name", ["llama", "gemma3, a narrow window", "vit", "whisper", "bert", "t5 has a position bias"]
)
def test_without_a_device_they_are_the_same_bits(tmp_path, name):
    register()
    make, _ = MODELS[name]
    with current.use(fake_runtime(None, tmp_path)), torch.no_grad():
        assert torch.equal(logits(make, NAME), logits(make, "sdpa"))


def test_padding_beside_a_position_bias(model_device):
    """Of T5 the encoder and the cross attention have a mask; the decoder has none."""
    mask = torch.ones(1, 48, dtype=torch.long)
    mask[:, -5:] = 0
    theirs = logits(t5, "sdpa", attention_mask=mask)
    logits(t5, NAME, attention_mask=mask)  # loads and checks the kernel
    before = len(model_device.launches)
    assert close(logits(t5, NAME, attention_mask=mask), theirs)
    assert len(model_device.launches) - before == 2
    assert not torch.allclose(theirs, logits(t5, "sdpa"), atol=0.1), "the mask is of consequence"


@pytest.mark.parametrize("make, cache", [(llama, "dynamic"), (llama, "static"), (t5, "dynamic")])
def test_generation(model_device, make, cache):
    answers = {}
    for name in ("sdpa", NAME):
        model, inputs = build(make, name)
        inputs = {"input_ids": inputs["input_ids"]}
        words = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, disable_compile=True)
        if cache == "static":
            words["cache_implementation"] = "static"
        answers[name] = model.generate(**inputs, **words)
    assert torch.equal(answers["sdpa"], answers[NAME])
    assert model_device.launches


def test_training_goes_through_sdpa(model_device):
    model, inputs = build(llama, NAME)
    with torch.enable_grad():
        model.train()(**inputs, labels=TOKENS).loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None
    assert not model_device.launches


@pytest.mark.slow
def test_a_compiled_model(model_device):
    """With a cache to fill: without one transformers suspects packed sequences, which a trace cannot rule out, and
    makes a mask."""
    torch.compiler.reset()
    model, inputs = build(llama, NAME)
    expected = model(**inputs).logits
    for use_cache, served in ((True, 2), (False, 0)):
        compiled = torch.compile(
            lambda ids, use_cache=use_cache: model(input_ids=ids, use_cache=use_cache).logits,
            backend="eager",
            fullgraph=True,
        )
        before = len(model_device.launches)
        assert close(compiled(inputs["input_ids"]), expected)
        assert len(model_device.launches) - before == served


@pytest.mark.slow
@pytest.mark.parametrize("make", [vit, gpt_oss])
def test_a_compiled_model_of_another_kind(model_device, make):
    """One without a mask, one with sinks and windows: no break of the graph, and what "eager" answers."""
    torch.compiler.reset()
    model, inputs = build(make, NAME)
    compiled = torch.compile(lambda given: model(**given), backend="eager", fullgraph=True)
    answer = compiled(inputs)
    assert close(answer["logits"] if "logits" in answer else answer["last_hidden_state"], logits(make, "eager"))


class Layer(torch.nn.Module):
    is_causal = True


def test_sinks_and_soft_caps_are_those_of_eager(model_device):
    """Of gpt-oss and Gemma 2; "sdpa" would leave them out."""
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as with_cap
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as with_sinks

    q, k, v = torch.randn(3, 2, 4, 16, 32, generator=torch.Generator().manual_seed(1))
    layer, mask = Layer(), torch.full((16, 16), -torch.inf).triu(1)
    layer.num_key_value_groups, layer.training, layer.sinks = 2, False, torch.randn(4)
    k, v = k[:, :2], v[:, :2]
    expected, _ = with_sinks(layer, q, k, v, mask[None, None], scaling=0.2)
    for given in (None, mask[None, None], (mask == 0)[None, None]):
        answer, _ = attention_forward(layer, q, k, v, given, scaling=0.2, s_aux=layer.sinks)
        assert torch.allclose(answer, expected, atol=1e-5)
    expected, _ = with_cap(layer, q, k, v, mask[None, None], scaling=0.2, softcap=2.0)
    answer, _ = attention_forward(layer, q, k, v, None, scaling=0.2, softcap=2.0)
    assert torch.allclose(answer, expected, atol=1e-5)
