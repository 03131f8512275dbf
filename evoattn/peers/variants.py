"""Variants of attention as the peers take them: SDPA as a tensor that is added to the scores, FlashAttention 3 and 4 as
options of their functions."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from evoattn.correctness.eight_bits import turned_back
from evoattn.correctness.sequences import NO_PAGE, gathered, sequence
from evoattn.correctness.terms import terms_of, torch_dtype
from evoattn.model.dtype import KEY_DTYPES
from evoattn.model.problem import AttentionProblem
from evoattn.model.variant import KEY_VARIANTS, SCORE_VARIANTS, parse_window


class PeerRefused(RuntimeError):
    """A peer is absent, does not take the problem, or answers wrong: the message says which, in one sentence."""


Tensors = Mapping[str, torch.Tensor]
KeysAndValues = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def without_nan(problem: AttentionProblem, tensors: Tensors) -> dict[str, torch.Tensor]:
    """The inputs with zeros in K and V for NaN, and page 0 in the table for none; the same where all keys are in use
    and every packed sequence has queries."""
    made = dict(tensors)
    some = problem.seqused or (problem.varlen and problem.page)
    if some or (problem.varlen and not all(queries for queries, _ in problem.sequences)):
        for name in problem.tensors[1:]:
            one = copied(tensors[name])
            made[name] = one.copy_(one.float().nan_to_num_(0.0))  # which numbers of 8 bits have not
    if problem.page:
        made["table"] = tensors["table"].masked_fill(tensors["table"] == NO_PAGE, 0)
    return made


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def whole_keys(problem: AttentionProblem, tensors: Tensors) -> KeysAndValues:
    """A call that gives K and V `[batch, kv_heads, seqlen_k, head_dim]`: out of pages, which a peer that has none must
    gather at each step, they are copied at each call."""
    clean = without_nan(problem, tensors) if problem.page else gathered(problem, tensors)
    k, v = clean["k"], clean["k"][..., : problem.head_dim_v] if problem.shared_kv else clean["v"]
    if not problem.page:
        return lambda: (k, v)
    pages = clean["table"].long()

    def gather(cache: torch.Tensor) -> torch.Tensor:
        rows = cache.transpose(1, 2)[pages]  # [batch, pages of it, page, kv_heads, head_dim]
        return rows.flatten(1, 2)[:, : problem.seqlen_k].transpose(1, 2)

    return lambda: (gather(k), gather(v))


def refuse_all_but(served: tuple[str, ...], problem: AttentionProblem, who: str) -> None:
    """Raises `PeerRefused` if the problem has a variant that is none of `served`."""
    if foreign := [name for name in problem.variants if name not in served]:
        raise PeerRefused(f"{who} has no {', '.join(foreign)}.")


def has_a_flag(problem: AttentionProblem) -> bool:
    """Whether SDPA's fused kernels compute the problem by their flags alone: peers whose compilers take long are not
    asked for it."""
    last = problem.mask == "causal_lower_right" and problem.seqlen_q != problem.seqlen_k
    return not problem.variants and problem.head_dim <= 256 and not last


def added_to_scores(problem: AttentionProblem, tensors: Tensors) -> torch.Tensor | None:
    """What SDPA takes as `attn_mask`: the bias or the slopes with -inf where the mask hides a key, `[1 or batch, 1 or
    heads, seqlen_q, seqlen_k]` in the problem's dtype with rows of whole 16 bytes, as SDPA's fast paths ask; of a
    window alone 0 and -inf, as SDPA would make a Bool mask into such a tensor in every call. None for plain attention.
    A bias whose gradient is asked for is taken as it is.

    Raises `PeerRefused` on a softcap and on sinks, and on that gradient beside a mask or keys in use."""
    served = ("window", "alibi", "bias", "value_dim", "shared_kv", *KEY_VARIANTS)
    refuse_all_but(served, problem, "SDPA")
    if not set(problem.variants) & {*SCORE_VARIANTS, *KEY_VARIANTS}:
        return None
    if problem.bias and tensors["bias"].requires_grad:
        if problem.mask != "full" or set(problem.variants) & {"window", "alibi", *KEY_VARIANTS}:
            raise PeerRefused("SDPA has no gradient of a bias but where all keys are seen: a mask is added to it.")
        return tensors["bias"][..., : problem.seqlen_k]
    rows, device = slice(0, problem.seqlen_q), tensors["q"].device
    batches = problem.batch if problem.seqused or "b" in problem.bias else 1
    heads = slice(0, problem.heads if problem.alibi or "h" in problem.bias else 1)
    shape = (batches, heads.stop, problem.seqlen_q)
    columns = -(-problem.seqlen_k // 8) * 8
    mask = torch.zeros(*shape, columns, dtype=torch_dtype(problem), device=device)[..., : problem.seqlen_k]
    for index, batch in enumerate(mask):
        own, _ = sequence(problem, index, tensors)
        seen = batch[..., : own.seqlen_k if own else 0]
        batch[..., seen.shape[-1] :] = float("-inf")
        if own is None:
            continue
        seen.copy_(terms_of(own, tensors, index, heads, rows, device).apply(torch.zeros(seen.shape, device=device)))
    return mask


def eight_bits(
    problem: AttentionProblem, tensors: Tensors
) -> tuple[AttentionProblem, dict[str, torch.Tensor], dict[str, Any]]:
    """A problem whose Q, K and V have 8 bits as FlashAttention 3 takes it: without its scales, which are arguments
    `[batch, kv_heads]`, and with V's keys as rows, as it turns V round itself. Any other problem as it is."""
    if problem.dtype not in KEY_DTYPES or problem.scales not in ("", "head"):
        return problem, dict(tensors), {}
    shape = (problem.batch, problem.kv_heads)
    scales = {"v_scale": tensors["k_scale"], **tensors}  # K's where V lies within it
    descales = {f"{name}_descale": scales[f"{name}_scale"].expand(shape).contiguous() for name in "qkv"}
    if problem.turned:
        rows = turned_back(tensors["v"], problem.seqlen_k)
        if problem.layout == "bshd":
            rows = rows.transpose(1, 2).contiguous().transpose(1, 2)
        tensors = {**tensors, "v": rows}
    return problem.with_(scales="", turned=False), dict(tensors), descales


