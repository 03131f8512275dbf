"""The problem of a trial as C++ constants, for the check of its exported file (`templates/export/check.cuh`)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from evoattn.families.base import starts_zeroed
from evoattn.model.launch import KernelLaunch
from evoattn.model.mask import MASKS, MaskKind
from evoattn.model.problem import AttentionProblem
from evoattn.model.variant import parse_window

TERMS = ("sinks", "slopes", "bias", "seqused", "table", "cu_seqlens_q", "cu_seqlens_k")
"""Inputs beside Q, K and V; in C++ each is the number of its buffer, -1 where there is none."""
FOUR_BYTES = frozenset(TERMS) - {"sinks", "bias"}
"""Those that are float32 or int32; the others have the problem's dtype."""


def buffers_of(problem: AttentionProblem, workspace: Iterable[str]) -> list[str]:
    """Names of the buffers in their order. Where V lies within K the buffer of V is empty."""
    return ["q", "k", "v", "o", *["lse"] * problem.lse, *problem.term_shapes, *workspace]


def problem_constants(
    problem: AttentionProblem, minimum_sm: int, launches: tuple[KernelLaunch, ...], workspace: dict[str, int]
) -> str:
    """The problem and the limits."""
    buffers, sizes = buffers_of(problem, workspace), _sizes(problem) + list(workspace.values())
    past, ahead = parse_window(problem.window) if problem.window else (0, 0)
    places = {name: buffers.index(name) if name in problem.term_shapes else -1 for name in TERMS}
    bias = problem.strides("bias")[:3] if problem.bias else (0, 0, 0)
    zeroed = (_cpp(starts_zeroed(name)) for name in buffers)
    queries, keys = zip(*problem.sequences, strict=True)
    strides = "\n".join(f"constexpr long {t.upper()}_STRIDES[3] = {_list(problem.strides(t)[:3])};" for t in "qkvo")
    return f"""\
enum class Dtype {{ fp16, bf16, fp32 }};
enum {{ Q, K, V, O }};                                            // the first four buffers
constexpr int LSE = 4;                                          // the next, if there is one
constexpr bool HAS_LSE = {_cpp(problem.lse)};
constexpr char PROBLEM[] = "{problem.with_().describe()}";
constexpr Dtype DTYPE = Dtype::{problem.dtype};
constexpr size_t ELEMENT_BYTES = {problem.element_bytes};
constexpr long BATCH = {problem.batch}, HEADS = {problem.heads}, KV_HEADS = {problem.kv_heads};
constexpr long SEQLEN_K = {problem.seqlen_k}, HEAD_DIM = {problem.head_dim}, VALUE_DIM = {problem.head_dim_v};
constexpr long QUERIES[BATCH] = {_list(queries)};  // of each sequence
constexpr long KEYS[BATCH] = {_list(keys)};        // that it has in use, at most SEQLEN_K
constexpr long ROWS = {problem.shape("o")[2]};  // of a head of Q and O
constexpr bool PACKED = {_cpp(bool(problem.varlen))};     // the sequences lie end to end
constexpr bool SHARED_KV = {_cpp(problem.shared_kv)};  // V is the first columns of K
constexpr long PAGE = {problem.page or 1}, TABLE_PAGES = {problem.table_pages if problem.page else 0};
constexpr bool CAUSAL = {_cpp(MASKS[problem.mask].causal)};
constexpr bool LOWER_RIGHT = {_cpp(_ends_lower_right(problem))};  // where the diagonal ends
constexpr double SCALE = {problem.softmax_scale!r}, SOFTCAP = {float(problem.softcap)!r};  // SOFTCAP 0: none
constexpr bool WINDOW = {_cpp(bool(problem.window))};
constexpr long PAST = {past}, AHEAD = {ahead};    // of the keys that a query sees with a window
// Buffers; -1: none.
constexpr int {", ".join(f"{name.upper()} = {place}" for name, place in places.items())};
constexpr long BIAS_STRIDES[3] = {_list(bias)};
{strides}
constexpr double FLOPS = {problem.flops}.0;  // 2 * (HEAD_DIM + VALUE_DIM) for each pair that the mask lets through
constexpr int BUFFERS = {len(sizes)};
constexpr size_t BUFFER_BYTES[BUFFERS] = {_list(sizes)};     // {", ".join(buffers)}
constexpr bool STARTS_ZEROED[BUFFERS] = {_list(zeroed)};
constexpr int MINIMUM_SM = {minimum_sm};
constexpr int LARGEST_SMEM = {max(n.smem_bytes for n in launches)};  // bytes of dynamic shared memory per block
"""


def _sizes(problem: AttentionProblem) -> list[int]:
    """Bytes of the problem's own buffers."""
    inputs = [math.prod(problem.shape(t)) * problem.element_bytes * (t in problem.tensors + "o") for t in "qkvo"]
    terms = [
        math.prod(shape) * (4 if name in FOUR_BYTES else problem.element_bytes)
        for name, shape in problem.term_shapes.items()
    ]
    return [*inputs, *[4 * math.prod(problem.lse_shape)] * problem.lse, *terms]


def _ends_lower_right(problem: AttentionProblem) -> bool:
    """Whether the diagonal of each sequence ends in the lower right corner: see `AttentionProblem.diagonal`."""
    mask = problem.masking
    return mask.kind is MaskKind.FULL or mask.corner == "lower_right"


def _cpp(value: bool) -> str:
    return str(value).lower()


def _list(values: Iterable[object]) -> str:
    return f"{{{', '.join(map(str, values))}}}"
