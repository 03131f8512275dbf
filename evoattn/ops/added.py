"""Slopes and a bias that an expression adds to scores, as the arguments that kernels know them by: they read these at a
time, and not by each score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from evoattn.model.mask import CAUSAL_UPPER_LEFT
from evoattn.model.problem import BIAS_ROW_STEP
from evoattn.model.score_lines import Bias, Slopes
from evoattn.ops.arguments import ALIGNMENT, BIAS, SLOPES, TERMS, autocast_dtype, has_autocast
from evoattn.ops.call import Call

Surely = Callable[[Any], bool]
"""Whether a condition on sizes holds. Within a trace these are symbols: there it is to hold for all of the graph's."""


def with_added(
    call: Call, added: Bias | Slopes | None, tables: Mapping[str, Tensor], surely: Surely = bool
) -> Call | None:
    """The call with what is added as its own term; None where nothing is, or it is no argument of such a call. The
    gradient of a table is that of an expression."""
    table = None if added is None else tables[added.table]
    if added is None or table is None or table.requires_grad or not (call.term(SLOPES) is call.term(BIAS) is None):
        return None
    which = SLOPES if isinstance(added, Slopes) else BIAS
    term = _slopes(call, added, table, surely) if isinstance(added, Slopes) else _bias(call, added, table, surely)
    if term is None:
        return None
    terms = list(call.terms or (None,) * len(TERMS))
    terms[which] = term
    return replace(call, terms=tuple(terms))


def _slopes(call: Call, added: Slopes, table: Tensor, surely: Surely) -> Tensor | None:
    heads, distance = call.query.shape[1], call.key.shape[2] - call.query.shape[2]
    diagonal = 0 if call.mask == CAUSAL_UPPER_LEFT else distance
    if not (
        surely(added.offset == diagonal) and (added.is_absolute or call.causal) and surely(table.shape[0] >= heads)
    ):
        return None
    return table if surely(table.shape[0] == heads) else table[:heads]


def _bias(call: Call, added: Bias, table: Tensor, surely: Surely) -> Tensor | None:
    (batch, heads, rows, _), keys, kind = call.query.shape, call.key.shape[2], table.device.type
    whole = (*({"b": batch, "h": heads}[one] for one in added.by), rows, keys)
    rounded = has_autocast(kind) and autocast_dtype(kind, table) != table.dtype  # as tables are not
    if table.dtype != call.query.dtype or rounded or not surely(keys % BIAS_ROW_STEP == 0):
        return None
    if not all(surely(one == size) for one, size in zip(table.shape, whole, strict=True)) or not table.is_contiguous():
        return None
    if surely is bool and table.data_ptr() % ALIGNMENT:  # a trace has no addresses: such a bias is copied when it runs
        return None
    return table[:, None] if added.by == "b" else table
