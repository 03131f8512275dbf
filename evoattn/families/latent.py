"""What families share that attend over a latent cache, whose V is the first columns of K, with the query heads of a
K/V head as the rows of a tile."""

from __future__ import annotations

import math

from evoattn.families.tensor_tiles import CHUNK_COLUMNS, key_map, why_not_sliding
from evoattn.model.gpu import MAX_GRID_YZ, GpuSpec
from evoattn.model.launch import TensorMap
from evoattn.model.problem import AttentionProblem

ARCH = "sm_90a"
MAX_VALUE_DIM = 512
"""Of V, whose sums in fp32 a warpgroup or two keep in registers."""


def why_not_latent(name: str, problem: AttentionProblem, gpu: GpuSpec, value_columns: int) -> str | None:
    """One sentence if the family called `name`, which takes `value_columns` columns of V at once, does not serve the
    problem or the GPU, else None."""
    if gpu.arch != ARCH:
        return f"{name} needs wgmma and tensor maps of {ARCH}, and {gpu.name} is {gpu.arch}."
    if not (problem.shared_kv or problem.rotary_apart):
        return f"{name} is for a V that is the first columns of K: take another family, or shared_kv=1."
    if problem.head_dim % CHUNK_COLUMNS or problem.head_dim_v % value_columns:
        return (
            f"{name} takes a head_dim of whole {CHUNK_COLUMNS} columns and of V of whole {value_columns}, not "
            f"{problem.head_dim} and {problem.head_dim_v}."
        )
    if problem.head_dim_v > MAX_VALUE_DIM:
        return f"{name} takes a head_dim of V of at most {MAX_VALUE_DIM}, not {problem.head_dim_v}."
    if max(problem.kv_heads, problem.batch) > MAX_GRID_YZ:
        return (
            f"{name} takes at most {MAX_GRID_YZ} K/V heads and batches (grid y and z), not "
            f"{max(problem.kv_heads, problem.batch)}."
        )
    return why_not_sliding(problem)


def row_blocks(problem: AttentionProblem, heads: int, queries: int = 1) -> int:
    """Tiles of rows of a K/V head, each of at most `heads` query heads of so many queries."""
    return math.ceil(problem.seqlen_q / queries) * math.ceil(problem.group_size / heads)


def key_maps(problem: AttentionProblem, keys: int) -> tuple[TensorMap, ...]:
    """Of tiles of `keys` keys: of K; or of its last columns, and then of V."""
    return tuple(key_map(problem, tensor, keys) for tensor in ("kv" if problem.rotary_apart else "k"))


def apart_constants(problem: AttentionProblem) -> dict[str, str | bool]:
    """What a template gets to know of K's columns in tensors of their own."""
    apart = problem.rotary_apart
    parameter = ", const __grid_constant__ TensorMap v_map" if apart else ""
    return {"APART": apart, "V_MAP": "v_map" if apart else "k_map", "V_MAP_PARAMETER": parameter}
