"""Configs to begin a climb at that no change of a gene or two leads to: other tiles of rows, keys shared out among the
blocks that SMs have room for, another family whose warps share a block's keys, and in fp32 one on tensor cores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from evoattn.families import registry
from evoattn.families.residency import WARP
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, Value
from evoattn.portfolio.work import tiles_of

FAMILY = "flash_wgmma"
"""Whose rows, keys and blocks on an SM are chosen so. Others have their splits as an argument of the launch."""
SHAPE = ("BLOCK_M", "BLOCKS_PER_SM", "GROUP_ROWS")
NARROW = {"PING_PONG": False, "CAUSAL_SKIP": False}
"""What a tile of one warpgroup cannot have."""
NARROW_ROWS = 64
ROOM: Sequence[dict[str, Value]] = (
    {},
    {"PRODUCER": "warpgroup"},
    {"PRODUCER": "warpgroup", "Q_IN_REGISTERS": False},
    {"Q_IN_REGISTERS": False},
)
"""Changes of where registers and shared memory go, of which the first is taken with which the shape fits."""
MOST_STAGES = 2
"""Of a start: more come with the climb."""

WARP_QUERIES, WARP_KEYS = 16, 512
"""Queries of a head, or keys, up to which warp-level tiles (WARP_FAMILY) have been fastest."""
WARP_FAMILY = "flash_mma"
WARP_ROWS = 16
"""Of a tile for each warp."""
WARP_SHAPES = {"few queries": ((1, 1), (1, 2), (1, 4)), "few keys": ((2, 1), (4, 1))}
"""Warps that share the rows of a tile, and warps that share its keys."""
WARP_GENES: dict[str, Value] = {
    "STAGES": 2, "SCHEDULE": "together", "SMEM_LAYOUT": "swizzled", "Q_PLACE": "shared", "RESCALE": "always",
    "ROW_SUM": "add", "O_STORE": "direct", "BLOCK_ORDER": "rows", "BLOCKS_PER_SM": 1,
}  # fmt: skip
"""The other genes of such a start. Where this family was fastest with few queries, most of its kernels had most of
them, or lay a step away."""

TENSOR_FAMILY = "large_head"
"""The one that has tensor cores in fp32. Many classes of portfolios are older than its kernels for their
head_dims, and have none."""
TENSOR_SHAPES = (
    (16, 32, "tf32x3_spread", 4, 16, 16),
    (16, 32, "tf32x3", 2, 16, 16),
    (32, 32, "tf32x3", 2, 16, 16),
    (32, 32, "tf32x3", 4, 16, 16),
    (32, 64, "tf32x3", 4, 16, 32),
    (64, 64, "tf32x3", 4, 16, 32),
    (64, 64, "tf32x3", 4, 32, 32),
    (64, 64, "tf32x3", 8, 32, 16),
    (64, 128, "tf32x3", 8, 32, 32),
)
"""BLOCK_M, BLOCK_N, MATH, WARPS, SCORE_ROWS and SCORE_KEYS that were fastest most often, among the campaigns' 165
problems on which the family was, or lie a step from those."""
TENSOR_GENES: dict[str, Value] = {
    "DIM_SPLIT": 1, "EXCHANGE": "none", "DEPENDENT_LAUNCH": False, "LANES": 32, "STAGES": 1, "UNROLL": 1,
}  # fmt: skip
TENSOR_OUTPUT = (16, 32)
"""Rows of the answer that each warp works on, alone or with others."""


def tensor_shapes(problem: AttentionProblem, gpu: GpuSpec, genes: Mapping[str, Sequence[Value]]) -> list[KernelConfig]:
    """Valid configs of TENSOR_FAMILY for an fp32 problem, each with most threads for a row of the answer. None in
    16 bits, and where head_dim is no multiple of 32."""
    if problem.dtype != "fp32" or "VALUE_THREADS" not in genes:
        return []
    why_invalid = registry.lookup(TENSOR_FAMILY).why_invalid
    found = []
    for rows, keys, math, warps, score_rows, score_keys in TENSOR_SHAPES:
        for threads in sorted(genes["VALUE_THREADS"], key=int, reverse=True):
            if rows * int(threads) / (WARP * warps) not in TENSOR_OUTPUT:
                continue
            shape: dict[str, Value] = {"BLOCK_M": rows, "BLOCK_N": keys, "MATH": math, "WARPS": warps,
                                       "SCORE_ROWS": score_rows, "SCORE_KEYS": score_keys, "VALUE_THREADS": threads,
                                       "Q_PLACE": "shared" if math == "tf32x3" else "global"}  # fmt: skip
            made = KernelConfig(TENSOR_FAMILY, registry.completed(TENSOR_FAMILY, shape | TENSOR_GENES))
            if not why_invalid(problem, made, gpu):
                found.append(made)
                break
    return found


def warp_shapes(problem: AttentionProblem, gpu: GpuSpec, genes: Mapping[str, Sequence[Value]]) -> list[KernelConfig]:
    """Valid configs of WARP_FAMILY with tiles of one warp's rows or few more, each with several tiles of keys.

    None where the family has hardly been fastest: with heads that share K/V, as its tiles have rows of one head, with
    many queries and many keys, and with few queries on less than half of the SMs, as its blocks do not share keys."""
    tiles = problem.batch * problem.heads
    able = {
        "few queries": problem.seqlen_q <= WARP_QUERIES and 2 * tiles >= gpu.sm_count,
        "few keys": problem.seqlen_q > WARP_QUERIES and problem.seqlen_k <= WARP_KEYS,
    }
    if problem.group_size > 1 or "BLOCK_N" not in genes or not any(able.values()):
        return []
    shapes = (shape for kind, shapes in WARP_SHAPES.items() if able[kind] for shape in shapes)
    why_invalid = registry.lookup(WARP_FAMILY).why_invalid
    found = (
        KernelConfig(WARP_FAMILY, {"BLOCK_M": WARP_ROWS * rows, "BLOCK_N": keys, "WARPS": rows, "KEY_WARPS": shared}
                     | WARP_GENES)
        for rows, shared in shapes
        for keys in genes["BLOCK_N"]
    )  # fmt: skip
    return [config for config in found if not why_invalid(problem, config, gpu)]


def other_shapes(
    config: KernelConfig, problem: AttentionProblem, gpu: GpuSpec, genes: Mapping[str, Sequence[Value]]
) -> list[KernelConfig]:
    """`config` with other tiles of rows, blocks per SM and shares of the keys, each with the largest tile of keys that
    fits: valid configs, without `config` itself. `genes`: values of each parameter of the family."""
    if config.family != FAMILY or not all(name in genes for name in (*SHAPE, "KEY_SPLIT", "BLOCK_N", "STAGES")):
        return []
    found = {}
    for values in product(*(genes[name] for name in SHAPE)):
        shape = dict(zip(SHAPE, values, strict=True))
        for split in _splits(config, shape, problem, gpu, genes["KEY_SPLIT"]):
            if made := _with_room(config, shape | {"KEY_SPLIT": split}, problem, gpu, genes):
                found[made.id] = made
    found.pop(config.id, None)
    return list(found.values())


def _splits(
    config: KernelConfig,
    shape: Mapping[str, Value],
    problem: AttentionProblem,
    gpu: GpuSpec,
    values: Sequence[Value],
) -> Iterator[int]:
    """One block for each tile of rows, and the two greatest numbers of blocks that run at once."""
    tiles = tiles_of(FAMILY, {**config.params, **shape, "KEY_SPLIT": 1}, problem).blocks
    slots = gpu.sm_count * int(shape["BLOCKS_PER_SM"])
    yield from sorted(int(value) for value in values if int(value) * tiles <= slots or value == 1)[-2:]


def _with_room(
    config: KernelConfig,
    shape: dict[str, Value],
    problem: AttentionProblem,
    gpu: GpuSpec,
    genes: Mapping[str, Sequence[Value]],
) -> KernelConfig | None:
    why_invalid = registry.lookup(FAMILY).why_invalid
    changed: dict[str, Value] = shape | (NARROW if shape["BLOCK_M"] == NARROW_ROWS else {})
    if shape["KEY_SPLIT"] != 1:
        changed |= {"SCHEDULE": "single", "TILE_ORDER": "by_head", "STORE": "rows"}
    tiles = sorted(product(genes["BLOCK_N"], (s for s in genes["STAGES"] if int(s) <= MOST_STAGES)), key=_extent)
    for room in ROOM:
        for alike in ({}, {"SCHEDULE": "single", "TILE_ORDER": "by_head", "STORE": "rows"}):
            made = KernelConfig(FAMILY, {**config.params, **changed, **room, **alike})
            sized = (_sized(made, *tile) for tile in (tiles[0], *reversed(tiles)))
            if not why_invalid(problem, next(sized), gpu):
                return next(one for one in sized if not why_invalid(problem, one, gpu))
    return None


def _extent(tile: tuple[Value, Value]) -> tuple[int, int]:
    return int(tile[0]) * int(tile[1]), int(tile[0])


def _sized(config: KernelConfig, block_n: Value, stages: Value) -> KernelConfig:
    return KernelConfig(FAMILY, {**config.params, "BLOCK_N": block_n, "STAGES": stages})
