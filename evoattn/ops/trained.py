"""Calls in eager code that want gradients: a node of autograd whose two passes are the runtime's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from evoattn.model.backward import TERM_GRADS
from evoattn.ops.call import Answer, Call
from evoattn.ops.gradients import PLACES, SECOND, Backward, Grads, keep, kept


class Computes(Protocol):
    """What a node asks of a `Runtime`."""

    def attend(self, call: Call) -> Answer: ...
    def gradients(self, given: Backward) -> Grads: ...


def attend(runtime: Computes, call: Call) -> Answer:
    """The answer to a call, and with `return_lse` the log-sum-exp, both differentiable."""
    tensors = call.query, call.key, call.value, *call.terms
    out, lse = _Attention.apply(runtime, call, *tensors)  # type: ignore[no-untyped-call]
    return (out, lse) if call.return_lse else out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, runtime: Computes, call: Call, *tensors: Tensor | None) -> Any:
        out, lse = runtime.attend(replace(call, return_lse=True))
        keep(ctx, call, out, lse)
        ctx.runtime = runtime
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> Any:
        given, runtime = kept(ctx, grad, grad_lse), ctx.runtime
        call = given.call
        if torch.is_grad_enabled():  # somebody may differentiate what is made here
            tensors = call.query, call.key, call.value, given.grad, grad_lse
            found = _Gradients.apply(runtime, given, *tensors)  # type: ignore[no-untyped-call]
        else:
            found = runtime.gradients(given)
        of_terms: list[Tensor | None] = [None] * len(call.terms)
        for name, made in zip(TERM_GRADS, found[3:], strict=True):
            if made is not None:
                of_terms[PLACES[name]] = made
        return (None, None, *found[:3], *of_terms)


class _Gradients(torch.autograd.Function):
    """The backward pass where autograd records it, too: it has no derivative, and says so."""

    @staticmethod
    def forward(ctx: Any, runtime: Computes, given: Backward, *tensors: Tensor | None) -> Any:
        return runtime.gradients(given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise RuntimeError(SECOND)
