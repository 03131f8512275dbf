"""Tensors of 8 bits with their scales: how inputs are quantised, and what they stand for."""

import math
from collections.abc import Mapping

import torch

from evoattn.correctness import sequences
from evoattn.correctness.sequences import each
from evoattn.correctness.terms import torch_dtype
from evoattn.model.forward import FORWARD
from evoattn.model.problem import AttentionProblem
from evoattn.model.scales import (
    ANSWERED,
    BLOCK_ROWS,
    PER_BLOCK,
    PER_COLUMNS,
    PER_TOKEN,
    ROUNDED,
    ROUNDED_ROWS,
    SCALE_COLUMNS,
)
from evoattn.model.turned import GROUP, ORDER, turned_keys

UNEVEN = 1.37
"""By which a scale is more than what it takes to use all of the range, so that a scale is no power of two."""


def quantised(
    problem: AttentionProblem, tensor: str, values: torch.Tensor, extreme: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers as 8 bits hold them, before they are cast; their scales).

    `values` are float32 of `sequences.whole_shape`. Scales broadcast over them: of all, of each sequence's K/V heads or
    of each block, row or columns of a row, so that the largest value is near the end of the range. `extreme`: some
    scales are 0 (of every other head, or every third row or block), some numbers are at either end of the range, and -0
    is among them."""
    element = problem.element_of(tensor)
    sizes = values.abs().nan_to_num(0)
    per_token = problem.scales in (PER_TOKEN, PER_COLUMNS)
    if problem.scales == PER_COLUMNS:
        largest = of_columns(sizes.unflatten(-1, (-1, SCALE_COLUMNS)).amax(-1))
    elif per_token:
        largest = sizes.amax(-1, keepdim=True)
    elif problem.scales == PER_BLOCK:
        largest = of_blocks(sizes.amax(-1, keepdim=True))
    elif problem.scales:
        largest = (
            sizes.unflatten(1, (problem.kv_heads, -1))
            .amax((2, 4))
            .repeat_interleave(sizes.shape[1] // problem.kv_heads, 1)[..., None]
        )
        for one in each(problem):
            rows = one.queries if tensor == "q" else one.keys
            part = largest[:, :, rows]
            if part.numel():
                largest[:, :, rows] = part.amax(2, keepdim=True)
    else:
        largest = sizes.amax().expand(1, 1, 1, 1).clone()
    scale = torch.where(largest > 0, largest * (UNEVEN / element.largest), 1.0)
    blocks = torch.arange(scale.shape[2], device=scale.device) // BLOCK_ROWS
    if problem.scales == PER_BLOCK:  # neighbours differ by more than an error that is allowed
        scale = scale * (1 + blocks % 3)[:, None]
    stored = values / scale
    if extreme:
        stored[:, :, ::5] = torch.where(stored[:, :, ::5] < 0, -element.largest, element.largest)
        stored[:, :, 1::5, ::2] = -0.0
        if per_token:
            scale[:, :, 2::3] = 0
        elif problem.scales == PER_BLOCK:
            scale[:, :, blocks % 3 == 1] = 0
        elif problem.scales:
            scale[:, 1::2] = 0
    stored = stored.clamp(-element.largest, element.largest)
    dtype = torch_dtype(problem, tensor)
    whole = not dtype.is_floating_point  # a sequence that no query sees is NaN, for which the least stands
    return stored.round().nan_to_num(torch.iinfo(dtype).min) if whole else stored, scale


def stored_scales(
    problem: AttentionProblem, tensor: str, scale: torch.Tensor, terms: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """`scale` of `quantised` as a kernel finds it: of the shape and strides of `evoattn.model.scales`. Per token it is
    NaN behind the last key in use."""
    name = f"{tensor}_scale"
    shape = problem.scale_shapes[name]
    if problem.scales in (PER_TOKEN, PER_COLUMNS):
        if tensor != "q" and (problem.seqused or problem.page):
            scale = sequences.stored(problem, scale, terms)
        out = torch.empty(math.prod(shape), dtype=torch.float32, device=scale.device)
        view = out.as_strided(shape, (*problem.scale_strides(name), 1)[: len(shape)])
        view.copy_(scale[..., ::SCALE_COLUMNS] if len(shape) == 4 else scale[..., 0])
        return view
    if not problem.scales:
        return scale.reshape(1, 1)
    if problem.scales == PER_BLOCK:
        return scale[:, :, ::BLOCK_ROWS, 0].contiguous()
    per_group = scale.shape[1] // problem.kv_heads
    heads = scale[:, ::per_group]
    made = torch.ones(shape, dtype=torch.float32, device=scale.device)
    if not problem.varlen:
        return made.copy_(heads[:, :, 0, 0])
    for one in each(problem):
        rows = heads[0, :, one.queries if tensor == "q" else one.keys, 0]
        if rows.shape[1]:
            made[one.number] = rows[:, 0]
    return made


def of_blocks(largest: torch.Tensor, block: int = BLOCK_ROWS) -> torch.Tensor:
    """`[batch, heads, rows, 1]` as it is largest in each block of rows, for each of these."""
    rows = largest.shape[2]
    whole = torch.nn.functional.pad(largest, (0, 0, 0, -rows % block))
    return spread(whole.unflatten(2, (-1, block)).amax((3, 4)), rows, block)


def spread(scale: torch.Tensor, rows: int, block: int = BLOCK_ROWS) -> torch.Tensor:
    """Scales `[batch, heads, blocks]` as they broadcast over `[batch, heads, rows, head_dim]`."""
    return scale.repeat_interleave(block, 2)[:, :, :rows, None]


def rounded_rows(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a kernel that rounds Q on the way multiplies (`rounded_rows.cuh`), as `dtype`, exactly in float64."""
    wide, largest = values.float(), torch.finfo(torch.float8_e4m3fn).max
    finite = wide.isfinite()
    most = of_blocks(wide.where(finite, 0).abs().amax(-1, keepdim=True), ROUNDED_ROWS)
    scale = torch.where(most > 0, (most / torch.full_like(most, largest)).clamp(min=torch.finfo(wide.dtype).tiny), 1.0)
    numbers = (wide * scale.reciprocal()).where(finite, torch.nan).clamp(-largest, largest)
    return numbers.to(torch.float8_e4m3fn).to(dtype) * scale.to(dtype)


