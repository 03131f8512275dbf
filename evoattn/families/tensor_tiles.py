"""Tensor maps of tiles of Q, K, V and O, for the families that copy by them."""

import math

from evoattn.families.base import buffer_of
from evoattn.model.dtype import DTYPES
from evoattn.model.launch import TensorMap
from evoattn.model.problem import AttentionProblem
from evoattn.model.symbol import as_one

CHUNK_COLUMNS = 64
"""Columns of a tile that one row of 128 bytes holds: the widest box of the 128-byte swizzle."""
ELEMENT_BYTES = DTYPES["fp16"].bytes
"""Of the 16-bit columns of a tensor map."""
ROW_BYTES = CHUNK_COLUMNS * ELEMENT_BYTES


def group_slots(problem: AttentionProblem) -> int:
    """Rows of a query where the heads of a K/V head are rows: their number up to a power of two (`tile_rows.cuh`)."""
    return 1 << (problem.group_size - 1).bit_length()


@as_one
def group_map(problem: AttentionProblem, tensor: str, rows: int) -> TensorMap:
    """The map of Q or O of tiles of `rows` rows, a power of two, each a query and one of the heads of a K/V head, a box
    for each 64 columns: the heads of a query below one another, up to a power of two, where what is missing reads zero.
    """
    batch, _, seqlen, head_dim = problem.shape(tensor)
    batch_bytes, head_bytes, row_bytes = (stride * problem.element_bytes for stride in problem.strides(tensor)[:3])
    heads = min(rows, group_slots(problem))
    return TensorMap(
        tensor,
        problem.dtype,
        (head_dim, problem.group_size, seqlen, problem.kv_heads, batch),
        (head_bytes, row_bytes, problem.group_size * head_bytes, batch_bytes),
        (CHUNK_COLUMNS, heads, rows // heads, 1, 1),
        rows_at=2 if problem.varlen else None,
    )


def tile_map(problem: AttentionProblem, tensor: str, rows: int, by_chunks: bool = False) -> TensorMap:
    """The map of tiles of `rows` rows: all 64-column chunks in one box if head_dim is whole chunks, else, or
    `by_chunks`, a box a chunk.

    A dimension of chunks would run past the end of a row where the last chunk is not whole; without it columns past
    head_dim read zero. Maps are of 16-bit columns: an element of fp32 is two of them, one of 8 bits half
    of one."""
    batch, heads, seqlen, head_dim = problem.shape(tensor)
    element_bytes = problem.element_of(tensor).bytes
    batch_bytes, head_bytes, row_bytes = (stride * element_bytes for stride in problem.strides(tensor)[:3])
    columns, dtype = head_dim * element_bytes // ELEMENT_BYTES, "bf16" if problem.dtype == "bf16" else "fp16"
    if columns % CHUNK_COLUMNS:
        shape, strides_bytes = (columns, seqlen, heads, batch), (row_bytes, head_bytes, batch_bytes)
        return TensorMap(buffer_of(problem, tensor), dtype, shape, strides_bytes, (CHUNK_COLUMNS, rows, 1, 1))
    chunks = columns // CHUNK_COLUMNS
    return TensorMap(
        buffer_of(problem, tensor),
        dtype,
        (CHUNK_COLUMNS, seqlen, chunks, heads, batch),
        (row_bytes, ROW_BYTES, head_bytes, batch_bytes),
        (CHUNK_COLUMNS, rows, 1 if by_chunks else chunks, 1, 1),
    )


def bias_map(problem: AttentionProblem, rows: int) -> TensorMap:
    """The map of tiles of the bias of `rows` queries, a box for each 64 keys; those past the last key read zero."""
    batch, heads, queries, _ = problem.term_shapes["bias"]
    batch_stride, head_stride, row_stride, _ = problem.strides("bias")
    head_bytes = ELEMENT_BYTES * (head_stride or row_stride * queries)
    return TensorMap(
        "bias",
        problem.answer.name,
        (problem.seqlen_k, queries, heads, batch),
        (ELEMENT_BYTES * row_stride, head_bytes, ELEMENT_BYTES * batch_stride or head_bytes * heads),
        (CHUNK_COLUMNS, rows, 1, 1),
    )


SLIDING_ROWS = 1 << 30
"""Of a map that slides: no sequence may have more (`templates/device/copy/tensor_tile.cuh`)."""
WRAP = 1 << 34
"""Bytes that SLIDING_ROWS of make 2^64."""


def row_stride(problem: AttentionProblem, tensor: str) -> int:
    """Elements from a row to the next. A row that is alone in a head has none: whole batches, or pages, are then taken
    for rows."""
    batch, _, rows, _ = problem.shape(tensor)
    batch_stride, _, stride, _ = problem.strides(tensor)
    return batch_stride if rows == 1 and batch > 1 else stride


def rows_apart(problem: AttentionProblem, tensor: str) -> int:
    """Rows from a batch, or a page, of a tensor to the next one."""
    return problem.strides(tensor)[0] // row_stride(problem, tensor)


def rows_of_head(problem: AttentionProblem, tensor: str) -> int:
    """Rows from the first of a head to the end of its last one, over all batches or pages."""
    batch, _, rows, _ = problem.shape(tensor)
    return (batch - 1) * rows_apart(problem, tensor) + rows


def sliding_map(problem: AttentionProblem, tensor: str, rows: int) -> TensorMap:
    """The map of boxes of `rows` rows and 64 columns, of packed sequences or of those with only some keys in use.

    Row r of a sequence of n rows, the last of which lies before row e of a head, is row SLIDING_ROWS - n + r at the
    outer coordinates e and SLIDING_ROWS: its address is e - n + r rows from the start, as 2^64 bytes are none. What
    lies past row n is outside of the map, whatever follows in memory. The way is that of Triton's ragged descriptors
    (`triton.tools.ragged_tma`)."""
    _, heads, _, head_dim = problem.shape(tensor)
    element = problem.element_of(tensor)
    columns = head_dim * element.bytes // ELEMENT_BYTES
    head_bytes, row_bytes = problem.strides(tensor)[1] * element.bytes, row_stride(problem, tensor) * element.bytes
    return TensorMap(
        buffer_of(problem, tensor),
        element.name if element.bytes > 1 else "fp16",
        (columns, SLIDING_ROWS, heads, rows_of_head(problem, tensor) + 1, SLIDING_ROWS + 1),
        (row_bytes, head_bytes, row_bytes, WRAP - row_bytes),
        (CHUNK_COLUMNS, rows, 1, 1, 1),
        wraps=True,
    )


def key_map(problem: AttentionProblem, tensor: str, keys: int) -> TensorMap:
    """The map of tiles of `keys` keys of K or V. With pages a box lies in one of them, and a tile is several boxes."""
    if problem.varlen or problem.seqused:
        return sliding_map(problem, tensor, math.gcd(problem.page, keys))
    return tile_map(problem, tensor, keys)


SWIZZLE_ROWS = 8
"""Of 128 bytes, after which the swizzle of a tile repeats."""
MAX_END = (1 << 31) - 1
"""Of the outer coordinate of a `sliding_map`, an int32."""


def why_not_sliding(problem: AttentionProblem) -> str | None:
    """Why no `sliding_map` has the packed sequences, or the batches or pages of K and V where only some keys are in
    use."""
    rows = max(problem.page or problem.seqlen_k, problem.seqlen_q if problem.varlen else 0)
    if (problem.varlen or problem.seqused) and rows > SLIDING_ROWS:
        return f"Tensor maps of sequences of their own lengths count at most {SLIDING_ROWS} rows of one, not {rows}."
    if not (problem.seqused or problem.page):
        return None
    if 0 < problem.page < SWIZZLE_ROWS:
        return f"Tensor maps bring {SWIZZLE_ROWS} keys of a page at once, and here it has {problem.page}."
    what, several = "pages" if problem.page else "batches", problem.shape("k")[0] > 1
    if several and rows_apart(problem, "k") != rows_apart(problem, "v"):
        return f"Tensor maps of keys in use need {what} of V as many rows apart as those of K."
    if several and any(problem.strides(kv)[0] % row_stride(problem, kv) for kv in "kv"):
        return f"Tensor maps of keys in use need {what} of K and V that are whole rows apart."
    if (rows := rows_of_head(problem, "k")) > MAX_END:
        return f"Tensor maps of keys in use need {what} whose rows an int32 counts, not {rows} of a head."
    return None
