"""What the trees may ask of a candidate: how its physical time splits, how it lies on the card, its genes."""

import math
from collections import Counter
from functools import lru_cache

from evoattn.cost.physics import PARTS, Physics
from evoattn.model.dtype import DTYPES
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.scales import GRANULARITIES
from evoattn.model.space import KernelConfig

LEAST = 1e-6
CACHE_LINE = 128
"""Bytes of a line of L2."""
SHARES = {name: f"{name} share" for name in PARTS}
LOOKED_AT = 8
"""Heads whose place in the lines of L2 is looked at: it repeats itself after so many, or nearly."""


def features(
    problem: AttentionProblem, config: KernelConfig, physics: Physics, gpu: GpuSpec, spill_bytes: int = 0
) -> dict[str, float]:
    """By name: those that no weight is part of, and the shares of the physical terms."""
    return _unweighed(problem, config, physics, gpu, spill_bytes) | shares(physics.us, physics.parts)


def shares(us: float, parts: dict[str, float]) -> dict[str, float]:
    """How the physical time splits, and what it is."""
    log_us = math.log(us)
    found = {SHARES[name]: math.log(max(part, LEAST)) - log_us for name, part in parts.items()}
    found["log us"] = log_us
    return found


def fixed_features(
    problem: AttentionProblem, config: KernelConfig, physics: Physics, gpu: GpuSpec, spill_bytes: int = 0
) -> dict[str, float]:
    """By name. Ratios and counts that mean the same on every card; of several launches the one that takes longest is
    looked at more closely. No fitted weight is part of them."""
    return {name: float(value) for name, value in _unweighed(problem, config, physics, gpu, spill_bytes).items()}


def _unweighed(
    problem: AttentionProblem, config: KernelConfig, physics: Physics, gpu: GpuSpec, spill_bytes: int
) -> dict[str, float]:
    """As `fixed_features`, numbers of any kind."""
    longest = max(range(len(physics.works)), key=lambda i: physics.terms[i].chain + physics.terms[i].issue)
    work, terms = physics.works[longest], physics.terms[longest]
    found = {
        "launches": len(physics.works),
        "resident": terms.resident,
        "beside": terms.beside,
        "waves": min(terms.waves, 64.0),
        "tail": terms.tail,
        "resident warps": work.warps * terms.beside,
        "warps": work.warps,
        "registers": work.registers,
        "smem KB": work.smem_bytes / 1024,
        "steps": work.steps,
        "uneven": work.most_steps / work.steps if work.steps else 1.0,
        "blocks per SM": min(work.blocks / gpu.sm_count, 256.0),
        "longest first": work.longest_first,
        "log in flight": math.log2(max(1.0, work.in_flight_bytes * terms.beside)),
        "log scratch": math.log2(1 + sum(w.scratch_bytes for w in physics.works)),
        "visit share": work.visit_share,
        "spills": spill_bytes,
    }
    for launch in physics.works:
        found |= launch.genes
    found |= _of_problem(problem, gpu)
    found |= _of_tile(problem, config)
    return found


@lru_cache(maxsize=64)  # the same for all candidates
def _of_problem(problem: AttentionProblem, gpu: GpuSpec) -> dict[str, float]:
    heads_apart = problem.layout == "bshd" and problem.kv_heads > 1
    return {
        "of L2": math.log2(problem.bytes / gpu.l2_bytes),
        "head dim": problem.head_dim,
        "log queries": math.log2(_mean_length(problem, 0)),
        "log keys": math.log2(_mean_length(problem, 1)),
        "longest keys": problem.seqlen_k / _mean_length(problem, 1),
        "log group": math.log2(problem.group_size),
        "log heads per SM": math.log2(problem.batch * problem.heads / gpu.sm_count),
        "log K/V heads": math.log2(problem.batch * problem.kv_heads),
        "causal": problem.causal,
        "element bytes": problem.element_bytes,
        "heads apart": heads_apart,
        "lines of a row": _lines_of_a_row(problem) if heads_apart else 1.0,
        "window": bool(problem.window),
        "sink": problem.sink,
        "softcap": problem.softcap > 0,
        "biased": problem.alibi or bool(problem.bias or problem.score),
        "varlen": bool(problem.varlen),
        "keys in use": bool(problem.seqused),
        "page": problem.page,
        "K/V bytes": DTYPES[problem.kv or problem.dtype].bytes,
        "scales": GRANULARITIES.index(problem.scales),
        "turned": problem.turned,
        "value dim": problem.head_dim_v,
    }


def _lines_of_a_row(problem: AttentionProblem) -> float:
    """Lines of L2 that a row of K touches where the rows of other heads lie between, over those that it would fill."""
    row = problem.head_dim * problem.element_bytes
    places = [head * row % CACHE_LINE for head in range(min(problem.kv_heads, LOOKED_AT))]
    return sum(math.ceil((place + row) / CACHE_LINE) for place in places) / len(places) * CACHE_LINE / row


def _of_tile(problem: AttentionProblem, config: KernelConfig) -> dict[str, float]:
    rows, keys = int(config["BLOCK_M"]), int(config.params.get("KEYS_AT_ONCE") or config["BLOCK_N"])
    if config.family == "flash_wgmma":  # which multiplies as many at least: the trees have seen no fewer
        rows = max(64, rows)
    return {
        "tile rows": rows,
        "tile keys": keys,
        "full rows": _full(problem, 0, rows),
        "full keys": _full(problem, 1, keys),
    }


@lru_cache(maxsize=256)
def _lengths(problem: AttentionProblem) -> tuple[dict[int, int], dict[int, int]]:
    """How many sequences have how many queries, and how many keys; those without a query do no work."""
    if not problem.varlen and not problem.seqused:
        return {problem.seqlen_q: problem.batch}, {problem.seqlen_k: problem.batch}
    found = [lengths for lengths in problem.sequences if lengths[0]]
    return Counter(rows for rows, _ in found), Counter(max(1, keys) for _, keys in found)


def _mean_length(problem: AttentionProblem, which: int) -> float:
    """Queries (0) or keys in use (1) of a sequence, on average."""
    lengths = _lengths(problem)[which]
    return sum(length * count for length, count in lengths.items()) / sum(lengths.values())


@lru_cache(maxsize=1024)  # candidates of one problem have few tiles
def _full(problem: AttentionProblem, which: int, tile: int) -> float:
    """The part of the tiles of so many queries (0) or keys (1) that sequences fill."""
    lengths = _lengths(problem)[which].items()
    return sum(n * count for n, count in lengths) / sum(math.ceil(n / tile) * tile * count for n, count in lengths)