def of_columns(scale: torch.Tensor) -> torch.Tensor:
    """Scales `[batch, heads, rows, columns / SCALE_COLUMNS]` for each column."""
    return scale.repeat_interleave(SCALE_COLUMNS, -1)


def turn(values: torch.Tensor) -> torch.Tensor:
    """`[batch, heads, keys, head_dim]` as `evoattn.model.turned` has it, contiguous."""
    keys = values.shape[2]
    wide = torch.zeros(*values.shape[:2], turned_keys(keys), values.shape[3], dtype=torch.uint8, device=values.device)
    wide[:, :, :keys] = values.view(torch.uint8)
    places = wide.unflatten(2, (-1, GROUP))[:, :, :, list(ORDER)].flatten(2, 3)
    turned: torch.Tensor = places.transpose(2, 3).contiguous()
    return turned.view(values.dtype)


def turned_back(values: torch.Tensor, keys: int) -> torch.Tensor:
    """Of what `turn` made, `[batch, heads, head_dim, places]`, the tensor of so many keys."""
    places = values.view(torch.uint8).transpose(2, 3).unflatten(2, (-1, GROUP))
    back = [ORDER.index(key) for key in range(GROUP)]
    rows: torch.Tensor = places[:, :, :, back].flatten(2, 3)[:, :, :keys].contiguous()
    return rows.view(values.dtype)


def dequantised(
    problem: AttentionProblem, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> tuple[AttentionProblem, dict[str, torch.Tensor]]:
    """The problem without 8 bits and its inputs: in `dtype` the numbers that they stand for, exactly in float64. The
    same where it has none.

    A page in use is one of a single sequence, as in the inputs of checks."""
    shapes = problem.scale_shapes
    if not shapes:
        return problem, dict(tensors)
    made = {name: tensor for name, tensor in tensors.items() if name not in shapes}
    for name in problem.tensors:
        if f"{name}_scale" not in shapes:
            continue
        stored = tensors[name]
        if problem.turned and name == "v":
            stored = turned_back(stored, problem.seqlen_k)
        wide = stored.to(dtype)
        made[name] = wide.mul_(_broadcast(problem, name, tensors).to(dtype))
    if problem.op in ROUNDED:
        made["q"] = rounded_rows(tensors["q"], dtype)
    plain = {"op": FORWARD.name} if problem.op in ANSWERED else {}
    return problem.with_(kv="", scales="", turned=False, dtype=problem.answer.name, **plain), made


def _broadcast(problem: AttentionProblem, tensor: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The scales of a tensor, as they broadcast over it."""
    scale = tensors[f"{tensor}_scale"]
    if problem.scales == PER_BLOCK:
        return spread(scale, problem.shape(tensor)[2])
    if problem.scales == PER_COLUMNS:
        return of_columns(scale)
    if scale.ndim == 3:
        return scale[..., None]
    if not problem.scales:
        return scale[:, :, None, None]
    if tensor == "q":
        scale = scale.repeat_interleave(problem.group_size, 1)
    elif problem.page:
        pages = torch.ones(problem.shape(tensor)[:2], dtype=scale.dtype, device=scale.device)
        held = sequences.held(problem, scale.device)
        batches = torch.arange(problem.batch, device=scale.device)[:, None].expand(held.shape)
        pages[tensors["table"][held].long()] = scale[batches[held]]
        return pages[:, :, None, None]
    if not problem.varlen:
        return scale[:, :, None, None]
    rows = [one.lengths[tensor != "q"] for one in each(problem)]
    return scale.T.repeat_interleave(torch.tensor(rows, device=scale.device), 1)[None, :, :, None]
