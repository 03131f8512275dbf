"""One call of the op as a record: what every way into it makes, and all that decides, runs or answers it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evoattn.model.backward import LIES_AS, MADE
from evoattn.model.forward import FORWARD, MAIN
from evoattn.model.mask import FULL
from evoattn.model.problem import AttentionProblem, ProblemError, canonical_mask, canonical_window
from evoattn.model.scales import PER_BLOCK, PER_COLUMNS, PER_TOKEN, ROUNDED
from evoattn.model.sequences import with_room
from evoattn.ops.arguments import (
    ALIGNMENT,
    BIAS,
    DTYPES,
    K_SCALE,
    KV_DTYPES,
    SEQUSED,
    SINKS,
    SLOPES,
    STARTS_K,
    STARTS_Q,
    TABLE,
    TERMS,
    V_SCALE,
    WATCHED,
    Given,
    Score,
    autocast,
    autocast_dtype,
    bias_reader,
    converter,
    has_autocast,
    is_apart,
)

E4M3, ANSWERS = torch.float8_e4m3fn, torch.bfloat16
"""A dtype of 8 bits that query may have too (`attention_fp8.py`), and that of its answers."""
BESIDE = {E4M3: (E4M3, torch.float8_e5m2), torch.int8: (torch.int8,)}
"""What key and value may be beside a query of 8 bits."""
KV_QUERIES = (torch.float16, torch.bfloat16)
"""Those that a query has beside other keys and values of 8 bits."""
INTEGERS = (torch.int32, torch.int64)
"""Dtypes of lengths and page tables; kernels read int32, and others are copied."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of torch's own formula, and of SDPA."""
DROPOUT = "kernels have no dropout"
DROPOUT_ALONE = "dropout_p goes with the arguments of SDPA alone: nothing computes it with others."
SEVERAL_DEVICES, GRADIENTS = "the tensors are on several devices", "gradients are wanted"
NO_TENSOR, NOT_STRIDED = "an argument is not a tensor", "kernels take strided tensors"
MOST_SCALE = 65_536
"""The largest softmax scale of kernels. They subtract a row's largest score by one rounding of its product with the
scale, so that weights overflow where that product is 2^28 and more."""
STRIDED = (*MAIN, *MADE)
"""The tensors that may lie in memory as callers like. The gradient of O lies as O does."""
_FIELDS = tuple(AttentionProblem.__dataclass_fields__)
Answer = Tensor | tuple[Tensor, Tensor]
"""The output, and where it is wanted the log-sum-exp."""


@dataclass(frozen=True)
class StridedProblem(AttentionProblem):
    """A problem whose tensors lie as a caller's do: `strides_of` holds the strides of `STRIDED` in elements, of the
    forward pass of the first four, `pages` how many pages the caches have, if there are pages."""

    strides_of: tuple[tuple[int, int, int, int], ...] = ()
    pages: int = 0
    scale_strides_of: tuple[tuple[int, int, int], ...] = ()
    """Those of the scales of K and V."""

    def scale_strides(self, name: str) -> tuple[int, int, int]:
        given = self.scale_strides_of if name != "q_scale" else ()  # which is contiguous
        return given["kv".index(name[0])] if given else super().scale_strides(name)

    def shape(self, tensor: str) -> tuple[int, int, int, int]:
        shape = super().shape(tensor)
        return (self.pages, *shape[1:]) if self.pages and tensor in "kv" else shape

    def strides(self, tensor: str) -> tuple[int, int, int, int]:
        if tensor in ("bias", "dbias"):  # kernels get a copy unless it lies so
            return super().strides(tensor)
        return self.strides_of[STRIDED.index(LIES_AS.get(tensor, tensor))]

    @property
    def as_searched(self) -> AttentionProblem:
        """The same problem in a memory layout of its own: what a search or a portfolio speaks of."""
        fields = self.__dict__
        made = object.__new__(AttentionProblem)  # without the checks, which its fields have passed
        made.__dict__.update({name: fields[name] for name in _FIELDS})
        return made


def strided(problem: AttentionProblem) -> StridedProblem:
    """The problem with the strides of its own memory layout."""
    strides = tuple(problem.strides(tensor) for tensor in STRIDED)
    return StridedProblem(**problem.to_dict(), strides_of=strides)


