"""What attention to compute: shapes, dtype and mask of one forward call, and the work it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from evoattn.model.dtype import DTYPES, Dtype
from evoattn.model.errors import WrongUse
from evoattn.model.mask import FULL, MASKS, Mask

LAYOUTS = ("bhsd", "bshd")
MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 8, 8192, 8
SMALLEST_HEAD_DIM = 4
"""The one head_dim under a whole step: for toy problems."""
MAX_TENSOR_BYTES = 1 << 36
"""64 GiB: more than any card in `gpu.py` could hold beside the other three tensors."""


class ProblemError(WrongUse):
    """A problem that cannot be: its message is one sentence that says what to change."""


@dataclass(frozen=True)
class AttentionProblem:
    """One forward attention call, `O = softmax(Q Kᵀ / sqrt(head_dim) + mask) V`.

    Shapes are those of `torch.nn.functional.scaled_dot_product_attention`:
    Q and O `[batch, heads, seqlen_q, head_dim]`, K and V `[batch, kv_heads, seqlen_k, head_dim]`.
    `kv_heads < heads` is grouped-query attention; query head h reads K/V head `h // (heads // kv_heads)`.

    `mask` names follow `torch.nn.attention.bias`: with `causal_upper_left` query i sees keys j <= i (SDPA's
    `is_causal=True`); with `causal_lower_right` keys j <= i + seqlen_k - seqlen_q (flash-attention, decoding).
    A query that sees no key has the output 0.

    `layout` is the order of the dimensions in memory: `bhsd` is contiguous, `bshd` is a
    `[batch, seqlen, heads, head_dim]` tensor seen through a transposed view.

    `lse` asks for a second output, the natural logarithm of the sum of exponentials of each query's masked and scaled
    scores, `-inf` for a query that sees no key: `[batch, heads, seqlen_q]`, contiguous, float32 whatever the dtype.

    Raises `ProblemError` on a size, dtype, mask or layout that is not one of the above.
    """

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: str = "fp16"
    mask: str = FULL
    layout: str = "bhsd"
    name: str = ""
    lse: bool = False

    def __post_init__(self) -> None:
        for field in ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ProblemError(f"{field} must be a whole number of at least 1, not {value!r}.")
        if self.heads % self.kv_heads:
            raise ProblemError(
                f"{self.heads} query heads do not divide over {self.kv_heads} K/V heads; choose kv_heads that divides "
                "heads."
            )
        whole_steps = self.head_dim % HEAD_DIM_STEP == 0 and MIN_HEAD_DIM <= self.head_dim <= MAX_HEAD_DIM
        if not whole_steps and self.head_dim != SMALLEST_HEAD_DIM:
            raise ProblemError(
                f"head_dim must be {SMALLEST_HEAD_DIM} or a multiple of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to "
                f"{MAX_HEAD_DIM}, not {self.head_dim}."
            )
        for field, allowed in (("dtype", DTYPES), ("mask", MASKS), ("layout", LAYOUTS)):
            if getattr(self, field) not in allowed:
                raise ProblemError(f"{field} must be one of {', '.join(allowed)}, not {getattr(self, field)!r}.")
        if not isinstance(self.lse, bool):
            raise ProblemError(f"lse must be true or false, not {self.lse!r}.")
        largest = max(self.shape("q"), self.shape("k"), key=math.prod)
        if math.prod(largest) * self.element_bytes > MAX_TENSOR_BYTES:
            raise ProblemError(
                f"a tensor of shape {list(largest)} takes more than {MAX_TENSOR_BYTES >> 30} GiB; choose a smaller "
                "shape."
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one K/V head."""
        return self.heads // self.kv_heads

    @property
    def masking(self) -> Mask:
        """The row of the table of masks."""
        return MASKS[self.mask]

    @property
    def causal(self) -> bool:
        """See `Mask.causal`."""
        return self.masking.causal

    @property
    def causal_offset(self) -> int:
        """Query i sees keys j <= i + causal_offset if the mask is a causal one; see `Mask.offset`."""
        return self.masking.offset(self.seqlen_q, self.seqlen_k)

    @property
    def element(self) -> Dtype:
        """The row of the table of dtypes."""
        return DTYPES[self.dtype]

    @property
    def element_bytes(self) -> int:
        return self.element.bytes

    @property
    def softmax_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return self.batch, self.heads, self.seqlen_q

    def shape(self, tensor: str) -> tuple[int, int, int, int]:
        """Logical shape `[batch, heads, seqlen, head_dim]` of `q`, `k`, `v` or `o`."""
        if tensor in ("q", "o"):
            return self.batch, self.heads, self.seqlen_q, self.head_dim
        return self.batch, self.kv_heads, self.seqlen_k, self.head_dim

    def strides(self, tensor: str) -> tuple[int, int, int, int]:
        """Strides of `shape(tensor)` in elements, in this problem's memory layout; the last one is 1."""
        _, heads, seqlen, dim = self.shape(tensor)
        if self.layout == "bshd":
            return seqlen * heads * dim, dim, heads * dim, 1
        return heads * seqlen * dim, seqlen * dim, dim, 1

    @property
    def visible_pairs(self) -> int:
        """Query-key pairs that the mask lets through, summed over batch and heads."""
        return self.batch * self.heads * self.masking.visible_pairs(self.seqlen_q, self.seqlen_k)

    @property
    def flops(self) -> int:
        """Floating-point operations: two products of 2·head_dim each for every visible pair (flash-attention's
        count)."""
        return 4 * self.head_dim * self.visible_pairs

    @property
    def bytes(self) -> int:
        """Fewest bytes through device memory: Q, K and V read once, O and the log-sum-exp, if any, written once."""
        return self.element_bytes * sum(math.prod(self.shape(t)) for t in "qkvo") + 4 * self.lse * math.prod(
            self.lse_shape
        )

    def with_(self, **changes: Any) -> AttentionProblem:
        """A copy with fields changed; its name is dropped unless given."""
        return replace(self, **{"name": "", **changes})

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields; `AttentionProblem(**d)` restores it.

        `lse` is left out where false, as in older records.
        """
        return {f: getattr(self, f) for f in self.__dataclass_fields__ if f != "lse" or self.lse}

    def describe(self) -> str:
        """One line for people, e.g. `seed_h100: B=1 H=16 S=1024 D=64 fp16 full`."""
        heads = f"H={self.heads}" if self.kv_heads == self.heads else f"H={self.heads}/{self.kv_heads}"
        seqlen = f"S={self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"Sq={self.seqlen_q} Sk={self.seqlen_k}"
        text = f"B={self.batch} {heads} {seqlen} D={self.head_dim} {self.dtype} {self.mask}"
        if self.layout != "bhsd":
            text += f" {self.layout}"
        if self.lse:
            text += " lse"
        return f"{self.name}: {text}" if self.name else text
