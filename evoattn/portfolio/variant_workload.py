"""Variants of attention as today's models compute them: `draw_variants(seed, count)` gives the same problems for the
same seed.

Heads, head_dims, windows, caps and sinks are those of the models' configs on Hugging Face; a call is a prefill, a
chunk of one, some drafted tokens, or one token. As in transformers, a window is one key shorter than the config says,
layers with a window keep no more keys than it shows, and a call whose keys all lie within it has none.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from evoattn.model.problem import AttentionProblem
from evoattn.portfolio.workload import MOST_BYTES, MOST_FLOPS, draw_by


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
KINDS = {"prefill": 45, "chunk": 20, "draft": 15, "decode": 20}
CHUNKS, DRAFTS = (64, 128, 256, 512, 1024), (2, 4, 5, 8)
MOST_CARDS, MOST_BATCH, LENGTHS = 4, 64, (64, 32768)
"""K/V heads are shared out among at most so many cards."""


def _length(rng: random.Random, low: int) -> int:
    most = LENGTHS[1]
    length = round(math.exp(rng.uniform(math.log(low), math.log(most))))
    return math.ceil(length / 64) * 64 if rng.random() < 0.5 else length


def _problem(rng: random.Random) -> AttentionProblem | None:
    """One call, or None where it is no variant or too large."""
    layer = rng.choices(LAYERS, [layer.weight for layer in LAYERS])[0]
    cards = rng.choice([n for n in (1, 2, MOST_CARDS) if layer.kv_heads % n == 0])
    kind = "prefill" if layer.encoder else rng.choices(list(KINDS), list(KINDS.values()))[0]
    rows = rng.choice(CHUNKS) if kind == "chunk" else rng.choice(DRAFTS) if kind == "draft" else 1
    keys = _length(rng, max(LENGTHS[0], 2 * rows))
    if layer.window:  # what a cache keeps for the rows of a call, beside the call's own keys
        keys = keys if kind == "prefill" else min(keys, layer.window - 1 + rows)
    window = ""
    if layer.encoder:
        window = f"{layer.window // 2}:{layer.window // 2}"
    elif layer.window and layer.window < keys:
        window = f"{layer.window - 1}:0"
    problem = AttentionProblem(
        batch=max(1, round(math.exp(rng.uniform(0, math.log(MOST_BATCH))))),
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


def draw_variants(seed: int, count: int) -> list[AttentionProblem]:
    """The first `count` problems of a seed."""
    return draw_by(_problem, f"evoattn variants {seed}", count)
