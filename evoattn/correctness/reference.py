"""The answer that an output is judged by; made once per problem."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from evoattn.correctness import eight_bits, sequences, terms
from evoattn.correctness.inputs import KINDS as KINDS
from evoattn.correctness.inputs import make_inputs as make_inputs
from evoattn.correctness.sequences import with_pairs
from evoattn.correctness.terms import torch_dtype
from evoattn.model.problem import AttentionProblem
from evoattn.model.scales import PER_COLUMNS

SCORES_PER_CHUNK = 1 << 27
"""Scores that the reference materialises at once: 1 GiB in float64."""


def exact_attention(
    problem: AttentionProblem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dtype: torch.dtype,
    scores_at_once: int = SCORES_PER_CHUNK,
    others: Mapping[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The answer in `dtype` (float32 or float64), contiguous `[batch, heads, seqlen_q, head_dim]`; with float8_e4m3fn
    in float32, made of weights that are rounded to it.

    torch's math `scaled_dot_product_attention` over upcast inputs, a few heads and rows at a time so that no more
    than `scores_at_once` scores are held, or one row of them; a row that sees no key is 0. `others` are the inputs
    beside q, k and v that the problem has."""
    wide = torch.float32 if dtype.itemsize == 1 else dtype
    cut = eight_bit_sums(problem.head_dim) if dtype.itemsize == 1 else 0.0
    if problem.varlen:
        if problem.page:
            k, v = (sequences.out_of_pages(problem, others, tensor) for tensor in (k, v))
            problem = problem.with_(page=0)
        packed = torch.zeros(problem.shape("o"), dtype=wide, device=q.device)
        packed[:, :, : sequences.rows_of_nobody(others, "cu_seqlens_q")] = math.nan
        for one in with_pairs(problem, others):
            parts = q[:, :, one.queries], k[:, :, one.keys], v[:, :, one.keys]
            packed[:, :, one.queries] = exact_attention(
                one.alone(problem), *parts, dtype, scores_at_once, one.inputs(others)
            )
        return packed
    out = torch.empty(problem.shape("o"), dtype=wide, device=q.device)
    rows = max(1, min(problem.seqlen_q, scores_at_once // problem.seqlen_k))
    heads = max(1, min(problem.group_size, scores_at_once // (problem.seqlen_k * rows)))
    for b in range(problem.batch):
        own, (keys, values) = sequences.sequence(problem, b, others, k, v)
        if own is None:
            out[b] = 0
            continue
        for kv_head in range(problem.kv_heads):
            key, value = keys[kv_head].to(wide), values[kv_head].to(wide)
            for head in range(kv_head * problem.group_size, (kv_head + 1) * problem.group_size, heads):
                last = min(head + heads, (kv_head + 1) * problem.group_size)
                for first in range(0, problem.seqlen_q, rows):
                    query = q[b, head:last, first : first + rows].to(wide)
                    chunk = slice(first, first + query.shape[-2])
                    added = terms.terms_of(own, others, b, slice(head, last), chunk, q.device)
                    out[b, head:last, first : first + rows] = _rows(
                        added.apply(added.scaled(query) @ key.T), value, added, cut
                    )
    return out


def eight_bit_sums(head_dim: int) -> float:
    """Of the largest score, what sums of products of 8 bits may be off. Tensor cores keep some 14 bits of them, and
    each product is cut to a unit of the sum so far, so that an error grows with the square of head_dim. Of scores with
    products of one sign it is 2^-12.3, 2^-10.3, 2^-9.4 and 2^-8.6 at 64, 128, 192 and 256 (`ptx/isa/wgmma_sums.py`);
    an H100 was 2^-10.6 off."""
    return 2.0**-9 * max(1.0, (head_dim / 128) ** 2)


TOP = 8
"""log2 of what stands for the largest weight of a row in e4m3, as in kernels (`templates/fp8_wgmma/operands.cuh`): from
2^-9 on there are numbers for the others."""


def _rows(scores: torch.Tensor, value: torch.Tensor, added: terms.Terms, cut: float) -> torch.Tensor:
    """Softmax of `scores [heads, rows, seqlen_k]` over `value` `[seqlen_k, D]`, in their dtype. With `cut`,
    `eight_bit_sums`, weights are rounded to e4m3, the largest of a row as 2^TOP; their sum is not. The answer is
    further off by what such scores may be off (the rule doubles half of it), each by itself: where two keys compete for
    a row."""
    if cut:
        with_sink = added.summed(scores)
        weights = torch.exp(with_sink - with_sink.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min))
        tiny = torch.finfo(scores.dtype).tiny
        shares = weights[..., : scores.shape[-1]] / weights.sum(-1, keepdim=True).clamp(min=tiny)
        rounded = (weights[..., : scores.shape[-1]] * 2.0**TOP).to(torch.float8_e4m3fn).to(scores.dtype)
        low = rounded @ value / (weights.sum(-1, keepdim=True) * 2.0**TOP).clamp(min=tiny)
        exact, squares = shares @ value, shares.square()
        spread = (
            squares @ value.square() - 2 * exact * (squares @ value) + exact.square() * squares.sum(-1, keepdim=True)
        )
        largest = scores.masked_fill(torch.isneginf(scores), 0).abs().amax(-1, keepdim=True)
        return low + torch.copysign(cut / 2 * largest * spread.clamp(min=0).sqrt(), low - exact)
    if not added.may_hide and not added.scoring.sums:
        return torch.softmax(scores, -1) @ value
    unseen = torch.isneginf(scores).all(-1, keepdim=True)
    weights = torch.softmax(added.summed(scores), -1)[..., : scores.shape[-1]].masked_fill(unseen, 0)
    return weights.to(value.dtype) @ value


def exact_lse(
    problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, others: Mapping[str, torch.Tensor] | None = None
) -> torch.Tensor:
    """Σ exp of each query's scores, and of its sink, as a natural logarithm, `[batch, heads, seqlen_q]` float64; -inf
    for nothing to sum."""
    if problem.varlen:
        if problem.page:
            k, problem = sequences.out_of_pages(problem, others, k), problem.with_(page=0)
        packed = torch.full(problem.lse_shape, -math.inf, dtype=torch.float64, device=q.device)
        if problem.sink:
            packed.copy_((others or {})["sinks"].double()[None, :, None])
        packed[:, :, : sequences.rows_of_nobody(others, "cu_seqlens_q")] = math.nan
        for one in with_pairs(problem, others):
            parts = q[:, :, one.queries], k[:, :, one.keys]
            packed[:, :, one.queries] = exact_lse(one.alone(problem), *parts, one.inputs(others))
        return packed
    out = torch.empty(problem.lse_shape, dtype=torch.float64, device=q.device)
    rows = max(1, min(problem.seqlen_q, SCORES_PER_CHUNK // problem.seqlen_k))
    for b in range(problem.batch):
        own, (keys,) = sequences.sequence(problem, b, others, k)
        if own is None:
            out[b] = (others or {})["sinks"][:, None] if problem.sink else -math.inf
            continue
        for head in range(problem.heads):
            key = keys[head // problem.group_size].double()
            for first in range(0, problem.seqlen_q, rows):
                query = q[b, head : head + 1, first : first + rows].double()
                chunk = slice(first, first + query.shape[-2])
                added = terms.terms_of(own, others, b, slice(head, head + 1), chunk, q.device)
                scores = added.summed(added.apply(added.scaled(query) @ key.T))
                out[b, head, first : first + rows] = torch.logsumexp(scores, -1)[0]
    return out


def largest_score(problem: AttentionProblem, tensors: Mapping[str, torch.Tensor]) -> float:
    """The largest finite scaled product of a query and a key, by magnitude, masked or not."""
    if problem.varlen:
        q, k = tensors["q"], tensors["k"]
        if problem.page:
            k, problem = sequences.out_of_pages(problem, tensors, k), problem.with_(page=0)
        parts = ((one.alone(problem), q[:, :, one.queries], k[:, :, one.keys]) for one in with_pairs(problem, tensors))
        return max((largest_score(alone, {"q": query, "k": key}) for alone, query, key in parts), default=0.0)
    largest = 0.0
    rows = max(1, min(problem.seqlen_q, SCORES_PER_CHUNK // problem.seqlen_k))
    for b in range(problem.batch):
        own, (keys,) = sequences.sequence(problem, b, tensors, tensors["k"])
        for head in range(problem.heads if own else 0):
            key = keys[head // problem.group_size].float()
            for first in range(0, problem.seqlen_q, rows):
                query = tensors["q"][b, head, first : first + rows].float()
                scores = (query * problem.softmax_scale) @ key.T
                largest = max(largest, scores.nan_to_num(0, 0, 0).abs().max().item())
    return largest


@dataclass(frozen=True)
class Exact:
    """One exact output of one set of inputs, and how far from it an honest kernel may be. NaN is asked for where it is
    NaN.

    flash-attention's rule: max|out − exact| ≤ 2·max|low − exact| + 2·max|(exact + 0.3 − 0.3) − exact|, where `low` is
    the same formula in the input dtype and the last term the rounding of the output dtype (tests/test_flash_attn.py of
    the flash-attention project). The same factor bounds the root-mean-square error: the largest error alone would let a
    kernel skip one K/V tile in many. Answers of rows that see one key alone, or one of huge weight, happen to be
    representable, so that rounding shows as 0 there. So the largest error is allowed the dtype's `eps` (2^-10, 2^-7) of
    the largest output, one to two units in its last place: half for the rounding of a weight and half for that of the
    sum; and the root-mean-square error half of `eps` of the outputs' own root mean square, for weights that are equal
    and so rounded alike, and the rounding of the outputs beside it. fp32 problems are judged
    against float64 and may always be 1e-5 of the largest output off, and as much as the largest score may be, since an
    error of a score is a relative error of its weight. Rounded before and after it is scaled, that is 2 units of 2^-24
    of itself; the sum of D products, rounded D times while it grows, adds sqrt(D) / 3, its standard deviation. With
    logits of 1,000 and D=64 that is 2.8e-4. A kernel that adds the products one after another is up to 4.8 units off at
    D=1024, where these are 12.7. Where something is added to scores, the interpreter's check allows two roundings of
    the largest log-sum-exp besides: a row whose highest score is -40,000 has weights 0.2 % off, alike in all of it.

    The log-sum-exp, where the problem asks for it, is fp32 from fp32 scores: 2e-4 (the polynomial exponential is 9e-5
    off) and 2e-5 of the largest are allowed. Leaving out one tile of 64 equal keys in 16,384 would be 4e-3."""

    values: torch.Tensor
    allowed_error: float
    allowed_rms: float = math.inf
    logarithms: bool = False
    """Whether it is -inf where nothing was summed up, there and nowhere else."""
    rounds_evenly: bool = False
    """Whether the roundings of an honest kernel cancel out over many rows, so that an output that leans to one side is
    wrong (`judge.judge_rounding`): of 16-bit answers to plain inputs."""
    partial: bool = False
    """Whether the kernel leaves an element as it is where the value is NaN, there and nowhere else."""
    dims: tuple[str, ...] = ("batch", "head", "query", "dim")
    """What each dimension counts; the first ones where there are fewer."""


Answer = dict[str, Exact]
"""The exact outputs by name. The first is the one that the error of a check is of, and all that a peer gives."""


def first(answer: Answer) -> Exact:
    """The first output."""
    return next(iter(answer.values()))


LSE_ABSOLUTE, LSE_RELATIVE = 2e-4, 2e-5
FP32_RELATIVE, FP32_ROUNDING, TERM_ROUNDINGS = 1e-5, 2.0**-24, 2


def make_answer(problem: AttentionProblem, tensors: dict[str, torch.Tensor], double: bool = False) -> Answer:
    """The `Answer` for inputs made by `make_inputs`. `double` takes float64 as exact for 16-bit problems too, as the
    interpreter's check does. Numbers of 8 bits are those that they stand for, times their scales: what is allowed is
    what 16-bit attention of these is off, in O's dtype; where Q too has 8 bits, what it is off with weights of 8 bits.
    Raises `ValueError` where finite numbers have an exact answer of NaN: a kernel would be asked for it."""
    exact_dtype = torch.float64 if double or not problem.element.on_tensor_cores else torch.float32
    by_columns = problem.scales == PER_COLUMNS  # whose scales are multiplied in before products, and rounded
    eight = problem.dtype == "e4m3"  # products of int8 are exact, and their weights have 16 bits
    tensors = sequences.with_new_keys(problem, tensors)
    problem, tensors = eight_bits.dequantised(problem, tensors, exact_dtype)
    dtype, (q, k, v) = torch_dtype(problem), terms.qkv(problem, tensors)
    exact = exact_attention(problem, q, k, v, exact_dtype, others=tensors)
    low = exact_attention(problem, q, k, v, torch.float8_e4m3fn if eight else dtype, others=tensors).to(dtype)
    answer, nowhere = exact, exact.isnan()
    front = sequences.rows_of_nobody(tensors, "cu_seqlens_q")
    missing = nowhere.any(-1) & q.isfinite().all(-1)
    if missing[:, :, front:].any() and k.isfinite().all() and v.isfinite().all():
        raise ValueError("The exact answer to finite numbers is none: the formula is wrong.")
    exact, low = exact.masked_fill(nowhere, 0), low.masked_fill(nowhere, 0)
    rounded = exact.to(dtype)
    nudged = (rounded + 0.3 - 0.3).to(exact_dtype) - rounded.to(exact_dtype)
    difference, rounding = low.to(exact_dtype) - exact, rounded.to(exact_dtype) - exact
    unit = torch.finfo(dtype).eps
    allowed = max(2 * difference.abs().max().item() + 2 * nudged.abs().max().item(), unit * exact.abs().max().item())
    # Where all rows have one answer, a few numbers are all that is rounded, and may be so by little: at most half of
    # the distance to the next number counts then.
    half = torch.ldexp(torch.full_like(exact, unit / 4), torch.frexp(exact).exponent) * (exact != 0)
    allowed_rms = max(
        2 * rms(difference) + 2 * rms(rounding), unit / 2 * rms(exact) + max(rms(rounding), rms(half.nan_to_num(0)))
    )
    if problem.dtype == "fp32":
        units = 2 + math.sqrt(problem.head_dim) / 3
        relative = FP32_RELATIVE + units * FP32_ROUNDING * largest_score(problem, tensors)
        allowed = max(allowed, relative * exact.abs().max().item())
        allowed_rms = max(allowed_rms, relative * rms(exact))
    adds = double and bool(problem.alibi or problem.bias or problem.score)
    partial = front > 0
    if not problem.lse and not adds:
        return {"o": Exact(answer, allowed, allowed_rms, partial=partial)}
    lse = exact_lse(problem, *terms.qkv(problem, tensors)[:2], tensors)
    largest = torch.where(lse.isfinite(), lse, 0).abs().max().item()
    if adds:
        allowed += TERM_ROUNDINGS * FP32_ROUNDING * largest * exact.abs().max().item()
        allowed_rms += TERM_ROUNDINGS * FP32_ROUNDING * largest * rms(exact)
    out = Exact(answer, allowed, allowed_rms, partial=partial)
    if not problem.lse:
        return {"o": out}
    allowed_lse = LSE_ABSOLUTE + LSE_RELATIVE * largest
    if eight:
        allowed_lse += eight_bit_sums(problem.head_dim) * largest_score(problem, tensors)
    if by_columns:
        off = (exact_lse(problem, q, k.to(dtype).to(exact_dtype), tensors) - lse).nan_to_num(0)
        allowed_lse += 2 * off.abs().max().item()
    return {"o": out, "lse": Exact(lse, allowed_lse, logarithms=True, partial=partial)}


def make_case_answer(
    problem: AttentionProblem, tensors: dict[str, torch.Tensor], kind: str, double: bool = False
) -> Answer:
    """As `make_answer`; with `double` it judges how 16-bit answers to plain inputs are rounded besides. Two kinds of
    right kernels have errors of one sign: soft caps by `tanh.approx`, and sums of 8-bit products, of which tensor cores
    cut all but some 14 bits; that is 1.2 `eps` of fp16, and too little to see in bf16."""
    cut = problem.dtype == "e4m3" and problem.element_of("o").name == "fp16"
    evenly = double and kind == "plain" and problem.dtype != "fp32" and not problem.softcap and not cut
    answer = make_answer(problem, tensors, double)
    return answer | {"o": replace(answer["o"], rounds_evenly=evenly)}


def with_kept_scores(answer: Answer, problem: AttentionProblem, tensors: dict[str, torch.Tensor], kept: str) -> Answer:
    """The answer to a kernel that keeps scores in memory as numbers of dtype `kept`, in octaves, those past its range
    at its end: twice what the same roundings cost the formula is allowed besides, as by `Exact`'s rule. Two keys may
    decide a row, which is then off by one rounding in all of it, in `make_answer`'s formula by another, that may happen
    to be small. For problems without variants."""
    dtype, (q, k, v) = getattr(torch, kept), terms.qkv(problem, tensors)
    limit = torch.finfo(dtype).max
    keys, values = (x.double().repeat_interleave(problem.group_size, 1) for x in (k, v))
    octaves = (q.double() * (problem.softmax_scale / math.log(2)) @ keys.mT).clamp(-limit, limit).to(dtype).double()
    added = terms.terms_of(problem, None, 0, slice(None), slice(0, problem.seqlen_q), q.device)
    scores = added.apply(octaves)
    weights = torch.exp2(scores - scores.amax(-1, keepdim=True).clamp(min=-limit))
    low = weights.to(torch_dtype(problem)).double() @ values / weights.sum(-1, keepdim=True).clamp(min=1)
    exact = answer["o"]
    difference = low.to(torch_dtype(problem)).double() - exact.values
    largest, mean = 2 * difference.abs().max().item(), 2 * rms(difference)
    allowed = max(exact.allowed_error, largest), max(exact.allowed_rms, mean)
    return answer | {"o": replace(exact, allowed_error=allowed[0], allowed_rms=allowed[1])}


def rms(x: torch.Tensor) -> float:
    """The root of the mean square."""
    return x.double().square().mean().sqrt().item()
