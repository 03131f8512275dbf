"""What attention to compute: shapes, dtype and mask of one forward call, and the work it takes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from evoattn.model import block_list
from evoattn.model import merge as merge  # its rows of OPERATIONS
from evoattn.model import quantize as quantize  # the same
from evoattn.model.append import new_rows
from evoattn.model.backward import why_no_grads
from evoattn.model.dtype import DTYPES, QUERY_DTYPES, Dtype
from evoattn.model.errors import WrongUse
from evoattn.model.forward import FORWARD, MAIN
from evoattn.model.hashes import kept_hash, short_hash
from evoattn.model.mask import FULL, MASKS, Band, Mask
from evoattn.model.operation import OPERATIONS, Operation, TensorSpec
from evoattn.model.scales import ANSWERED, ROUNDED, scale_shapes, scale_strides, why_no_scales
from evoattn.model.score import (
    INTEGERS,
    Apply,
    Name,
    Score,
    Table,
    Tree,
    load,
    parse_predicate,
    parse_score,
    parse_tables,
)
from evoattn.model.scoring import Scoring, scoring_of
from evoattn.model.sequences import Sequences, parse_lengths, parse_sequences, with_room
from evoattn.model.variant import SMALL_PAGE, VARIANTS, fault_of, parse_window

LAYOUTS = ("bhsd", "bshd")
MAX_TENSOR_BYTES = 1 << 36
"""64 GiB: more than any card in `gpu.py` could hold beside the other three tensors."""
MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 8, 8192, 8
SMALLEST_HEAD_DIM = 4
"""The one head_dim under a whole step: for toy problems."""
BIAS_ROW_STEP = 8
"""Elements that the rows of a bias are multiples of."""
LONGEST_LENGTHS = 40
"""Characters of lengths that a file's name may have."""
OPTIONAL = ("lse", "scale", "op", "tables", "predicate", "grads", "deterministic", "batch_invariant", *VARIANTS)
"""Fields that `to_dict` leaves out where they say nothing: older records lack them."""


class ProblemError(WrongUse):
    """A problem that cannot be: its message is one sentence that says what to change."""


