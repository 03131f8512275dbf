"""The op in torch's registry, which compiled and exported code calls: `torch.ops.evoattn.attention`, `attention_lse`.

Defined by `torch.library.Library`: a call of a `torch.library.custom_op` passes through three Python functions more,
which takes as long as the launch (2.9 µs against 8.7 for an empty op on one CPU).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from evoattn.ops import current
from evoattn.ops.asked import out_like

ARGUMENTS = "(Tensor query, Tensor key, Tensor value, bool is_causal, str causal, float? scale, bool strict)"
TAGS = (torch.Tag.pt2_compliant_tag,)
_library = torch.library.Library("evoattn", "FRAGMENT")


def register(name: str, signature: str, compute: Callable[..., object], fake: Callable[..., object]) -> OpOverload:
    """`torch.ops.evoattn.NAME`. `signature`: arguments and results as torch's schemas have them; `fake`: what `compute`
    returns, without its numbers."""
    _library.define(name + signature, tags=TAGS)
    _library.impl(name, compute, "CompositeExplicitAutograd")
    _library.impl(name, fake, "Meta")
    op: OpOverload = getattr(torch.ops.evoattn, name).default
    return op


def require_no_gradient(*tensors: Tensor | None) -> None:
    """Raise `RuntimeError` where autograd would get an answer without a gradient."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise RuntimeError("torch.ops.evoattn computes no gradients; call evoattn.attention, which does.")


def _attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, causal: str, scale: float | None, strict: bool
) -> Tensor:
    """`evoattn.attention` with an answer laid out in memory as `query` is."""
    require_no_gradient(query, key, value)
    out = out_like(query, value)
    gqa = key.size(-3) != query.size(-3)
    current.runtime().attend(query, key, value, is_causal, scale, gqa, causal, False, out, strict, compiled=True)
    return out


def _attention_lse(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, causal: str, scale: float | None, strict: bool
) -> tuple[Tensor, Tensor]:
    """`_attention`, and the log-sum-exp."""
    require_no_gradient(query, key, value)
    out = out_like(query, value)
    gqa = key.size(-3) != query.size(-3)
    answer = current.runtime().attend(
        query, key, value, is_causal, scale, gqa, causal, True, out, strict, compiled=True
    )
    return out, answer[1]


def fake_answer(query: Tensor, key: Tensor, value: Tensor, *others: object) -> Tensor:
    """The answer's shape, strides, dtype and device."""
    return out_like(query, value)


def _fake_attention_lse(query: Tensor, key: Tensor, value: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    return out_like(query, value), query.new_empty(query.shape[:-1], dtype=torch.float32)


attention_op = register("attention", f"{ARGUMENTS} -> Tensor", _attention, fake_answer)
attention_lse_op = register("attention_lse", f"{ARGUMENTS} -> (Tensor, Tensor)", _attention_lse, _fake_attention_lse)


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor has a shape and a device but no data."""
    return isinstance(tensor, FakeTensor)
