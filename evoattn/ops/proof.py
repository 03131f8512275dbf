"""The check of a kernel at its first use on a machine."""

from __future__ import annotations

import torch

from evoattn.backends.base import ContextLost
from evoattn.correctness.cases import device_cases, make_case
from evoattn.correctness.validate import check
from evoattn.families.base import Family
from evoattn.families.built import BuiltKernel
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompiledKernel, CompileInfo
from evoattn.model.space import KernelConfig
from evoattn.ops.cubins import Cubin
from evoattn.ops.kernel import KernelBackend, LoadedKernel
from evoattn.ops.platform import Platform

CASES = ("ragged", "ragged, strided, Sq > Sk")
"""Of the small cases with which a search checks every candidate: two ragged shapes, both layouts, grouped heads."""
SEED = 20


def prove(
    family: Family,
    problem: AttentionProblem,
    config: KernelConfig,
    gpu: GpuSpec,
    cubin: Cubin,
    kernel: LoadedKernel,
    platform: Platform,
) -> str:
    """Empty if the kernel answers right on this machine, else one sentence.

    Two small problems of the same head_dim, dtype and mask, over poisoned outputs between guard bands, judged by
    flash-attention's rule (`correctness.reference.Answer`); the second is run twice and compared bit for bit. A kernel
    that loses the device's context is not right either. Waits for the device.

    Raises what says nothing of the kernel: `LaunchError` where the driver refuses something, torch's errors where there
    is no memory, `ContextLost` where the context was lost before.
    """
    backend = KernelBackend(kernel, platform)
    built = BuiltKernel(family, config, gpu, CompiledKernel(cubin.code, "", CompileInfo()))
    platform.synchronize(kernel.index)  # a fault in what was enqueued before is not this kernel's
    try:
        with platform.guard(kernel.index), torch.no_grad(), torch.autocast(platform.device_type, enabled=False):
            for name, shape, kind in device_cases(problem):
                if name in CASES:
                    case = make_case(name, shape, SEED, backend.device, kind, double=True)
                    result = check(backend, built, case, repeat=name == CASES[-1])
                    if not result.passed:
                        return result.reason
    except ContextLost as error:
        return str(error)
    return ""