@kept_hash
@dataclass(frozen=True)
class AttentionProblem:
    """One forward attention call, `O = softmax(Q Kᵀ / sqrt(head_dim) + mask) V`, or a variant of it.

    Shapes are those of `torch.nn.functional.scaled_dot_product_attention`:
    Q and O `[batch, heads, seqlen_q, head_dim]`, K and V `[batch, kv_heads, seqlen_k, head_dim]`.
    `kv_heads < heads` is grouped-query attention; query head h reads K/V head `h // (heads // kv_heads)`.
    `value_dim` gives V and O a head_dim of their own (0: that of Q and K; `head_dim_v` is the number either way). With
    `shared_kv` V is these first columns of K, and no tensor; with `rotary_apart` the tensor K has the others alone.

    `mask` names follow `torch.nn.attention.bias`: with `causal_upper_left` query i sees keys j <= i (SDPA's
    `is_causal=True`); with `causal_lower_right` keys j <= i + seqlen_k - seqlen_q (decoding). No key: the output 0.
    `layout` is the order of the dimensions in memory: `bhsd` is contiguous, `bshd` `[batch, seqlen, heads, head_dim]`.

    `lse` asks for a second output, the natural logarithm of the sum of exponentials of each query's masked and scaled
    scores, `-inf` for a query that sees no key: `[batch, heads, seqlen_q]`, contiguous, float32 whatever the dtype.

    The variants change the scores `s = Q Kᵀ · scale`, in this order; each has a sentence in `evoattn.model.variant`:
    - `scale`: a positive number in place of 1/sqrt(head_dim);
    - `softcap`: `s = softcap · tanh(s / softcap)`, 0 for none;
    - `alibi`: `s -= slope of the head · |i + offset - j|`, with the offset of the mask's diagonal;
    - `bias`: `s += bias`, a tensor over queries and keys (`s`), and heads (`hs`), batches (`bs`) or both (`bhs`);
    - `score`: `s` becomes the value of an expression of it, and of `tables` (see `evoattn.model.score`);
    - `window`: `past:ahead`, of the keys that the mask shows those from i + offset - past to i + offset + ahead;
    - `sink`: each head has one more score, without a value, that takes part in the sum of exponentials.

    `seqused` is how many keys each batch has in use (`key_lengths`, at most seqlen_k): those behind them are no keys,
    and masks end at the last one in use. With `page` K and V are `[pages, kv_heads, page, head_dim]`, a page of a
    `bshd` layout in memory being `[page, kv_heads, head_dim]`, and a table says which pages a sequence has. With
    `appended` the last seqlen_q keys in use are new: a kernel first writes `new_k` and `new_v` into K and V, and the
    input `seqused` counts the keys before them.

    With `varlen` the sequences are packed end to end: `batch` of them, of the lengths in `sequences`, at most seqlen_q
    and seqlen_k; a mask's diagonal is each sequence's own. Q and O are `[1, heads, all queries, head_dim]`, K and V
    likewise, and the log-sum-exp is `[1, heads, all queries]`.

    `kv` gives K and V another dtype than Q, one of 8 bits, `e4m3`, `e5m2` or `int8`: values are the stored numbers
    times the scales `k_scale` and `v_scale`, float32 inputs, one of each tensor or, by `scales`, one for each K/V head
    of a sequence (`head`), each row of a head (`token`), or of V beside `rotary_apart` each 128 columns of one
    (`columns`). Where `dtype` has 8 bits, Q has `q_scale`, and O is bf16; `turned` has V's keys along rows then.

    `blocks` is a list of blocks of keys that each block of rows sees, on the device (`evoattn.model.block_list`), and
    `predicate` an expression of indices and `tables` that says which keys are seen in PARTIAL blocks.

    `op` is what is computed, a row of `OPERATIONS`; the above is of `forward`. `backward` makes the gradients of q, k
    and v out of that of O and, with `lse`, of the log-sum-exp; `grads` names further inputs whose gradients are wanted,
    `bias`, `sinks`, `own_NAME` of a table, a `+` between two; `deterministic` asks for the same bits in every run,
    `batch_invariant` for those of a row whatever else is computed (`Family.row_bits`).

    Raises `ProblemError` on what is none of these, or variants that exclude each other."""

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
    rotary_apart: bool = False
    seqused: str = ""
    page: int = 0
    appended: bool = False
    varlen: str = ""
    score: str = ""
    tables: str = ""
    blocks: str = ""
    predicate: str = ""
    op: str = FORWARD.name
    grads: str = ""
    deterministic: bool = False
    batch_invariant: bool = False
    kv: str = ""
    scales: str = ""
    turned: bool = False

    def __post_init__(self) -> None:
        if self.value_dim is None or self.value_dim == self.head_dim:
            object.__setattr__(self, "value_dim", 0)  # one way to say it, so that equal problems are equal
        if self.kv == self.dtype:
            object.__setattr__(self, "kv", "")
        if fault := self._size_fault():
            raise ProblemError(fault)
        for field, allowed in (("dtype", QUERY_DTYPES), ("mask", MASKS), ("layout", LAYOUTS), ("op", OPERATIONS)):
            if getattr(self, field) not in tuple(allowed):
                raise ProblemError(f"{field} must be one of {', '.join(allowed)}, not {getattr(self, field)!r}.")
        for field in ("lse", "deterministic", "batch_invariant"):
            if not isinstance(getattr(self, field), bool):
                raise ProblemError(f"{field} must be true or false, not {getattr(self, field)!r}.")
        for why in (why_no_scales, fault_of, why_no_grads, self.operation.why_not):
            if fault := why(self):
                raise ProblemError(fault)
        if self.own_score:  # one way to write it
            object.__setattr__(self, "score", self.own_score.text)
        if self.predicate:
            object.__setattr__(self, "predicate", parse_predicate(self.predicate, self.tables, True).text)
        largest = max(*map(self.shape, MAIN), self.term_shapes.get("bias", (0,)), key=math.prod)
        if math.prod(largest) * self.element_bytes > MAX_TENSOR_BYTES:
            gib = MAX_TENSOR_BYTES >> 30
            raise ProblemError(f"a tensor of shape {list(largest)} takes more than {gib} GiB; choose a smaller shape.")

    @property
    def operation(self) -> Operation:
        """The row of the table of operations."""
        return OPERATIONS[self.op]

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What a kernel reads."""
        return self.operation.inputs(self)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What a kernel writes."""
        return self.operation.outputs(self)

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

    @cached_property
    def masking(self) -> Mask:
        """The row of the table of masks, with the window if there is one."""
        mask = MASKS[self.mask]
        return mask.windowed(*parse_window(self.window)) if self.window else mask

    @cached_property
    def variants(self) -> tuple[str, ...]:
        """Names of the fields by which this is more than plain attention; `scale` is none, as every kernel takes it."""
        return tuple(name for name in VARIANTS if getattr(self, name))

    @cached_property
    def own_score(self) -> Score | None:
        """The problem's own expression of scores."""
        return parse_score(self.score, self.tables, True) if self.score else None

    @cached_property
    def shown(self) -> Tree | None:
        """What shows a key in a PARTIAL block beside the mask: documents, the problem's own predicate; None for
        neither."""
        own = parse_predicate(self.predicate, self.tables, True).tree if self.predicate else None
        found = {table.name: table for table in self.own_tables}
        if "query_documents" not in found:
            return own
        places = {"query_documents": "q", "key_documents": "k"}
        same = Apply("==", tuple(load(found[name], (Name("b"), Name(at))) for name, at in places.items()))
        return same if own is None else Apply("&", (same, own))

    @cached_property
    def own_tables(self) -> tuple[Table, ...]:
        """The tables of the problem's own expressions, and documents."""
        documents = self.block_mask[0].document_shapes(self.batch, self.band) if self.blocks else {}
        made = (Table(name, INTEGERS, shape, name) for name, shape in documents.items())
        return (*parse_tables(self.tables), *made)

    @cached_property
    def scoring(self) -> Scoring:
        """What is done to scores."""
        return scoring_of(self)

    @cached_property
    def compiled_variants(self) -> tuple[str, ...]:
        """`variants` as far as a kernel's code depends on them: of expressions their texts, and the dtypes and ranks of
        their tables."""
        tables = [f"{table.name}:{table.dtype}:{len(table.shape)}" for table in self.own_tables]
        said = {"score": f"score={self.score}", "blocks": f"blocks={self.predicate}"}
        said |= {"kv": f"kv={self.kv}", "scales": f"scales={self.scales}"}
        said |= {"page": "small page"} if self.page < SMALL_PAGE else {}
        names = (name for name in self.variants if name != "scales" or self.scales not in ("", "head"))
        return tuple(
            " ".join([said[name], *(tables if name in ("score", "blocks") else ())]) if name in said else name
            for name in names
        )

    @cached_property
    def key_lengths(self) -> tuple[int, ...]:
        """Keys of each batch that are in use; those of packed sequences, if they lie in pages."""
        if self.varlen and self.page:
            return tuple(keys for _, keys in self.sequences)
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
        return self.seqlen_k - self.seqlen_q if self.masking.ends_lower_right else 0

    @property
    def band(self) -> Band:
        """What the mask shows of seqlen_q queries and seqlen_k keys."""
        return self.masking.band(self.seqlen_q, self.seqlen_k)

    @property
    def block_mask(self) -> tuple[block_list.BlockMask, int, int, Band, int]:
        """What `block_list.draw` and its neighbours take, with `blocks`."""
        return block_list.parse_blocks(self.blocks), self.batch, self.heads, self.band, self.diagonal

    @property
    def element(self) -> Dtype:
        """Q's row of the table of dtypes."""
        return DTYPES[self.dtype]

    @property
    def element_bytes(self) -> int:
        return DTYPES[self.dtype].bytes

    @property
    def answer(self) -> Dtype:
        """O's row, and that of the bias and the sinks."""
        return DTYPES[ANSWERED.get(self.op) or self.element.answers or self.dtype]

    def element_of(self, tensor: str) -> Dtype:
        """The row of `q`, `k`, `v`, `o` or `bias`, or of a gradient."""
        name, others = tensor.removeprefix("d"), "v" if self.rotary_apart else "kv"
        wide = name in ("o", "bias") or (name == "q" and self.op in ROUNDED)
        return self.answer if wide else DTYPES[self.kv] if self.kv and name in others else self.element

    @property
    def scale_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `evoattn.model.scales`."""
        return scale_shapes(self)

    @property
    def softmax_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def sequences(self) -> Sequences:
        """(queries, keys) of each sequence."""
        if self.varlen:
            return parse_sequences(self.varlen, self.batch, self.seqlen_q, self.seqlen_k)
        return tuple((self.seqlen_q, keys) for keys in self.key_lengths)

    @cached_property
    def _packed_rows(self) -> list[int]:
        return [sum(side) for side in zip(*self.sequences, strict=True)]

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return self.shape("o")[:3]

    @property
    def term_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the contiguous inputs beside q, k and v.

        `sinks` is in O's dtype, `slopes` float32; `bias`, in O's dtype, has rows of `seqlen_k` rounded up to 8
        elements, so that they begin at multiples of 16 bytes, and what lies past the last key means nothing. `seqused`
        holds the keys of each batch that are in use, `table` the pages of each batch's sequence in their order, both
        int32; entries of pages behind the last key in use mean nothing. `cu_seqlens_q` and `cu_seqlens_k`, int32, say
        where packed sequences begin, and where the last one ends; those whose keys lie in pages have `seqused` in place
        of the latter. A block list has six: `BlockMask.shapes`. Tables of the problem's own expression are `own_NAME`.
        Scales of numbers of 8 bits: `evoattn.model.scales`, per token not contiguous but in the order of the layout."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.sink:
            shapes["sinks"] = (self.heads,)
        if self.alibi:
            shapes["slopes"] = (self.heads,)
        if self.bias:
            rows = self.batch if "b" in self.bias else 1, self.heads if "h" in self.bias else 1
            columns = -(-self.seqlen_k // BIAS_ROW_STEP) * BIAS_ROW_STEP
            shapes["bias"] = (*rows, self.seqlen_q, columns)
        if self.seqused:
            shapes["seqused"] = (self.batch,)
        if self.page:
            shapes["table"] = (self.batch, self.table_pages)
        if self.appended:
            shapes |= {f"new_{name}": new_rows(self, name)[0] for name in "kv"}
        if self.varlen:
            shapes["cu_seqlens_q"] = (self.batch + 1,)
            shapes |= {"seqused": (self.batch,)} if self.page else {"cu_seqlens_k": (self.batch + 1,)}
        shapes |= {table.buffer: table.shape for table in self.own_tables}
        if self.blocks:
            shapes |= block_list.parse_blocks(self.blocks).shapes(self.batch, self.heads, self.band)
        return shapes | self.scale_shapes

    @property
    def head_rows(self) -> tuple[int, int]:
        """Rows of queries and of keys of a head in memory: of packed sequences all together, of pages those of one."""
        return self.shape("q")[2], self.shape("k")[2]

    def shape(self, tensor: str) -> tuple[int, int, int, int]:
        """Logical shape `[batch, heads, seqlen, head_dim]` of `q`, `k`, `v` or `o`, or of its gradient: `dq`, …"""
        tensor = tensor.removeprefix("d")
        dim = self.head_dim if tensor in ("q", "k") else self.head_dim_v
        dim -= self.head_dim_v * (tensor == "k" and self.rotary_apart)
        batch, rows, keys = self.batch, self.seqlen_q, self.seqlen_k
        if self.varlen:
            batch, (rows, keys) = 1, self._packed_rows
        if tensor in ("q", "o"):
            return batch, self.heads, rows, dim
        if self.page:
            return self.batch * self.table_pages, self.kv_heads, self.page, dim
        return batch, self.kv_heads, keys, dim

    def scale_strides(self, name: str) -> tuple[int, int, int]:
        """See `evoattn.model.scales`."""
        return scale_strides(self, name)

    def strides(self, tensor: str) -> tuple[int, int, int, int]:
        """Strides of `shape(tensor)` in elements, in this problem's memory layout; the last one is 1. Of `bias` too:
        0 where it is the same for all."""
        tensor = tensor.removeprefix("d")
        if tensor == "bias":
            batch, heads, rows, row = self.term_shapes["bias"]
            return heads * rows * row * (batch > 1), rows * row * (heads > 1), row, 1
        _, heads, seqlen, dim = self.shape("k" if tensor == "v" and self.shared_kv else tensor)
        if self.layout == "bshd":
            return seqlen * heads * dim, dim, heads * dim, 1
        return heads * seqlen * dim, seqlen * dim, dim, 1

    @property
    def visible_pairs(self) -> int:
        """Query-key pairs that the mask lets through, summed over sequences and heads."""
        if self.blocks:
            return block_list.visible_pairs(*self.block_mask)
        return self.heads * sum(self.masking.band(*lengths).pairs for lengths in self.sequences)

    @property
    def flops(self) -> int:
        """See `Operation.flops`."""
        return self.operation.flops(self)

    @property
    def bytes(self) -> int:
        """See `Operation.bytes`."""
        return self.operation.bytes(self)

    def with_(self, **changes: Any) -> AttentionProblem:
        """A copy with fields changed; its name is dropped unless given."""
        return replace(self, **{"name": "", **changes})

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields; `AttentionProblem(**d)` restores it.

        Fields that older records lack (`OPTIONAL`) are left out where they say nothing."""
        fields = self.__dataclass_fields__
        said = {f: getattr(self, f) for f in fields if f not in OPTIONAL or getattr(self, f)}
        return said if self.op != fields["op"].default else {f: value for f, value in said.items() if f != "op"}

    def describe(self) -> str:
        """One line for people, e.g. `seed_h100: B=1 H=16 S=1024 D=64 fp16 full`: what every problem has, then what is
        unusual in this one."""
        heads = f"{self.heads}" if self.kv_heads == self.heads else f"{self.heads}/{self.kv_heads}"
        rows, keys = self.seqlen_q, self.seqlen_k
        parts = [f"B={self.batch}", f"H={heads}", f"S={rows}" if rows == keys else f"Sq={rows} Sk={keys}"]
        parts.append(f"D={self.head_dim} Dv={self.value_dim}" if self.value_dim else f"D={self.head_dim}")
        parts += [self.dtype, self.mask]
        parts += [self.layout] * (self.layout != "bhsd")
        if self.op != "forward":
            parts += [f"op={self.op}"] + [f"grads={self.grads}"] * bool(self.grads)
            parts += ["deterministic"] * self.deterministic
        if self.scale is not None:
            parts.append(f"scale={_number(self.scale)}")
        for field in self.variants:
            value = getattr(self, field)
            if field == "score":
                parts += [f"score={self.score}"] + [f"tables={self.tables}"] * bool(self.tables)
            elif field == "blocks" and self.predicate:
                tables = [f"tables={self.tables}"] * bool(self.tables and not self.score)
                parts += [f"blocks={self.blocks}", f"predicate={self.predicate}", *tables]
            elif field != "value_dim":
                text = _number(value) if field == "softcap" else value
                parts.append(field if value is True else f"{field}={text}")
        parts += ["lse"] * self.lse + ["batch_invariant"] * self.batch_invariant
        text = " ".join(parts)
        return f"{self.name}: {text}" if self.name else text

    def short_name(self) -> str:
        """A name for files and studies: the problem's own, else made of its shape, e.g. `b1_h16_s1024_d64_fp16_full`.

        Different problems without a name have different ones; it holds letters, digits and underscores only."""
        if self.name:
            return self.name
        said = {
            f"b{self.batch}_h{self.heads}": True,
            f"kv{self.kv_heads}": self.kv_heads != self.heads,
            f"s{self.seqlen_q}": self.seqlen_q == self.seqlen_k,
            f"sq{self.seqlen_q}_sk{self.seqlen_k}": self.seqlen_q != self.seqlen_k,
            f"d{self.head_dim}v{self.value_dim}" if self.value_dim else f"d{self.head_dim}": True,
            f"{self.dtype}_{self.masking.short or self.mask}": True,
            self.layout: self.layout != "bhsd",
            self.op: self.op != "forward",
            f"d{self.grads.replace('+', '_d')}": self.grads,
            "deterministic": self.deterministic,
            "batch_invariant": self.batch_invariant,
            "lse": self.lse,
            f"scale{_digits(self.scale or 0)}": self.scale,
            f"w{self.window.replace(':', '_')}": self.window,
            f"cap{_digits(self.softcap)}": self.softcap,
            "sink": self.sink,
            "alibi": self.alibi,
            f"bias_{self.bias}": self.bias,
            "rotary_apart" if self.rotary_apart else "shared_kv": self.rotary_apart or self.shared_kv,
            f"used{self.seqused.replace(':', '_')}": self.seqused,
            f"page{self.page}": self.page,
            "appended": self.appended,
            _lengths_name(self.varlen): self.varlen,
            f"score_{short_hash(self.score + ' ' + self.tables)}": self.score,
            f"blocks_{re.sub('[+:/]', '_', self.blocks)}": self.blocks,
            f"predicate_{short_hash(self.predicate + ' ' + self.tables)}": self.predicate,
            f"kv_{self.kv}": self.kv,
            f"scales_{self.scales}": self.scales,
            "turned": self.turned,
        }
        return "_".join(part for part, applies in said.items() if applies)

    def canonical(self) -> AttentionProblem:
        """The problem as a call of these lengths has it: what is the same answer has one form, so that the kernel that
        is picked, made ready or searched for a shape is the one that a call of that shape gets. Itself where it is that
        form."""
        mask, window = self.canonical_masking(self.mask, self.window)
        return self if (mask, window) == (self.mask, self.window) else self.with_(mask=mask, window=window)

    def canonical_masking(self, mask: str, window: str) -> tuple[str, str]:
        """(mask, window) as a call of this problem's lengths has this mask and this `window`."""
        if window:
            keys = self.head_rows[1] if self.varlen and not self.page else self.seqlen_k
            window = canonical_window(*parse_window(window), self.head_rows[0], keys, mask != FULL)
        return canonical_mask(mask, self.seqlen_q), window

    def with_unknown_lengths(self) -> AttentionProblem:
        """`canonical`, with the lengths that only the device knows as a call has to take them: anything up to all keys
        in use, packed sequences of equal lengths, in pages as many as a plan has room for."""
        problem = self
        if self.varlen and self.page:
            count, longest, rows = with_room(self.batch, self.seqlen_q, self.head_rows[0])
            keys = count * self.seqlen_k // 2 + 1
            problem = self.with_(batch=count, seqlen_q=longest, varlen=f"sum:{rows}/sum:{keys}")
        problem = problem.canonical()
        if problem.seqused:
            return problem.with_(seqused=f"0:{problem.seqlen_k}")
        if problem.varlen and not problem.page:
            return problem.with_(varlen="sum:{}/sum:{}".format(*problem.head_rows))
        return problem

    def _size_fault(self) -> str:
        """One sentence if the sizes cannot be, alone or together, else empty."""
        for field in ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                return f"{field} must be a whole number of at least 1, not {value!r}."
        if self.heads % self.kv_heads:
            return f"{self.heads} query heads do not divide over {self.kv_heads} K/V heads; choose another kv_heads."
        for field, dim in (("head_dim", self.head_dim), ("value_dim", self.head_dim_v)):
            steps = range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1, HEAD_DIM_STEP)
            if isinstance(dim, bool) or not isinstance(dim, int) or (dim != SMALLEST_HEAD_DIM and dim not in steps):
                return (
                    f"{field} must be {SMALLEST_HEAD_DIM} or a multiple of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to "
                    f"{MAX_HEAD_DIM}, not {dim!r}."
                )
        return ""