def flash_options(problem: AttentionProblem, tensors: Tensors, own: tuple[str, ...], who: str) -> dict[str, Any]:
    """Arguments beside q, k, v and causal of FlashAttention's functions; `own` are the variants that `who` takes beside
    those that FlashAttention 3 and 4 share. FlashAttention 4 gets slopes and a bias by these names, the bias `[batch,
    heads, seqlen_q, seqlen_k]`.

    Raises `PeerRefused` on what it does not take."""
    refuse_all_but(("window", "softcap", "value_dim", "shared_kv", *KEY_VARIANTS, "varlen", *own), problem, who)
    options: dict[str, Any] = {}
    if problem.deterministic:
        options["deterministic"] = True
    if problem.scale is not None:
        options["softmax_scale"] = problem.scale
    if problem.window:
        options["window_size"] = parse_window(problem.window)
    if problem.softcap:
        options["softcap"] = float(problem.softcap)
    if problem.sink:
        options["learnable_sink"] = tensors["sinks"]
    if problem.alibi:
        options["slopes"] = tensors["slopes"]
    if problem.bias:
        bias = tensors["bias"][..., : problem.seqlen_k]
        options["bias"] = bias.expand(problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    if problem.seqused or (problem.varlen and problem.page):
        options["seqused_k" if own or problem.varlen else "cache_seqlens"] = tensors["seqused"]
    if problem.page:
        options["page_table"] = tensors["table"]
    if problem.varlen:
        options |= {name: tensors[name] for name in ("cu_seqlens_q", "cu_seqlens_k") if name in tensors}
        options |= {"max_seqlen_q": problem.seqlen_q, "max_seqlen_k": problem.seqlen_k}
    return options
