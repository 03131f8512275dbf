"""The same of FlashAttention 3: `_flash_attn_forward` and `_flash_attn_backward` of its `flash_attn_interface`."""

from typing import Any

from torch import Tensor

from evoattn.integrations.flash_attn import low_level_2, version_3


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and two tensors without elements. Raises `ValueError` for `seqused_q` beside a cache."""
    words: dict[str, Any] = dict(softmax_scale=softmax_scale, causal=causal, qv=qv)
    words |= dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    words |= dict(window_size=(window_size_left, window_size_right), attention_chunk=attention_chunk, softcap=softcap)
    answer: Any
    if cu_seqlens_k is not None and cu_seqlens_q is not None:
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q or 0, max_seqlen_k or 0, seqused_q, seqused_k
        answer = version_3.flash_attn_varlen_func(q, k, v, *lengths, **words, return_attn_probs=True)
    elif seqused_q is not None:
        raise ValueError("seqused_q goes with cu_seqlens_q and cu_seqlens_k.")
    else:
        words |= dict(rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved)
        words |= dict(cache_seqlens=seqused_k, cache_batch_idx=kv_batch_idx, cache_leftpad=leftpad_k)
        words |= dict(page_table=page_table, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q)
        words |= dict(cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=seqlens_rotary)
        answer = version_3.flash_attn_with_kvcache(q, k, v, k_new, v_new, **words, return_softmax_lse=True)
    out, lse = answer[:2]
    out = out if out_ is None else out_.copy_(out)
    return out, lse, q.new_empty(0), q.new_empty(0)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """Writes dq, dk and dv; the row sums of dout · out. Raises `ValueError` for lengths within packed rows."""
    if sequed_q is not None or sequed_k is not None:
        raise ValueError("seqused_q and seqused_k have no gradients here; call flash_attn_varlen_func, which has.")
    said: Any = 0.0, softmax_scale, is_causal, window_size_left, window_size_right, softcap
    tensors = dout, q, k, v, out, softmax_lse, dq, dk, dv
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return low_level_2._flash_attn_backward(*tensors, *said)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q or 0, max_seqlen_k or 0
    return low_level_2._flash_attn_varlen_backward(*tensors, *lengths, *said)
