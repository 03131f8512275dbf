"""Which keys a mask tensor of transformers shows, by the function that made it, or by what it holds."""

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

Kind = tuple[bool, tuple[int, int] | None]
"""Whether a mask is causal, and its window `(past, ahead)`, as in `padded_batch.Padded`."""
MOST_COMPARED = 1 << 28
"""Elements of the largest mask whose content is compared, which takes as much memory again."""


def is_same(one: object, other: object) -> bool:
    """Whether two functions are of the same code and have the same values bound. A trace cannot look into functions
    that are made within it: there only one and the same function is."""
    if one is other or torch.compiler.is_compiling():
        return one is other
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if not (isinstance(one, FunctionType) and isinstance(other, FunctionType)):
        return type(one) is type(other) and bool(one == other)
    bound = [tuple(cell.cell_contents for cell in f.__closure__ or ()) for f in (one, other)]
    return one.__code__ is other.__code__ and is_same(*bound)


def mark(
    made: Tensor,
    padding: Tensor | None,
    function: Callable[..., bool],
    q_offset: object,
    kv_offset: int,
    local_size: int | None,
    window: int | None,
) -> None:
    """Say on a mask tensor `[batch, 1, queries, keys]` which keys a query sees, if a kernel can show the same: all,
    those up to its own, or those near it, before it or on both sides. Unless it sees all, the last query must be of the
    last key. `padding`, bool `[batch, all keys]`, is true at real tokens; `window` is the model's `sliding_window`.
    Nothing is said in a trace."""
    if torch.compiler.is_compiling():  # a trace cannot ask what follows, and would be of these lengths alone
        return
    queries, keys = made.shape[2:]
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + keys] if padding.dim() == 2 else padding
        if padding.dtype != torch.bool or padding.shape != (made.shape[0], keys):
            return
    if not padded_batch.may_mark(made):
        return
    aligned = isinstance(q_offset, int) and q_offset + queries == kv_offset + keys
    kind = _of_function(function, local_size, aligned) or _of_content(made, padding, window)
    if kind is not None:
        padded_batch.mark(made, padding, *kind)


def _of_function(function: Callable[..., bool], local_size: int | None, aligned: bool) -> Kind | None:
    """What a mask function shows, None where it is another one; `aligned`: the last query is of the last key."""
    if is_same(function, bidirectional_mask_function):
        return False, None
    if not aligned:
        return None
    if is_same(function, causal_mask_function):
        return True, None
    if local_size is None:
        return None
    if is_same(function, sliding_window_causal_mask_function(local_size)):
        return True, (local_size - 1, -1)
    if is_same(function, sliding_window_bidirectional_mask_function(local_size)):
        return False, (local_size, local_size)
    return None


def _of_content(made: Tensor, padding: Tensor | None, window: int | None) -> Kind | None:
    """What a mask of a model's own function shows, by what it holds: functions of multimodal models show what a causal
    mask does where there is no image. Waits for the device."""
    _, heads, queries, keys = made.shape
    if heads != 1 or made.numel() > MOST_COMPARED:
        return None
    seen = made if made.dtype == torch.bool else made == 0  # of "eager", which are added to scores
    if padding is None and made.stride(0) == 0:
        seen = seen[:1]
    behind = (
        torch.arange(queries, device=made.device)[:, None] + (keys - queries) - torch.arange(keys, device=made.device)
    )
    shown: dict[Kind, Tensor] = {(False, None): torch.ones_like(behind, dtype=torch.bool), (True, None): behind >= 0}
    if window is not None and window > 1:
        shown[True, (window - 1, -1)] = (behind >= 0) & (behind < window)
        for side in (window, window - 1):
            shown[False, (side, side)] = behind.abs() <= side
    real = True if padding is None else padding[:, None, None]
    same = torch.stack([(seen == (one & real)).all() for one in shown.values()]).tolist()
    return next((kind for kind, holds in zip(shown, same, strict=True) if holds), None)
