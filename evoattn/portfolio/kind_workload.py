"""Problems of packed sequences, keys in use, pages, latent heads, slopes and biases, as models and serving engines have
them: `draw_kind(kind, seed, count)` gives the same problems for the same seed.

Heads and head_dims are those of the models' configs on Hugging Face. How long sequences are is drawn, and recorded in
the problem (`evoattn.model.lengths`): a kernel sees that on the device alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from evoattn.model.problem import AttentionProblem
from evoattn.portfolio.workload import MOST_BYTES, MOST_FLOPS, draw_by, log_uniform, weighted

Drawn = dict[str, Any]
"""Fields of a problem."""

CARDS = (1, 1, 2, 4)
"""K/V heads are shared out among so many."""
LLM_128 = ((32, 8), (32, 8), (64, 8), (28, 4), (40, 8), (16, 8), (32, 4), (32, 32))
"""(heads, K/V heads): Llama 3 8B and 70B, Qwen 2.5 and 3, Llama 2."""
LLM_64 = ((32, 8), (14, 2), (9, 3), (16, 16))
"""Llama 3.2 1B, Qwen 2.5 0.5B, SmolLM, Pythia."""
ENCODERS_64 = ((12, 12), (16, 16), (6, 6))
"""BERT, embedding models and ViT, base, large and small."""
BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
PAGES = {16: 45, 64: 25, 128: 15, 256: 15}
"""vLLM's pages have 16 keys, those of FlashMLA 64, of FlashAttention 256."""
CHUNKS, DRAFTS = (32, 64, 128, 256, 512), (2, 4, 5, 8)
GPT_OSS = 64, 8


def _length(rng: random.Random, low: int, high: int) -> int:
    length = log_uniform(rng, low, high)
    return math.ceil(length / 64) * 64 if length > 96 and rng.random() < 0.5 else length


