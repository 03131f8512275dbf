"""K and V of 8 bits under a Q of 16: what flash_wgmma takes of them, and what making 16 bits of them takes."""

import math

from evoattn.families.tensor_tiles import ROW_BYTES
from evoattn.model.problem import AttentionProblem
from evoattn.model.scales import PER_TOKEN

MULTIPLIED = "fp16"
"""What is made of K and V of 8 bits, exactly, and of a Q beside them."""
CONVERTER_REGISTERS = {1: 56, 2: 56, 3: 56, 4: 48}
"""Per thread of the producer warpgroup, by consumer warpgroups, where three of its warps convert."""
CONVERTED_AN_INSTRUCTION = 32
"""Numbers that an instruction of a warp makes 16 bits of: 2,048 by some 60 (SASS)."""
LOADED_STEP = 16
"""Bytes that rows are multiples of, for tensor maps."""
WORDS = 4 * 8 + 4
"""Bytes of a stage: barriers that say that K, and V, came and were read, and a word that says that no more will."""


def loaded_bytes(problem: AttentionProblem, keys: int) -> int:
    """Shared memory of a stage of K and V as they come, where they are of 8 bits."""
    if not problem.kv:
        return 0
    chunks = math.ceil(problem.head_dim / ROW_BYTES) + math.ceil(problem.head_dim_v / ROW_BYTES)
    return keys * ROW_BYTES * chunks + WORDS


def instructions(problem: AttentionProblem, numbers: int) -> float:
    """Of warps that make 16 bits of so many numbers."""
    return numbers / CONVERTED_AN_INSTRUCTION if problem.kv else 0.0


def scale_registers(problem: AttentionProblem, keys: int) -> int:
    """Of a consumer thread, for scales of keys: of K and of V, of two keys in each of eight, and of
    those of the next tile that lanes load in turn."""
    return keys // 2 + keys // 16 if problem.kv and problem.scales == PER_TOKEN else 0


def why_no_cache(problem: AttentionProblem) -> str | None:
    """K and V of 8 bits under a Q of 16 that are left to other families."""
    if not problem.kv:
        return None
    for term in ("alibi", "bias", "score", "shared_kv", "batch_invariant"):
        if getattr(problem, term):
            return f"flash_wgmma takes no {term} beside K and V of 8 bits; other families do."
    for dim in (problem.head_dim, problem.head_dim_v):
        if dim % LOADED_STEP:
            return f"flash_wgmma takes K and V of 8 bits with a head_dim of a multiple of {LOADED_STEP}, not {dim}."
    return None
