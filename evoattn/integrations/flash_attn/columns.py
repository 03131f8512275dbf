"""Queries and keys that come in two tensors, as those of latent attention do: columns that meet V, and rotated ones."""

import torch
from torch import Tensor


def with_values(qv: Tensor, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The queries `[qv, q]`. Raises `ValueError` where `qv` has not q's rows and heads, and as many columns as V, or V
    not the rows and heads of K."""
    if keys.shape[:-1] != values.shape[:-1]:
        raise ValueError(
            f"With qv, v {list(values.shape)} must have the shape of k {list(keys.shape)} but for its columns."
        )
    if qv.shape[:-1] != q.shape[:-1] or qv.shape[-1] != values.shape[-1]:
        raise ValueError(
            f"qv {list(qv.shape)} must have the rows and heads of q {list(q.shape)} and the {values.shape[-1]} columns "
            "of the values."
        )
    return side_by_side(qv, q)


def side_by_side(first: Tensor, second: Tensor) -> Tensor:
    """`[…, columns of both]` of two tensors with the same leading dimensions: a view where each row of `second` lies
    right behind that of `first`, as in a latent cache or a projection that was split, else a copy."""
    if not (first.requires_grad or second.requires_grad) and lie_side_by_side(first, second):
        shape = *first.shape[:-1], first.shape[-1] + second.shape[-1]
        return first.as_strided(shape, first.stride(), first.storage_offset())
    return torch.cat((first, second), dim=-1)


def lie_side_by_side(first: Tensor, second: Tensor) -> bool:
    """Whether each row of `second` lies right behind that of `first`; compiled code cannot tell."""
    return (
        not torch.compiler.is_compiling()
        and first.stride() == second.stride()
        and first.stride(-1) == 1
        and first.dtype == second.dtype
        and first.shape[:-1] == second.shape[:-1]
        and first.numel() > 0
        and second.data_ptr() == first.data_ptr() + first.shape[-1] * first.element_size()
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    )
