"""What a call of FlashAttention asks for beside its tensors and their lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evoattn.ops.arguments import Score
from evoattn.ops.attention import attend
from evoattn.ops.call import INTEGERS, Answer
from evoattn.ops.given import call_of, require_tensors

OPEN = -1
"""A side of a window that hides nothing; `None` is another word for it, as in FlashAttention 4."""
MOST_COLUMNS = 256
"""The largest head_dim of V beside a K of its own."""
COLUMNS_OF_KERNELS = 8
"""Of which a head_dim is a multiple."""
FP8 = (
    "queries of fp8, with q_descale, are float8_e4m3fn and take no qv, new keys or rotary embeddings; k_descale and "
    "v_descale are for such queries and for caches of 8 bits: give q, k and v in float16 or bfloat16."
)


@dataclass(frozen=True)
class Options:
    """Arguments as FlashAttention has them, with one word for each."""

    scale: float | None = None
    """None for 1/sqrt(head_dim)."""
    causal: bool = False
    window: tuple[int, int] = (OPEN, OPEN)
    """Keys before and behind the diagonal that a query sees. A side below -1 ends before the diagonal, as in
    FlashAttention 4: (-5, 9) shows the keys from the fifth to the ninth behind it."""
    softcap: float = 0.0
    chunk: int = 0
    """Queries see keys of their own chunk of so many keys; 0 for none."""
    slopes: Tensor | None = None
    """`[heads]`, or `[batch, heads]`."""
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    return_lse: bool = False
    deterministic: bool = False
    k_scale: Tensor | None = None
    """`[batch, kv_heads]`, of keys of 8 bits."""
    v_scale: Tensor | None = None
    q_scale: Tensor | None = None
    """The same of queries of 8 bits, packed or over a cache."""

    def __post_init__(self) -> None:
        given = (("alibi_slopes", self.slopes), ("the sinks", self.sinks))
        require_tensors(**{name: tensor for name, tensor in given if tensor is not None})

    @property
    def is_local(self) -> bool:
        """Whether the mask depends on where a query stands."""
        return self.causal or self.window != (OPEN, OPEN) or self.chunk > 0

    @property
    def words(self) -> dict[str, Any]:
        """The arguments of `evoattn.attention` that say the same; the rest is in `score_of`."""
        past, ahead = (side if side >= 0 else OPEN for side in self.window)
        return {
            "scale": self.scale,
            "causal": self.causal,
            "window": None if past == ahead == OPEN else (past, ahead),
            "softcap": self.softcap,
            "alibi_slopes": self.slopes if self.slopes is None or self.slopes.dim() == 1 else None,
            "sinks": self.sinks,
            "return_lse": self.return_lse,
            "deterministic": self.deterministic,
            "q_scale": self.q_scale,
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
            "enable_gqa": True,
        }

    def of_sequences(self, which: Tensor) -> Options:
        """The options of these sequences of the batch, in this order."""
        given = {name: getattr(self, name) for name in ("slopes", "q_scale", "k_scale", "v_scale")}
        of_batches = {name: one[which] for name, one in given.items() if one is not None and one.dim() == 2}
        return replace(self, **of_batches) if of_batches else self


def window_of(window_size: Any) -> tuple[int, int]:
    """Two sides as numbers: FlashAttention takes numbers, tensors of one number and None."""
    try:
        past, ahead = (OPEN, OPEN) if window_size is None else window_size
        return OPEN if past is None else int(past), OPEN if ahead is None else int(ahead)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"window_size must be (past, ahead), of numbers, not {window_size!r}.") from None


def only_one(**given: Tensor | None) -> Tensor | None:
    """The one that is given, of two names for it, or None. Raises `ValueError` where both are."""
    found = [one for one in given.values() if one is not None]
    if len(found) > 1:
        raise ValueError(f"{' and '.join(given)} are names of one argument; give one of the two.")
    return found[0] if found else None


def require_of_each(batch: int, **given: Any) -> None:
    """Raise `ValueError` for what is not a whole number of each of so many sequences: a GPU that looks behind the end
    of a tensor is lost to the process."""
    require_tensors(**{name: one for name, one in given.items() if one is not None})
    for name, one in given.items():
        if one is not None and (tuple(one.shape) != (batch,) or one.dtype not in INTEGERS):
            found = f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}"
            raise ValueError(f"{name} must be int32 [{batch}], one for each sequence, not {found}.")


def refuse_fp8(q: Tensor, *descale: Tensor | None) -> None:
    """Raise `ValueError` for what only fp8 kernels take."""
    if any(one is not None for one in descale) or q.element_size() == 1:
        raise ValueError(FP8)


def score_of(options: Options, pad: Tensor | None, device: torch.device) -> Score | None:
    """What no argument of `evoattn.attention` says, as an expression of scores: chunks, sides of windows below -1,
    slopes of each batch, and `pad` `[batch]`, the first key of each sequence. None where there is none of it."""
    tables: dict[str, Tensor] = {}
    value, seen = "s", []
    if options.slopes is not None and options.slopes.dim() == 2:
        tables["slope"], value = options.slopes.float(), "s - slope[b, h] * abs(q + d - k)"
    if pad is not None:
        tables["pad"] = pad.to(torch.int32)
        seen.append("k >= pad[b]")
    if options.chunk > 0:  # numbers are tables, so that one kernel serves all of them
        tables["chunk"] = torch.full((1,), options.chunk, dtype=torch.int32, device=device)
        size = "max(chunk[0], 1)"  # the check of a kernel draws tables, zeros too
        first = f"(q + d) // {size} * {size}"
        if pad is not None:
            first = f"((q + d - pad[b]) // {size} * {size} + pad[b])"
        seen += [f"k >= {first}", f"k < {first} + {size}"]
    ahead = OPEN if options.causal else options.window[1]
    for name, side, said in (
        ("near", options.window[0], "k >= q + d + near[0]"),
        ("far", ahead, "k <= q + d - far[0]"),
    ):
        if side < OPEN:
            tables[name] = torch.full((1,), -side, dtype=torch.int32, device=device)
            seen.append(said)
    if seen:
        value = f"where({' & '.join(f'({one})' for one in seen)}, {value}, -inf)"
    return Score(value, **tables) if tables else None


def wants_gradients(*tensors: Tensor) -> bool:
    """Whether an answer without gradients would be a wrong one."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def answered(
    query: Tensor, key: Tensor, value: Tensor, options: Options, score: Score | None = None, **given: Any
) -> Answer:
    """`evoattn.attention`, with `block_table` `attention_paged`, with `cu_seqlens_q` `attention_varlen`, with both
    `attention_mixed`; each with its own order of dimensions.

    A V that is wider than kernels take, beside a K that is not, is served in parts: each has the same weights. Rows
    whose strides kernels do not read, as they are no multiple of 16 bytes, are copied into wider ones."""
    if query.shape[-1] == key.shape[-1] <= MOST_COLUMNS < value.shape[-1]:  # else V's columns are some of K's
        first, *others = value.split(MOST_COLUMNS, dim=-1)
        answer = answered(query, key, first, options, score, **given)
        rest = [answered(query, key, part, replace(options, return_lse=False), score, **given) for part in others]
        if isinstance(answer, Tensor):
            return torch.cat((answer, *rest), dim=-1)  # type: ignore[arg-type]
        return torch.cat((answer[0], *rest), dim=-1), answer[1]  # type: ignore[arg-type]
    columns, room = value.shape[-1], [-tensor.shape[-1] % COLUMNS_OF_KERNELS for tensor in (query, key, value)]
    padded = any(room) and "block_table" not in given and min(query.element_size(), key.element_size()) > 1
    if padded and query.shape[-1] == key.shape[-1]:  # else the call is refused, and would not be once both are wider
        # Zeros change no score, and gradients of zeros are dropped; FlashAttention pads, too.
        scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
        query, key, value = (
            torch.nn.functional.pad(tensor, (0, more)) for tensor, more in zip((query, key, value), room, strict=True)
        )
        answer = answered(query, key, value, replace(options, scale=scale), score, **given)
        return answer[..., :columns] if isinstance(answer, Tensor) else (answer[0][..., :columns], answer[1])
    call = call_of(query, key, value, {**options.words, "score": score, **given})
    return call.given_back(attend(call))
