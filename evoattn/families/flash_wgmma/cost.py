"""How long a `flash_wgmma` kernel should take, from its config alone: a rank, never a time.

Its units work asynchronously, so that counts of instructions say little. Instead, one step (a K/V tile of one block)
takes shares of what the blocks of an SM keep busy together (tensor cores, exponential units, issue slots) and of the
chain that one warpgroup waits for by itself; the step is repeated over tiles and waves. Costs some 20 µs, where the
interpreter takes up to a second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from evoattn.families.flash_wgmma.genes import FlashWgmmaGenes
from evoattn.families.flash_wgmma.registers import WARPGROUP_ROWS, threads
from evoattn.families.flash_wgmma.resources import smem_bytes
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem

LANES, SCHEDULERS = 32, 4


@dataclass(frozen=True)
class Constants:
    """Fitted to measured kernels; clocks unless said otherwise."""

    tensor: float
    special: float
    issue: float
    chain: float
    """Shares of a step that are not hidden behind the others.

    They add up: a norm that takes the longest fitted worse.
    """
    latency: float
    """Of the dependent instructions of one softmax: maximum, shuffles, barriers, the first results of a product."""
    hidden: float
    """Share of P V that OVERLAP hides where the compiler waits for it before the exponentials: in every form but
    `lazy_after`."""
    launch: float
    block: float
    """First loads and last stores of a block; `tile` those of a persistent block's next tile."""
    tile: float
    split: float
    """For each block of a cluster that sends its result to another."""
    claim: float
    """For each claimed tile: the answer of the counter."""
    hand_over: float
    """For the two results that a block of a balanced schedule leaves and takes."""
    longest: float
    """Share of the longest tile's excess over the mean that is not hidden by other tiles, under a causal mask."""
    factors: tuple[tuple[str, float], ...]
    """Factors for genes that no term above knows."""


# Fitted by least squares of logarithms, those within 8 % of a problem's best three times as heavy, to 2,688 of 24,633
# kernels that today's space holds, measured on 18 problems (H100 and H200, 2026-11-21). Spearman's correlation with the
# problem left out of the fit, over all kernels and over the best third of them: 0.81 and 0.35 (seed_h100), 0.57 and
# 0.51 (fa_d64_2k), 0.78 and 0.57 (fa_d128_4k_causal), 0.71 and 0.25 (fa_d64_16k_causal), 0.65 and -0.03
# (fa_d128_512_causal, whose best are 20 % faster than it says), 0.61 and 0.19 (seed_l4_s512). What is balanced was
# added afterwards, from five pairs of kernels (`tests/test_wgmma_cost.py`).
FITTED = Constants(
    tensor=0.42,
    special=0.226,
    issue=1.29,
    chain=0.631,
    latency=209,
    hidden=0.55,
    launch=3350,
    block=1350,
    tile=587,
    split=643,
    claim=132,
    hand_over=8000,
    longest=0.639,
    factors=(
        ("ping_pong", 0.985),
        ("q_in_registers", 0.977),
        ("rows", 1.01),
        ("one_stage", 1.06),
        ("deep", 0.984),
        ("causal_skip", 0.97),
        ("lazy", 1.05),
        ("lazy_after", 1.08),
        ("sequential", 0.975),
        ("balanced", 1.01),
    ),
)


@dataclass(frozen=True)
class Step:
    """What a K/V tile of one block takes by itself, in clocks of an SM's unit. `tensor` is (Q Kᵀ, P V)."""

    tensor: tuple[float, float]
    special: float
    issue: float


def step_work(problem: AttentionProblem, genes: FlashWgmmaGenes, gpu: GpuSpec) -> Step:
    """Unit clocks of a BLOCK_M × BLOCK_N tile.

    Instructions a score: scale, exponential, sum, half a conversion, and what RESCALE adds.
    """
    rows, scores = genes.BLOCK_M, genes.BLOCK_M * genes.BLOCK_N
    polynomial = genes.POLYNOMIAL_EIGHTHS / 8
    a_score = 3.5 + {"always": 1.0, "lazy_5": 0.5, "lazy_8": 0.5, "lazy_after": 0.0}[genes.RESCALE]
    a_score += 5 * polynomial
    rescaled = rows * problem.head_dim if genes.RESCALE == "always" else 0
    a_column = 2 * scores / gpu.tensor_flops_per_clock
    products = a_column * (math.ceil(problem.head_dim / 16) * 16), a_column * problem.head_dim
    return Step(
        products, scores * (1 - polynomial) / gpu.exp2_per_clock, (scores * a_score + rescaled) / LANES / SCHEDULERS
    )


