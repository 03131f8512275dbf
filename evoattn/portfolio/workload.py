"""Attention problems as people have them: `draw(seed, count)` gives the same problems for the same seed.

Self-attention, causal prefill, decoding, chunked or speculative decoding, and cross-attention; lengths are
log-uniform, half of them round. Portfolios are built from seeds below 100 (`BUILD_SEEDS`); whoever judges one draws
from others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import TypeVar

from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import parse_shape

Choice = TypeVar("Choice")

BUILD_SEEDS = range(50)
"""Of the problems that shipped portfolios were made from; 50 to 99 were used to try rules on."""
HEAD_DIMS = {32: 4, 64: 30, 72: 3, 80: 6, 96: 8, 128: 35, 160: 3, 192: 4, 256: 7}
KINDS = {"full": 40, "causal": 30, "decode": 14, "chunk": 8, "cross": 8}
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


def _length(rng: random.Random, low: int, high: int) -> int:
    n = math.exp(rng.uniform(math.log(low), math.log(high)))
    return max(1, round(n / 64) * 64) if n > 96 and rng.random() < 0.5 else max(1, round(n))


def _lengths(rng: random.Random, kind: str) -> tuple[int, int, str]:
    """(seqlen_q, seqlen_k, mask)."""
    if kind == "decode":
        return 1, _length(rng, 256, 65536), "full"
    if kind == "chunk":
        keys = _length(rng, 512, 32768)
        return rng.choice(CHUNKS), keys, "causal_lower_right"
    if kind == "cross":
        return _length(rng, 32, 8192), _length(rng, 16, 8192), "full"
    length = _length(rng, 32, 16384)
    return length, length, "full" if kind == "full" else rng.choice(CAUSAL_MASKS)


def _shape(rng: random.Random) -> str:
    """One problem as a shape on the command line."""
    while True:
        kind, dim, group = weighted(rng, KINDS), weighted(rng, HEAD_DIMS), weighted(rng, GROUPS)
        dtype = weighted(rng, DTYPES)
        kv_heads = rng.choice(KV_HEADS)
        heads, batch = kv_heads * group, log_uniform(rng, 1, MOST_BATCH)
        if heads > MOST_HEADS:
            continue
        sq, sk, mask = _lengths(rng, kind)
        if sq > sk and mask != "full":
            continue
        size = 4 if dtype == "fp32" else 2
        flops = 4 * batch * heads * sq * sk * dim * (0.5 if mask != "full" and sq == sk else 1)
        if flops > MOST_FLOPS or size * dim * batch * (2 * heads * sq + 2 * kv_heads * sk) > MOST_BYTES:
            continue
        text = f"B={batch},H={heads}" + (f",Hkv={kv_heads}" if group > 1 else "")
        text += f",S={sq}" if sq == sk else f",Sq={sq},Sk={sk}"
        text += f",D={dim},dtype={dtype},mask={mask}"
        return text + (",layout=bshd" if rng.random() < BSHD_SHARE else "")


def draw(seed: int, count: int) -> list[AttentionProblem]:
    """The first `count` problems of a seed."""
    rng = random.Random(f"evoattn problems {seed}")
    return [parse_shape(_shape(rng)) for _ in range(count)]


def draw_by(
    problem: Callable[[random.Random], AttentionProblem | None], name: str, count: int
) -> list[AttentionProblem]:
    """The first `count` that `problem` makes of the random numbers of the seed `name`; None is no problem."""
    rng = random.Random(name)
    found: list[AttentionProblem] = []
    while len(found) < count:
        if made := problem(rng):
            found.append(made)
    return found
