"""The scales of tensors of 8 bits: a value is the stored number times the scale of its place.

Sources: per tensor and per head `[batch, kv_heads]` as `q_descale`, `k_descale` and `v_descale` of FlashAttention 3,
per block of rows as SageAttention's Q and K, per token and head as vLLM's `fp8_per_token_head` caches, per token and
128 columns as DeepSeek's latent cache (FlashMLA's "FP8 with scale")."""

from typing import Any, Final

from evoattn.model.dtype import DTYPES, KEY_DTYPES

SCALES = ("q_scale", "k_scale", "v_scale")
"""Inputs of float32, not negative: `k_scale` those of K. Where V lies within K, its scales are K's."""
GRANULARITIES = ("", "head", "block", "token", "columns")
"""What has a scale of its own: the whole tensor, each K/V head of each sequence, each BLOCK_ROWS rows of each head,
each row of each head, or each SCALE_COLUMNS columns of such a row."""
PER_BLOCK: Final = "block"
PER_TOKEN: Final = "token"
PER_COLUMNS: Final = "columns"
SCALE_COLUMNS = 128
BLOCK_ROWS = 128
"""A tile of keys of 64 or 128 has one scale then, and so have the 64 rows of a warpgroup."""
ROUNDED = {"forward_of_bf16": "bf16", "forward_of_fp16": "fp16"}
"""Operations of `dtype=e4m3` whose Q, like O, has 16 bits, which ones: a kernel rounds it to e4m3 as it comes, with a
scale of each ROUNDED_ROWS rows of a head."""
ROUNDED_ROWS = 16
IN_FP16 = "forward_in_fp16"
"""The forward pass of numbers of e4m3 whose answer is fp16, not bf16."""
ANSWERED = {**ROUNDED, IN_FP16: "fp16"}
"""By such an operation the dtype of its answer."""


def rounded_op(dtype: str) -> str:
    """Of a Q of that dtype."""
    return next(op for op, given in ROUNDED.items() if given == dtype)


def why_not_rounded(problem: Any) -> str:
    """One sentence if the fields of a problem whose operation is one of `ANSWERED` cannot be, else empty."""
    if problem.op not in ANSWERED:
        return ""
    if problem.dtype != "e4m3":
        return f"op={problem.op} multiplies numbers of e4m3: write dtype=e4m3."
    if problem.op == IN_FP16:
        return ""
    others = [name for name in ("seqused", "page", "varlen", "shared_kv", "blocks") if getattr(problem, name)]
    return f"op={problem.op} and {others[0]} exclude each other; take one of them out." if others else ""


def scale_blocks(rows: Any) -> Any:
    """Blocks of so many rows."""
    return (rows + BLOCK_ROWS - 1) // BLOCK_ROWS


def scale_shapes(problem: Any) -> dict[str, tuple[int, ...]]:
    """By its name the shape of each scale that the problem has.

    `[1, 1]` of a tensor; `[batch, kv_heads]`, Q's too; per block `[batch, heads, blocks]`, of the tensor's own heads;
    per token that of the tensor without its last dimension, so that scales of pages lie in pages, and per columns with
    a last dimension of scales. A sequence of a packed batch counts as a batch of its own."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in SCALES:
        tensor = name[0]
        if tensor not in problem.tensors or problem.element_of(tensor).name not in KEY_DTYPES:
            continue
        if problem.scales == PER_TOKEN:
            shapes[name] = problem.shape(tensor)[:3]
        elif problem.scales == PER_COLUMNS:
            *rows, columns = problem.shape(tensor)
            shapes[name] = (*rows, columns // SCALE_COLUMNS)
        elif problem.scales == PER_BLOCK:
            batch, heads, rows, _ = problem.shape(tensor)
            shapes[name] = (batch, heads, scale_blocks(rows))
        else:
            shapes[name] = (problem.batch, problem.kv_heads) if problem.scales else (1, 1)
    return shapes


def scale_strides(problem: Any, name: str) -> tuple[int, int, int]:
    """In elements, from one batch, head and row, per block: block, to the next: 0 where the scale is the same. Kernels
    take them as arguments. Scales of columns lie next to one another. With pages a batch of scales per token is a page;
    scales per head are of sequences."""
    shape = scale_shapes(problem)[name]
    if len(shape) == 4:
        _, heads, rows, columns = shape
        if problem.layout == "bshd":
            return rows * heads * columns, columns, heads * columns
        return heads * rows * columns, rows * columns, columns
    if len(shape) == 3:
        _, heads, rows = shape
        by_rows = problem.layout == "bshd" and problem.scales == PER_TOKEN
        return (rows * heads, 1, heads) if by_rows else (heads * rows, rows, 1)
    return (shape[1], 1, 0) if problem.scales else (0, 0, 0)


def why_no_scales(problem: Any) -> str:
    """One sentence if the dtypes and scales of a problem cannot be, alone or together, else empty."""
    if problem.kv and problem.kv not in KEY_DTYPES:
        return f"kv must be one of {', '.join(KEY_DTYPES)}, or left out where K and V are as Q, not {problem.kv!r}."
    if problem.scales not in GRANULARITIES:
        return (
            f"scales must be head, block, token, columns, or left out for one of each tensor, not {problem.scales!r}."
        )
    eight = problem.kv or problem.dtype in KEY_DTYPES
    if problem.scales and not eight:
        return f"scales={problem.scales}: only numbers of 8 bits have scales; write kv=e4m3 too, or take scales out."
    if problem.scales == PER_BLOCK and (reason := _why_no_blocks(problem)):
        return reason
    by_columns = problem.scales == PER_COLUMNS
    fits = by_columns and problem.rotary_apart and problem.head_dim_v % SCALE_COLUMNS == 0
    if eight and (by_columns or problem.rotary_apart) and not fits:
        return (
            "scales=columns and rotary_apart=1 go together where V has 8 bits: K's own columns have 16 then, and V has "
            f"whole {SCALE_COLUMNS} columns."
        )
    if problem.kv and not DTYPES[problem.dtype].on_tensor_cores:
        return f"kv={problem.kv}: K and V of 8 bits go with queries of 16 bits; write dtype=bf16 or fp16."
    if eight and problem.op == "backward":
        return f"op={problem.op} takes no numbers of 8 bits; take kv out, and write dtype=bf16 or fp16."
    return ""


def _why_no_blocks(problem: Any) -> str:
    if problem.op == "forward" and DTYPES[problem.dtype].bytes > 1:
        return "scales=block: a Q of 8 bits has those too; write dtype=e4m3."
    others = [name for name in ("seqused", "page", "varlen", "shared_kv") if getattr(problem, name)]
    return f"scales=block and {others[0]} exclude each other; take one of them out." if others else ""
