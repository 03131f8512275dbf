"""Attention problems as people have them, by kind: `DRAWS[kind](seed, count)` gives the same ones for the same seed.

- `plain`: self-attention, causal prefill, decoding, chunked or speculative decoding, and cross-attention; lengths are
  log-uniform, half of them round.
- `wide`: heads beyond 256. Full layers of Gemma 4 have a head_dim of 512, and 16 query heads that share 8 or 2 K/V
  heads. The autoencoders of image models have one head of 512 over all points of an image an eighth as high and wide.
- `scores`: windows, soft caps and sinks of today's models. Heads, head_dims, windows, caps and sinks are those of their
  configs on Hugging Face. As in transformers, a window is one key shorter than the config says, layers with a window
  keep no more keys than it shows, and a call whose keys all lie within it has none.
- `eight_bits`, `eight_bit_chunks`: caches of 8 bits under 16-bit queries, as serving engines have them.
- `fp8`, `fp8_turned`: prefill and encoders of Q, K and V of 8 bits with scales of heads; the same with V's keys along
  rows, as `attention_fp8` quantises it.
- `packed`, `cached`, `paged`, `mixed`, `latent`, `latent_paged`, `biased`: packed sequences, keys in use, pages, packed
  queries over pages, latent heads, slopes and biases, as models and serving engines have them. How long sequences are
  is drawn, and recorded in the problem (`evoattn.model.sequences`): a kernel sees that on the device alone.

What ships is made from seeds below 100 (`BUILD_SEEDS`); whoever judges it draws from others."""

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.shape_text import parse_shape

Choice = TypeVar("Choice")

BUILD_SEEDS = range(50)
"""Of the problems that shipped portfolios were made from; 50 to 99 were used to try rules on."""
PLAIN_HEAD_DIMS = {32: 4, 64: 30, 72: 3, 80: 6, 96: 8, 128: 35, 160: 3, 192: 4, 256: 7}
PLAIN_KINDS = {"full": 40, "causal": 30, "decode": 14, "chunk": 8, "cross": 8}
GROUPS = {1: 60, 2: 5, 4: 15, 5: 3, 7: 3, 8: 14}
KV_HEADS = (1, 2, 4, 8, 8, 12, 16, 16, 20, 32)
DTYPES = {"fp16": 45, "bf16": 50, "fp32": 5}
CHUNKS = (2, 4, 5, 8, 16, 64, 256, 512)
CAUSAL_MASKS = ("causal_upper_left", "causal_lower_right")
MOST_FLOPS, MOST_BYTES, MOST_HEADS, MOST_BATCH = 3e12, 2 << 30, 128, 64
BSHD_SHARE = 0.3


def weighted(rng: random.Random, table: Mapping[Choice, int]) -> Choice:
    """One of the table's keys, each as often as its value says."""
    return rng.choices(list(table), list(table.values()))[0]


def log_uniform(rng: random.Random, low: float, high: float) -> int:
    """A whole number from `low` to `high` whose logarithm is drawn evenly, at least 1."""
    return max(1, round(math.exp(rng.uniform(math.log(low), math.log(high)))))


def _length(rng: random.Random, low: int, high: int, whole: Callable[[float], int] = math.ceil) -> int:
    """Log-uniform, half of those above 96 `whole` times 64."""
    length = log_uniform(rng, low, high)
    return whole(length / 64) * 64 if length > 96 and rng.random() < 0.5 else length


def _plain_length(rng: random.Random, low: int, high: int) -> int:
    n = math.exp(rng.uniform(math.log(low), math.log(high)))
    return max(1, round(n / 64) * 64) if n > 96 and rng.random() < 0.5 else max(1, round(n))


def _plain_lengths(rng: random.Random, kind: str) -> tuple[int, int, str]:
    """(seqlen_q, seqlen_k, mask)."""
    if kind == "decode":
        return 1, _plain_length(rng, 256, 65536), "full"
    if kind == "chunk":
        keys = _plain_length(rng, 512, 32768)
        return rng.choice(CHUNKS), keys, "causal_lower_right"
    if kind == "cross":
        return _plain_length(rng, 32, 8192), _plain_length(rng, 16, 8192), "full"
    length = _plain_length(rng, 32, 16384)
    return length, length, "full" if kind == "full" else rng.choice(CAUSAL_MASKS)


