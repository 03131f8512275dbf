"""What attention to compute: shapes, dtype and mask of one forward call, and the work it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from evoattn.model import least_work
from evoattn.model.describe import describe
from evoattn.model.dtype import DTYPES, Dtype
from evoattn.model.errors import WrongUse
from evoattn.model.lengths import parse_lengths
from evoattn.model.mask import FULL, MASKS, Mask, MaskKind
from evoattn.model.sequences import Sequences, parse_sequences
from evoattn.model.size_fault import size_fault
from evoattn.model.term_shapes import bias_strides, term_shapes
from evoattn.model.variant import VARIANTS, variant_fault, windowed

LAYOUTS = ("bhsd", "bshd")
MAX_TENSOR_BYTES = 1 << 36
"""64 GiB: more than any card in `gpu.py` could hold beside the other three tensors."""


OPTIONAL = ("lse", "scale", *VARIANTS)
"""Fields that `to_dict` leaves out where they say nothing: older records lack them."""


class ProblemError(WrongUse):
    """A problem that cannot be: its message is one sentence that says what to change."""


@dataclass(frozen=True)
class AttentionProblem:
    """One forward attention call, `O = softmax(Q Kᵀ / sqrt(head_dim) + mask) V`, or a variant of it.

    Shapes are those of `torch.nn.functional.scaled_dot_product_attention`:
    Q and O `[batch, heads, seqlen_q, head_dim]`, K and V `[batch, kv_heads, seqlen_k, head_dim]`.
    `kv_heads < heads` is grouped-query attention; query head h reads K/V head `h // (heads // kv_heads)`.
    `value_dim` gives V and O a head_dim of their own (0: that of Q and K; `head_dim_v` is the number either way); with
    `shared_kv` V is the first `value_dim` columns of K, so that there is no tensor V (DeepSeek's decoding).

    `mask` names follow `torch.nn.attention.bias`: with `causal_upper_left` query i sees keys j <= i (SDPA's
    `is_causal=True`); with `causal_lower_right` keys j <= i + seqlen_k - seqlen_q (flash-attention, decoding).
    A query that sees no key has the output 0.

    `layout` is the order of the dimensions in memory: `bhsd` is contiguous, `bshd` is a
    `[batch, seqlen, heads, head_dim]` tensor seen through a transposed view.

    `lse` asks for a second output, the natural logarithm of the sum of exponentials of each query's masked and scaled
    scores, `-inf` for a query that sees no key: `[batch, heads, seqlen_q]`, contiguous, float32 whatever the dtype.

    The variants change the scores `s = Q Kᵀ · scale`, in this order; each has a sentence in `evoattn.model.variant`:
    - `scale`: a positive number in place of 1/sqrt(head_dim);
    - `softcap`: `s = softcap · tanh(s / softcap)`, 0 for none;
    - `alibi`: `s -= slope of the head · |i + offset - j|`, with the offset of the mask's diagonal;
    - `bias`: `s += bias`, a tensor over queries and keys (`s`), and heads (`hs`), batches (`bs`) or both (`bhs`);
    - `window`: `past:ahead`, of the keys that the mask shows those from i + offset - past to i + offset + ahead;
    - `sink`: each head has one more score, without a value, that takes part in the sum of exponentials.

    `seqused` is how many keys each batch has in use (`key_lengths`, at most seqlen_k): those behind them are no keys,
    and masks end at the last one in use. With `page` K and V are `[pages, kv_heads, page, head_dim]`, a page of a
    `bshd` layout in memory being `[page, kv_heads, head_dim]`, and a table says which pages a sequence has.

    With `varlen` the sequences are packed end to end: `batch` of them, of the lengths in `sequences`, at most seqlen_q
    and seqlen_k; a mask's diagonal is each sequence's own. Q and O are `[1, heads, all queries, head_dim]`, K and V
    likewise, and the log-sum-exp is `[1, heads, all queries]`.

    Raises `ProblemError` on a size, dtype, mask or layout that is not one of the above, and on variants that exclude
    each other.
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
    scale: float | None = None
    window: str = ""
    softcap: float = 0.0
    sink: bool = False
    alibi: bool = False
    bias: str = ""
    value_dim: int = 0
    shared_kv: bool = False
    seqused: str = ""
    page: int = 0
    varlen: str = ""

    def __post_init__(self) -> None:
        if self.value_dim is None or self.value_dim == self.head_dim:
            object.__setattr__(self, "value_dim", 0)  # one way to say it, so that equal problems are equal
        if fault := size_fault(self):
            raise ProblemError(fault)
        for field, allowed in (("dtype", DTYPES), ("mask", MASKS), ("layout", LAYOUTS)):
            if getattr(self, field) not in tuple(allowed):
                raise ProblemError(f"{field} must be one of {', '.join(allowed)}, not {getattr(self, field)!r}.")
        if not isinstance(self.lse, bool):
            raise ProblemError(f"lse must be true or false, not {self.lse!r}.")
        if fault := variant_fault(self):
            raise ProblemError(fault)
        shapes: list[tuple[int, ...]] = [self.shape(tensor) for tensor in "qkvo"]
        largest = max([*shapes, self.term_shapes.get("bias", ())], key=math.prod)
        if math.prod(largest) * self.element_bytes > MAX_TENSOR_BYTES:
            raise ProblemError(
                f"a tensor of shape {list(largest)} takes more than {MAX_TENSOR_BYTES >> 30} GiB; choose a smaller "
                "shape."
            )

    @property
    def head_dim_v(self) -> int:
        """The head_dim of V and O."""
        return self.value_dim or self.head_dim

    @property
    def tensors(self) -> str:
        """Letters of the input tensors: `qkv`, or `qk` where V is a part of K."""
        return "qk" if self.shared_kv else "qkv"

    @property
    def group_size(self) -> int:
        """Query heads that share one K/V head."""
        return self.heads // self.kv_heads

    @property
    def masking(self) -> Mask:
        """The row of the table of masks, with the window if there is one."""
        return windowed(self.mask, self.window) if self.window else MASKS[self.mask]

    @cached_property
    def variants(self) -> tuple[str, ...]:
        """Names of the fields by which this is more than plain attention; `scale` is none, as every kernel takes it."""
        return tuple(name for name in VARIANTS if getattr(self, name))

    @property
    def key_lengths(self) -> tuple[int, ...]:
        """Keys of each batch that are in use."""
        if not self.seqused:
            return (self.seqlen_k,) * self.batch
        return tuple(min(length, self.seqlen_k) for length in parse_lengths(self.seqused).draw(self.batch))

    @property
    def table_pages(self) -> int:
        """Pages that a row of the table has room for."""
        return -(-self.seqlen_k // self.page)

    @property
    def causal(self) -> bool:
        """See `Mask.causal`."""
        return self.masking.causal

    @property
    def causal_offset(self) -> int:
        """Query i sees keys j <= i + causal_offset if the mask is a causal one; see `Mask.offset`."""
        return self.masking.offset(self.seqlen_q, self.seqlen_k)

    @property
    def diagonal(self) -> int:
        """The key from which query 0 counts a distance: that of the mask's diagonal, or, where it has none, of the one
        that ends in the lower right corner, as in FlashAttention."""
        mask = self.masking if self.masking.kind is not MaskKind.FULL else self.masking.windowed(0, 0)
        return mask.offset(self.seqlen_q, self.seqlen_k)

    @property
    def element(self) -> Dtype:
        """The row of the table of dtypes."""
        return DTYPES[self.dtype]

    @property
    def element_bytes(self) -> int:
        return DTYPES[self.dtype].bytes

    @property
    def softmax_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def sequences(self) -> Sequences:
        """(queries, keys) of each sequence."""
        if self.varlen:
            return parse_sequences(self.varlen, self.batch, self.seqlen_q, self.seqlen_k)
        return tuple((self.seqlen_q, keys) for keys in self.key_lengths)

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return self.shape("o")[:3]

    @property
    def term_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `evoattn.model.term_shapes`."""
        return term_shapes(self)

    def shape(self, tensor: str) -> tuple[int, int, int, int]:
        """Logical shape `[batch, heads, seqlen, head_dim]` of `q`, `k`, `v` or `o`."""
        dim = self.head_dim if tensor in ("q", "k") else self.head_dim_v
        batch, rows, keys = self.batch, self.seqlen_q, self.seqlen_k
        if self.varlen:
            batch, (rows, keys) = 1, map(sum, zip(*self.sequences, strict=True))
        if tensor in ("q", "o"):
            return batch, self.heads, rows, dim
        if self.page:
            return self.batch * self.table_pages, self.kv_heads, self.page, dim
        return batch, self.kv_heads, keys, dim

    def strides(self, tensor: str) -> tuple[int, int, int, int]:
        """Strides of `shape(tensor)` in elements, in this problem's memory layout; the last one is 1. Of `bias` too."""
        if tensor == "bias":
            return bias_strides(self)
        _, heads, seqlen, dim = self.shape("k" if tensor == "v" and self.shared_kv else tensor)
        if self.layout == "bshd":
            return seqlen * heads * dim, dim, heads * dim, 1
        return heads * seqlen * dim, seqlen * dim, dim, 1

    @property
    def visible_pairs(self) -> int:
        """Query-key pairs that the mask lets through, summed over batch and heads."""
        return least_work.visible_pairs(self)

    @property
    def flops(self) -> int:
        """See `least_work.flops`."""
        return least_work.flops(self)

    @property
    def bytes(self) -> int:
        """See `least_work.moved_bytes`."""
        return least_work.moved_bytes(self)

    def with_(self, **changes: Any) -> AttentionProblem:
        """A copy with fields changed; its name is dropped unless given."""
        return replace(self, **{"name": "", **changes})

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields; `AttentionProblem(**d)` restores it.

        Fields that older records lack (`OPTIONAL`) are left out where they say nothing.
        """
        return {f: getattr(self, f) for f in self.__dataclass_fields__ if f not in OPTIONAL or getattr(self, f)}

    def describe(self) -> str:
        """One line for people, e.g. `seed_h100: B=1 H=16 S=1024 D=64 fp16 full`."""
        return describe(self)
