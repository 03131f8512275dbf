"""Torch's gradients where a kernel answered to a call and none serves its backward pass."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from evoattn.ops import torch_answer
from evoattn.ops.arguments import SEQUSED, SINKS
from evoattn.ops.gradients import PLACES, Backward, Grads, names_of, places_of, score_of
from evoattn.ops.torch_answer import SCORES_PER_CHUNK, diagonal_of, keys_in_use, rows_at_once, scores_of, wide
from evoattn.ops.torch_modes import autograd_at_work, without_autocast


def gradients(given: Backward) -> Grads:
    """The gradients of a backward pass, laid out as kernels' are: SDPA's own after it has computed the answer again,
    or, for what SDPA lacks and with the log-sum-exp's gradient, by the formula, which never holds all scores. Packed
    sequences are computed again, too."""
    call = given.call
    again = call.packed or not (call.has_variant or given.grad_lse is not None)
    with without_autocast(call.query.device.type), autograd_at_work():
        found = _again(given) if again else by_rows(given)
    q, k, v, *of_terms = found
    if given.is_ordinary:
        tensors = zip((q, k, v), (call.query, call.key, call.value), strict=True)
        q, k, v = (torch.empty_like(tensor).copy_(one) for one, tensor in tensors)
    return q, k, v, *of_terms


def _again(given: Backward) -> Grads:
    """By autograd through torch's answer to the call."""
    call = given.call
    tensors = [call.query, call.key, call.value, *(call.terms[PLACES[name]] for name in given.grads)]
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in tensors if tensor is not None]
        terms = list(call.terms)
        for name, leaf in zip(given.grads, leaves[3:], strict=True):
            terms[PLACES[name]] = leaf
        query, key, value = leaves[:3]
        with_lse = given.grad_lse is not None
        changed = replace(
            call, query=query, key=key, value=value, terms=tuple(terms), out=None, return_lse=with_lse, strict=False
        )
        answer = torch_answer.answer(changed)
        outputs = (answer,) if isinstance(answer, Tensor) else answer
        grads = [grad for grad in (given.grad, given.grad_lse) if grad is not None]
        found = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
    made = [torch.zeros_like(leaf) if one is None else one for one, leaf in zip(found, leaves, strict=True)]
    of_terms = dict(zip(given.grads, made[3:], strict=True))
    return made[0], made[1], made[2], *(of_terms.get(name) for name in names_of(given.grads))


def by_rows(given: Backward, scores_at_once: int = SCORES_PER_CHUNK) -> Grads:
    """By the formula, in float32 (float64 in itself), out of the answer and the log-sum-exp, some rows at a time: of
    scores S with the weights P = exp(S - lse), dS is P · (dO Vᵀ - rowsum(dO · O) + dlse). What makes scores of Q, K,
    a bias and tables, torch differentiates. `scores_at_once` bounds the scores in memory."""
    call = given.call
    used, sinks = call.term(SEQUSED), call.term(SINKS)
    if used is not None and not call.finite:
        key, value = keys_in_use(call.key, call.value, used, None)
        call = replace(call, key=key, value=value)
    groups = call.query.shape[1] // call.key.shape[1]
    keys, values = (wide(tensor).repeat_interleave(groups, dim=1) for tensor in (call.key, call.value))
    delta = (wide(given.grad) * wide(given.out)).sum(-1)
    if given.grad_lse is not None:
        delta = delta - given.grad_lse
    lse = given.lse.masked_fill(torch.isneginf(given.lse), 0)  # of rows without keys, whose scores are all -inf
    places = {name: place for name, place in places_of(call).items() if name in given.grads and name != "sinks"}
    leaves = [keys, *(term for place in places.values() if (term := call.terms[place]) is not None)]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    terms = list(call.terms)
    for place, leaf in zip(places.values(), leaves[1:], strict=True):
        terms[place] = leaf
    call = replace(call, terms=tuple(terms), score=score_of(call, terms))
    sums = [torch.zeros_like(leaf, dtype=keys.dtype) for leaf in leaves]
    of_values, parts, diagonal = torch.zeros_like(values), [], diagonal_of(call)
    rows = rows_at_once(call, scores_at_once)
    for first in range(0, call.query.shape[2], rows):
        chunk = slice(first, min(first + rows, call.query.shape[2]))
        grad = wide(given.grad[..., chunk, :])
        with torch.enable_grad():
            queries = call.query[..., chunk, :].detach().requires_grad_()
            scores = scores_of(call, queries, leaves[0], chunk, diagonal)
        weights = torch.exp(scores.detach() - lse[..., chunk, None])
        of_values += weights.transpose(-1, -2) @ grad
        of_scores = weights * (grad @ values.transpose(-1, -2) - delta[..., chunk, None])
        of_queries, *others = torch.autograd.grad(scores, [queries, *leaves], of_scores, allow_unused=True)
        parts.append(torch.zeros_like(queries) if of_queries is None else of_queries)
        for total, one in zip(sums, others, strict=True):
            if one is not None:  # an expression may leave out what it is given
                total += one
    of_keys, of_values = (_of_groups(tensor, call.key.shape[1]) for tensor in (sums[0], of_values))
    of_terms = {name: sum_.to(leaf.dtype) for name, sum_, leaf in zip(places, sums[1:], leaves[1:], strict=True)}
    if "sinks" in given.grads:
        assert sinks is not None
        of_terms["sinks"] = -(torch.exp(wide(sinks)[:, None] - lse) * delta).sum((0, 2)).to(sinks.dtype)
    query, key = (torch.cat(parts, dim=2), of_keys) if parts else (torch.zeros_like(call.query), of_keys)
    return query, key, of_values, *(of_terms.get(name) for name in names_of(given.grads))


def _of_groups(tensor: Tensor, kv_heads: int) -> Tensor:
    """Summed over the query heads of each K/V head."""
    grouped: Tensor = tensor.unflatten(1, (kv_heads, -1)).sum(2)
    return grouped
