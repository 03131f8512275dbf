"""The genes of fp8_wgmma, and what they take: threads, shared memory, registers, scratch, work."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from evoattn.families.flash_wgmma import resources as flash
from evoattn.families.flash_wgmma.resources import (
    FIXED_REGISTERS,
    O_CHUNK_PLACES,
    ORDERED_BATCHES,
    REGISTERS_UNDER_WGMMA,
    SEQUENCE_TILE_WORDS,
    TILE_WORDS,
    WARPGROUP_ROWS,
    FlashWgmmaGenes,
    Store,
    TileOrder,
    chunks_of,
    is_persistent,
    moved_registers,
    registers_at_launch,
    warpgroups,
)
from evoattn.families.genes import Genes, gene
from evoattn.families.residency import WARP
from evoattn.families.tensor_tiles import ROW_BYTES
from evoattn.families.work import LaunchWork, Step, together, up_to, variant_step
from evoattn.model.problem import AttentionProblem
from evoattn.model.scales import PER_BLOCK, ROUNDED

SHARED: Mapping[str, Any] = FlashWgmmaGenes.declared
"""Parameters that mean the same in both families are declared in flash_wgmma's."""


class Fp8WgmmaGenes(Genes):
    """The parameters of fp8_wgmma."""

    BLOCK_M: int = gene("query rows per block, 64 per consumer warpgroup", (64, 128, 192, 256))
    BLOCK_N: int = gene("keys per tile", (64, 96, 128, 160, 192, 224))
    STAGES: int = gene("tiles of K and of V in shared memory; those not in use are being copied", (1, 2, 3, 4))
    BLOCKS_PER_SM: int = gene("blocks that registers and shared memory leave room for on one SM", (1, 2))
    OVERLAP: bool = SHARED["OVERLAP"]
    PING_PONG: bool = gene(
        "warpgroups take turns, so that the softmax of one overlaps the products of another: on the tensor cores, "
        "without OVERLAP at Q K^T alone"
    )
    SCHEDULE: Literal["single", "fixed", "claimed", "balanced"] = gene(
        "single: one block per tile of rows; else one wave of blocks takes the tiles in fixed order (fixed), by a "
        "counter (claimed), or so that the key tiles of the last ones are shared evenly (balanced)"
    )
    TILE_ORDER: TileOrder = SHARED["TILE_ORDER"]
    CAUSAL_SKIP: bool = SHARED["CAUSAL_SKIP"]
    POLYNOMIAL_EIGHTHS: int = gene(
        "how many of every eight exponentials are computed on the FMA units: where scores come in fp16 by straight "
        "lines of three bits, beside no log-sum-exp, and some up to a head_dim of V of 128; else by a polynomial, none "
        "in place of all",
        (0, 1, 2, 3, 4, 8),
    )
    Q_IN_REGISTERS: bool = SHARED["Q_IN_REGISTERS"]
    STORE: Store = SHARED["STORE"]
    FLUSH_TILES: int = gene(
        "tiles of keys whose values tensor cores add up, in some 14 bits, before the sum is added to one in fp32",
        (1, 2, 4, 8),
    )
    SUM_PLACE: Literal["registers", "shared"] = gene(
        "the sum in fp32 lies in registers, or in shared memory, so that more warpgroups have room"
    )
    VALUE_PARTS: int = gene(
        "columns of V are multiplied all at once (1), or one half (2) or quarter (4) after another, so that the "
        "sums that are added to O in fp32 take as much less of the registers",
        (1, 2, 4),
        default=1,
    )
    VALUE_SUMS: int = gene(
        "sums of such parts that exist at once: with two, one is added to O while the next is multiplied",
        (1, 2),
        default=1,
    )

    @cached_property
    def flash(self) -> FlashWgmmaGenes:
        """Those that flash_wgmma has too: the parts that both families share read these."""
        shared = {name: value for name, value in vars(self).items() if name in FlashWgmmaGenes.declared}
        return FlashWgmmaGenes(PRODUCER="warpgroup", KEY_SPLIT=1, RESCALE="always", **shared)


ALIGNMENT = 1024
"""Bytes: of a tile with the 128-byte swizzle."""
STEP_BYTES = 32
"""Of a row, in one wgmma."""


