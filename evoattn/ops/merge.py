"""The merge of partial answers by a kernel, in place of some ten of PyTorch's."""

from __future__ import annotations

import torch
from torch import Tensor

from evoattn.model.merge import NARROW
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.ops.arguments import is_ordinary
from evoattn.ops.call import DTYPES, Call, strided
from evoattn.ops.choice import Choice, Refusal
from evoattn.ops.plan import COLD, CallPlan
from evoattn.ops.runtime import Runtime, current


def merged(parts: Tensor, sums: Tensor, out: Tensor, lse: Tensor) -> bool:
    """Whether a kernel has written the merge of `parts` `[parts, …, head_dim]` with the log-sum-exps `sums`
    `[parts, …]`, float32, to `out` and `lse`, of the same shapes without the parts. All are contiguous."""
    runtime = current.runtime()
    if runtime.platform is None or not parts.numel() or not _can_be_read(parts, sums, out):
        return False
    known = "merge", parts.shape, parts.dtype, out.dtype, parts.get_device()
    plan = runtime.plans.get(known)
    if plan is None:
        plans = runtime.plans
        plan = _planned(runtime, parts, out)
        if not (isinstance(plan, Refusal) and plan.reason is COLD):
            runtime.keep(plans, known, plan)
    if not isinstance(plan, CallPlan):
        return False
    tensors = parts, sums, parts, out, lse
    return runtime.differentiates(plan, Call(parts, sums, parts), tensors, ())


def _can_be_read(parts: Tensor, sums: Tensor, out: Tensor) -> bool:
    """Whether tensors are as kernels read them, and no gradient is wanted."""
    if torch.compiler.is_compiling() or not is_ordinary(parts, sums, out) or sums.dtype != torch.float32:
        return False
    if torch.is_grad_enabled() and (parts.requires_grad or sums.requires_grad or out.requires_grad):
        return False
    if parts.dim() < 2 or sums.shape != parts.shape[:-1] or out.shape != parts.shape[1:]:
        return False  # what torch says of these is right
    return all(one.is_contiguous() and one.device == parts.device for one in (parts, sums, out))


def _planned(runtime: Runtime, parts: Tensor, out: Tensor) -> CallPlan | Refusal:
    """The plan for tensors of these shapes and dtypes."""
    platform, index = runtime.platform, parts.get_device()
    wide = parts.dtype == torch.float32
    if platform is None or parts.device.type != runtime.device_type or out.dtype not in DTYPES:
        return Refusal("no kernel takes such tensors")
    if not (wide or parts.dtype == out.dtype) or (gpu := platform.spec(index)) is None:
        return Refusal("no kernel takes such tensors")
    rows, dim = out.numel() // out.shape[-1], out.shape[-1]
    try:
        made = AttentionProblem(
            1, 1, 1, rows, parts.shape[0], dim, DTYPES[out.dtype], lse=True, op="merge" if wide else NARROW
        )
    except ProblemError as error:
        return Refusal(str(error).rstrip("."))
    choice = runtime.choose(strided(made), gpu, index=index, promised=True)  # PyTorch has no such kernel to race
    return runtime.prepare(choice, index) if isinstance(choice, Choice) else choice
