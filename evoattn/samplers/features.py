"""A config on a problem as numbers, for models that learn from one problem what to try on another."""

from __future__ import annotations

import math
from typing import Any

from evoattn.families import registry
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, SearchSpace

PROBLEM = (
    "log2 queries",
    "log2 keys",
    "log2 heads",
    "log2 group",
    "head_dim",
    "causal",
    "bytes per element",
    "log2 operations per SM",
    "log2 bytes per SM",
)
LAUNCH = (
    "launches",
    "log2 blocks",
    "threads",
    "shared memory",
    "blocks per SM",
    "log2 waves",
    "last wave",
    "log2 queries per block",
    "log2 operations per block",
)


def problem_features(problem: AttentionProblem, gpu: GpuSpec) -> list[float]:
    """The numbers of PROBLEM."""
    return [
        math.log2(problem.seqlen_q),
        math.log2(problem.seqlen_k),
        math.log2(problem.batch * problem.heads),
        math.log2(problem.group_size),
        float(problem.head_dim),
        float(problem.causal),
        float(problem.element_bytes),
        math.log2(max(1, problem.flops) / gpu.sm_count),
        math.log2(problem.bytes / gpu.sm_count),
    ]


def launch_features(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> list[float]:
    """The numbers of LAUNCH, of the launch that has most threads; registers are not known before the compile."""
    launches = registry.lookup(config.family).launches(problem, config, gpu)
    main = max(launches, key=lambda launch: math.prod(launch.grid) * math.prod(launch.block))
    blocks, threads = math.prod(main.grid), math.prod(main.block)
    resident = max(
        1,
        min(
            int(config.params.get("BLOCKS_PER_SM", 32)),
            gpu.smem_per_sm // (main.smem_bytes + gpu.smem_reserved_per_block),
            gpu.threads_per_sm // threads,
        ),
    )
    waves = blocks / (gpu.sm_count * resident)
    return [
        float(len(launches)),
        math.log2(blocks),
        float(threads),
        float(main.smem_bytes),
        float(resident),
        math.log2(waves),
        waves / math.ceil(waves),
        math.log2(problem.batch * problem.heads * problem.seqlen_q / blocks),
        math.log2(max(1, problem.flops) / blocks),
    ]


def gene_features(space: SearchSpace, params: dict[str, Any]) -> list[float]:
    """One number per gene: log2 of a positive number, else the place of the value among all."""
    return [_number(params[p.name], p.values) for p in space.parameters]


def _number(value: Any, values: tuple[Any, ...]) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return math.log2(value) if value > 0 else -1.0
    return float(values.index(value))