def row_chunks(dim: int) -> int:
    """128-byte chunks of a row of `dim` numbers of 8 bits."""
    return math.ceil(dim / ROW_BYTES)


def value_chunk(genes: Fp8WgmmaGenes) -> int:
    """Keys of a row of a chunk of V, as `ValueTile` has them."""
    return next(keys for keys in (128, 64, 32) if genes.BLOCK_N % keys == 0)


def smem_bytes(problem: AttentionProblem, genes: Fp8WgmmaGenes) -> int:
    """Dynamic shared memory of a block: Q; the rings of K, of V as it comes and of V turned round; O or some chunks of
    it if the next Q loads before O has left; or O in fp32 if it is added up there; barriers; what the producer says of
    two tiles, of the last V, of scales, and the order of batches."""
    q_chunks = chunks_of(problem.head_dim) if problem.op in ROUNDED else row_chunks(problem.head_dim)
    chunks, value_chunks, o_columns = (
        row_chunks(problem.head_dim),
        row_chunks(problem.head_dim_v),
        chunks_of(problem.head_dim_v),
    )
    sums = max(problem.head_dim_v * 4, o_columns * ROW_BYTES)  # O takes their place
    sums = genes.BLOCK_M * sums if genes.SUM_PLACE == "shared" else 0
    own = is_persistent(genes.flash) and not sums
    o_chunks = (O_CHUNK_PLACES if genes.STORE == "chunks" else o_columns) if own else 0
    q_bytes = genes.BLOCK_M * ROW_BYTES * (q_chunks if o_chunks or sums else max(q_chunks, o_columns))
    turned = math.ceil(problem.head_dim_v * genes.BLOCK_N / ALIGNMENT) * ALIGNMENT
    loaded = 0 if problem.turned else value_chunks
    rings = genes.STAGES * (genes.BLOCK_N * ROW_BYTES * (chunks + loaded) + turned)
    tile_words = SEQUENCE_TILE_WORDS if problem.varlen or problem.seqused else TILE_WORDS
    barriers = 8 * (2 * warpgroups(genes.flash) + (4 if problem.turned else 6) * genes.STAGES + 1)
    told = 16 if problem.scales == PER_BLOCK else 0
    order = ORDERED_BATCHES if problem.seqused and genes.SCHEDULE == "claimed" else 0
    words = genes.STAGES * (told + 4 * (not problem.turned)) + (2 * tile_words + order) * 4
    return q_bytes + rings + o_chunks * genes.BLOCK_M * ROW_BYTES + sums + barriers + words


OTHER_REGISTERS = 16
"""Beside operands: of 20 kernels none that had so many spilled more than 4 bytes (NVRTC 13.0)."""


def in_pairs(problem: AttentionProblem) -> bool:
    """Whether scores and weights come in fp16, of which one instruction takes two: where a row's greatest weight is a
    power of two that is summed as it is. A number of K is at most 448 then, so that no score is beyond fp16."""
    return not problem.softcap and problem.kv != "e5m2"


def score_registers(problem: AttentionProblem, genes: Fp8WgmmaGenes) -> int:
    """Of a thread, for the scores of a tile."""
    return genes.BLOCK_N // (4 if in_pairs(problem) else 2)


def registers_needed(problem: AttentionProblem, genes: Fp8WgmmaGenes) -> int:
    """Estimate of the registers per consumer thread below which ptxas spills or serializes wgmma: S, P, O and what it
    was before the last flush, and Q if it stays. Without OVERLAP S has gone when P is multiplied. A loop over tiles of
    rows counts nothing: 192 and 256 rows that take all registers spill 0 to 112 bytes then, and are the fastest
    at six of eight problems (H100, 2026-11-27)."""
    o, twice = problem.head_dim_v // 2, genes.SUM_PLACE == "registers"
    sums = o + o * genes.VALUE_SUMS // genes.VALUE_PARTS if twice else o
    scores, rest = score_registers(problem, genes), genes.BLOCK_N // 8 + sums
    operands = scores + rest if genes.OVERLAP else max(scores + o, rest)  # beside S one of two sums is read
    if genes.Q_IN_REGISTERS:
        operands += 4 * math.ceil(problem.head_dim / STEP_BYTES)
    return operands + OTHER_REGISTERS


