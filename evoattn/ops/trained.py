"""Calls in eager code that want gradients: a node of autograd whose two passes are the runtime's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from evoattn.ops.arguments import ALIGNMENT
from evoattn.ops.call import Answer, Call
from evoattn.ops.gradients import (
    SECOND,
    Backward,
    Grads,
    are_deterministic,
    empty_grads,
    keep,
    kept,
    names_of,
    places_of,
)
from evoattn.ops.plan import CallPlan
from evoattn.ops.torch_modes import is_ordinary


@dataclass(frozen=True, slots=True)
class Training:
    """The plans of both passes of a call, its words without its tensors, and whether the gradients' bits are the same
    in every run."""

    forward: CallPlan
    backward: CallPlan
    words: Call
    deterministic: bool


class Computes(Protocol):
    """What a node asks of a `Runtime`."""

    def trained(self, call: Call, plan: CallPlan) -> tuple[Tensor, Tensor]: ...
    def gradients(self, given: Backward) -> Grads: ...
    def differentiates(
        self, plan: CallPlan, call: Call, tensors: Sequence[Tensor], backward: Sequence[Tensor | None]
    ) -> bool: ...


def attend(runtime: Computes, call: Call, plans: Training) -> Answer:
    """The answer to a call, and with `return_lse` the log-sum-exp, both differentiable."""
    tensors = call.query, call.key, call.value, *call.terms
    out, lse = _Attention.apply(runtime, call, plans, *tensors)  # type: ignore[no-untyped-call]
    return (out, lse) if call.return_lse else out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, runtime: Computes, call: Call, plans: Training, *tensors: Tensor | None) -> Any:
        out, lse = runtime.trained(call, plans.forward)
        keep(ctx, call, out, lse, plans.words)
        ctx.runtime, ctx.plans = runtime, plans
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> Any:
        runtime, saved = ctx.runtime, ctx.saved_tensors
        recorded = torch.is_grad_enabled()  # then somebody may differentiate what is made here
        if grad is not None and grad_lse is None and not recorded:
            made = _as_planned(runtime, ctx.plans, saved, grad)
            if made is not None:
                return (None, None, None, *made)
        given = kept(ctx, saved, grad, grad_lse)
        call = given.call
        if recorded:
            tensors = call.query, call.key, call.value, given.grad, grad_lse
            found = _Gradients.apply(runtime, given, *tensors)  # type: ignore[no-untyped-call]
        else:
            found = runtime.gradients(given)
        of_terms: list[Tensor | None] = [None] * len(call.terms)
        places = places_of(call)
        for name, of_term in zip(names_of(given.grads), found[3:], strict=True):
            if of_term is not None:
                of_terms[places[name]] = of_term
        return (None, None, None, *found[:3], *of_terms)


def _as_planned(
    runtime: Computes, plans: Training, saved: Sequence[Tensor], grad: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The gradients of query, key and value by the kernel that was planned with the forward pass, where the gradient
    of the answer lies as the answer does; None for all else, whose plan has to be found first."""
    if len(saved) != 5 or are_deterministic(plans.words) != plans.deterministic or plans.backward.kernel.failure:
        return None
    query, key, value, out, _ = saved
    if type(grad) is not Tensor or not is_ordinary(query, key, value) or grad.stride() != out.stride():
        return None
    try:
        if grad.data_ptr() % ALIGNMENT or grad.is_neg():
            return None
    except RuntimeError:  # a batch of gradients has no memory
        return None
    made = empty_grads(query, key, value)
    done = runtime.differentiates(plans.backward, plans.words, saved, (grad, None, *made, None, None))
    return made if done else None


class _Gradients(torch.autograd.Function):
    """The backward pass where autograd records it, too: it has no derivative, and says so."""

    @staticmethod
    def forward(ctx: Any, runtime: Computes, given: Backward, *tensors: Tensor | None) -> Any:
        return runtime.gradients(given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise RuntimeError(SECOND)
