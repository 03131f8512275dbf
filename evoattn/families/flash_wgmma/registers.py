"""Registers of a flash_wgmma kernel: what a thread has at launch and after setmaxnreg, and about how many it needs."""

from __future__ import annotations

import math

from evoattn.families.flash_wgmma.genes import FlashWgmmaGenes
from evoattn.families.residency import register_cap
from evoattn.model.problem import AttentionProblem

WARPGROUP = 128
WARPGROUP_ROWS = 64
PRODUCER_REGISTERS = {1: 40, 2: 24, 3: 32, 4: 24}
"""Per thread of the producer warpgroup after setmaxnreg, by consumer warpgroups; ran on an H100
(docs/sources.md)."""
MAX_CONSUMER_REGISTERS = 240
FIXED_REGISTERS = 28
"""Addresses, counters, row sums and shifts beside the operands of wgmma.

With the terms of `registers_needed` fitted to 1,050 random configs near the limit, compiled by ptxas 13.0; 94 of them
spilled, and none of those that these terms accept.
"""
PERSISTENT_REGISTERS = 4
UNEVEN_ROWS_REGISTERS = 13
"""Replaces PERSISTENT_REGISTERS when STORE=rows and head_dim is no multiple of 64: half of 38 such configs spilled with
4, and five still with 9."""
WIDE_HEAD_DIM = 128
"""Above it ptxas keeps more addresses and moves parts of O: 5 registers for each 32 columns, and more where a loop goes
over tiles."""
WIDE_PERSISTENT_REGISTERS = 12
"""With 4, two of 330 kernels of head_dim 136 to 256 spilled, both with SCHEDULE=claimed and without OVERLAP."""
WIDE_ROWS_REGISTERS = 32
"""Replaces WIDE_PERSISTENT_REGISTERS when STORE=rows, where with 26 one of 107 kernels still spilled."""
MERGE_REGISTERS = 32
"""Of a balanced schedule, beside its own O and that of another block, which ptxas reads in one go: with less, tight
configs of head_dim 112 (30) and 184 to 256 (60) spilled, of some 800 that were compiled."""
WIDE_MERGE_REGISTERS = 60
LAZY_AFTER_REGISTERS = 16
"""For the product that brings lost scores back, and one more for 16 columns of a row; found as FIXED_REGISTERS."""
TWO_HEADS_REGISTERS = 12
"""Of GROUP_ROWS with slopes, a bias or an expression, which a thread's two rows may have of two heads: of 16 configs
with up to 12 to spare two spilled, with 0 and with 8."""
AHEAD_ROWS_REGISTERS = 16
"""That must be left to begin a tile of rows ahead with STORE=rows: of 109 configs with less 61 spilled, of 16 with as
many none."""
AHEAD_MERGE_REGISTERS = 16
"""The same of a balanced schedule, whose merge then has S beside it: all eleven that had fewer spilled, of ten others
one, by rows."""
REGISTERS_UNDER_WGMMA = 26
"""Registers that ptxas keeps below and above the operands of one wgmma: with fewer at launch it refuses (C7602)."""


def warpgroups(genes: FlashWgmmaGenes) -> int:
    """Consumer warpgroups."""
    return genes.BLOCK_M // WARPGROUP_ROWS


def producer_warps(genes: FlashWgmmaGenes) -> int:
    return 4 if genes.PRODUCER == "warpgroup" else 1


def threads(genes: FlashWgmmaGenes) -> int:
    """Threads per block."""
    return WARPGROUP * warpgroups(genes) + 32 * producer_warps(genes)


