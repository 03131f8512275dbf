"""What a trace (`torch.compile`, `torch.export`, fake tensors) takes: the custom op where a kernel may run, torch's own
SDPA elsewhere.

Importing this module imports `torch._dynamo`, which takes a second: `attention` does so inside of a trace only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evoattn.ops import asked, current, fallback
from evoattn.ops.autocast import autocast, has_autocast
from evoattn.ops.custom_op import attention_lse_op, attention_op, is_fake
from evoattn.ops.given_out import require_out
from evoattn.ops.runtime import GRADIENTS, NoKernel
from evoattn.ops.variant import Variant


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def kernels_run_on() -> str:
    """The kind of device that kernels run on in this process, empty if there is none."""
    platform = current.runtime().platform
    return platform.device_type if platform else ""


def why_not_traced(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, scale: float | None) -> str | None:
    """One reason, without a full stop, why a trace takes SDPA at once; what else may speak against a kernel shows when
    it runs.
    """
    kind = kernels_run_on()
    if not kind or not query.device.type == key.device.type == value.device.type == kind:
        return f"the tensors are on the {query.device.type.upper()}"
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return GRADIENTS
    return asked.why_not_shapes(query, key, value, enable_gqa) or asked.why_not_scale(scale)


def takes_variant(query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> bool:
    """Whether a trace takes the op of a variant. Not on devices without kernels, nor where gradients are wanted, nor
    for tensor subclasses, modes and transforms: there torch's own code is traced."""
    if not (torch.compiler.is_compiling() or is_fake(query)) or query.device.type != kernels_run_on():
        return False
    tensors = (query, key, value, *variant.tensors)
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


def traced(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    causal: str,
    return_lse: bool,
    out: Tensor | None,
    strict: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `evoattn.attention`. Raises `NoKernel` under `strict` where no kernel serves the call, and `ValueError` for
    an `out` that does not fit."""
    if has_autocast(query.device.type):
        query, key, value = autocast(query.device.type, query, key, value)
    if out is not None:
        require_out(out, query, value)
    reason = why_not_traced(query, key, value, enable_gqa, scale)
    if reason is not None:
        if strict:
            raise NoKernel(f"No kernel serves this call: {reason}.")
        return fallback.call(query, key, value, is_causal, scale, enable_gqa, causal, return_lse, out)
    lse = None
    if return_lse:
        answer, lse = attention_lse_op(query, key, value, is_causal, causal, scale, strict)
    else:
        answer = attention_op(query, key, value, is_causal, causal, scale, strict)
    answer = answer if out is None else out.copy_(answer)
    return answer if lse is None else (answer, lse)