def canonical_mask(mask: str, seqlen_q: int) -> str:
    """The mask, or `full` where it hides nothing: a last query alone sees every key, and kernels without a mask are the
    faster ones."""
    return FULL if seqlen_q == 1 and mask == "causal_lower_right" else mask


def canonical_window(past: int, ahead: int, queries: int, keys: int, causal: bool) -> str:
    """The field `window` for a mask that is `causal` or not; empty where the window hides nothing of so many rows of
    each. A side that is open (-1), or wider, is as wide as both together. A query alone is that of the last key, so
    that nothing lies ahead of it."""
    everything = queries + keys
    past, ahead = (everything if side < 0 else min(side, everything) for side in (past, ahead))
    none_ahead = causal or queries == 1
    hides = min(past, everything if none_ahead else ahead) < max(queries, keys) - 1
    return f"{past}:{0 if none_ahead else ahead}" if hides else ""


def _number(value: float) -> str:
    """In as many digits as tell it from every other number, so that the line can be read back."""
    short = f"{value:g}"
    return short if float(short) == value else repr(float(value))


def _lengths_name(varlen: str) -> str:
    """Lengths in letters, digits and underscores; long lists by a hash."""
    if len(varlen) > LONGEST_LENGTHS:
        return f"varlen_{short_hash(varlen)}"
    return varlen and "varlen_" + varlen.replace("/", "_k").replace("+", "_").replace(":", "to")


def _digits(number: float) -> str:
    """A number in letters and digits, e.g. `0p125`."""
    return repr(float(number)).removesuffix(".0").replace(".", "p").replace("-", "m").replace("+", "")
