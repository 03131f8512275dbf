"""A variant of attention, of plain tensors: a kernel compiled for what is asked, or torch where there is none."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from evoattn.backends.base import LaunchError
from evoattn.ops import asked, current, fallback, ordinary
from evoattn.ops.given_out import needs_copy
from evoattn.ops.kernels import COLD
from evoattn.ops.plan import NO_MEMORY, CallPlan, Refusal
from evoattn.ops.runtime import GRADIENTS, NoKernel, Runtime
from evoattn.ops.variant import Variant

FREED = -1
"""In place of the address of a tensor whose memory was freed: 0 says that there is no such tensor."""
WATCHED = "variants of attention are not served in compiled code, transforms and traces"


def answer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    variant: Variant,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    causal: str,
    return_lse: bool,
    out: Tensor | None,
    strict: bool,
    compiled: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The answer, and with `return_lse` the log-sum-exp; see `evoattn.attention`. `compiled`: the call comes from
    compiled code. Raises `NoKernel` under `strict` where no kernel serves it, and `ValueError` for a variant that does
    not fit."""
    asked_for = query, key, value, variant, is_causal, scale, enable_gqa, causal, return_lse, out
    done = by_kernel(current.runtime(), *asked_for, compiled)
    if not isinstance(done, str):
        return done
    variant.require(query, key)
    return by_torch(done, *asked_for, strict)


def by_torch(
    reason: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    variant: Variant,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    causal: str,
    return_lse: bool,
    out: Tensor | None,
    strict: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Torch's answer, where `reason` says why no kernel gives one. Raises `NoKernel` under `strict`."""
    if strict:
        raise NoKernel(f"No kernel serves this call: {reason}.")
    return fallback.varied(query, key, value, variant, is_causal, scale, enable_gqa, causal, return_lse, out)


def why_not_tensors(query: Tensor, variant: Variant) -> str | None:
    """One reason, without a full stop, why kernels cannot read the tensors of a variant as they are, or None."""
    if any(t.is_neg() for t in variant.tensors):
        return ordinary.WATCHED
    if variant.bias is not None and variant.bias.dtype != query.dtype:
        return f"the bias is {variant.bias.dtype} beside {query.dtype}, which kernels would round"
    return None


def by_kernel(
    runtime: Runtime,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    variant: Variant,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    causal: str,
    return_lse: bool,
    out: Tensor | None,
    compiled: bool = False,
) -> Tensor | tuple[Tensor, Tensor] | str:
    """The answer, or one reason, without a full stop, why no kernel gives it. Raises `ValueError` for a variant that
    does not fit."""
    try:
        if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, *variant.tensors)):
            return GRADIENTS
        if any(t.device != query.device for t in variant.tensors):
            return asked.SEVERAL_DEVICES
    except AttributeError:  # a look at their types beforehand would cost every call
        variant.require_tensors()
        raise
    if reason := why_not_tensors(query, variant):
        return reason
    if out is not None and needs_copy(out, query, key, value, *variant.tensors):
        done = by_kernel(
            runtime, query, key, value, variant, is_causal, scale, enable_gqa, causal, return_lse, None, compiled
        )
        if isinstance(done, str):
            return done
        return out.copy_(done) if isinstance(done, Tensor) else (out.copy_(done[0]), done[1])
    call: tuple[object, ...] = (
        *(query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride()),
        *(query.dtype, key.dtype, value.dtype, query.get_device(), key.get_device(), value.get_device()),
        *(is_causal, causal, scale, enable_gqa, return_lse, None if out is None else out.stride()),
        *variant.form(query, key),
    )
    plans = runtime.plans
    plan = plans.get(call)
    if plan is None:
        variant.require(query, key)
        fields = variant.fields(is_causal, query, key)
        if scale is not None:
            fields["scale"] = float(scale)
        choice = runtime.choice(query, key, value, is_causal, scale, enable_gqa, causal, return_lse, out, fields)
        plan = choice if isinstance(choice, Refusal) else runtime.prepare(choice, query.get_device())
        if not (isinstance(plan, Refusal) and (plan.reason is COLD or asked.may_share(key, value))):
            runtime.keep(plans, call, plan)
    if isinstance(plan, Refusal):
        return plan.reason
    return _run(runtime, plan, query, key, value, variant, out, compiled)


def _run(
    runtime: Runtime,
    plan: CallPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    variant: Variant,
    out: Tensor | None,
    compiled: bool,
) -> Tensor | tuple[Tensor, Tensor] | str:
    """As `by_kernel`, of a decided call."""
    assert runtime.platform is not None
    terms = variant.for_kernel(query, key)  # named until the launches are enqueued
    answer = asked.out_like(query, value) if out is None else out
    lse = None
    if plan.lse_shape is not None:
        lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=query.device)
    addresses = tuple(0 if term is None else term.data_ptr() or FREED for term in terms)
    if FREED in addresses:
        return NO_MEMORY
    try:
        here = runtime.platform.current_device() == plan.index
        with contextlib.nullcontext() if here else runtime.platform.guard(plan.index):
            if reason := plan.run(query, key, value, answer, lse, compiled, addresses):
                return reason
    except LaunchError as error:
        return runtime.fail(plan.kernel, str(error).rstrip("."))
    return answer if lse is None else (answer, lse)
