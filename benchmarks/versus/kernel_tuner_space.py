"""The search space of flash_mma in Kernel Tuner's words: the same parameters and values, and restrictions as strings.

Kernel Tuner takes 7 s for the space of seed_h100 from such strings; given `Family.why_invalid` as one function it did
not finish in 19 minutes. A test holds the strings against `why_invalid`.
"""

from __future__ import annotations

import math
from typing import Any

from evoattn.families.flash_mma import family as refusals
from evoattn.families.flash_mma import resources
from evoattn.families.flash_mma.resources import FlashMmaGenes
from evoattn.families.registry import load_space
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem

FAMILY = "flash_mma"
THREADS = "THREADS"
"""Kernel Tuner takes the size of a block from a tunable parameter; here it follows from two others."""


def tune_params(problem: AttentionProblem, gpu: GpuSpec) -> dict[str, list[Any]]:
    """Values of each parameter. Those that no config of the problem may have are left out."""
    params: dict[str, list[Any]] = {p.name: list(p.values) for p in load_space(FAMILY, gpu).parameters}
    if not problem.causal:
        params["BLOCK_ORDER"] = [order for order in params["BLOCK_ORDER"] if not order.endswith("reversed")]
    params[THREADS] = sorted({32 * w * k for w in params["WARPS"] for k in params["KEY_WARPS"]})
    return params


def restrictions(problem: AttentionProblem, gpu: GpuSpec) -> list[str]:
    """`why_invalid` of flash_mma, a string for each of its sentences."""
    rows, keys, dim = problem.seqlen_q, problem.seqlen_k, problem.head_dim
    bytes_of_row = math.ceil(dim / 16) * 16 * problem.element_bytes
    row = f"({bytes_of_row} + {resources.CHUNK_BYTES} * (SMEM_LAYOUT == 'padded'))"
    q = f"(Q_PLACE != 'direct') * BLOCK_M * {row}"
    ring = f"(2 * STAGES - (SCHEDULE == 'split_short_v')) * BLOCK_N * {row}"
    merge = f"(KEY_WARPS - 1) * BLOCK_M // 16 * {32 * (dim // 2 + 4) * 4}"
    o = f"(O_STORE == 'shared') * BLOCK_M * {row}"
    ticket = f"(KEY_SPLIT > 1) * {resources.TICKET_BYTES}"
    loop, end = f"({q} + {ring} + {ticket})", f"(max({q}, {o}) + {merge} + {ticket})"
    tiles = f"-(-{keys} // BLOCK_N)"
    own_tiles = f"-(-{tiles} // KEY_SPLIT)"
    residents = f"BLOCKS_PER_SM * ({{}} + {gpu.smem_reserved_per_block}) <= {gpu.smem_per_sm}"
    warps = "WARPS * KEY_WARPS"
    cap = f"min(255, 512 // -(-{warps} * BLOCKS_PER_SM // 4) // 8 * 8)"
    less = f"min(255, 512 // max(1, -(-{warps} * (BLOCKS_PER_SM - 1) // 4)) // 8 * 8)"
    lazy = f"({resources.LAZY_REGISTERS['mma']} if ROW_SUM == 'mma' else {resources.LAZY_REGISTERS['add']})"
    needed = (
        f"BLOCK_M // (16 * WARPS) * ({dim // 2 + resources.ROW_TILE_REGISTERS}"
        f" + BLOCK_N // KEY_WARPS // 2 * (1 + (SCHEDULE == 'overlapped'))"
        f" + (Q_PLACE != 'shared') * {4 * math.ceil(dim / 16)} + (RESCALE == 'lazy') * {lazy})"
        f" + {resources.FIXED_REGISTERS}"
    )
    said = [
        f"{THREADS} == 32 * {warps}",
        "BLOCK_M % (16 * WARPS) == 0",
        "BLOCK_N % (16 * KEY_WARPS) == 0",
        f"BLOCK_N // KEY_WARPS <= {refusals.MAX_WARP_KEYS}",
        f"{warps} <= {refusals.MAX_WARPS}",
        "STAGES > 1 or SCHEDULE == 'split'",
        f"BLOCK_M <= 16 or BLOCK_M < {2 * rows}",
        f"BLOCK_N <= 16 * KEY_WARPS or BLOCK_N < {2 * keys}",
        f"{keys} > BLOCK_N // KEY_WARPS * (KEY_WARPS - 1)",
        f"{own_tiles} > 1 or SCHEDULE == 'split'",
        f"{own_tiles} > 1 or RESCALE == 'always'",
        f"STAGES <= {own_tiles}",
        f"KEY_SPLIT <= -(-{tiles} // ({own_tiles}))",
        f"KEY_SPLIT == 1 or -(-{rows} // BLOCK_M) * {problem.heads * problem.batch} <= {gpu.sm_count} * BLOCKS_PER_SM",
        f"BLOCK_ORDER == 'rows' or BLOCK_M < {rows}",
        f"{loop} <= {gpu.smem_per_block}",
        f"{end} <= {gpu.smem_per_block}",
        residents.format(loop),
        residents.format(end),
        f"BLOCKS_PER_SM * 32 * {warps} <= {gpu.threads_per_sm}",
        f"BLOCKS_PER_SM == 1 or {cap} != {less}",
        f"{needed} <= {cap}",
    ]
    if problem.heads * problem.batch == 1:
        said.append("BLOCK_ORDER != 'heads'")
    return said


def params_of(config: dict[str, Any]) -> dict[str, Any]:
    """The family's own parameters out of Kernel Tuner's."""
    return {name: config[name] for name in FlashMmaGenes.declared}