def step_clocks(step: Step, genes: FlashWgmmaGenes, resident: float, c: Constants) -> float:
    """Clocks between two tiles of a block with `resident` blocks on its SM."""
    warpgroups = genes.BLOCK_M // WARPGROUP_ROWS
    qk, pv = (clocks / warpgroups for clocks in step.tensor)
    softmax = max(step.special, step.issue) / warpgroups + c.latency
    if not genes.OVERLAP:
        chain = qk + softmax + pv
    elif genes.RESCALE == "lazy_after":
        chain = qk + max(softmax, pv)
    else:
        chain = qk + softmax + (1 - c.hidden) * pv
    return resident * (c.tensor * sum(step.tensor) + c.special * step.special + c.issue * step.issue) + c.chain * chain


def _key_tiles(problem: AttentionProblem, genes: FlashWgmmaGenes) -> list[int]:
    """K/V tiles that a block of each row block visits."""
    tiles = []
    for first in range(0, problem.seqlen_q, genes.BLOCK_M):
        last = min(first + genes.BLOCK_M, problem.seqlen_q)
        keys = problem.masking.visible_keys(first, last, problem.seqlen_q, problem.seqlen_k)
        tiles.append(math.ceil(math.ceil(max(1, keys.stop) / genes.BLOCK_N) / genes.KEY_SPLIT))
    return tiles


def _factors_of(genes: FlashWgmmaGenes) -> dict[str, bool]:
    """Which of `Constants.factors` apply."""
    return {
        "ping_pong": genes.PING_PONG,
        "q_in_registers": genes.Q_IN_REGISTERS,
        "rows": genes.STORE == "rows",
        "one_stage": genes.STAGES == 1,
        "deep": genes.STAGES > 2,
        "causal_skip": genes.CAUSAL_SKIP,
        "lazy": genes.RESCALE in ("lazy_5", "lazy_8"),
        "lazy_after": genes.RESCALE == "lazy_after",
        "sequential": not genes.OVERLAP,
        "balanced": genes.SCHEDULE == "balanced",
    }


def relative_cost(
    problem: AttentionProblem, genes: FlashWgmmaGenes, gpu: GpuSpec, registers: int, c: Constants = FITTED
) -> float:
    """The estimate in clocks of one SM for a kernel of `registers` a thread.

    Infinite if no block of it fits on an SM.
    """
    resident = gpu.blocks_resident(registers, threads(genes), smem_bytes(problem, genes))
    if not resident:
        return math.inf
    step, tiles = step_work(problem, genes, gpu), _key_tiles(problem, genes)
    mean, blocks = sum(tiles) / len(tiles), len(tiles) * problem.heads * problem.batch * genes.KEY_SPLIT
    rounds = blocks / gpu.sm_count / resident
    visited = mean + c.longest * (max(tiles) - mean) / max(1.0, rounds)
    if genes.SCHEDULE == "single":
        of_an_sm = math.ceil(blocks / gpu.sm_count)
        full, rest = divmod(of_an_sm, resident)
        a_block = c.block + c.split * (genes.KEY_SPLIT - 1)
        clocks = full * (a_block + visited * step_clocks(step, genes, resident, c))
        clocks += a_block + visited * step_clocks(step, genes, rest, c) if rest else 0
    else:
        claimed, balanced = (schedule == genes.SCHEDULE for schedule in ("claimed", "balanced"))
        turns = rounds + 0.5 if claimed else rounds if balanced else math.ceil(rounds)
        clocks = (
            c.block
            + turns * (c.tile + claimed * c.claim + visited * step_clocks(step, genes, resident, c))
            + balanced * c.hand_over
        )
    clocks += c.launch
    applies = _factors_of(genes)
    return clocks * math.prod(factor for name, factor in c.factors if applies[name])