def _heads(rng: random.Random, models: tuple[tuple[int, int], ...]) -> Drawn:
    heads, kv_heads = rng.choice(models)
    cards = rng.choice([n for n in CARDS if kv_heads % n == 0])
    return {"heads": heads // cards, "kv_heads": kv_heads // cards}


def _range(rng: random.Random, longest: int, least: int = 1) -> str:
    """Lengths up to `longest`: all of them alike, uniform, or mostly short."""
    low = max(least, round(longest * rng.choice((0.02, 0.1, 0.3, 0.6, 1.0))))
    low = min(low, longest)
    return f"{low}:{longest}" if low == longest or rng.random() < 0.5 else f"log:{low}:{longest}"


def _packed(rng: random.Random) -> Drawn:
    """Documents of training and prompts of a server; sentences of an embedding model; windows and images of a vision
    encoder (Qwen 2.5 VL); DeepSeek's prompts."""
    kind = weighted(rng, {"llm128": 30, "llm64": 20, "encoder": 25, "vision": 12, "deepseek": 13})
    if kind == "encoder":
        longest = rng.choice((128, 256, 512, 512, 1024, 2048, 8192))
        batch = log_uniform(rng, 4, min(512, 131072 / longest))
        shape: Drawn = {"head_dim": 64, "mask": "full"} | _heads(rng, ENCODERS_64)
    elif kind == "vision":
        longest = rng.choice((64, 64, 256, 1024, 4096))
        batch = log_uniform(rng, 1, min(512, 65536 / longest))
        shape = {"head_dim": 80, "mask": "full", "heads": 16, "kv_heads": 16}
        return shape | {"batch": batch, "seqlen_q": longest, "seqlen_k": longest} | {"varlen": f"{longest}:{longest}"}
    else:
        longest = _length(rng, 128, 16384)
        batch = log_uniform(rng, 1, min(128, 131072 / longest))
        shape = {"mask": "causal_lower_right", "head_dim": 128 if kind == "llm128" else 64}
        shape |= _heads(rng, LLM_128 if kind == "llm128" else LLM_64)
        if kind == "deepseek":
            shape |= _deepseek(rng)
    lengths, rows = _range(rng, longest), longest
    if kind.startswith("llm") and rng.random() < 0.2:  # a chunk of each prompt, over the keys that are there
        rows = rng.choice([n for n in CHUNKS if n <= longest])
        lengths = f"{rows}:{rows}/{_range(rng, longest, rows)}"
    return shape | {"batch": batch, "seqlen_q": rows, "seqlen_k": longest, "varlen": lengths}


def _call_over_cache(rng: random.Random, longest: int, page: int = 0) -> Drawn:
    """One token, some drafted ones, or a chunk."""
    kind = weighted(rng, {"decode": 60, "draft": 15, "chunk": 25})
    rows = 1 if kind == "decode" else rng.choice(DRAFTS) if kind == "draft" else rng.choice(CHUNKS)
    rows = min(rows, longest)
    return {
        "batch": log_uniform(rng, 1, 16 if kind == "chunk" else 128),
        "seqlen_q": rows,
        "seqlen_k": longest,
        "mask": "full" if rows == 1 else "causal_lower_right",
        "seqused": _range(rng, longest, rows),
        "page": page,
    }


def _cached(rng: random.Random) -> Drawn:
    """The static cache of transformers, in which all sequences are as long as each other but for padding, which a bias
    hides; the slots of a server's; and batches of padded sentences."""
    if rng.random() < 0.2:
        longest = rng.choice((64, 128, 256, 512, 512, 1024))
        lengths = {"seqlen_q": longest, "seqlen_k": longest, "seqused": _range(rng, longest), "mask": "full"}
        return {"batch": log_uniform(rng, 2, 128), "head_dim": 64} | _heads(rng, ENCODERS_64) | lengths
    longest = rng.choice(BUCKETS[2:])
    call = _call_over_cache(rng, longest)
    if rng.random() < 0.5:  # one length, anywhere in the cache
        used = max(call["seqlen_q"], round(longest * rng.random()))
        call["seqused"] = f"{used}:{used}"
        if call["mask"] == "full" and rng.random() < 0.5:
            call["bias"] = "bs"
    head_dim = rng.choice((64, 128, 128)) if call["mask"] == "full" else 128
    return {"head_dim": head_dim} | _heads(rng, LLM_128 if head_dim == 128 else LLM_64) | call


def _paged(rng: random.Random) -> Drawn:
    """Decoding, drafts and chunks of prompts over pages, gpt-oss among the models."""
    model = weighted(rng, {"llm128": 60, "llm64": 15, "gpt-oss": 13, "gpt-oss window": 12})
    call = _call_over_cache(rng, _length(rng, 256, 32768), weighted(rng, PAGES))
    if model == "llm128":
        return {"head_dim": 128} | _heads(rng, LLM_128) | call
    one = call | {"seqlen_q": 1, "mask": "full", "head_dim": 64}
    if model == "llm64":
        return one | _heads(rng, LLM_64)
    window = "127:0" if model.endswith("window") else ""
    return one | _heads(rng, (GPT_OSS,)) | {"sink": True, "window": window}


def _deepseek(rng: random.Random) -> Drawn:
    heads = rng.choice((128, 64, 32, 16))
    return {"heads": heads, "kv_heads": heads, "head_dim": 192, "value_dim": 128}


def _latent(rng: random.Random) -> Drawn:
    """DeepSeek V2, V3 and R1 and Kimi K2: prefill with heads of their own, decoding over the latent cache."""
    if rng.random() < 0.5:
        keys = _length(rng, 64, 16384)
        rows = keys if rng.random() < 0.75 else min(keys, rng.choice(CHUNKS))
        lengths = {"seqlen_q": rows, "seqlen_k": keys, "mask": "causal_lower_right"}
        return _deepseek(rng) | lengths | {"batch": log_uniform(rng, 1, 16)}
    heads = rng.choice((128, 128, 64, 16, 16))
    shape = {"heads": heads, "kv_heads": 1, "head_dim": 576, "value_dim": 512, "shared_kv": True}
    return shape | {"batch": log_uniform(rng, 1, 128), "seqlen_q": 1, "seqlen_k": _length(rng, 256, 65536)}


def _latent_paged(rng: random.Random) -> Drawn:
    """The same decoding as a serving engine has it, the pages mostly those of FlashMLA."""
    heads = rng.choice((128, 128, 64, 16, 16))
    longest = _length(rng, 256, 65536)
    lengths = {"seqlen_q": 1, "seqlen_k": longest, "seqused": _range(rng, longest), "mask": "full"}
    shape = {"heads": heads, "kv_heads": 1, "head_dim": 576, "value_dim": 512, "shared_kv": True}
    return (
        shape | lengths | {"batch": log_uniform(rng, 1, 128), "page": weighted(rng, {64: 70, 16: 10, 32: 10, 128: 10})}
    )


def _biased(rng: random.Random) -> Drawn:
    """Slopes of MPT, BLOOM, Baichuan and of Jina's encoder; biases of T5, Swin, BEiT and SAM."""
    kind = weighted(rng, {"alibi": 35, "jina": 12, "t5": 20, "swin": 20, "vit": 13})
    if kind == "alibi":
        heads, keys = rng.choice((32, 32, 40, 112)) // rng.choice((1, 1, 2)), _length(rng, 128, 16384)
        rows = 1 if rng.random() < 0.35 else keys
        lengths = {"seqlen_q": rows, "seqlen_k": keys, "mask": "full" if rows == 1 else "causal_lower_right"}
        alibi = {"heads": heads, "kv_heads": heads, "head_dim": 128, "alibi": True}
        return alibi | lengths | {"batch": log_uniform(rng, 1, 64 if rows == 1 else 8)}
    if kind == "swin":
        heads, side = rng.choice((3, 6, 12, 24, 4, 8, 16, 32)), rng.choice((7, 7, 7, 8, 12, 16))
        rows, windows = side * side, rng.choice((1, 4, 16, 64))
        shape: Drawn = {"heads": heads, "kv_heads": heads, "head_dim": 32, "bias": rng.choice(("hs", "hs", "bhs"))}
        return shape | {"batch": windows * log_uniform(rng, 1, 64), "seqlen_q": rows, "seqlen_k": rows}
    models = ENCODERS_64 if kind in ("vit", "jina") else ((12, 12), (8, 8), (16, 16), (32, 32), (64, 64))
    low, high = (32, 8192) if kind == "jina" else (16, 2048)
    rows = rng.choice((196, 197, 577, 1025)) if kind == "vit" else _length(rng, low, high)
    field: Drawn = {"alibi": True} if kind == "jina" else {"bias": "hs" if rng.random() < 0.8 else "bhs"}
    shape = {"head_dim": 64, "seqlen_q": rows, "seqlen_k": rows, "batch": log_uniform(rng, 1, 64)}
    return shape | _heads(rng, models) | field


KINDS: dict[str, Callable[[random.Random], Drawn]] = {
    "packed": _packed,
    "cached": _cached,
    "paged": _paged,
    "latent": _latent,
    "latent_paged": _latent_paged,
    "biased": _biased,
}
"""What draws each kind."""


def draw_kind(kind: str, seed: int, count: int) -> list[AttentionProblem]:
    """The first `count` problems of a seed. Raises `KeyError` on a kind that is not of `KINDS`."""

    def problem(rng: random.Random) -> AttentionProblem | None:
        drawn: Drawn = {"dtype": "bf16", "layout": "bshd" if rng.random() < 0.7 else "bhsd"} | KINDS[kind](rng)
        made = AttentionProblem(**drawn)
        return made if made.flops <= MOST_FLOPS and made.bytes <= MOST_BYTES else None

    return draw_by(problem, f"evoattn {kind} {seed}", count)
