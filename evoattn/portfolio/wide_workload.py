"""Problems of wide heads, beyond a head_dim of 256: `draw_wide(seed, count)` gives the same problems for the same seed.

Full layers of Gemma 4 have a head_dim of 512, and 16 query heads that share 8 or 2 K/V heads (`gemma4_full` of
`evoattn problems` has 8). Heads of other sizes are made up. The autoencoders of image models
have one head of 512 over all points of an image an eighth as high and wide. Others are drawn as in
`evoattn/portfolio/workload.py`.
"""

from __future__ import annotations

import random

from evoattn.model.problem import AttentionProblem
from evoattn.portfolio.workload import (
    BSHD_SHARE,
    CHUNKS,
    GROUPS,
    KV_HEADS,
    MOST_BATCH,
    MOST_BYTES,
    MOST_HEADS,
    draw_by,
    log_uniform,
    weighted,
)

MODEL_DIM = 512
KINDS = {"language": 45, "image": 20, "other": 35}
HEAD_DIMS = {320: 30, 384: 30, MODEL_DIM: 40}
LANGUAGE_HEADS = ((8, 1), (8, 2), (8, 4), (16, 2), (16, 8), (32, 4), (32, 16))
"""(heads, K/V heads): of Gemma 4 are 16 with 8 or 2, known from its configs; 8 with 4 or 1 are what one of two cards
has of these. The others are guesses at smaller and larger models."""
SIDES = (32, 48, 64, 96, 128)
"""Points of an image's side: of 256, 384, 512, 768 and 1024 pixels."""
CALLS = {"prefill": 55, "chunk": 15, "draft": 8, "decode": 22}
FULL_SHARE, FP32_SHARE = 0.4, 0.2
"""Of prefills that are not of a language model, and of problems of MODEL_DIM that are not."""
MOST_FLOPS = {"fp32": 3e10, "fp16": 4e11, "bf16": 4e11}
"""Some milliseconds: more are more waves of the same tiles."""


def _length(rng: random.Random, low: int, high: int) -> int:
    length = log_uniform(rng, low, high)
    return max(1, round(length / 64)) * 64 if length > 96 and rng.random() < 0.5 else length


def _call(rng: random.Random, full_share: float) -> tuple[int, int, str]:
    """(seqlen_q, seqlen_k, mask): of so many prefills all keys are seen."""
    call = weighted(rng, CALLS)
    if call == "decode":
        return 1, _length(rng, 64, 65536), "full"
    if call == "prefill":
        length = _length(rng, 32, 16384)
        return length, length, "full" if rng.random() < full_share else "causal_lower_right"
    keys = _length(rng, 512, 32768)
    rows = rng.choice([n for n in CHUNKS if (n > 16) == (call == "chunk")])
    return rows, keys, "causal_lower_right"


def _problem(rng: random.Random) -> AttentionProblem | None:
    """One problem, or None where it is too large."""
    kind, head_dim, dtype = weighted(rng, KINDS), MODEL_DIM, rng.choice(("fp16", "bf16", "bf16"))
    if kind == "language":
        heads, kv_heads = rng.choice(LANGUAGE_HEADS)
        rows, keys, mask = _call(rng, 0.0)
    elif kind == "image":
        heads = kv_heads = 1
        rows = keys = rng.choice(SIDES) * rng.choice(SIDES)
        mask = "full"
    else:
        kv_heads, head_dim = rng.choice(KV_HEADS), weighted(rng, HEAD_DIMS)
        heads = kv_heads * weighted(rng, GROUPS)
        rows, keys, mask = _call(rng, FULL_SHARE)
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
    return problem if problem.flops <= MOST_FLOPS[dtype] and problem.bytes <= MOST_BYTES else None


def draw_wide(seed: int, count: int) -> list[AttentionProblem]:
    """The first `count` problems of a seed."""
    return draw_by(_problem, f"evoattn wide {seed}", count)