def _plain_problem(rng: random.Random) -> AttentionProblem:
    while True:
        kind, dim, group = weighted(rng, PLAIN_KINDS), weighted(rng, PLAIN_HEAD_DIMS), weighted(rng, GROUPS)
        dtype = weighted(rng, DTYPES)
        kv_heads = rng.choice(KV_HEADS)
        heads, batch = kv_heads * group, log_uniform(rng, 1, MOST_BATCH)
        if heads > MOST_HEADS:
            continue
        sq, sk, mask = _plain_lengths(rng, kind)
        if sq > sk and mask != "full":
            continue
        size = 4 if dtype == "fp32" else 2
        flops = 4 * batch * heads * sq * sk * dim * (0.5 if mask != "full" and sq == sk else 1)
        if flops > MOST_FLOPS or size * dim * batch * (2 * heads * sq + 2 * kv_heads * sk) > MOST_BYTES:
            continue
        text = f"B={batch},H={heads}" + (f",Hkv={kv_heads}" if group > 1 else "")
        text += f",S={sq}" if sq == sk else f",Sq={sq},Sk={sk}"
        text += f",D={dim},dtype={dtype},mask={mask}"
        return parse_shape(text + (",layout=bshd" if rng.random() < BSHD_SHARE else ""))


Problem = Callable[[random.Random], AttentionProblem | None]
"""Of random numbers; None where that is none."""


def _draw(problem: Problem, name: str, seed: int, count: int) -> list[AttentionProblem]:
    """The first `count` problems of a seed."""
    rng = random.Random(f"evoattn {name} {seed}")
    found: list[AttentionProblem] = []
    while len(found) < count:
        if made := problem(rng):
            found.append(made)
    return found


MODEL_DIM = 512
WIDE_KINDS = {"language": 45, "image": 20, "other": 35}
WIDE_HEAD_DIMS = {320: 30, 384: 30, MODEL_DIM: 40}
LANGUAGE_HEADS = ((8, 1), (8, 2), (8, 4), (16, 2), (16, 8), (32, 4), (32, 16))
"""(heads, K/V heads): of Gemma 4 are 16 with 8 or 2, known from its configs; 8 with 4 or 1 are what one of two cards
has of these. The others are guesses at smaller and larger models."""
SIDES = (32, 48, 64, 96, 128)
"""Points of an image's side: of 256, 384, 512, 768 and 1024 pixels."""
WIDE_CALLS = {"prefill": 55, "chunk": 15, "draft": 8, "decode": 22}
FULL_SHARE, FP32_SHARE = 0.4, 0.2
"""Of prefills that are not of a language model, and of problems of MODEL_DIM that are not."""
WIDE_MOST_FLOPS = {"fp32": 3e10, "fp16": 4e11, "bf16": 4e11}
"""Some milliseconds: more are more waves of the same tiles."""


def _wide_call(rng: random.Random, full_share: float) -> tuple[int, int, str]:
    """(seqlen_q, seqlen_k, mask): of so many prefills all keys are seen."""
    call = weighted(rng, WIDE_CALLS)
    if call == "decode":
        return 1, _length(rng, 64, 65536, round), "full"
    if call == "prefill":
        length = _length(rng, 32, 16384, round)
        return length, length, "full" if rng.random() < full_share else "causal_lower_right"
    keys = _length(rng, 512, 32768, round)
    rows = rng.choice([n for n in CHUNKS if (n > 16) == (call == "chunk")])
    return rows, keys, "causal_lower_right"


def _wide_problem(rng: random.Random) -> AttentionProblem | None:
    """One problem, or None where it is too large."""
    kind, head_dim, dtype = weighted(rng, WIDE_KINDS), MODEL_DIM, rng.choice(("fp16", "bf16", "bf16"))
    if kind == "language":
        heads, kv_heads = rng.choice(LANGUAGE_HEADS)
        rows, keys, mask = _wide_call(rng, 0.0)
    elif kind == "image":
        heads = kv_heads = 1
        rows = keys = rng.choice(SIDES) * rng.choice(SIDES)
        mask = "full"
    else:
        kv_heads, head_dim = rng.choice(KV_HEADS), weighted(rng, WIDE_HEAD_DIMS)
        heads = kv_heads * weighted(rng, GROUPS)
        rows, keys, mask = _wide_call(rng, FULL_SHARE)
    if kind != "language" and head_dim == MODEL_DIM and rng.random() < FP32_SHARE:
        dtype = "fp32"
    batch = log_uniform(rng, 1, MOST_BATCH)
    if heads > MOST_HEADS or 4 * batch * (heads * rows + kv_heads * keys) * head_dim > MOST_BYTES:
        return None  # in 16 bits already
    problem = AttentionProblem(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        seqlen_q=rows,
        seqlen_k=keys,
        head_dim=head_dim,
        dtype=dtype,
        mask=mask,
        layout="bshd" if rng.random() < BSHD_SHARE else "bhsd",
    )
    return problem if problem.flops <= WIDE_MOST_FLOPS[dtype] and problem.bytes <= MOST_BYTES else None


