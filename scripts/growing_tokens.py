"""What a token over a growing cache of transformers costs the CPU, by attention implementation, without a GPU.

    python scripts/growing_tokens.py [MODEL …] [--gpu h100] [--tokens 60] [--json FILE]

Small models of four layers, whose linear layers take as long with any implementation. µs of CPU time, medians over the
tokens behind a prompt: of the whole token, of its masks, and of one layer's attention. With evoattn nothing computes
attention (`no_device.py`); with "sdpa" and "eager" the CPU does, of 4 heads of 64 columns, which counts. "padded": two
sequences, one with padding in front, and the mask that `generate` gives.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from no_device import NoDevice, no_code

import evoattn.integrations.transformers as integration
from evoattn.ops import current
from evoattn.ops.runtime import Runtime
from evoattn.portfolio.climb_cache import ClimbCache
from evoattn.portfolio.pick import lasting_pick, next_picks

LAYERS, PROMPT, PADDING = 4, 130, 20
SIZES: dict[str, Any] = dict(hidden_size=256, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
SIZES |= dict(num_hidden_layers=LAYERS, vocab_size=99, max_position_embeddings=4096)
HEADS: dict[str, Any] = SIZES | dict(head_dim=64)
KINDS = ["sliding_attention", "full_attention"] * (LAYERS // 2)
LATENT = dict(q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "llama": lambda: (transformers.LlamaForCausalLM, transformers.LlamaConfig(**HEADS)),
    "mistral": lambda: (transformers.MistralForCausalLM, transformers.MistralConfig(**HEADS, sliding_window=64)),
    "gemma3": lambda: (
        transformers.Gemma3ForCausalLM,
        transformers.Gemma3TextConfig(**HEADS, sliding_window=64, layer_types=KINDS),
    ),
    "deepseek": lambda: (
        transformers.DeepseekV3ForCausalLM,
        transformers.DeepseekV3Config(**SIZES | dict(num_key_value_heads=4), **LATENT, first_k_dense_replace=LAYERS),
    ),
}


class Timed:
    """An implementation of its own around another one, which sums up what masks and attention take."""

    def __init__(self, name: str) -> None:
        self.name, self.masks_us, self.attention_us = f"timed_{name}", 0.0, 0.0
        attention, mask = transformers.AttentionInterface().get(name), transformers.AttentionMaskInterface()[name]

        def timed_attention(*arguments: Any, **words: Any) -> Any:
            begun = time.process_time()
            answer = attention(*arguments, **words)
            self.attention_us += (time.process_time() - begun) * 1e6
            return answer

        def timed_mask(*arguments: Any, **words: Any) -> Any:
            begun = time.process_time()
            made = mask(*arguments, **words)
            self.masks_us += (time.process_time() - begun) * 1e6
            return made

        transformers.AttentionInterface.register(self.name, timed_attention)
        transformers.AttentionMaskInterface.register(self.name, timed_mask)


def measure(name: str, implementation: str, padded: bool, tokens: int) -> dict[str, float]:
    """Medians in µs: a token, its masks, a layer's attention. All lengths are new."""
    current.runtime().forget()
    make, config = MODELS[name]()
    timed = Timed(implementation)
    torch.manual_seed(0)
    model = make._from_config(config, attn_implementation=timed.name).eval().bfloat16()
    ids = torch.arange(3, 3 + PROMPT).repeat(1 + padded, 1) % 99
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :PADDING] = 0
    words: dict[str, Any] = dict(past_key_values=transformers.DynamicCache(config=config))
    rows = []
    for token in range(tokens + 1):
        timed.masks_us = timed.attention_us = 0.0
        begun = time.process_time()
        model(input_ids=ids if token == 0 else ids[:, :1], **words, **(dict(attention_mask=mask) if padded else {}))
        rows.append(((time.process_time() - begun) * 1e6, timed.masks_us, timed.attention_us / LAYERS))
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
    return dict(zip(("token", "masks", "attention"), map(statistics.median, zip(*rows[1:], strict=True)), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all unless given")
    parser.add_argument("--gpu", default="h100", help="whose kernels are picked")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - set(MODELS):
        parser.error(f"{', '.join(sorted(unknown))}: the models are {', '.join(MODELS)}")
    integration.register()
    torch.set_num_threads(1)
    climbs, rows = ClimbCache(), []
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        op = Runtime(
            NoDevice(arguments.gpu), lambda p, gpu: lasting_pick(p, gpu, climbs), Path(folder), no_code, next_picks
        )
        with current.use(op):
            for name in arguments.models or MODELS:
                for padded in (False, True):
                    for implementation in ("sdpa", integration.NAME):
                        times = [measure(name, implementation, padded, arguments.tokens) for _ in range(3)]
                        least = {what: min(one[what] for one in times) for what in times[0]}
                        rows.append(dict(model=name, padded=padded, implementation=implementation) | least)
                        said = ", ".join(f"{what} {us:.0f}" for what, us in least.items())
                        print(f"{name}{', padded' * padded}, {implementation}: {said}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
