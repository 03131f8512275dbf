"""The arguments of the op, said once, and what torch's modes make of them: tensors that something watches, autocast."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from evoattn.model.dtype import DTYPES as ELEMENTS
from evoattn.model.dtype import KEY_DTYPES, WIDE_DTYPES
from evoattn.model.mask import CAUSAL_LOWER_RIGHT, CAUSAL_UPPER_LEFT, FULL
from evoattn.model.problem import BIAS_ROW_STEP
from evoattn.model.score import FLAGS, INTEGERS, LONG, SCORE, Tree, evaluate, parse_predicate, parse_score

Causal = bool | Literal["upper_left", "lower_right"] | None
"""What callers say of a causal mask: see `mask_of`."""
MASKS: dict[object, str] = {
    None: FULL,
    False: FULL,
    True: CAUSAL_LOWER_RIGHT,
    "upper_left": CAUSAL_UPPER_LEFT,
    "lower_right": CAUSAL_LOWER_RIGHT,
}
"""`AttentionProblem.mask` by the value of `causal`. True is FlashAttention's, which aligns the last query and key."""
Reader = Callable[[Tensor], Tensor]
"""Makes of a term what kernels read."""
Given = tuple[int, Reader | None, bool]
"""A term of a call: its index, what makes of it what kernels read, if it is not so already, and whether it is so as
long as its address is aligned."""
ALIGNMENT = 16
"""Bytes that every address and stride is a multiple of: vector loads and tensor maps need it."""
DTYPES, KV_DTYPES = (
    {getattr(torch, ELEMENTS[name].torch): name for name in names} for names in (WIDE_DTYPES, KEY_DTYPES)
)
"""Those of query, and those that key and value may have beside a query of 16 bits, with scales (`given.py`)."""
EIGHT_BIT_NAMES = ", ".join(ELEMENTS[name].torch for name in KEY_DTYPES)
TABLE_DTYPES = DTYPES | {torch.int32: INTEGERS, torch.int64: LONG, torch.bool: FLAGS}
MOST_DIMENSIONS = 4
"""Of a table."""
LONGEST = 1 << 31
"""No sequence has so many keys."""
ATTENTION, VARLEN, PAGED, MIXED = "attention", "attention_varlen", "attention_paged", "attention_mixed"
ALL = frozenset((ATTENTION, VARLEN, PAGED, MIXED))


@dataclass(frozen=True)
class Argument:
    """One argument beside query, key and value."""

    name: str
    default: Any
    of: frozenset[str]
    """The functions that take it by its name. `evoattn.explain` and a loaded kernel take those of all, as they answer
    to calls of all."""
    meaning: str
    in_schema: str = ""
    """Its type in torch's registry, with the same name; empty where it has another form there (`causal`), or where
    compiled code says it by other means."""


