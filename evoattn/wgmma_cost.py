"""How long a `flash_wgmma` kernel should take, from its config alone: a rank, never a time.

Its units work asynchronously, so that counts of instructions say little. Instead, one step (a K/V tile of one block) takes the longest of
what the blocks of an SM keep busy together (tensor cores, exponential units, issue slots) and of the chain that one warpgroup waits for by
itself; the step is repeated over tiles and waves. Costs some 20 µs, where the interpreter takes up to a second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from evoattn.config import KernelConfig
from evoattn.families.flash_wgmma import smem_bytes
from evoattn.families.wgmma_registers import WARPGROUP_ROWS, threads
from evoattn.gpu import GpuSpec
from evoattn.problem import AttentionProblem

LANES, SCHEDULERS = 32, 4


@dataclass(frozen=True)
class Constants:
    """Fitted to measured kernels; clocks unless said otherwise."""

    tensor: float
    special: float
    issue: float
    chain: float
    """Shares of the four bounds of a step."""
    sharpness: float
    """Exponent of their norm: 1 adds them up, more takes the longest."""
    latency: float
    """Of the dependent instructions of one softmax: maximum, shuffles, barriers, the first results of a product."""
    hidden: float
    """Share of P V that OVERLAP hides where the compiler waits for it before the exponentials (no LATE_WAIT)."""
    launch: float
    block: float
    """First loads and last stores of a block; `tile` those of a persistent block's next tile."""
    tile: float
    output: float
    """For each 64 × 64 outputs of a block."""
    split: float
    """For each block of a cluster that sends its result to another."""
    reset: float
    """The launch that resets the counter of claimed tiles."""
    longest: float
    """Share of the longest tile's excess over the mean that is not hidden by other tiles, under a causal mask."""
    factors: tuple[tuple[str, float], ...]
    """Factors for genes that no term above knows."""


# Fitted by least squares of logarithms, near the best twice as heavy, to 2,326 of 28,621 kernels measured on 15 problems (H100,
# 2026-11-21), none of them with SCORES_AHEAD or LATE_WAIT. Spearman's correlation a problem: 0.86 (seed_h100), 0.75 (fa_d64_2k), 0.78
# (fa_d128_4k_causal), 0.48 at the least (seed_s128_b8h4); the interpreter's counts gave 0.3.
FITTED = Constants(
    tensor=0.71, special=0.224, issue=1.52, chain=0.841, sharpness=1.44, latency=304, hidden=0.625, launch=1430, block=2480, tile=1630,
    output=708, split=487, reset=3990, longest=0.424, factors=(
        ("ping_pong", 0.969), ("q_in_registers", 0.971), ("rows", 1.02), ("one_stage", 1.1), ("warpgroup", 1.01), ("causal_skip", 0.986),
        ("lazy_after", 1.03), ("all_heads", 1.08), ("claimed", 0.976)))


@dataclass(frozen=True)
class Step:
    """What a K/V tile of one block takes by itself, in clocks of an SM's unit. `tensor` is (Q Kᵀ, P V)."""

    tensor: tuple[float, float]
    special: float
    issue: float