def registers_at_launch(genes: FlashWgmmaGenes) -> int:
    """Registers per thread under the launch bounds."""
    return register_cap(threads(genes) // 32, genes.BLOCKS_PER_SM)


def moved_registers(genes: FlashWgmmaGenes) -> tuple[int, int]:
    """(producer's, consumers') registers per thread after setmaxnreg, (0, 0) without.

    A block owns what it had at launch: W·c + p <= (W + 1)·launch, or an increase would wait forever (docs/sources.md).
    """
    if genes.PRODUCER != "warpgroup":
        return 0, 0
    consumers, launch = warpgroups(genes), min(registers_at_launch(genes) + 1, 256) // 8 * 8
    producer = PRODUCER_REGISTERS[consumers]
    consumer = ((consumers + 1) * launch - producer) // consumers // 8 * 8
    return producer, min(consumer, MAX_CONSUMER_REGISTERS)


def _persistent_registers(value_dim: int, by_rows: bool) -> int:
    """What a loop over tiles of rows keeps, with `by_rows` its addresses of the rows of O."""
    if value_dim > WIDE_HEAD_DIM:
        return WIDE_ROWS_REGISTERS if by_rows else WIDE_PERSISTENT_REGISTERS
    return UNEVEN_ROWS_REGISTERS if by_rows and value_dim % 64 else PERSISTENT_REGISTERS


def registers_needed(problem: AttentionProblem, genes: FlashWgmmaGenes) -> int:
    """Estimate of the registers per consumer thread below which ptxas spills or serializes wgmma.

    S, P, O, Q if it stays, and what the other genes keep beside them.
    """
    block_n, wide = genes.BLOCK_N, max(0, problem.head_dim - WIDE_HEAD_DIM, problem.head_dim_v - WIDE_HEAD_DIM)
    operands = block_n // 2 + block_n // 4 + problem.head_dim_v // 2
    if genes.Q_IN_REGISTERS:
        operands += 4 * math.ceil(problem.head_dim / 16)
    others = FIXED_REGISTERS + math.ceil(wide * 5 / 32)
    if genes.SCHEDULE != "single":
        others += _persistent_registers(problem.head_dim_v, genes.STORE == "rows")
    if genes.RESCALE == "lazy_after":
        others += LAZY_AFTER_REGISTERS + problem.head_dim // 16 + wide // 8
    if genes.GROUP_ROWS and (problem.alibi or problem.bias or problem.score):
        others += TWO_HEADS_REGISTERS
    if problem.bias:  # one register for two keys of two rows, loaded beside the product
        others += block_n // 4
    return max(operands + others, _merge_registers(problem.head_dim_v) if _adds_results(genes) else 0)


def _adds_results(genes: FlashWgmmaGenes) -> bool:
    """Whether a block adds an O of global memory to its own."""
    return genes.SCHEDULE == "balanced" or (genes.PART_TILES > 0 and genes.KEY_SPLIT == 1)


def _merge_registers(value_dim: int) -> int:
    return value_dim + (WIDE_MERGE_REGISTERS if value_dim > WIDE_HEAD_DIM else MERGE_REGISTERS)


def begins_ahead(problem: AttentionProblem, genes: FlashWgmmaGenes) -> bool:
    """Whether a tile of rows begins beside the last product of the one before (`AHEAD` in the template).

    Q must come before its turn, which it does where the last one has gone into registers; the ring must hold V of that
    product and of the keys that are skipped; and there must be registers for two tiles of rows at once, which three
    blocks per SM leave too few of (64×48 tiles of head_dim 64 spilled 16 bytes).
    """
    skipped = math.ceil((genes.BLOCK_M - WARPGROUP_ROWS) / genes.BLOCK_N) if genes.CAUSAL_SKIP else 0
    if genes.SCHEDULE == "single" or not (genes.OVERLAP and genes.Q_IN_REGISTERS):
        return False
    if skipped >= genes.STAGES or genes.BLOCKS_PER_SM > 2:
        return False
    registers = moved_registers(genes)[1] or registers_at_launch(genes)
    if (
        _adds_results(genes)
        and _merge_registers(problem.head_dim_v) + genes.BLOCK_N // 2 + AHEAD_MERGE_REGISTERS > registers
    ):
        return False
    wanted = AHEAD_ROWS_REGISTERS if genes.STORE == "rows" else 0
    if genes.RESCALE == "lazy_after":  # 128×112 tiles spilled with 4 to spare, 192×80 of head_dim 64 not with 0
        wanted += max(0, problem.head_dim - 64) // 8
    return registers_needed(problem, genes) + wanted <= registers


def widest_wgmma(problem: AttentionProblem, genes: FlashWgmmaGenes) -> int:
    """Registers per thread that the widest wgmma needs at launch."""
    return max(genes.BLOCK_N // 2 + 4 * genes.Q_IN_REGISTERS, problem.head_dim_v // 2 + 4) + REGISTERS_UNDER_WGMMA
