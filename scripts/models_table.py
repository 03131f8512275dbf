"""Transformers models at real widths, few layers, random weights, bf16: "evoattn" beside "sdpa" and, where installed,
FlashAttention.

python scripts/models_table.py [--layers 4] [--only llama,vit] [--json FILE]

For each model: how far the logits are from "sdpa" (and how far "sdpa" is from "eager", as a measure), the time of one
forward pass and of the attention in it by CUDA events, and for decoders the time of a token: with a growing cache, and
with a static cache under a CUDA graph. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

import evoattn.integrations.transformers as integration
from evoattn.ops import current

BATCH, SEQLEN, TOKENS = 1, 4096, 16
ROUNDS = 8


def decoder(kind: str, layers: int, **sizes: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    config = getattr(transformers, f"{kind}Config")(num_hidden_layers=layers, vocab_size=32000, **sizes)
    model_class = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")
    ids = torch.randint(3, 32000, (BATCH, SEQLEN), generator=torch.Generator().manual_seed(1))
    return lambda: model_class._from_config(config, dtype=torch.bfloat16), dict(input_ids=ids)


def llama(layers: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Llama 3 8B."""
    sizes = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
    return decoder("Llama", layers, **sizes, max_position_embeddings=8192)


def qwen3(layers: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Qwen3 8B."""
    sizes = dict(hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    return decoder("Qwen3", layers, **sizes, max_position_embeddings=8192)


def gemma3(layers: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Gemma 3 4B: head_dim 256, five layers of six with a window of 1024."""
    sizes = dict(hidden_size=2560, intermediate_size=10240, num_attention_heads=8, num_key_value_heads=4, head_dim=256)
    return decoder("Gemma3Text", layers, **sizes, sliding_window=1024, max_position_embeddings=8192)


def vit(layers: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """ViT-L/16 at 384 pixels: 577 tokens."""
    sizes = dict(hidden_size=1024, intermediate_size=4096, num_attention_heads=16, image_size=384, patch_size=16)
    config = transformers.ViTConfig(num_hidden_layers=layers, **sizes)
    pixels = torch.randn(8, 3, 384, 384, generator=torch.Generator().manual_seed(1))
    return lambda: transformers.ViTModel._from_config(config, dtype=torch.bfloat16), dict(pixel_values=pixels)


def whisper(layers: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Whisper large: 1500 frames, and the prompt of a long text."""
    sides = {f"{side}_{what}": count for side in ("encoder", "decoder") for what, count in
             (("layers", layers), ("attention_heads", 20), ("ffn_dim", 5120))}  # fmt: skip
    config = transformers.WhisperConfig(d_model=1280, num_mel_bins=128, **sides)
    generator = torch.Generator().manual_seed(1)
    inputs = dict(
        input_features=torch.randn(4, 128, 3000, generator=generator),
        decoder_input_ids=torch.randint(3, 50000, (4, 224), generator=generator),
    )
    make = transformers.WhisperForConditionalGeneration._from_config
    return lambda: make(config, dtype=torch.bfloat16), inputs


def bert(layers: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """BERT large."""
    sizes = dict(hidden_size=1024, intermediate_size=4096, num_attention_heads=16)
    config = transformers.BertConfig(num_hidden_layers=layers, **sizes)
    ids = torch.randint(3, 30000, (16, 512), generator=torch.Generator().manual_seed(1))
    return lambda: transformers.BertModel._from_config(config, dtype=torch.bfloat16), dict(input_ids=ids)


def t5(layers: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """T5 large: every layer but cross attention adds a position bias."""
    config = transformers.T5Config(d_model=1024, d_kv=64, d_ff=4096, num_layers=layers, num_heads=16)
    ids = torch.randint(3, 32000, (4, 512), generator=torch.Generator().manual_seed(1))
    make = transformers.T5ForConditionalGeneration._from_config
    return lambda: make(config, dtype=torch.bfloat16), dict(input_ids=ids, decoder_input_ids=ids[:, :128])


MODELS = dict(llama=llama, qwen3=qwen3, gemma3=gemma3, vit=vit, whisper=whisper, bert=bert, t5=t5)
DECODERS = ("llama", "qwen3", "gemma3")


class Clock:
    """CUDA events around every attention call of a model: registered as an implementation of its own around another
    one.
    """

    def __init__(self, name: str) -> None:
        self.name = f"timed_{name}"
        self._inner = transformers.AttentionInterface()[name]
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        transformers.AttentionInterface.register(self.name, self)
        masks = transformers.AttentionMaskInterface()
        transformers.AttentionMaskInterface.register(self.name, masks[name])

    def __call__(self, *arguments: Any, **others: Any) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        answer = self._inner(*arguments, **others)
        end.record()
        self._events.append((begin, end))
        return answer

    def take_ms(self) -> float:
        """Time since the last call, in ms."""
        torch.cuda.synchronize()
        total = sum(begin.elapsed_time(end) for begin, end in self._events)
        self._events.clear()
        return total


def median_ms(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(ROUNDS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def output(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    answer = model(**inputs)
    value: torch.Tensor = answer["logits"] if "logits" in answer else answer["last_hidden_state"]
    return value.float()


def growing_cache_ms(model: Any, ids: torch.Tensor) -> float:
    """A token after a prompt, in ms: the keys grow by one each time, CPU time included."""
    cache = transformers.DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache)
    return median_ms(lambda: model(input_ids=ids[:, :1], past_key_values=cache))


def static_cache_ms(model: Any, ids: torch.Tensor) -> float:
    """A token in a static cache, captured in a CUDA graph, without a padding mask: the filled part is known to the
    device alone, and transformers makes a mask tensor of it, or evoattn keys in use."""
    length = ids.shape[1] + TOKENS
    cache = transformers.StaticCache(config=model.config, max_cache_len=length)
    model(input_ids=ids, past_key_values=cache)
    token, place = ids[:, :1].clone(), torch.full((1, 1), ids.shape[1], device=ids.device)

    def step() -> Any:
        return model(input_ids=token, past_key_values=cache, position_ids=place).logits

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which still makes the prompt's keys, and `token`
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return median_ms(graph.replay)


def measure(name: str, layers: int) -> list[dict[str, Any]]:
    """A row for each implementation."""
    make, inputs = MODELS[name](layers)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = make().eval()
    inputs = {n: (t.bfloat16() if t.is_floating_point() else t).cuda() for n, t in inputs.items()}
    rows = []
    model.set_attn_implementation("sdpa")
    reference = output(model, inputs)
    model.set_attn_implementation("eager")
    eager_error = (output(model, inputs) - reference).abs().max().item()
    names = ["sdpa", "evoattn", *(["flash_attention_2"] if find_spec("flash_attn") else [])]
    for implementation in names:
        clock = Clock(implementation)
        model.set_attn_implementation(clock.name)
        try:
            output(model, inputs)
        except (RuntimeError, ValueError, ImportError) as error:
            print(f"{name} with {implementation}: {str(error).splitlines()[0]}")
            continue
        clock.take_ms()
        attention = []
        for _ in range(ROUNDS):
            output(model, inputs)
            attention.append(clock.take_ms())
        model.set_attn_implementation(implementation)
        row: dict[str, Any] = dict(model=name, implementation=implementation, eager_error=eager_error)
        row["error"] = (output(model, inputs) - reference).abs().max().item()
        row["attention_ms"] = statistics.median(attention)
        row["forward_ms"] = median_ms(lambda: model(**inputs))
        if name in DECODERS:
            for what, time in (("growing_ms", growing_cache_ms), ("static_ms", static_cache_ms)):
                try:
                    row[what] = time(model, inputs["input_ids"])
                except RuntimeError as error:
                    print(f"{name} with {implementation}, {what}: {str(error).splitlines()[0]}")
        rows.append(row)
    return rows


COLUMNS = dict(
    model="model", implementation="attention by", error="largest difference from sdpa", eager_error="eager from sdpa",
    attention_ms="attention, ms", forward_ms="forward, ms", growing_ms="token, growing cache, ms",
    static_ms="token, static cache in a graph, ms",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--estimated", action="store_true", help="also kernels that were measured on no GPU like this")
    arguments = parser.parse_args()
    current.runtime().estimated = arguments.estimated
    integration.register()
    rows = []
    with torch.no_grad():
        for name in arguments.only.split(","):
            rows += measure(name, arguments.layers)
            torch.cuda.empty_cache()
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}\n")
    print("| " + " | ".join(COLUMNS.values()) + " |\n|" + "---|" * len(COLUMNS))
    for row in rows:
        cells = (row.get(column, "") for column in COLUMNS)
        print("| " + " | ".join(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells) + " |")
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