@dataclass(frozen=True)
class Layer:
    """What some of a model's layers compute. `window`: the keys that a query sees, itself among them; 0 for all."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    softcap: float = 0.0
    sink: bool = False
    encoder: bool = False
    weight: int = 1
    """How often it is drawn."""


LAYERS = (
    Layer(64, 8, 64, window=128, sink=True, weight=4),  # gpt-oss
    Layer(64, 8, 64, sink=True, weight=4),
    Layer(12, 12, 64, window=128, encoder=True),  # ModernBERT: 64 keys on each side
    Layer(16, 16, 64, window=128, encoder=True),
    Layer(32, 8, 128, window=4096, weight=3),  # Mistral, Command R7B, OLMo 3
    Layer(32, 16, 128, window=1024),  # Gemma 3, 27B
    Layer(32, 16, 128, softcap=50.0, weight=2),  # Gemma 2, 27B
    Layer(32, 16, 128, window=4096, softcap=50.0, weight=2),
    Layer(8, 4, 256, window=1024),  # Gemma 3, 4B and 12B; the 1B has windows of 512
    Layer(16, 8, 256, window=1024),
    Layer(4, 1, 256, window=512),
    Layer(8, 4, 256, softcap=50.0),  # Gemma 2, 2B and 9B
    Layer(16, 8, 256, softcap=50.0),
    Layer(8, 4, 256, window=4096, softcap=50.0),
    Layer(16, 8, 256, window=4096, softcap=50.0),
)
LAYER_KINDS = {"prefill": 45, "chunk": 20, "draft": 15, "decode": 20}
LAYER_CHUNKS, LAYER_DRAFTS = (64, 128, 256, 512, 1024), (2, 4, 5, 8)
LAYER_MOST_CARDS, LAYER_MOST_BATCH, LAYER_LENGTHS = 4, 64, (64, 32768)
"""K/V heads are shared out among at most so many cards."""


def _layer_length(rng: random.Random, low: int) -> int:
    length = log_uniform(rng, low, LAYER_LENGTHS[1])
    return math.ceil(length / 64) * 64 if rng.random() < 0.5 else length


def _layer_problem(rng: random.Random) -> AttentionProblem | None:
    """One call, or None where it is no variant or too large."""
    layer = rng.choices(LAYERS, [layer.weight for layer in LAYERS])[0]
    cards = rng.choice([n for n in (1, 2, LAYER_MOST_CARDS) if layer.kv_heads % n == 0])
    kind = "prefill" if layer.encoder else rng.choices(list(LAYER_KINDS), list(LAYER_KINDS.values()))[0]
    rows = rng.choice(LAYER_CHUNKS) if kind == "chunk" else rng.choice(LAYER_DRAFTS) if kind == "draft" else 1
    keys = _layer_length(rng, max(LAYER_LENGTHS[0], 2 * rows))
    if layer.window:  # what a cache keeps for the rows of a call, beside the call's own keys
        keys = keys if kind == "prefill" else min(keys, layer.window - 1 + rows)
    window = ""
    if layer.encoder:
        window = f"{layer.window // 2}:{layer.window // 2}"
    elif layer.window and layer.window < keys:
        window = f"{layer.window - 1}:0"
    problem = AttentionProblem(
        batch=max(1, round(math.exp(rng.uniform(0, math.log(LAYER_MOST_BATCH))))),
        heads=layer.heads // cards,
        kv_heads=layer.kv_heads // cards,
        seqlen_q=keys if kind == "prefill" else rows,
        seqlen_k=keys,
        head_dim=layer.head_dim,
        dtype="bf16",
        mask="full" if layer.encoder or kind == "decode" else "causal_lower_right",
        layout=rng.choice(("bhsd", "bshd")),
        window=window,
        softcap=layer.softcap,
        sink=layer.sink,
    )
    fits = problem.flops <= MOST_FLOPS and problem.bytes <= MOST_BYTES
    return problem if problem.variants and fits else None


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
SERVED_CHUNKS = (32, 64, 128, 256, 512)
GPT_OSS = 64, 8


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
        rows = rng.choice([n for n in SERVED_CHUNKS if n <= longest])
        lengths = f"{rows}:{rows}/{_range(rng, longest, rows)}"
    return shape | {"batch": batch, "seqlen_q": rows, "seqlen_k": longest, "varlen": lengths}


def _call_over_cache(rng: random.Random, longest: int, page: int = 0) -> Drawn:
    """One token, some drafted ones, or a chunk."""
    kind = weighted(rng, {"decode": 60, "draft": 15, "chunk": 25})
    rows = 1 if kind == "decode" else rng.choice(LAYER_DRAFTS) if kind == "draft" else rng.choice(SERVED_CHUNKS)
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


def _eight_bits(rng: random.Random) -> Drawn:
    """Decoding and drafts over caches of 8 bits: pages, static caches, all keys in use; a scale of a tensor or of each
    head, a few of each key. e4m3 stands for the other dtypes, whose numbers take as many instructions to convert."""
    form = weighted(rng, {"paged": 50, "cached": 20, "dense": 30})
    head_dim = weighted(rng, {128: 70, 64: 30})
    batch, longest = log_uniform(rng, 1, 128), _length(rng, 256, 131072)
    rows = 1 if form == "dense" or head_dim == 64 or rng.random() < 0.75 else rng.choice((2, 4, 8, 32))
    shape: Drawn = {"batch": batch, "seqlen_q": rows, "seqlen_k": longest, "head_dim": head_dim}
    shape |= {"mask": "full" if rows == 1 else "causal_lower_right", "kv": "e4m3"}
    shape |= _heads(rng, LLM_128 if head_dim == 128 else (*LLM_64, GPT_OSS))
    if form != "dense":
        shape["seqused"] = _range(rng, longest, rows)
    if form == "paged":
        shape["page"] = weighted(rng, {16: 50, 64: 50})
        if head_dim == 128 and rows == 1 and rng.random() < 0.25:
            return shape | {"scales": "token"}
    return shape | {"scales": rng.choice(("", "head"))}


def _eight_bit_chunks(rng: random.Random) -> Drawn:
    """Chunks of prompts over caches of 8 bits in pages, which hold the chunk's own keys too."""
    rows = rng.choice(SERVED_CHUNKS)
    longest = _length(rng, rows, 32768)
    shape: Drawn = {"batch": log_uniform(rng, 1, 16), "seqlen_q": rows, "seqlen_k": longest, "head_dim": 128}
    shape |= {"mask": "causal_lower_right", "kv": "e4m3", "page": weighted(rng, {16: 50, 64: 50})}
    return shape | _heads(rng, LLM_128) | {"seqused": _range(rng, longest, rows), "scales": rng.choice(("", "head"))}


