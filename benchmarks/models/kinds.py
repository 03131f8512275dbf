"""The models of `models_table.py`: real widths, few layers, random weights, and inputs of a usual size.

Each function takes a number of layers, and gives what makes the model with an attention implementation, and the
arguments of its forward pass. (Encoder and decoder of T5 have configs of their own, which `set_attn_implementation`
does not reach.)"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers

BATCH, SEQLEN = 1, 4096

Made = tuple[Callable[[str], Any], dict[str, torch.Tensor]]


def _maker(model_class: Any, config: Any) -> Callable[[str], Any]:
    def make(implementation: str) -> Any:
        own = copy.deepcopy(config)  # a model writes into it
        return model_class._from_config(own, dtype=torch.bfloat16, attn_implementation=implementation)

    return make


def _decoder(kind: str, layers: int, seqlen: int = SEQLEN, **sizes: Any) -> Made:
    config = getattr(transformers, f"{kind}Config")(num_hidden_layers=layers, vocab_size=32000, **sizes)
    model_class = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")
    ids = torch.randint(3, 32000, (BATCH, seqlen), generator=torch.Generator().manual_seed(1))
    return _maker(model_class, config), dict(input_ids=ids)


def llama(layers: int) -> Made:
    """Llama 3 8B."""
    sizes = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
    return _decoder("Llama", layers, **sizes, max_position_embeddings=8192)


def qwen3(layers: int) -> Made:
    """Qwen3 8B."""
    sizes = dict(hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    return _decoder("Qwen3", layers, **sizes, max_position_embeddings=8192)


def mistral(layers: int) -> Made:
    """Mistral 7B v0.1 and 8192 tokens: a window of 4096."""
    sizes = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
    return _decoder("Mistral", layers, 2 * SEQLEN, **sizes, sliding_window=4096, max_position_embeddings=32768)


def gemma2(layers: int) -> Made:
    """Gemma 2 9B: head_dim 256, soft-capped scores, every other layer with a window of 4096."""
    sizes = dict(hidden_size=3584, intermediate_size=14336, num_attention_heads=16, num_key_value_heads=8, head_dim=256)
    return _decoder("Gemma2", layers, **sizes, max_position_embeddings=8192)


def gemma3(layers: int) -> Made:
    """Gemma 3 4B: head_dim 256, five layers of six with a window of 1024."""
    sizes = dict(hidden_size=2560, intermediate_size=10240, num_attention_heads=8, num_key_value_heads=4, head_dim=256)
    return _decoder("Gemma3Text", layers, **sizes, sliding_window=1024, max_position_embeddings=8192)


def gemma4(layers: int) -> Made:
    """The default sizes of Gemma 4 in transformers: five layers of six with head_dim 256 and a window of 512, every
    sixth with head_dim 512."""
    return _decoder("Gemma4Text", layers, vocab_size_per_layer_input=32000)


def deepseek(layers: int) -> Made:
    """DeepSeek V3 without experts: 128 heads of 192 columns, and values of 128."""
    sizes = dict(hidden_size=7168, intermediate_size=18432, num_attention_heads=128, num_key_value_heads=128)
    return _decoder("DeepseekV3", layers, **sizes, first_k_dense_replace=layers, max_position_embeddings=8192)


def gptoss(layers: int) -> Made:
    """gpt-oss 20B with four experts: sinks, every other layer with a window of 128."""
    sizes = dict(hidden_size=2880, intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8, head_dim=64)
    return _decoder("GptOss", layers, **sizes, sliding_window=128, num_local_experts=4, num_experts_per_tok=4)


def vit(layers: int) -> Made:
    """ViT-L/16 at 384 pixels: 577 tokens."""
    sizes: dict[str, Any] = dict(hidden_size=1024, intermediate_size=4096, num_attention_heads=16)
    config = transformers.ViTConfig(num_hidden_layers=layers, **sizes, image_size=384, patch_size=16)
    pixels = torch.randn(32, 3, 384, 384, generator=torch.Generator().manual_seed(1))
    return _maker(transformers.ViTModel, config), dict(pixel_values=pixels)


def whisper(layers: int) -> Made:
    """Whisper large: 1500 frames, and the prompt of a long text."""
    sides: dict[str, Any] = {f"{side}_{what}": count for side in ("encoder", "decoder") for what, count in
             (("layers", layers), ("attention_heads", 20), ("ffn_dim", 5120))}  # fmt: skip
    config = transformers.WhisperConfig(d_model=1280, num_mel_bins=128, **sides)
    generator = torch.Generator().manual_seed(1)
    inputs = dict(
        input_features=torch.randn(4, 128, 3000, generator=generator),
        decoder_input_ids=torch.randint(3, 50000, (4, 224), generator=generator),
    )
    return _maker(transformers.WhisperForConditionalGeneration, config), inputs


def bert(layers: int) -> Made:
    """BERT large."""
    sizes: dict[str, Any] = dict(hidden_size=1024, intermediate_size=4096, num_attention_heads=16)
    config = transformers.BertConfig(num_hidden_layers=layers, **sizes)
    ids = torch.randint(3, 30000, (16, 512), generator=torch.Generator().manual_seed(1))
    return _maker(transformers.BertModel, config), dict(input_ids=ids)


def modernbert(layers: int) -> Made:
    """ModernBERT large: every third layer sees all keys, the others 64 on either side."""
    sizes: dict[str, Any] = dict(hidden_size=1024, intermediate_size=2624, num_attention_heads=16)
    config = transformers.ModernBertConfig(num_hidden_layers=layers, **sizes)
    ids = torch.randint(3, 50000, (4, SEQLEN), generator=torch.Generator().manual_seed(1))
    return _maker(transformers.ModernBertModel, config), dict(input_ids=ids)


def t5(layers: int) -> Made:
    """T5 large: every layer but cross attention adds a position bias."""
    config = transformers.T5Config(d_model=1024, d_kv=64, d_ff=4096, num_layers=layers, num_heads=16)
    ids = torch.randint(3, 32000, (4, 512), generator=torch.Generator().manual_seed(1))
    return _maker(transformers.T5ForConditionalGeneration, config), dict(input_ids=ids, decoder_input_ids=ids[:, :128])


def padded(made: Made, left: bool) -> Made:
    """The same with a padding mask: texts of a quarter of the tokens to all of them, in equal steps."""
    make, inputs = made
    batch, seqlen = inputs["input_ids"].shape
    lengths = torch.linspace(seqlen / 4, seqlen, batch).round()[:, None]
    places = torch.arange(seqlen)
    mask = seqlen - places <= lengths if left else places < lengths
    return make, inputs | dict(attention_mask=mask.long())


def bert_padded(layers: int) -> Made:
    """Sentences of 128 to 512 tokens, padded behind them."""
    return padded(bert(layers), left=False)


def llama_padded(layers: int) -> Made:
    """Four prompts of 512 to 2048 tokens, padded before them."""
    make, inputs = llama(layers)
    return padded((make, dict(input_ids=inputs["input_ids"].repeat(4, 1)[:, :2048])), left=True)


DECODERS = dict(llama=llama, qwen3=qwen3, mistral=mistral, gemma2=gemma2, gemma3=gemma3, gemma4=gemma4)
DECODERS |= dict(gptoss=gptoss, deepseek=deepseek)
MODELS = DECODERS | dict(vit=vit, whisper=whisper, bert=bert, modernbert=modernbert, t5=t5)
MODELS |= dict(bert_padded=bert_padded, llama_padded=llama_padded)