@dataclass(slots=True, eq=False)
class Call:
    """A call whose values, but for tensors beside each other, have been checked.

    query is `[batch, heads, seqlen_q, head_dim]`, key and value are `[batch, kv_heads, seqlen_k, head_dim]`; of packed
    sequences batch is 1, of pages key and value are `[pages, kv_heads, page, head_dim]`. `out` is the answer's place.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: str = FULL
    """As in `AttentionProblem`."""
    scale: float | None = None
    enable_gqa: bool = False
    window: tuple[int, int] | None = None
    """Keys that a query sees before and behind the diagonal; -1 leaves a side open."""
    softcap: float = 0.0
    """0 for none."""
    terms: tuple[Tensor | None, ...] = ()
    """The tensors of `arguments.TERMS` in order, the tables of `score`, the four lists of `blocks`; empty for none."""
    return_lse: bool = False
    out: Tensor | None = None
    strict: bool = False
    longest: tuple[int, int] = (0, 0)
    """The most queries and keys of a packed sequence."""
    finite: bool = False
    """Whether what lies behind the last key in use is finite, so that torch need not clear it."""
    compiled: bool = False
    """Whether it comes from compiled code."""
    from_functions: bool = False
    """Whether functions say what is computed: one of another length or mask waits for no compiler."""
    folds: bool = False
    """Whether another call takes numbers as arguments that its expressions have: it waits for no compiler."""
    score: Score | None = None
    blocks: str = ""
    """As in `AttentionProblem`, of lists among the terms; the score has the predicate."""
    deterministic: bool = False
    """Whether its gradients have the same bits in every run."""
    batch_invariant: bool = False
    """Whether each row has the same bits whatever is computed beside it; its gradients are deterministic then."""
    q_scaled: bool = False
    """Whether query has 8 bits too, and the last of the terms is its scales."""
    turned: bool = False
    """Whether value is a view of what `evoattn.model.turned` speaks of."""
    op: str = FORWARD.name
    """Or one of `evoattn.model.scales.ANSWERED`; of IN_FP16 the answer goes to `out`."""

    def term(self, which: int) -> Tensor | None:
        """One of `terms`, by its index."""
        return self.terms[which] if self.terms else None

    @property
    def has_variant(self) -> bool:
        """Whether SDPA lacks an argument that was given."""
        return self.softcap != 0 or any((self.terms, self.window, self.score, self.blocks))

    @property
    def sizes(self) -> tuple[int, int]:
        """Packed sequences, and rows of their queries."""
        return sizes_of(self.terms, self.query.size(2))

    @property
    def packed(self) -> bool:
        """Whether it is of sequences that lie end to end."""
        return self.term(STARTS_Q) is not None

    @property
    def paged(self) -> bool:
        """Whether keys and values lie in pages."""
        return self.term(TABLE) is not None

    @property
    def causal(self) -> bool:
        return self.mask != FULL

    @property
    def given_terms(self) -> tuple[Tensor, ...]:
        """Those of `terms` that there are."""
        return tuple(term for term in self.terms if term is not None)

    @property
    def wants_gradients(self) -> bool:
        """Whether an answer without gradients would be a wrong one."""
        tensors = (self.query, self.key, self.value, *self.given_terms)
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

    def autocast(self, kind: str) -> Call:
        """The call as autocast hands it on, on devices of that kind; itself where all dtypes stay, as mostly. Numbers
        of 8 bits stay beside their scales, and slopes too: rounded they would be off by much at far keys."""
        if not self.terms and torch.get_autocast_dtype(kind) == self.query.dtype == self.key.dtype == self.value.dtype:
            return self
        query, key, value = autocast(kind, self.query, self.key, self.value)
        if self.value.dtype in KV_DTYPES:
            key, value = self.key if self.key.dtype in KV_DTYPES else key, self.value
        query = self.query if self.q_scaled else query
        named, others = self.terms[:K_SCALE], self.terms[K_SCALE:]
        cast = (
            term if term is None or which == SLOPES else autocast(kind, term)[0] for which, term in enumerate(named)
        )
        terms = (*cast, *others)
        before = self.query, self.key, self.value, *self.terms
        same = all(a is b for a, b in zip((query, key, value, *terms), before, strict=True))
        return self if same else replace(self, query=query, key=key, value=value, terms=terms)

    def given_back(self, answer: Answer) -> Answer:
        """The answer in the caller's order of dimensions."""
        if not (self.paged or self.packed):
            return answer
        output, lse = (answer, None) if isinstance(answer, Tensor) else answer
        output = output.squeeze(0).transpose(0, 1) if self.packed else output.transpose(1, 2)
        return output if lse is None else (output, lse[0] if self.packed else lse)

    def require_terms(self) -> None:
        """Raise `TypeError` for a list, an array or another thing where a tensor belongs."""
        for name, term in zip(TERMS, self.terms, strict=False):
            if term is not None and not isinstance(term, Tensor):
                raise TypeError(f"{name} must be a tensor, not {type(term).__name__}.")

    def require(self) -> None:
        """Raise `ValueError` where tensors of a variant do not fit each other, `TypeError` for what is no tensor."""
        if not self.has_variant:
            return
        self.require_terms()
        query, key = self.query, self.key
        for name, tensor in zip(("query", "key", "value"), (query, key, self.value), strict=True):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}.")
            if tensor.dim() != 4:
                raise ValueError(f"{name} must have four dimensions beside what SDPA lacks, not {tensor.dim()}.")
        if not self.terms:
            return
        starts, (batch, heads) = self.terms[STARTS_Q], query.shape[:2]
        batch = batch if starts is None else len(starts) - 1
        for which in (SINKS, SLOPES):
            if (term := self.terms[which]) is not None and tuple(term.shape) != (heads,):
                raise ValueError(
                    f"{TERMS[which]} must have one value for each of the {heads} heads, not {list(term.shape)}."
                )
        for which, dimensions in ((SEQUSED, 1), (TABLE, 2)):
            if (term := self.terms[which]) is None:
                continue
            if term.dtype not in INTEGERS or term.dim() != dimensions or term.shape[0] != batch:
                pages = ", pages" * (dimensions - 1)
                raise ValueError(f"{TERMS[which]} must be int32 [{batch}{pages}], not {_said(term)}.")
        if self.paged and self.terms[SEQUSED] is None:
            raise ValueError("block_table needs seqused_k, the number of keys in each sequence.")
        if self.packed:
            self._require_packed()
        if (bias := self.terms[BIAS]) is not None:
            self._require_bias(bias)

    def _require_bias(self, bias: Tensor) -> None:
        if self.terms[SLOPES] is not None:
            raise ValueError("alibi_slopes and bias exclude each other; add the slopes to the bias.")
        whole = (*self.query.shape[:3], self.key.shape[2])
        shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
        if len(shape) != 4 or any(have not in (1, want) for have, want in zip(shape, whole, strict=True)):
            raise ValueError(f"bias must be broadcastable to {list(whole)}, not {list(bias.shape)}.")
        if bias.dtype not in (self.query.dtype, torch.float32):
            raise ValueError(f"bias must be float32 or of query's dtype {self.query.dtype}, not {bias.dtype}.")

    def _require_packed(self) -> None:
        """Raise `ValueError` where sequences of these starts and longest lengths cannot lie in so many rows."""
        totals, starts_q = (self.query.shape[2], self.key.shape[2]), self.terms[STARTS_Q]
        if self.paged and self.terms[STARTS_K] is not None:
            raise ValueError("cu_seqlens_k and block_table exclude each other; give seqused_k.")
        for which, most, total in list(zip((STARTS_Q, STARTS_K), self.longest, totals, strict=True))[: 2 - self.paged]:
            starts, name = self.terms[which], TERMS[which]
            if starts is None or starts_q is None:
                raise ValueError("cu_seqlens_q and cu_seqlens_k go together.")
            if starts.dtype not in INTEGERS or starts.dim() != 1 or not len(starts) == len(starts_q) > 1:
                raise ValueError(
                    f"{name} must be int32 [sequences + 1], as many of queries as of keys, not {_said(starts)}."
                )
            if most < 0 or (total > most * (len(starts) - 1) and not self.paged):
                raise ValueError(
                    f"max_seqlen_{name[-1]}={most} is too short: {len(starts) - 1} sequences of so many rows are fewer "
                    f"than the {total} rows of the tensor, of which those behind the last sequence count too."
                )

    def _variant_fields(self) -> dict[str, Any]:
        """The fields of `AttentionProblem` that a variant sets. An open side of a window is as wide as both sequences,
        and one that hides nothing is left out; how many keys are in use is known to the device alone, so that it is
        anything from none to all, and of packed sequences how long all of them are together."""
        query, key, bias, table = self.query, self.key, self.term(BIAS), self.term(TABLE)
        starts, rows = self.term(STARTS_Q), query.shape[2]
        fields: dict[str, Any] = {"softcap": float(self.softcap)}
        fields |= {"sink": self.term(SINKS) is not None, "alibi": self.term(SLOPES) is not None}
        seqlen_k = key.shape[2] if table is None else table.shape[1] * key.shape[2]
        if self.term(SEQUSED) is not None and not has_room(self):
            fields["seqused"] = f"0:{seqlen_k}"
        if table is not None:
            fields |= {"page": key.shape[2], "seqlen_k": seqlen_k}
        if starts is not None:
            count, (most_q, most_k), keys = len(starts) - 1, self.longest, key.shape[2]
            if table is not None:  # how many keys there are the device alone knows
                (count, most_q, rows), most_k = room_of(self), seqlen_k
                keys = count * seqlen_k // 2 + 1
            fields |= {"batch": count, "seqlen_q": most_q, "seqlen_k": most_k, "varlen": f"sum:{rows}/sum:{keys}"}
        if self.window is not None:
            fields["window"] = canonical_window(*self.window, rows, seqlen_k, self.causal)
        if bias is not None:
            over = (1,) * (4 - bias.dim()) + tuple(bias.shape)
            fields["bias"] = "b" * (over[0] > 1) + "h" * (over[1] > 1) + "s"
        if self.score is not None:
            fields |= {"score": self.score.text, "tables": self.score.tables, "predicate": self.score.predicate}
        fields["blocks"] = self.blocks
        if self.scale is not None and any(fields.values()):  # of plain calls the launches take it: one pick serves all
            fields["scale"] = float(self.scale)
        return fields

    def _scale_fields(self) -> dict[str, Any]:
        """Those of `StridedProblem` that K and V of 8 bits set."""
        if self.value.dtype not in KV_DTYPES:
            return {}
        both, kv = [self.term(which) for which in (K_SCALE, V_SCALE)], KV_DTYPES[self.value.dtype]
        dims = max((one.dim() for one in both if one is not None and (one.dim() > 2 or one.numel() > 1)), default=0)
        scales = ("", "", "head", PER_BLOCK if self.q_scaled or self.op in ROUNDED else PER_TOKEN, PER_COLUMNS)[dims]
        strides = ((0, 0, 0) if one is None or one.numel() == 1 else (*one.stride(), 0)[:3] for one in both)
        return {"op": self.op, "kv": kv, "scales": scales, "scale_strides_of": tuple(strides)}

    def problem(self, out_strides: tuple[int, ...]) -> StridedProblem | str:
        """The problem of the call, whose answer has these strides, or one reason, without a full stop, why no kernel
        takes it."""
        query, key, value = self.query, self.key, self.value
        if reason := why_not_shapes(self):
            return reason
        if 0 in (*query.shape, *key.shape, *value.shape):
            return "a tensor is empty"
        of_rows = (*query.shape[:2], room_of(self)[2] if has_room(self) else query.shape[2])
        shapes = (*of_rows, query.shape[3]), tuple(key.shape), tuple(value.shape), (*of_rows, value.shape[3])
        strides = (query.stride(), key.stride(), (key if self.turned else value).stride(), out_strides)
        names, like = ("query", "key", "value", "out"), (query, key, value, query)
        for name, one, shape, stride in zip(names, like, shapes, strides, strict=True):
            if wrong := why_wrong_strides(name, shape, stride, one.element_size()):
                return wrong
        fields = (self._variant_fields() if self.has_variant else {}) | self._scale_fields()
        try:
            return StridedProblem(
                heads=query.shape[1],
                kv_heads=key.shape[1],
                head_dim=query.shape[3],
                value_dim=value.shape[3],
                rotary_apart=key.shape[3] != query.shape[3],
                shared_kv="kv" not in fields and may_share(key, value) and key.data_ptr() == value.data_ptr() != 0,
                dtype="e4m3" if self.op in ROUNDED else (DTYPES | KV_DTYPES)[query.dtype],
                mask=canonical_mask(self.mask, fields.get("seqlen_q", query.shape[2])),
                layout="bshd" if query.stride(1) < query.stride(2) else "bhsd",
                lse=self.return_lse,
                batch_invariant=self.batch_invariant,
                turned=self.turned,
                **{"batch": query.shape[0], "seqlen_q": query.shape[2], "seqlen_k": key.shape[2], **fields},
                pages=key.shape[0] if self.paged else 0,
                strides_of=tuple([plain_strides(s, t) for s, t in zip(shapes, strides, strict=True)]),
            )
        except ProblemError as error:
            return str(error).rstrip(".")

    def why_not_terms(self) -> str | None:
        """One reason, without a full stop, why kernels cannot read the terms as they are, or None."""
        bias, query = self.term(BIAS), self.query
        if any(term.device != query.device for term in self.given_terms):
            return SEVERAL_DEVICES
        if any(term.is_neg() for term in self.given_terms):
            return WATCHED
        if bias is not None and bias.dtype != query.dtype:
            return f"the bias is {bias.dtype} beside {query.dtype}, which kernels would round"
        return None

    def given(self) -> tuple[Given, ...]:
        """Those of `terms` that there are, and what makes of each, and of every other tensor of its shape, strides and
        dtype, what kernels read: sinks in query's dtype, slopes in float32, the bias with rows of whole 16 bytes,
        lengths and table int32, all contiguous."""
        wanted = {SINKS: answer_dtype(self.query if self.out is None else self.out), SLOPES: torch.float32}
        made: list[Given] = []
        for which, term in enumerate(self.terms):
            if term is None:
                continue
            dtype = wanted.get(which, torch.int32) if which < len(TERMS) else term.dtype
            if which == BIAS:
                made.append((which, *bias_reader(term, self.query.shape[2], self.key.shape[2])))
            elif which in (K_SCALE, V_SCALE) or (term.dtype == dtype and term.is_contiguous()):
                made.append((which, None, False))
            else:
                made.append((which, converter(dtype), False))
        return tuple(made)