def _mixed(rng: random.Random) -> Drawn:
    """A step of a serving engine: its decoding sequences, its prompts, or both, packed over pages; Mistral and gpt-oss
    among the models."""
    step = weighted(rng, {"decode": 40, "draft": 10, "prompts": 30, "both": 20})
    count, prompts = log_uniform(rng, 1, 256), log_uniform(rng, 1, 12)
    longest = _length(rng, 256, 16384)
    most, chunk = rng.choice(LAYER_DRAFTS) if step == "draft" else 1, _length(rng, 64, 4096)
    queries = [] if step == "prompts" else [rng.randint(1, most) for _ in range(count)]
    if step in ("prompts", "both"):
        queries += [log_uniform(rng, max(1, chunk // 8), chunk) for _ in range(prompts)]
    keys = [min(longest, n + (log_uniform(rng, 1, longest) if rng.random() < 0.8 else 0)) for n in queries]
    queries = [min(pair) for pair in zip(queries, keys, strict=True)]
    model = weighted(rng, {"llm128": 45, "llm64": 13, "mistral": 12, "gpt-oss": 15, "gpt-oss window": 15})
    shape: Drawn = {"head_dim": 128 if model in ("llm128", "mistral") else 64, "page": weighted(rng, PAGES)}
    shape |= _heads(rng, (GPT_OSS,) if "gpt" in model else LLM_64 if model == "llm64" else LLM_128)
    if "gpt" in model:
        shape["sink"] = True
    if model in ("mistral", "gpt-oss window"):
        shape["window"] = "127:0" if "gpt" in model else "4095:0"
    lengths = "/".join("+".join(map(str, side)) for side in (queries, keys))
    most = max(queries)
    shape |= {"batch": len(queries), "seqlen_q": most, "seqlen_k": longest, "varlen": lengths, "layout": "bshd"}
    return shape | {"mask": "full" if most == 1 else "causal_lower_right"}


def _deepseek(rng: random.Random) -> Drawn:
    heads = rng.choice((128, 64, 32, 16))
    return {"heads": heads, "kv_heads": heads, "head_dim": 192, "value_dim": 128}


def _latent(rng: random.Random) -> Drawn:
    """DeepSeek V2, V3 and R1 and Kimi K2: prefill with heads of their own, decoding over the latent cache."""
    if rng.random() < 0.5:
        keys = _length(rng, 64, 16384)
        rows = keys if rng.random() < 0.75 else min(keys, rng.choice(SERVED_CHUNKS))
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


FP8_HEAD_DIMS = {64: 35, 96: 5, 128: 60}
TURNED_HEAD_DIMS = {64: 30, 96: 5, 128: 50, 256: 15}


def _fp8(rng: random.Random, dims: dict[int, int] = FP8_HEAD_DIMS) -> Drawn:
    """Long prefills and encoders, for which 8 bits of all three tensors are asked."""
    length = _length(rng, 512, 32768)
    shape: Drawn = {"dtype": "e4m3", "scales": "head", "seqlen_q": length, "seqlen_k": length}
    shape |= {"mask": weighted(rng, {"full": 50, "causal_lower_right": 50}), "batch": log_uniform(rng, 1, 16)}
    dim = weighted(rng, dims)
    return shape | {"head_dim": dim} | _heads(rng, LLM_64 if dim == 64 else LLM_128)


def _fp8_turned(rng: random.Random) -> Drawn:
    return _fp8(rng, TURNED_HEAD_DIMS) | {"turned": True}


KINDS: dict[str, Callable[[random.Random], Drawn]] = {
    "packed": _packed,
    "cached": _cached,
    "paged": _paged,
    "mixed": _mixed,
    "latent": _latent,
    "latent_paged": _latent_paged,
    "biased": _biased,
    "eight_bits": _eight_bits,
    "eight_bit_chunks": _eight_bit_chunks,
    "fp8": _fp8,
    "fp8_turned": _fp8_turned,
}
"""What draws each kind."""


def _served_problem(fields: Callable[[random.Random], Drawn], rng: random.Random) -> AttentionProblem | None:
    drawn: Drawn = {"dtype": "bf16", "layout": "bshd" if rng.random() < 0.7 else "bhsd"} | fields(rng)
    try:
        made = AttentionProblem(**drawn)
    except ProblemError:  # a tensor too large for any card
        return None
    return made if made.flops <= MOST_FLOPS and made.bytes <= MOST_BYTES else None


PLAIN, WIDE, SCORES = "plain", "wide", "scores"
"""Full and causal attention; the same beyond a head_dim of 256; windows, soft caps and sinks."""
DRAWS: dict[str, Callable[[int, int], list[AttentionProblem]]] = {
    PLAIN: partial(_draw, _plain_problem, "problems"),
    WIDE: partial(_draw, _wide_problem, "wide"),
    SCORES: partial(_draw, _layer_problem, "variants"),
    **{kind: partial(_draw, partial(_served_problem, fields), kind) for kind, fields in KINDS.items()},
}
"""The first so many problems of a seed."""
draw = DRAWS[PLAIN]


def drawn(kinds: Iterable[str], seeds: Iterable[int], each: int) -> list[AttentionProblem]:
    """`each` of every kind and seed. Raises `KeyError` on a kind that is not of `DRAWS`."""
    return [problem for kind in kinds for seed in seeds for problem in DRAWS[kind](seed, each)]


def draw_all(kinds: Sequence[str], seeds: Sequence[int], count: int) -> list[AttentionProblem]:
    """`count` problems in all, about as many of each kind and seed. Raises as `drawn` does."""
    return drawn(kinds, seeds, math.ceil(count / (len(kinds) * len(seeds))))[:count]