def step_work(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> Step:
    """Unit clocks of a BLOCK_M × BLOCK_N tile. Instructions a score: scale, exponential, sum, half a conversion, and what RESCALE adds."""
    rows, scores = config["BLOCK_M"], config["BLOCK_M"] * config["BLOCK_N"]
    polynomial = config["POLYNOMIAL_EIGHTHS"] / 8
    a_score = 3.5 + {"always": 1.0, "lazy_5": 0.5, "lazy_8": 0.5, "lazy_after": 0.0}[config["RESCALE"]]
    a_score += 5 * polynomial + config["SCORES_AHEAD"]
    rescaled = rows * problem.head_dim if config["RESCALE"] == "always" else 0
    products = tuple(2 * scores * width / gpu.tensor_flops_per_clock for width in (math.ceil(problem.head_dim / 16) * 16, problem.head_dim))
    return Step(products, scores * (1 - polynomial) / gpu.exp2_per_clock, (scores * a_score + rescaled) / LANES / SCHEDULERS)


def step_clocks(step: Step, config: KernelConfig, resident: float, c: Constants) -> float:
    """Clocks between two tiles of a block with `resident` blocks on its SM."""
    warpgroups = config["BLOCK_M"] // WARPGROUP_ROWS
    qk, pv = (clocks / warpgroups for clocks in step.tensor)
    softmax = max(step.special, step.issue) / warpgroups + c.latency
    late = config["LATE_WAIT"] or config["RESCALE"] == "lazy_after"
    if not config["OVERLAP"]:
        chain = qk + softmax + pv
    elif not late:
        chain = (0 if config["SCORES_AHEAD"] else qk) + softmax + (1 - c.hidden) * pv
    else:
        chain = max(softmax, qk + pv) if config["SCORES_AHEAD"] else qk + max(softmax, pv)
    bounds = (c.tensor * resident * sum(step.tensor), c.special * resident * step.special, c.issue * resident * step.issue, c.chain * chain)
    return sum(bound ** c.sharpness for bound in bounds) ** (1 / c.sharpness)


def _key_tiles(problem: AttentionProblem, config: KernelConfig) -> list[int]:
    """K/V tiles that a block of each row block visits."""
    tiles = []
    for first in range(0, problem.seqlen_q, config["BLOCK_M"]):
        last = min(first + config["BLOCK_M"], problem.seqlen_q)
        keys = min(problem.seqlen_k, max(1, last + problem.causal_offset)) if problem.causal else problem.seqlen_k
        tiles.append(math.ceil(math.ceil(keys / config["BLOCK_N"]) / config["KEY_SPLIT"]))
    return tiles


def _genes(config: KernelConfig) -> dict[str, bool]:
    """Which of `Constants.factors` apply."""
    return {
        "ping_pong": config["PING_PONG"], "q_in_registers": config["Q_IN_REGISTERS"], "rows": config["STORE"] == "rows",
        "one_stage": config["STAGES"] == 1, "warpgroup": config["PRODUCER"] == "warpgroup", "causal_skip": config["CAUSAL_SKIP"],
        "lazy_after": config["RESCALE"] == "lazy_after", "all_heads": config["TILE_ORDER"] == "all_heads",
        "claimed": config["SCHEDULE"] == "claimed",
    }


def relative_cost(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, registers: int, c: Constants = FITTED) -> float | None:
    """The estimate in clocks of one SM for a kernel of `registers` a thread. None if no block of it fits on an SM."""
    resident = gpu.blocks_resident(registers, threads(config), smem_bytes(problem, config))
    if not resident:
        return None
    step, tiles = step_work(problem, config, gpu), _key_tiles(problem, config)
    mean, blocks = sum(tiles) / len(tiles), len(tiles) * problem.heads * problem.batch * config["KEY_SPLIT"]
    rounds = blocks / gpu.sm_count / resident
    visited = mean + c.longest * (max(tiles) - mean) / max(1.0, rounds)
    a_block = c.output * config["BLOCK_M"] * problem.head_dim / 4096 + c.split * (config["KEY_SPLIT"] - 1)
    if config["SCHEDULE"] == "single":
        of_an_sm = math.ceil(blocks / gpu.sm_count)
        full, rest = divmod(of_an_sm, resident)
        clocks = full * (c.block + a_block + visited * step_clocks(step, config, resident, c))
        clocks += c.block + a_block + visited * step_clocks(step, config, rest, c) if rest else 0
    else:
        turns = math.ceil(rounds) if config["SCHEDULE"] == "fixed" else rounds + 0.5
        clocks = c.block + turns * (c.tile + a_block + visited * step_clocks(step, config, resident, c))
    clocks += c.launch + (c.reset if config["SCHEDULE"] == "claimed" else 0)
    genes = _genes(config)
    return clocks * math.prod(factor for name, factor in c.factors if genes[name])
