"""Backward passes of the op: one as a record, the node of autograd in eager code that asks for it, and torch's
gradients where no kernel serves it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from evoattn.model.backward import BACKWARD, MADE, TERM_GRADS
from evoattn.model.problem import BIAS_ROW_STEP, ProblemError
from evoattn.ops import torch_answer
from evoattn.ops.arguments import (
    ALIGNMENT,
    BIAS,
    KV_DTYPES,
    SEQUSED,
    SINKS,
    TERMS,
    Score,
    autograd_at_work,
    is_ordinary,
    without_autocast,
)
from evoattn.ops.call import GRADIENTS, Answer, Call, StridedProblem, out_like, plain_strides, why_wrong_strides
from evoattn.ops.plan import CallPlan
from evoattn.ops.torch_answer import (
    SCORES_PER_CHUNK,
    diagonal_of,
    is_promised,
    keys_in_use,
    rows_at_once,
    scores_of,
    wide,
)

Grads = tuple[Any, ...]
"""Tensors: of query, key, value, and of what `names_of` names, where None is none."""
PLACES = {"bias": BIAS, "sinks": SINKS}
"""Where the terms of `TERM_GRADS` are among a call's."""
SECOND = (
    "evoattn's backward pass has no derivative: attention that is differentiated twice has to be PyTorch's, by "
    "scaled_dot_product_attention of torch.nn.functional outside of evoattn.sdpa and evoattn.enable."
)


def places_of(call: Call) -> dict[str, int]:
    """Where among a call's terms those are that may have gradients, by their names in `AttentionProblem.grads`."""
    tables = () if call.score is None else call.score.buffers
    return PLACES | {name: len(TERMS) + which for which, name in enumerate(tables)}


def names_of(grads: Sequence[str]) -> tuple[str, ...]:
    """The terms whose gradients a backward pass gives, None of those that are not wanted: `TERM_GRADS`, then tables."""
    return (*TERM_GRADS, *(name for name in grads if name not in TERM_GRADS))


def grads_of(call: Call) -> tuple[str, ...]:
    """The terms of a call whose gradients are wanted, as `AttentionProblem.grads` names them."""
    if not call.terms:
        return ()
    given = ((name, call.terms[which]) for name, which in places_of(call).items())
    return tuple(name for name, term in given if term is not None and term.requires_grad)


def why_not_differentiable(call: Call) -> str:
    """One reason, without a full stop, why torch alone computes the gradients that a call wants; else empty."""
    if call.out is not None:
        return f"{GRADIENTS}, and there is an out"
    if call.paged:
        return f"{GRADIENTS}, and kernels compute none of pages"
    if call.value.dtype in KV_DTYPES:
        return f"{GRADIENTS}, and kernels compute none beside values of 8 bits"
    for name, term in zip(TERMS, call.terms, strict=False):
        if term is not None and term.requires_grad and name not in PLACES:
            return f"{GRADIENTS}, and kernels compute none of {name}"
    return ""


def are_deterministic(call: Call) -> bool:
    """Whether gradients are to have the same bits in every run: asked of this call, or by torch's switch."""
    return call.deterministic or is_promised(call.batch_invariant) or torch.are_deterministic_algorithms_enabled()


