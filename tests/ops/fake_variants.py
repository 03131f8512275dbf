"""What the fake device makes of the arguments of a variant of attention."""

import ctypes
import math
from itertools import accumulate, islice, pairwise

import torch

from evoattn.model.dtype import DTYPES
from evoattn.model.score import WHOLE, evaluate, parse_predicate, parse_score, parse_tables

VARIED = [ctypes.c_int32] * 3 + [ctypes.c_float] * 2 + [ctypes.c_uint64] * 3 + [ctypes.c_int64] * 3
VARIED += [ctypes.c_uint64] * 2 + [ctypes.c_int32] * 3 + [ctypes.c_uint64] * 2 + [ctypes.c_int32] * 2
"""Behind the others in a kernel of a variant: window and diagonal, scales, sinks, slopes and bias, strides of the
bias, keys in use and the table of pages, its size and a page's in bits, rows of a batch of keys in a tensor map, starts
of packed queries and keys, all queries and the number of sequences."""


def tensor_at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Host memory as a tensor."""
    items = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    raw = (ctypes.c_char * (items * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).as_strided(shape, strides)


def values_of(kernel: dict, plain: list, arguments: int) -> list:
    """The arguments of a launch: those of all kernels, then of a kernel of a variant all of `VARIED`, 0 for what it
    does not take."""
    taken = kernel["taken"]
    varied = [kind for kind, is_taken in zip(VARIED, taken, strict=False) if is_taken]
    new = NEW_KEYS if "appended" in kernel["variants"] else []
    types = [*plain, *varied, *own_types(kernel), *list_types(kernel), *new]
    pointers = (ctypes.c_void_p * len(types)).from_address(arguments)
    values = iter(
        [at if kind is None else kind.from_address(at).value for at, kind in zip(pointers, types, strict=True)]
    )
    return [*islice(values, len(plain)), *(next(values) if is_taken else 0 for is_taken in taken), *values]


NEW_KEYS = [ctypes.c_uint64] * 4 + [ctypes.c_int64] * 3 + [ctypes.c_int32]
"""Last of all: new keys and values, the caches, strides of the new ones, pages of a cache."""


def own_types(kernel: dict) -> list:
    """The arguments behind `VARIED` of an expression of scores: the last scale, each table and its sizes."""
    if "score" not in kernel:
        return []
    types = [ctypes.c_float]
    for table in parse_tables(kernel["tables"]):
        types += [ctypes.c_uint64] + [ctypes.c_int32] * len(table.shape)
    return types


BITS = [ctypes.c_uint64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32]
"""Of what the predicate says: where it is, its strides."""
LISTS = [ctypes.c_uint64] * 4 + [ctypes.c_int32] * 3 + [ctypes.c_int64] * 2 + BITS
"""Behind those of a block list: the four lists, rows and keys of a block, blocks of keys, strides; bits."""


def list_types(kernel: dict) -> list:
    """The arguments of a block list."""
    return LISTS if "blocks" in kernel["variants"] else []


def seen_by_lists(kernel: dict, scores: torch.Tensor, arguments: list) -> torch.Tensor:
    """Bool: keys in a FULL block, or in a PARTIAL one where the predicate shows them."""
    batch, heads, seqlen_q, seqlen_k = scores.shape
    *addresses, rows, keys, columns, batch_stride, head_stride = arguments[-len(LISTS) : -len(BITS)]
    values, count = own_values(kernel, scores, arguments), -(-seqlen_q // rows)
    shown = torch.ones((), dtype=torch.bool)
    if kernel["predicate"]:
        shown = evaluate(parse_predicate(kernel["predicate"], kernel["tables"], True).tree, values, torch)
    states = torch.zeros(batch, heads, count, columns, dtype=torch.int32)
    for kind in range(2):
        strides = batch_stride, head_stride, 1
        counts = tensor_at(addresses[2 * kind], (batch, heads, count), strides, torch.int32)
        inner = *(stride * columns for stride in strides), 1
        indices = tensor_at(addresses[2 * kind + 1], (batch, heads, count, columns), inner, torch.int32)
        for place in torch.cartesian_prod(*map(torch.arange, (batch, heads, count))).tolist():
            listed = indices[tuple(place)][: counts[tuple(place)]]
            states[tuple(place)][listed.long()] = kind + 1
    states = states.repeat_interleave(rows, 2)[:, :, :seqlen_q].repeat_interleave(keys, 3)[..., :seqlen_k]
    return (states == 2) | ((states == 1) & shown)


def expressed(kernel: dict, scores: torch.Tensor, arguments: list) -> torch.Tensor:
    """What the kernel's expression makes of scores before they are scaled."""
    values = own_values(kernel, scores, arguments)
    tree = parse_score(kernel["score"], kernel["tables"], True).tree
    return evaluate(tree, values | {"s": scores * arguments[len(VARIED)]}, torch) * arguments[4]