REQUIRED = object()
"""The default of an argument that has none."""
_SDPA = frozenset((ATTENTION,))
ARGUMENTS = (
    Argument("attn_mask", None, _SDPA, "SDPA's mask: bool, or added to the scores"),
    Argument("dropout_p", 0.0, _SDPA, "SDPA's dropout"),
    Argument("is_causal", False, _SDPA, 'SDPA\'s mask: query i sees keys j <= i; the same as `causal="upper_left"`'),
    Argument("block_table", REQUIRED, frozenset((PAGED, MIXED)), "int32 `[batch, pages]`: where keys lie", "Tensor?"),
    Argument("seqused_k", None, frozenset((ATTENTION, PAGED, MIXED)), "int32 `[batch]`: keys in use", "Tensor?"),
    Argument("cu_seqlens_q", REQUIRED, frozenset((VARLEN, MIXED)), "int32 `[sequences + 1]`: starts", "Tensor?"),
    Argument("cu_seqlens_k", REQUIRED, frozenset((VARLEN,)), "int32 `[sequences + 1]`: starts", "Tensor?"),
    Argument("max_seqlen_q", REQUIRED, frozenset((VARLEN, MIXED)), "at least the longest sequence's queries", "SymInt"),
    Argument("max_seqlen_k", REQUIRED, frozenset((VARLEN,)), "at least the longest sequence's keys", "SymInt"),
    Argument("scale", None, ALL, "of scores; 1/sqrt(head_dim) unless given", "float?"),
    Argument("enable_gqa", False, _SDPA, "whether fewer K/V heads than query heads are meant"),
    Argument("causal", None, ALL, "the causal mask, and the corner that its diagonal ends in"),
    Argument("window", None, ALL, "`(past, ahead)`: keys seen beside the diagonal, -1 for an open side", "int[]?"),
    Argument("softcap", 0.0, ALL, "s becomes softcap · tanh(s / softcap); 0 or None for none", "float"),
    Argument("sinks", None, ALL, "`[heads]`: scores without a value", "Tensor?"),
    Argument("alibi_slopes", None, ALL, "`[heads]`: slope · distance is taken from scores", "Tensor?"),
    Argument("bias", None, _SDPA, "added to scores", "Tensor?"),
    Argument("k_scale", None, ALL, "what keys of 8 bits are multiplied by: a number, or a tensor", "Tensor?"),
    Argument("v_scale", None, ALL, "what values of 8 bits are multiplied by", "Tensor?"),
    Argument("q_scale", None, frozenset((VARLEN, PAGED)), "what queries of float8_e4m3fn are multiplied by"),
    Argument("score", None, _SDPA, "an `evoattn.Score`: an expression of scores and tables"),
    Argument("return_lse", False, ALL, "whether the log-sum-exp is wanted too"),
    Argument("out", None, ALL, "takes the answer"),
    Argument("strict", False, ALL, "whether `NoKernel` is raised where torch would compute", "bool"),
    Argument("deterministic", False, frozenset((ATTENTION, VARLEN)), "whether gradients always have the same bits"),
    Argument("batch_invariant", False, ALL, "whether a row has the same bits in every batch"),
)
TERMS = (
    "sinks", "alibi_slopes", "bias", "seqused_k", "block_table", "cu_seqlens_q", "cu_seqlens_k", "k_scale", "v_scale",
)  # fmt: skip
"""The arguments that are tensors beside query, key and value, in the order in which calls and launches hold them."""
SINKS, SLOPES, BIAS, SEQUSED, TABLE, STARTS_Q, STARTS_K, K_SCALE, V_SCALE = range(len(TERMS))
"""Indices into a call's `terms`."""


