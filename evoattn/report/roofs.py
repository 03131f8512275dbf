"""The limits of a GPU for one problem."""

from __future__ import annotations

from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.report.rows import Roof


def roofs(problem: AttentionProblem, spec: GpuSpec) -> tuple[Roof, ...]:
    """What bounds the problem on the GPU, in TFLOP/s at its boost clock.

    Matrix and CUDA-core peaks, `mma.sync` where it reaches less than `wgmma`; the exponentials: one for each
    4·head_dim FLOP, `exp2_per_clock` per clock and SM; DRAM: the problem's fewest bytes.
    """
    intensity = problem.flops / problem.bytes
    clocks = spec.sm_count * spec.boost_clock_ghz / 1e3  # SM clocks in 1e12 per second
    exponentials = 4 * problem.head_dim * spec.exp2_per_clock * clocks
    found = [Roof("DRAM", intensity * spec.dram_gb_per_s / 1e3, spec.dram_gb_per_s)]
    if problem.element.on_tensor_cores:
        matrix = spec.peak_tflops(problem.dtype)
        found.append(Roof(f"tensor cores, {problem.dtype}", matrix, None))
        if spec.mma_sync_share < 1:
            found.append(Roof("tensor cores by mma.sync", matrix * spec.mma_sync_share, None))
    found.append(Roof("CUDA cores, fp32", spec.peak_tflops("fp32"), None))
    found.append(Roof(f"exponentials at head_dim {problem.head_dim}", exponentials, None))
    return tuple(found)