def own_values(kernel: dict, scores: torch.Tensor, arguments: list) -> dict:
    """The indices and tables of the kernel's expressions."""
    _, heads, seqlen_q, seqlen_k = scores.shape
    _, *given = arguments[len(VARIED) :]
    batches = torch.arange(len(scores)) + kernel.get("sequence", 0)
    values = {"b": batches.view(-1, 1, 1, 1), "h": torch.arange(heads).view(-1, 1, 1)}
    values |= {"q": torch.arange(seqlen_q).view(-1, 1), "k": torch.arange(seqlen_k), "d": arguments[2], "s": scores}
    for table in parse_tables(kernel["tables"]):
        address, *shape = (given.pop(0) for _ in range(1 + len(table.shape)))
        dtype = getattr(torch, table.dtype if table.dtype in WHOLE else DTYPES[table.dtype].torch)
        values[table.buffer] = tensor_at(address, tuple(shape), torch.empty(shape, device="meta").stride(), dtype)
    return values


def changed(
    scores: torch.Tensor,
    variants: list[str],
    mask: str,
    arguments: list,
    dtype: torch.dtype,
    kernel: dict | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores before they are scaled, with what the arguments say of them, and the sinks."""
    _, heads, seqlen_q, seqlen_k = scores.shape
    rows, columns, sinks = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k), None
    if not variants:
        return scores, None
    past, ahead, diagonal, score_scale, unit, sinks_at, slopes_at, bias_at = arguments[:8]
    if "varlen" in variants:
        diagonal = 0 if mask == "causal_upper_left" else seqlen_k - seqlen_q
        arguments = [*arguments[:2], diagonal, *arguments[3:]]
    if "softcap" in variants:
        scores = torch.tanh(scores * score_scale)
    if "alibi" in variants:
        slopes = tensor_at(slopes_at, (heads, 1, 1), (1, 1, 1), torch.float32)
        scores = scores - slopes * (columns - rows - diagonal).abs() * unit
    if "bias" in variants:
        scores = scores + tensor_at(bias_at, scores.shape, (*arguments[8:11], 1), dtype).to(scores.dtype) * unit
    if kernel and kernel.get("score"):
        scores = expressed(kernel, scores, arguments)
    if "blocks" in variants:
        scores = scores.masked_fill(~seen_by_lists(kernel, scores, arguments), -math.inf)
    if "sink" in variants:
        sinks = tensor_at(sinks_at, (heads, 1, 1), (1, 1, 1), dtype).double()
    if "window" in variants:
        middle = rows + (0 if mask == "causal_upper_left" else seqlen_k - seqlen_q)
        scores = scores.masked_fill((columns < middle - past) | (columns > middle + ahead), -math.inf)
    return scores, sinks


def sequences(arguments: list) -> list[tuple[slice, slice]]:
    """Rows of the queries and of the keys of each packed sequence."""
    *_, queries_at, keys_at, total, count = arguments[: len(VARIED)]
    queries = tensor_at(queries_at, (count + 1,), (1,), torch.int32).tolist()
    if keys_at:
        keys = tensor_at(keys_at, (count + 1,), (1,), torch.int32).tolist()
        assert queries[-1] == total
    else:  # those in pages say how many there are
        keys = [0, *accumulate(tensor_at(arguments[11], (count,), (1,), torch.int32).clamp(min=0).tolist())]
        assert queries[-1] <= total
    return [tuple(slice(*pair) for pair in pairs) for pairs in zip(pairwise(queries), pairwise(keys), strict=True)]


def shapes_of(kernel: dict, q: tuple[int, ...], k: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Of q, k, v and o."""
    dims = (kernel["head_dim"], kernel["head_dim"], kernel["head_dim_v"], kernel["head_dim_v"])
    return tuple((*rows, dim) for rows, dim in zip((q, k, k, q), dims, strict=True))


def attend(kernel: dict, q, k, v, o, lse, scale: float, others: list, error: float) -> None:
    """Write O, with `error` added, and the log-sum-exp."""
    k, v = (t.double().repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores, sinks = changed(
        q.double() @ k.transpose(-1, -2), kernel["variants"], kernel["mask"], others, q.dtype, kernel
    )
    scores = scores * scale
    if kernel["mask"] != "full":
        offset = k.shape[2] - q.shape[2] if kernel["mask"] == "causal_lower_right" else 0
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(offset)
        scores = scores.masked_fill(~seen, -math.inf)
    unseen = torch.isneginf(scores).all(-1, keepdim=True)
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
        v = torch.cat((v, v.new_zeros(*v.shape[:2], 1, v.shape[3])), 2)
    o.copy_(torch.softmax(scores, -1).masked_fill(unseen, 0) @ v + error)
    if lse is not None:
        lse.copy_(torch.logsumexp(scores, -1))