class Score:
    """An expression that every score becomes the value of, e.g. `Score("s + table[h, k - q + 63] * gate[h]",
    table=table, gate=gate)`.

    `s` is the score, scaled, capped and with slopes or a bias added; `b`, `h`, `q` and `k` are the batch, the query
    head, the query and the key, whole numbers; `d` is the key of query 0's diagonal, 0 for the upper left corner, else
    seqlen_k - seqlen_q. A table is a tensor of up to four dimensions, float16, bfloat16, float32, int32, int64 or bool.
    An index outside of it is taken as the nearest one inside; `table[wrap(i)]` counts one below 0 from the end first.
    There are `+ - * / // % >> <<`, comparisons, `& | ~`, `where(c, x, y)`, `max`, `min`, `abs`, `exp`, `log`, `sqrt`,
    `pow`, `tanh`, `erf`, `sin`, `cos`, `floor`, `whole`, `bitand` and `inf`: `where((q >= k) & (doc[q] == doc[k]), s,
    -inf)` hides keys.

    It is made once, outside of compiled code, and given to many calls, which read the tables' values of their time.
    Raises `ValueError` for what is no such expression, and `TypeError` for a table that is no such tensor."""

    __slots__ = ("_names", "_tree", "key", "predicate", "tensors", "text")

    def __init__(self, expression: str, /, **tables: Tensor) -> None:
        if not isinstance(expression, str):
            raise TypeError(f"a score's expression must be a text, not {type(expression).__name__}.")
        self._names, self.tensors = tuple(tables), tuple(tables.values())
        try:
            parsed = parse_score(expression, self.tables)
        except ValueError as error:
            raise ValueError(f"{error}.") from None
        self.text, self.predicate = parsed.text, ""
        self._tree: Tree | None = parsed.tree  # compiled code cannot parse
        self.key = self.written
        """The text and the names of the tables, by which calls are known beside the tables' shapes."""

    @classmethod
    def of_texts(cls, text: str, predicate: str, tables: Mapping[str, Tensor]) -> Score:
        """As they are: `text` of a score may be empty, and `predicate` is that of PARTIAL blocks of a call's lists."""
        made = object.__new__(cls)
        made.text, made.predicate, made._tree = text, predicate, None
        made._names, made.tensors = tuple(tables), tuple(tables.values())
        made.key = f"{text} {predicate}"
        return made

    @property
    def written(self) -> str:
        """The text and the names of the tables, as ops have them."""
        return " ".join((self.text, *self._names))

    @property
    def buffers(self) -> tuple[str, ...]:
        """The names of the tables' buffers in a problem, in the order of `tensors`."""
        return tuple(f"own_{name}" for name in self._names)

    def of_tensors(self, tensors: Sequence[Tensor]) -> Score:
        """The same expressions of other tables."""
        made = copy.copy(self)
        made.tensors = tuple(tensors)
        return made

    @property
    def tables(self) -> str:
        """As `AttentionProblem.tables`, of the sizes of now. Raises `TypeError` for what is no table."""
        described = []
        for name, table in zip(self._names, self.tensors, strict=True):
            if (
                not isinstance(table, Tensor)
                or table.dtype not in TABLE_DTYPES
                or not 1 <= table.dim() <= MOST_DIMENSIONS
            ):
                wanted = "a tensor of one to four dimensions, float16, bfloat16, float32, int32, int64 or bool"
                raise TypeError(f"table {name} of a score must be {wanted}.")
            described.append(f"{name}:{TABLE_DTYPES[table.dtype]}:{'x'.join(map(str, table.shape))}")
        return "+".join(described)

    @property
    def likely_tables(self) -> str:
        """The same, whatever sizes tables have."""
        both = zip(self._names, self.tensors, strict=True)
        return "+".join([f"{name}:{TABLE_DTYPES[t.dtype]}:{'x'.join(('64',) * t.dim())}" for name, t in both])

    def __repr__(self) -> str:
        return f"Score({self.text!r})"

    def of(self, scores: Tensor, indices: Mapping[str, int | Tensor]) -> Tensor:
        """The expression's values, by torch: `indices` has `b`, `h`, `q`, `k` and `d`, which broadcast with scores."""
        values = {**dict(zip(self.buffers, self.tensors, strict=True)), **indices, SCORE: scores}
        tree = self._tree or parse_score(self.text or SCORE, self.tables, True).tree
        changed: Tensor = evaluate(tree, values, torch)
        return changed

    def shows(self, indices: Mapping[str, int | Tensor]) -> Tensor | bool:
        """Whether the predicate shows keys, by torch: indices as in `of`."""
        if not self.predicate:
            return True
        values = {**dict(zip(self.buffers, self.tensors, strict=True)), **indices}
        shown: Tensor | bool = evaluate(parse_predicate(self.predicate, self.tables, True).tree, values, torch)
        return shown


def mask_of(causal: object, is_causal: object = False) -> str:
    """The `AttentionProblem.mask` that SDPA's flag and `causal` say together: SDPA's is the upper left one, `causal`
    names its corner, and True is the lower right one, as in FlashAttention.

    Raises `TypeError` for an `is_causal` that is no bool, `ValueError` for another `causal`, and where the two do not
    say the same: neither may be overruled in silence."""
    require_flags(is_causal=is_causal)
    if not (causal is None or causal is True or causal is False or isinstance(causal, str)) or causal not in MASKS:
        raise ValueError(f"causal must be True, False, 'upper_left' or 'lower_right', not {causal!r}.")
    mask = MASKS[causal]
    if not is_causal:
        return mask
    if causal is not None and mask != CAUSAL_UPPER_LEFT:
        raise ValueError(
            f"is_causal=True is the upper left mask, and causal={causal!r} says another one; give one of the two."
        )
    return CAUSAL_UPPER_LEFT


