"""Functions of FlashAttention 2 that begin with an underscore: libraries that split keys over cards call them. Forward
passes are evoattn's, gradients are torch's by the formula, from the output and the log-sum-exp that are given."""

from typing import Any

import torch
from torch import Tensor

from evoattn.integrations.flash_attn import gradients, version_2, version_3
from evoattn.integrations.flash_attn.options import Options, window_of

NO_DROPOUT = "evoattn has no dropout here: its pattern would have to be the same in both passes."


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, no probabilities and no random state."""
    if dropout_p:
        raise ValueError(NO_DROPOUT)
    window = window_size_left, window_size_right
    words: dict[str, Any] = dict(softcap=softcap, alibi_slopes=alibi_slopes, return_attn_probs=True)
    answer = version_2.flash_attn_func(q, k, v, 0.0, softmax_scale, causal, window, **words)
    return (*answer, torch.zeros(2, dtype=torch.int64, device=q.device))


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `_flash_attn_forward`, of packed sequences. Over pages `num_splits` above 1 raises `RuntimeError`, as in
    FlashAttention 2."""
    if dropout_p or leftpad_k is not None:
        raise ValueError(NO_DROPOUT if dropout_p else "leftpad_k goes with flash_attn_with_kvcache.")
    if block_table is not None and num_splits > 1:
        raise RuntimeError("num_splits > 1 is not supported over pages: evoattn splits keys as it sees fit.")
    words: dict[str, Any] = dict(softcap=softcap, alibi_slopes=alibi_slopes, return_attn_probs=True)
    words |= dict(seqused_k=seqused_k, page_table=block_table, window_size=(window_size_left, window_size_right))
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    answer = version_3.flash_attn_varlen_func(
        q, k, v, *lengths, softmax_scale=softmax_scale, causal=bool(causal), **words
    )
    return (*answer, answer[0].new_empty(0), torch.zeros(2, dtype=torch.int64, device=q.device))


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes dq, dk and dv; the row sums of dout · out."""
    if dropout_p:
        raise ValueError(NO_DROPOUT)
    options = _options(softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    first, *others, one_out = (tensor.transpose(1, 2) for tensor in (dout, q, k, v, out))
    found = gradients.of_batch(first, (others[0], others[1], others[2]), one_out, softmax_lse, options)
    _write((dq, dk, dv), tuple(tensor.transpose(1, 2) for tensor in found))
    return (dout.float() * out.float()).sum(-1).transpose(1, 2)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """As `_flash_attn_backward`, of packed sequences."""
    if dropout_p:
        raise ValueError(NO_DROPOUT)
    options = _options(softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    lengths = (
        (cu_seqlens_q[:-1], cu_seqlens_q[1:] - cu_seqlens_q[:-1], int(max_seqlen_q)),
        (cu_seqlens_k[:-1], cu_seqlens_k[1:] - cu_seqlens_k[:-1], int(max_seqlen_k)),
    )
    _write((dq, dk, dv), gradients.of_sequences(dout, (q, k, v), out, softmax_lse, options, lengths))
    return (dout.float() * out.float()).sum(-1).transpose(0, 1)


_wrapped_flash_attn_forward, _wrapped_flash_attn_backward = _flash_attn_forward, _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def varlen_bwd(*_: Any) -> None:
    """TransformerEngine imports it from `flash_attn_2_cuda`. Raises `NotImplementedError`."""
    raise NotImplementedError("evoattn has no flash_attn_2_cuda.varlen_bwd; use _flash_attn_varlen_backward.")


def _options(
    scale: float | None, causal: bool, left: int, right: int, softcap: float, slopes: Tensor | None
) -> Options:
    return Options(scale, bool(causal), window_of((left, right)), softcap, slopes=slopes)


def _write(places: tuple[Tensor | None, ...], values: tuple[Tensor, ...]) -> None:
    for place, value in zip(places, values, strict=True):
        if place is not None:
            place.copy_(value)