def begins_ahead(problem: AttentionProblem, genes: Fp8WgmmaGenes) -> bool:
    """As flash_wgmma's: whether a tile of rows begins beside the last product of the one before."""
    skipped = math.ceil((genes.BLOCK_M - WARPGROUP_ROWS) / genes.BLOCK_N) if genes.CAUSAL_SKIP else 0
    if problem.scales == PER_BLOCK:  # O keeps the unit of its last tile
        return False
    if not (is_persistent(genes.flash) and genes.OVERLAP and genes.Q_IN_REGISTERS) or skipped >= genes.STAGES:
        return False
    ahead = genes.BLOCK_N // 8 + FIXED_REGISTERS - OTHER_REGISTERS  # for the next tile's P, and as flash_wgmma keeps
    return registers_needed(problem, genes) + ahead <= moved_registers(genes.flash)[1]


def widest_wgmma(problem: AttentionProblem, genes: Fp8WgmmaGenes) -> int:
    """Registers per thread that the widest wgmma needs at launch."""
    return (
        max(
            score_registers(problem, genes) + 4 * genes.Q_IN_REGISTERS,
            problem.head_dim_v // genes.VALUE_PARTS // 2 + 4,
        )
        + REGISTERS_UNDER_WGMMA
    )


RATE = 2
"""Times as many products a clock as of 16 bits: `tensor_flops` count those."""


def launch_work(problem: AttentionProblem, genes: Fp8WgmmaGenes, registers: int) -> tuple[LaunchWork, ...]:
    """The one launch: flash_wgmma's, but for the tiles of keys, what a block keeps, and the bytes of Q."""
    [launch] = flash.launch_work(problem, genes.flash, registers)
    rows, keys, groups = genes.BLOCK_M, genes.BLOCK_N, warpgroups(genes.flash)
    of_query = 0 if problem.op in ROUNDED else problem.head_dim
    have = moved_registers(genes.flash)[1] or registers_at_launch(genes.flash)
    numbers = dict(launch.genes) | {
        "begins ahead": begins_ahead(problem, genes),
        "spare registers": have - registers_needed(problem, genes),
        "flush tiles": genes.FLUSH_TILES,
        "sum columns": 0,
        "turned": problem.turned,
        "rounds": problem.op in ROUNDED,
        "value parts": genes.VALUE_PARTS,
        "value sums": genes.VALUE_SUMS,
    }
    return (
        replace(
            launch,
            kernel="fp8_wgmma",
            smem_bytes=smem_bytes(problem, genes),
            step=together(variant_step(problem, rows * keys), _step(problem, genes, groups)),
            ends=replace(launch.ends, loaded_bytes=launch.ends.loaded_bytes - rows * of_query),
            genes=numbers,
        ),
    )


def _step(problem: AttentionProblem, genes: Fp8WgmmaGenes, groups: int) -> Step:
    """A block's work on a tile of keys, but for a variant's own."""
    rows, keys, value_dim = genes.BLOCK_M, genes.BLOCK_N, problem.head_dim_v
    scores, polynomial = rows * keys, genes.POLYNOMIAL_EIGHTHS / 8
    shared = rows * value_dim / genes.FLUSH_TILES if genes.SUM_PLACE == "shared" else 0
    a_score = flash.SCORE_OPERATIONS["always"] + 0.5
    kept = float(rows * value_dim)
    lanes = scores * (a_score + 5 * polynomial) + kept + shared
    width = up_to(problem.head_dim, 32) + value_dim
    tile_bytes = keys * (up_to(problem.head_dim, 128) + value_dim)
    loaded = 0 if problem.turned else keys * up_to(value_dim, 128)
    reads = groups * tile_bytes + (0 if genes.Q_IN_REGISTERS else rows * up_to(problem.head_dim, 32))
    return Step(
        2.0 * scores * width / RATE,
        lanes,
        scores * (1 - polynomial),
        lanes / WARP + scores * (1 - polynomial) / WARP + 20 * 4 * groups,
        reads + tile_bytes + 2.0 * loaded + 8.0 * shared,
        keys * (problem.head_dim + value_dim),
        flash.SOFTMAX_WAIT + (40 if genes.PING_PONG else 0),
    )