def aligned_mask_of(causal: object, is_causal: object = False) -> str:
    """As `mask_of`, for packed sequences and pages, whose masks end in the lower right corner. Raises `ValueError` for
    the upper left one."""
    mask = mask_of(causal, is_causal)
    if mask == CAUSAL_UPPER_LEFT:
        raise ValueError(
            "the causal mask of packed sequences and of pages is the lower right one: say causal=True or "
            "'lower_right'; nothing computes the upper left one of is_causal."
        )
    return mask


def number(name: str, value: Any) -> float:
    """What torch takes for a float: a number, NumPy's too, or a tensor of one number without dimensions, whose value is
    waited for. Kept as a tensor it would be a part of what calls are known by, whatever it holds later.

    Raises `TypeError` for anything else."""
    if isinstance(value, int | float):
        return float(value)
    plain = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    if plain and isinstance(found := value.item(), int | float):
        return float(found)
    raise TypeError(f"{name} must be a number, not {type(value).__name__}.")


def scale_of(value: Any) -> Any:
    """A scale as `number` makes it, None for none. Compiled code gets a number as it is."""
    if value is None or value.__class__ is float:
        return value
    if not torch.compiler.is_compiling():
        return number("scale", value)
    return value.item() if isinstance(value, Tensor) else value


def cap_of(softcap: Any) -> Any:
    """A soft cap as `number` makes it, 0 for None: models pass the one or the other for none. In compiled code a number
    is left as it is. Raises `ValueError` for a negative or infinite one, and for NaN."""
    if softcap is None:
        return 0.0
    if not torch.compiler.is_compiling():
        softcap = number("softcap", softcap)
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap must be positive, or 0 for none, not {softcap!r}.")
    return softcap


def window_of(window: Any) -> Any:
    """The window as a tuple, or None where both of its sides are open, as in flash-attention's default. Sides that are
    wider than any sequence are open, too: int64 does not hold the sum of `sys.maxsize` and a place. Raises `ValueError`
    for what is no window."""
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2 or not (_is_side(window[0]) and _is_side(window[1])):
        raise ValueError(f"window must be (past, ahead), keys beside the diagonal or -1, not {window!r}.")
    past, ahead = window
    past, ahead = -1 if past >= LONGEST else past, -1 if ahead >= LONGEST else ahead
    return None if past == ahead == -1 else (past, ahead)


def _is_side(side: object) -> bool:
    return isinstance(side, int) and not isinstance(side, bool) and side >= -1


def require_flags(**flags: object) -> None:
    """Raise `TypeError` for what is no bool, but in compiled code, which has symbols."""
    for name, value in flags.items():
        if value.__class__ is not bool and not torch.compiler.is_compiling():
            raise TypeError(f"{name} must be bool, not {value!r}.")


def needs_copy(out: Tensor, *inputs: Tensor) -> bool:
    """Whether a kernel may not write the answer into `out` itself: it lies in the memory of an input, which may be read
    after that, or is negated when it is read, or is of a subclass."""
    if type(out) is not Tensor or out.is_neg():
        return True
    memory = out.untyped_storage()
    start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes()
    others = (tensor.untyped_storage() for tensor in inputs)  # not the same ones: DLPack makes another of a part
    return any(start < other.data_ptr() + other.nbytes() and other.data_ptr() < end for other in others)


def converter(dtype: torch.dtype) -> Reader:
    return lambda tensor: tensor.to(dtype).contiguous()


