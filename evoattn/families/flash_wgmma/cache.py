"""K and V of 8 bits under a Q of 16: what flash_wgmma takes of them, and what making 16 bits of them takes."""

import math

from evoattn.families.flash_wgmma.text import EightBits
from evoattn.families.tensor_tiles import ROW_BYTES
from evoattn.model.problem import AttentionProblem
from evoattn.model.scales import PER_TOKEN

MULTIPLIED = "fp16"
"""What is made of V of 8 bits, exactly, of K where its products are of 16 bits, and of a Q beside it."""
SPLIT = "e4m3"
"""What a Q of bf16 is a sum of two numbers of, where K is multiplied as it comes."""
MULTIPLIED_AS_THEY_COME = ("e4m3", "e5m2")
"""Of K; wgmma has no product of int8 by others."""
CONVERTER_REGISTERS = {1: 56, 2: 56, 3: 56, 4: 48}
"""Per thread of the producer warpgroup, by consumer warpgroups, where three of its warps convert."""
CONVERTED_AN_INSTRUCTION = 32
"""Numbers that an instruction of a warp makes 16 bits of: 2,048 by some 60 (SASS)."""
LOADED_STEP = 16
"""Bytes that rows are multiples of, for tensor maps."""
BARRIERS, WORD = 2 * 8, 4
"""Bytes of a stage: barriers that say that K, or V, came and was read, and a word that says that no more will."""


def splits_queries(problem: AttentionProblem) -> bool:
    """Whether Q is a sum of two numbers of 8 bits, and K is multiplied as it comes. Not where log-sum-exps are asked
    for, which say more digits of scores than tensor cores keep of sums of 8 bits."""
    return problem.dtype == "bf16" and problem.kv in MULTIPLIED_AS_THEY_COME and not problem.lse


def key_product(problem: AttentionProblem) -> tuple[int, str | EightBits]:
    """Of Q Kᵀ: its steps, and what they multiply."""
    if splits_queries(problem):
        return 2 * math.ceil(problem.head_dim / 32), EightBits(SPLIT, problem.kv)
    return math.ceil(problem.head_dim / 16), MULTIPLIED if problem.kv else problem.dtype


def stage_bytes(problem: AttentionProblem, keys: int) -> int:
    """Shared memory of a stage of K and V as they come, where they are of 8 bits, and as they are multiplied."""
    rows, value_rows = (
        keys * ROW_BYTES * math.ceil(2 * dim / ROW_BYTES) for dim in (problem.head_dim, problem.head_dim_v)
    )
    if not problem.kv:
        return rows + value_rows
    loaded, loaded_values = (
        keys * ROW_BYTES * math.ceil(dim / ROW_BYTES) for dim in (problem.head_dim, problem.head_dim_v)
    )
    of_keys = loaded if splits_queries(problem) else rows + loaded + BARRIERS
    return of_keys + value_rows + loaded_values + BARRIERS + WORD


def made(problem: AttentionProblem) -> int:
    """Numbers of a key, and its row of V, of which warps make 16 bits."""
    return (0 if splits_queries(problem) else problem.head_dim) + problem.head_dim_v if problem.kv else 0


def scale_registers(problem: AttentionProblem) -> int:
    """Of a consumer thread, for scales of keys: of its key of the next tile, and of keys at hand."""
    return 26 if problem.kv and problem.scales == PER_TOKEN else 0


def scale_bytes(problem: AttentionProblem, keys: int) -> int:
    """Shared memory of a consumer warpgroup for scales of keys: three numbers of each of two tiles."""
    return 2 * 3 * 4 * keys if problem.kv and problem.scales == PER_TOKEN else 0


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