@dataclass(slots=True, eq=False)
class Backward:
    """What one backward pass is of: a call with its answer in `out`, the log-sum-exp, the gradients of both, and the
    terms whose gradients are wanted."""

    call: Call
    lse: Tensor
    grad: Tensor
    grad_lse: Tensor | None
    grads: tuple[str, ...]

    @property
    def out(self) -> Tensor:
        """The call's answer."""
        assert self.call.out is not None
        return self.call.out

    @property
    def is_ordinary(self) -> bool:
        """Whether all tensors are such as kernels read: see `arguments.is_ordinary`. Batches of gradients, which
        autograd makes of `is_grads_batched`, have no memory; what was packed away may have another dtype or device."""
        call, given = self.call, (self.grad, self.grad_lse)
        if not self.grad.dtype == self.out.dtype == call.query.dtype or self.lse.dtype != torch.float32:
            return False
        if any(one.get_device() != self.grad.get_device() for one in (call.query, self.out, self.lse)):
            return False
        try:
            of_torch = all(one is None or (type(one) is Tensor and one.data_ptr() >= 0) for one in given)
        except RuntimeError:
            return False
        return of_torch and is_ordinary(call.query, call.key, call.value) and is_ordinary(self.out, self.lse, self.lse)

    @property
    def known(self) -> tuple[object, ...]:
        """All that the plan of this backward pass depends on."""
        call = self.call
        tensors = call.query, call.key, call.value, self.out, self.grad_lse, *call.terms
        words = (
            call.mask,
            call.scale,
            call.enable_gqa,
            call.window,
            call.softcap,
            call.score and call.score.key,
            call.blocks,
        )
        of_tensors = [t if t is None else (t.shape, t.stride(), t.dtype, t.get_device(), t.is_neg()) for t in tensors]
        return (BACKWARD.name, *words, call.longest, self.grads, are_deterministic(call), *of_tensors)

    def readable(self) -> Backward:
        """The same with a gradient of the answer that kernels can read: a copy where it does not lie as the answer
        does, as that of a sum, which is expanded, where its address is no multiple of 16 bytes, or it is negated."""
        grad = self.grad
        if grad.stride() != self.out.stride() or grad.data_ptr() % ALIGNMENT or grad.is_neg():
            grad = torch.empty_like(self.out).copy_(grad)
        lse, of_lse = self.lse.contiguous(), self.grad_lse
        return replace(self, grad=grad, lse=lse, grad_lse=None if of_lse is None else of_lse.float().contiguous())

    def problem(self) -> StridedProblem | str:
        """The problem of this backward pass, or one reason, without a full stop, why no kernel takes it."""
        call, made = self.call, self.made("meta")
        forward = call.problem(self.out.stride())
        if isinstance(forward, str):
            return forward
        strides, element = list(forward.strides_of), call.query.element_size()
        for name, tensor in zip(MADE, made, strict=False):
            if wrong := why_wrong_strides(name, tuple(tensor.shape), tensor.stride(), element):
                return wrong
            strides.append(plain_strides(tuple(tensor.shape), tensor.stride()))
        try:
            return replace(
                forward,
                op=BACKWARD.name,
                shared_kv=False,  # key and value have gradients of their own
                scale=_own_scale(call),
                lse=self.grad_lse is not None,
                grads="+".join(self.grads),
                deterministic=are_deterministic(call),
                batch_invariant=False,
                strides_of=tuple(strides),
            )
        except ProblemError as error:
            return str(error).rstrip(".")

    def made(self, device: str | None = None) -> Grads:
        """Empty gradients as kernels write them, on the tensors' device unless another is given: those of query, key
        and value in their order of dimensions, those of terms float32, contiguous, the bias's with all rows."""
        call = self.call
        query, key = call.query, call.key
        bias = sinks = None
        tables = [
            torch.empty(term.shape, dtype=torch.float32, device=device or query.device) for term in self._tables()
        ]
        if "bias" in self.grads:
            given = call.terms[BIAS]
            assert given is not None
            over = (1,) * (4 - given.dim()) + tuple(given.shape)
            whole = -(-key.shape[2] // BIAS_ROW_STEP) * BIAS_ROW_STEP
            shape = over[0], over[1], query.shape[2], whole
            bias = torch.empty(shape, dtype=torch.float32, device=device or query.device)
        if "sinks" in self.grads:
            sinks = torch.empty(query.shape[1], dtype=torch.float32, device=device or query.device)
        return *empty_grads(query, key, call.value, device), bias, sinks, *tables

    def _tables(self) -> list[Tensor]:
        """The tables whose gradients are wanted."""
        places = places_of(self.call)
        terms = (self.call.terms[places[name]] for name in names_of(self.grads)[len(TERM_GRADS) :])
        return [term for term in terms if term is not None]

    def in_turn(self, plans: Mapping[int, CallPlan]) -> dict[int, Callable[[], str]]:
        """What enqueues each of these plans, over gradients that are nobody's."""
        call, own = self.call, list[Any]()

        def run(plan: CallPlan) -> str:
            own.extend(() if own else self.made())
            tensors = call.query, call.key, call.value, self.out
            return plan.run(call, tensors, self.lse, (self.grad, self.grad_lse, *own))

        return {place: partial(run, plan) for place, plan in plans.items()}

    def fitted(self, made: Grads) -> Grads:
        """What kernels wrote, those of terms summed over what was broadcast, and in the terms' dtypes."""
        q, k, v, bias, sinks, *tables = made
        if bias is not None:
            given = self.call.terms[BIAS]
            assert given is not None
            rows = bias[..., : self.call.key.shape[2]]
            bias = rows.sum_to_size((1,) * (4 - given.dim()) + tuple(given.shape)).reshape(given.shape).to(given.dtype)
        if sinks is not None:
            given = self.call.terms[SINKS]
            assert given is not None
            sinks = sinks.to(given.dtype)
        own = (made.to(given.dtype) for made, given in zip(tables, self._tables(), strict=True) if made is not None)
        return q, k, v, bias, sinks, *own


def _own_scale(call: Call) -> float | None:
    """The scale where it is not that of the head_dim: kernels of the backward pass multiply by it in several places,
    so that the problem says it."""
    usual = 1 / math.sqrt(call.query.shape[3])
    return None if call.scale is None or math.isclose(call.scale, usual) else float(call.scale)


def expected(call: Call) -> Backward:
    """The backward pass of a call before it has run: with tensors without data where those of its answer will be."""
    out = out_like(call.query, call.value, "meta")
    lse = torch.empty(call.query.shape[:3], dtype=torch.float32, device="meta")
    given_lse = lse if call.return_lse else None
    return Backward(replace(call, out=out), lse, out, given_lse, grads_of(call))


def empty_grads(query: Tensor, key: Tensor, value: Tensor, device: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Empty gradients of these, in their order of dimensions, on their device unless another is given."""
    q, k, v = (torch.empty_like(tensor, device=device) for tensor in (query, key, value))
    return q, k, v


def words_of(call: Call) -> Call:
    """A call without its tensors, and without what it says of their values."""
    none: Any = None
    score = None if call.score is None else call.score.of_tensors(())
    return replace(call, query=none, key=none, value=none, terms=(), out=None, finite=False, score=score)


def score_of(call: Call, terms: Sequence[Tensor | None]) -> Score | None:
    """The expressions of a call with these terms, of whose tables they are."""
    if call.score is None:
        return None
    tables = terms[len(TERMS) : len(TERMS) + len(call.score.buffers)]
    return call.score.of_tensors([table for table in tables if table is not None])


def kept(
    words: Call, grads: tuple[str, ...], saved: Sequence[Tensor], grad: Tensor | None, grad_lse: Tensor | None
) -> Backward:
    """The backward pass of a call of these words (see `words_of`), whose tensors a node of autograd kept by
    `save_for_backward` alone, so that they may be packed away, or computed again, until then: `saved`, the call's own,
    the answer and the log-sum-exp. `grads`: as of `grads_of`; with the gradients that came."""
    query, key, value, *terms, out, lse = saved
    score = score_of(words, terms)
    call = replace(words, query=query, key=key, value=value, terms=tuple(terms), out=out, score=score)
    return Backward(call, lse, torch.zeros_like(out) if grad is None else grad, grad_lse, grads)


Lies = tuple[object, ...]
"""The strides of five tensors, then their dtypes."""


def lies_of(query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor) -> Lies:
    """How a call's tensors lie. What packs saved tensors away may hand back ones that lie otherwise, as
    `torch.autograd.graph.save_on_cpu` does of views, or have another dtype."""
    strides = query.stride(), key.stride(), value.stride(), out.stride(), lse.stride()
    return *strides, query.dtype, key.dtype, value.dtype, out.dtype, lse.dtype


@dataclass(frozen=True, slots=True)
class Training:
    """The plans of both passes of a call, its words without its tensors, of which terms gradients are wanted, and
    whether their bits are the same in every run."""

    forward: CallPlan
    backward: CallPlan
    words: Call
    grads: tuple[str, ...]
    deterministic: bool
    lies: Lies = ()
    """Of the tensors and the answer whose gradients the planned kernel computes; empty where another may have to: a
    call has terms, a race is still to come, or the kernel would read a gradient of the log-sum-exp."""


def training_of(call: Call, plans: Sequence[CallPlan], races: bool) -> Training:
    """The plans of both passes of calls like one. `races`: the kernel of the backward pass has still to race others."""
    lies: Lies = ()
    if not (races or call.terms or call.return_lse):
        given = expected(call)
        lies = lies_of(call.query, call.key, call.value, given.out, given.lse)
    return Training(plans[0], plans[1], words_of(call), grads_of(call), are_deterministic(call), lies)


class Computes(Protocol):
    """What a node asks of a `Runtime`."""

    def trained(self, call: Call, plan: CallPlan) -> tuple[Tensor, Tensor]: ...
    def gradients(self, given: Backward) -> Grads: ...
    def differentiates(
        self, plan: CallPlan, call: Call, tensors: Sequence[Tensor], backward: Sequence[Tensor | None]
    ) -> bool: ...


def attend_trained(runtime: Computes, call: Call, plans: Training) -> Answer:
    """The answer to a call, and with `return_lse` the log-sum-exp, both differentiable."""
    return _recorded(runtime, call, plans, call.query, call.key, call.value, *call.terms)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, runtime: Computes, call: Call, plans: Training, *tensors: Tensor | None) -> Any:
        out, lse = runtime.trained(call, plans.forward)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.runtime, ctx.plans = runtime, plans
        return (out, lse) if call.return_lse else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None = None) -> Any:
        runtime, plans, saved = ctx.runtime, ctx.plans, ctx.saved_tensors
        recorded = torch.is_grad_enabled()  # then somebody may differentiate what is made here
        if plans.lies and grad is not None and not recorded:
            made = _as_planned(runtime, plans, saved, grad)
            if made is not None:
                return (None, None, None, *made)
        given = kept(plans.words, plans.grads, saved, grad, grad_lse)
        call = given.call
        if recorded:
            tensors = call.query, call.key, call.value, given.grad, grad_lse, *call.given_terms
            found = _Gradients.apply(runtime, given, *tensors)  # type: ignore[no-untyped-call]
        else:
            found = runtime.gradients(given)
        of_terms: list[Tensor | None] = [None] * len(call.terms)
        places = places_of(call)
        for name, of_term in zip(names_of(given.grads), found[3:], strict=True):
            if of_term is not None:
                of_terms[places[name]] = of_term
        return (None, None, None, *found[:3], *of_terms)


_recorded: Callable[..., Answer] = super(torch.autograd.Function, _Attention).apply
"""`_Attention.apply` without what it does for `torch.func`, whose transforms this never meets."""


def _as_planned(
    runtime: Computes, plans: Training, saved: Sequence[Tensor], grad: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The gradients of query, key and value by the kernel that was planned with the forward pass, where all tensors
    lie as they did then and the gradient as the answer; None for all else, whose plan has to be found first, by a race
    if need be."""
    if plans.backward.kernel.failure or are_deterministic(plans.words) != plans.deterministic:
        return None
    query, key, value, out, lse = saved
    if type(grad) is not Tensor or not is_ordinary(query, key, value):
        return None
    index = grad.get_device()
    if any(one.get_device() != index for one in saved):
        return None
    if lies_of(query, key, value, out, lse) != plans.lies or grad.stride() != plans.lies[3]:
        return None
    try:
        if grad.data_ptr() % ALIGNMENT or grad.is_neg():
            return None
    except RuntimeError:  # a batch of gradients has no memory
        return None
    made = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    done = runtime.differentiates(plans.backward, plans.words, saved, (grad, None, *made, None, None))
    return made if done else None


class _Gradients(torch.autograd.Function):
    """The backward pass where autograd records it, too: it has no derivative, and says so."""

    @staticmethod
    def forward(ctx: Any, runtime: Computes, given: Backward, *tensors: Tensor | None) -> Any:
        return runtime.gradients(given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise RuntimeError(SECOND)


def by_torch(given: Backward) -> Grads:
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