def bias_reader(bias: Tensor, seqlen_q: int, seqlen_k: int) -> tuple[Reader, bool]:
    """The last two of `Given`, of a bias. Kernels read the bias itself where its rows, of `seqlen_k` up to a multiple
    of 8 elements, lie one behind another, with room behind the last one, at a multiple of 16 bytes. Else a copy,
    contiguous, `[batch or 1, heads or 1, seqlen_q, keys]`: kernels load two elements at once, and after a misaligned
    load a process can no longer use the device."""
    batch, heads, rows, keys = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    strides = (0,) * (4 - bias.dim()) + tuple(bias.stride())
    whole = -(-seqlen_k // BIAS_ROW_STEP) * BIAS_ROW_STEP
    places = heads * seqlen_q * whole, seqlen_q * whole, whole, 1
    sizes = batch, heads, seqlen_q, seqlen_k
    strides = tuple(
        0 if have < size else stride
        for have, size, stride in zip((batch, heads, rows, keys), sizes, strides, strict=True)
    )
    lies_so = all(size == 1 or stride == place for size, stride, place in zip(sizes, strides, places, strict=True))
    end = batch * places[0]
    holds_end = bias.numel() >= end  # else the room behind the last row is the storage's, if it has so much

    def read(given: Tensor) -> Tensor:
        if lies_so and not given.data_ptr() % ALIGNMENT:
            if holds_end:
                return given
            if (given.storage_offset() + end) * given.element_size() <= given.untyped_storage().nbytes():
                return given
        expanded = given.reshape((1,) * (4 - given.dim()) + tuple(given.shape)).expand(-1, -1, seqlen_q, seqlen_k)
        copied = (
            torch.nn.functional.pad(expanded, (0, whole - seqlen_k)) if whole != seqlen_k else expanded.contiguous()
        )
        return copied.clone() if copied.data_ptr() % ALIGNMENT else copied

    return read, lies_so and holds_end


WATCHED = "a tensor subclass, mode, transform, trace or negation is at work"
_ORDINARY = frozenset((Tensor, torch.nn.Parameter))
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_tracing_state = torch._C._get_tracing_state


def is_apart(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the first columns of each key are value's, and key holds those behind them alone."""
    return 0 < key.shape[-1] <= value.shape[-1] == query.shape[-1] - key.shape[-1] and key.dtype == query.dtype


def is_ordinary(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether these are plain tensors that nothing watches: no subclass, dispatch mode, `torch.func` transform, JIT
    trace or forward-mode differentiation, nor views that are negated when they are read."""
    return (
        (type(query) is type(key) is type(value) is Tensor or _ORDINARY.issuperset(map(type, (query, key, value))))
        and not _dispatch_modes()
        and _transforms() is None
        and _tracing_state() is None
        and forward_ad._current_level < 0
        and not (query.is_neg() or key.is_neg() or value.is_neg())
    )


def one_has_gradients(terms: Sequence[Tensor | None]) -> bool:
    """Whether autograd watches one of them."""
    for term in terms:  # noqa: SIM110  # `any` takes twice as long
        if term is not None and term.requires_grad:
            return True
    return False


def has_autocast(kind: str) -> bool:
    """Whether autocast is on for devices of that kind; torch raises where it knows none for it."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def autocast_dtype(kind: str, tensor: Tensor) -> torch.dtype:
    """What autocast hands to SDPA has this dtype: of floating tensors on devices of that kind its own, but for float64,
    which stays as it is."""
    changes = tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.device.type == kind
    return torch.get_autocast_dtype(kind) if changes else tensor.dtype


def autocast(kind: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors as autocast hands them to SDPA."""
    return tuple(tensor.to(autocast_dtype(kind, tensor)) for tensor in tensors)


def without_autocast(kind: str) -> contextlib.AbstractContextManager[object]:
    """A block in which products of float32 tensors on devices of that kind stay float32: autocast would round scores
    to 16 bits."""
    return torch.autocast(kind, enabled=False) if has_autocast(kind) else contextlib.nullcontext()


def autograd_at_work() -> contextlib.AbstractContextManager[object]:
    """A block in which autograd records what is asked of it, within an op of torch's registry too, whose own autograd
    keeps it out."""
    keys, excluded = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor):
        excluded = excluded.remove(key)
    guard: contextlib.AbstractContextManager[object] = torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), excluded
    )
    return guard
