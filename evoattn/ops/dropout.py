"""`dropout_p` of `evoattn.attention`: torch's SDPA has dropout, kernels do not."""

from __future__ import annotations

from torch import Tensor

from evoattn.ops import capture
from evoattn.ops.attn_mask import causal_kind, said_by
from evoattn.ops.given_out import require_out
from evoattn.ops.runtime import NoKernel
from evoattn.ops.torch_sdpa import lower_right_mask, sdpa, without_unseen

REASON = "kernels have no dropout"


def require_alone(beyond: bool) -> None:
    """Raise `ValueError` where there are arguments that SDPA lacks."""
    if beyond:
        raise ValueError("dropout_p goes with the arguments of SDPA alone: nothing computes it with others.")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    out: Tensor | None,
    strict: bool,
    beyond: bool,
) -> Tensor:
    """SDPA's answer with dropout, and its errors. `beyond`: there are arguments that SDPA lacks.

    Raises `ValueError` for those and for an `out` that does not fit, and `NoKernel` under `strict`.
    """
    require_alone(beyond)
    if strict:
        raise NoKernel(f"No kernel serves this call: {REASON}.")
    if capture.recorders():
        capture.miss("it has dropout")
    if out is not None:
        require_out(out, query, value)
    unseen = None
    if causal_kind(attn_mask) is not None:  # torch's causal masks know torch's function by its name, which may be ours
        is_causal, kind, _ = said_by(attn_mask, query, key, is_causal, "upper_left", None)
        lower_right = kind == "lower_right" and query.shape[-2] != key.shape[-2]
        attn_mask = lower_right_mask(query.shape[-2], key.shape[-2], query.device) if lower_right else None
        is_causal = not lower_right
        unseen = attn_mask if query.shape[-2] > key.shape[-2] else None
    answer = sdpa(query, key, value, attn_mask, dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    answer = answer if unseen is None else without_unseen(answer, unseen)
    return answer if out is None else out.copy_(answer)
