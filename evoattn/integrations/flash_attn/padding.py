"""`flash_attn.bert_padding`: padded batches to packed rows and back, by torch, with gradients."""

import torch
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of `[rows, …]` by their numbers."""
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """`[first_axis_dim, …]`: the values at these rows, zeros elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Rows `[total, …]` of `[batch, seqlen, …]` where the mask `[batch, seqlen]` is set; their places in the flattened
    batch; cu_seqlens; the longest length; and how many of each sequence are used. Rows of `unused_mask` have room among
    the packed ones and are not used. It waits for the device: the number of rows is one of the host."""
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(kept.flatten(), as_tuple=False).flatten()
    bounds = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, bounds, longest, attention_mask.sum(dim=-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """`[batch, seqlen, …]` of packed rows `[total, …]` at these places, zeros elsewhere."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.view(batch, seqlen, *rows.shape[1:])
