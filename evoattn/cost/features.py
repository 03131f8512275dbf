"""What the trees may ask of a candidate: how its physical time splits, how it lies on the card, its genes."""

from __future__ import annotations

import math

from evoattn.cost.physics import Physics
from evoattn.model.gpu_spec import GpuSpec
from evoattn.model.problem import AttentionProblem

LEAST = 1e-6


def features(problem: AttentionProblem, physics: Physics, gpu: GpuSpec, spill_bytes: int = 0) -> dict[str, float]:
    """By name. Ratios and counts that mean the same on every card; of several launches the one that takes longest is
    looked at more closely."""
    longest = max(range(len(physics.works)), key=lambda i: physics.terms[i].chain + physics.terms[i].issue)
    work, terms = physics.works[longest], physics.terms[longest]
    found = {f"{name} share": math.log(max(us, LEAST) / physics.us) for name, us in physics.parts.items()}
    found |= {
        "log us": math.log(physics.us),
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
        "of L2": math.log2(problem.bytes / gpu.l2_bytes),
        "head dim": problem.head_dim,
        "log queries": math.log2(problem.seqlen_q),
        "log keys": math.log2(problem.seqlen_k),
        "log group": math.log2(problem.group_size),
        "log heads per SM": math.log2(problem.batch * problem.heads / gpu.sm_count),
        "causal": problem.causal,
        "element bytes": problem.element_bytes,
        "ragged steps": math.modf(work.steps)[0],
        "spills": spill_bytes,
    }
    for launch in physics.works:
        found |= launch.genes
    return {name: float(value) for name, value in found.items()}
