"""Which of transformers' mask functions a mask tensor was made by."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

import torch
from torch import Tensor
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from evoattn.integrations import padded_batch


def is_same(one: object, other: object) -> bool:
    """Whether two functions are of the same code and have the same values bound."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if not (isinstance(one, FunctionType) and isinstance(other, FunctionType)):
        return type(one) is type(other) and bool(one == other)
    try:
        bound = [tuple(cell.cell_contents for cell in f.__closure__ or ()) for f in (one, other)]
    except AttributeError:  # a trace cannot look into functions that are made within it
        return False
    return one.__code__ is other.__code__ and is_same(*bound)


def mark(
    made: Tensor,
    padding: Tensor | None,
    function: Callable[..., bool],
    q_offset: object,
    kv_offset: int,
    local_size: int | None,
) -> None:
    """Say on a mask tensor `[batch, 1, queries, keys]` which keys a query sees, if a kernel knows that: all, those
    up to its own, or those near it, before it or on both sides. But for the first, the last query must be of the last
    key. `padding`, bool `[batch, all keys]`, is true at real tokens. Nothing is said in a trace."""
    if torch.compiler.is_compiling():  # which cannot ask what follows, and would be of these lengths alone
        return
    queries, keys = made.shape[2:]
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + keys] if padding.dim() == 2 else padding
        if padding.dtype != torch.bool or padding.shape != (made.shape[0], keys):
            return
    if is_same(function, bidirectional_mask_function):
        padded_batch.mark(made, padding, causal=False)
    elif isinstance(q_offset, int) and q_offset + queries == kv_offset + keys:
        if is_same(function, causal_mask_function):
            padded_batch.mark(made, padding, causal=True)
        elif local_size is None:
            return
        elif is_same(function, sliding_window_causal_mask_function(local_size)):
            padded_batch.mark(made, padding, causal=True, window=(local_size - 1, -1))
        elif is_same(function, sliding_window_bidirectional_mask_function(local_size)):
            padded_batch.mark(made, padding, causal=False, window=(local_size, local_size))