def _said(tensor: Tensor) -> str:
    """Dtype and shape, as messages say them."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def terms_of(**given: Tensor | None) -> tuple[Tensor | None, ...]:
    """`Call.terms` of arguments by their names."""
    terms = tuple(given.get(name) for name in TERMS)
    return () if all(term is None for term in terms) else terms


def with_tables(terms: tuple[Tensor | None, ...], score: Score | None) -> tuple[Tensor | None, ...]:
    """`Call.terms` with the tables of a score behind them. Raises `TypeError` for what is no `Score`."""
    if score is None:
        return terms
    if not isinstance(score, Score):
        raise TypeError(f"score must be an evoattn.Score, not {type(score).__name__}.")
    return behind(terms, score.tensors)


def behind(terms: tuple[Tensor | None, ...], others: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """`Call.terms` with more behind them."""
    return (*(terms or (None,) * len(TERMS)), *others) if others else terms


def answer_dtype(query: Tensor) -> torch.dtype:
    """The dtype of an answer, and of sinks."""
    return ANSWERS if query.dtype in BESIDE else query.dtype


def out_like(query: Tensor, value: Tensor, device: str | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """An empty answer to a call: of query's order of dimensions in memory, with the head_dim of value; on query's
    device and of `answer_dtype` unless others are given."""
    dtype = dtype or answer_dtype(query)
    if query.shape[-1:] == value.shape[-1:]:
        return torch.empty_like(query, dtype=dtype, device=device)
    if query.dim() == 4 and query.stride(1) < query.stride(2):
        batch, heads, rows, _ = query.shape
        return query.new_empty((batch, rows, heads, value.shape[3]), dtype=dtype, device=device).transpose(1, 2)
    return query.new_empty((*query.shape[:-1], *value.shape[-1:]), dtype=dtype, device=device)


def require_out(out: Tensor, query: Tensor, value: Tensor) -> None:
    """Raise `ValueError` unless `out` has the answer's shape, dtype, which autocast may change, and device, and nothing
    wants gradients, `TypeError` where it is no tensor."""
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be a tensor, not {type(out).__name__}.")
    shape, dtype = (*query.shape[:-1], value.shape[-1]), answer_dtype(query)
    if dtype == query.dtype and has_autocast(query.device.type):
        dtype = autocast_dtype(query.device.type, query)
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != query.device:
        raise ValueError(
            f"out must be a {dtype} tensor of shape {list(shape)} on {query.device}, "
            f"not {out.dtype} {list(out.shape)} on {out.device}."
        )
    if torch.is_grad_enabled() and (out.requires_grad or query.requires_grad or value.requires_grad):
        raise ValueError("out cannot be given where gradients are wanted, as with torch's own out arguments.")


def may_share(key: Tensor, value: Tensor) -> bool:
    """Whether value lies in memory as the first columns of key would; it is them if their addresses are equal too."""
    return value.shape[-1:] < key.shape[-1:] and value.stride() == key.stride()


def plain_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, int, int]:
    """`strides` with those of dimensions of one element, which mean nothing, replaced by what the other dimensions
    span."""
    span = max([stride * size for stride, size in zip(strides, shape, strict=True) if size > 1 or stride == 1])
    span = -(-span // ALIGNMENT) * ALIGNMENT
    batch, head, row = [strides[dim] if shape[dim] > 1 else span for dim in range(3)]
    return batch, head, row, strides[3]


def why_wrong_strides(name: str, shape: tuple[int, ...], strides: tuple[int, ...], element: int) -> str | None:
    if strides[3] != 1:
        return f"{name}'s last dimension has stride {strides[3]}, not 1"
    for dim, what in enumerate(("batch", "head", "row")):
        if shape[dim] > 1 and (strides[dim] <= 0 or strides[dim] * element % ALIGNMENT):
            return f"{name}'s {what} stride of {strides[dim] * element} bytes is no positive multiple of {ALIGNMENT}"
    return None


def why_not_shapes(call: Call) -> str | None:
    """One reason, without a full stop, why a call of these shapes and dtypes is no problem of a kernel, or None."""
    query, key, value = call.query, call.key, call.value
    beside = BESIDE.get(query.dtype, ()) if call.q_scaled else KV_DTYPES if query.dtype in KV_QUERIES else ()
    of_columns = query.dtype == key.dtype and value.dtype == E4M3 and call.paged
    of_eight = (key.dtype == value.dtype and key.dtype in beside) or (of_columns and query.dtype in KV_QUERIES)
    known = BESIDE if call.q_scaled else DTYPES
    if query.dtype not in known or not (of_eight or query.dtype == key.dtype == value.dtype):
        found = ", ".join(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in (query, key, value)))
        return f"kernels take tensors of one dtype out of float16, bfloat16 and float32, not {found}"
    if not query.dim() == key.dim() == value.dim() == 4:
        return "kernels take tensors of four dimensions, [batch, heads, seqlen, head_dim]"
    of_batch = call.paged or key.shape[0] == query.shape[0]
    fits = of_batch and (key.shape[3] == query.shape[3] or (call.paged and is_apart(query, key, value)))
    if key.shape[:3] != value.shape[:3] or not fits:
        return "key and value are not of as many batches, heads and rows, with query's batch and head_dim"
    if key.shape[1] != query.shape[1] and not call.enable_gqa:
        return f"{key.shape[1]} K/V heads for {query.shape[1]} query heads need enable_gqa=True"
    if key.shape[1] and query.shape[1] % key.shape[1]:
        return f"{query.shape[1]} query heads are no multiple of {key.shape[1]} K/V heads"
    return None


def why_not_devices(call: Call, kind: str) -> str | None:
    """One reason, without a full stop, why kernels for devices of that kind cannot read the tensors, or None."""
    query, key, value = call.query, call.key, call.value
    if not query.device.type == key.device.type == value.device.type == kind:
        return f"the tensors are on the {query.device.type.upper()}, and kernels run on {kind.upper()} devices"
    return None if query.device == key.device == value.device else SEVERAL_DEVICES


def why_not_scale(scale: float | None) -> str | None:
    """Kernels keep the largest unscaled score of a row, which is the largest scaled one only for a positive scale."""
    if scale is None or 0 < scale <= MOST_SCALE:
        return None
    return f"kernels take a positive scale up to {MOST_SCALE}, not {scale}"


def has_room(call: Call) -> bool:
    """Whether it is of packed queries over pages."""
    terms = call.terms
    return bool(terms) and terms[STARTS_Q] is not None and terms[TABLE] is not None


def sizes_of(terms: Sequence[Tensor | None], rows: int) -> tuple[int, int]:
    """How many packed sequences and rows of queries there are."""
    starts = terms[STARTS_Q]
    assert starts is not None
    return starts.size(0) - 1, rows  # `len` of a tensor takes a microsecond


def room_of(call: Call) -> tuple[int, int, int]:
    """Sequences, the longest and all rows that a plan of the call has room for."""
    count, rows = sizes_of(call.terms, call.query.size(2))
    return with_room(count, call.longest[0], rows)
