"""The proof of the backward pass, a `cases.Proof`, and its small cases: what catches wrong kernels of it."""

import math
from dataclasses import replace
from itertools import cycle
from math import lcm

import torch

from evoattn.correctness import inputs
from evoattn.correctness.cases import begin_apart, beside_tiles, fitted, listed, sequenced, used_cases, windowed
from evoattn.correctness.gradients import attend, exact_gradients, gradients_of_torch
from evoattn.correctness.interpreter_cases import SmallCase, can_be_far
from evoattn.correctness.reference import FP32_RELATIVE, FP32_ROUNDING, Answer, Exact, largest_score, rms
from evoattn.correctness.sequences import rows_of_nobody
from evoattn.correctness.terms import torch_dtype
from evoattn.families.residency import WARP
from evoattn.model.block_list import parse_blocks
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

MOST_ROWS = 700
"""Queries, or keys, of the longest case of the interpreter."""


def device_cases(problem: AttentionProblem) -> list[tuple[str, AttentionProblem, str]]:
    """(name, problem, kind of inputs) of the small cases on a GPU; see `cases.device_cases`. Lengths that are an odd
    multiple of 64 end in the middle of a tile of 128."""
    other = "bshd" if problem.layout == "bhsd" else "bhsd"
    small = problem.with_(varlen="", batch=1, heads=2, kv_heads=1)
    grouped = small.with_(batch=2, heads=4, kv_heads=2, seqlen_q=203, seqlen_k=239)
    ladder = [
        ("ragged", grouped, "plain"),
        ("ragged, strided, Sq > Sk", small.with_(seqlen_q=415, seqlen_k=113, layout=other), "plain"),
        ("one query", small.with_(seqlen_q=1, seqlen_k=799), "plain"),
        ("one key", small.with_(seqlen_q=127, seqlen_k=1), "plain"),
        ("half a tile", small.with_(heads=6, kv_heads=2, seqlen_q=320, seqlen_k=192), "plain"),
        ("logits x30", small.with_(seqlen_q=259, seqlen_k=1023), "large_logits"),
        ("logits x300, a huge late key", small.with_(seqlen_q=130, seqlen_k=515), "large_logits_late_key"),
        ("a huge late key", small.with_(seqlen_q=130, seqlen_k=1025, layout=other), "late_huge_key"),
        ("equal keys", small.with_(seqlen_q=65, seqlen_k=513), "equal_keys"),
        ("low scores", small.with_(seqlen_q=131, seqlen_k=333), "low_scores"),
        ("large gradients beside zeros", grouped, "large_gradients"),
        ("some of the keys", grouped.with_(seqlen_q=333), "parts_of_keys"),
    ]
    if problem.own_score:  # of which an expression may make anything
        ladder = [case for case in ladder if case[2] != "low_scores"]
    if problem.term_shapes:
        ladder.append(("extreme terms", small.with_(kv_heads=2, seqlen_q=190, seqlen_k=333), "extreme_terms"))
    pasts = cycle((64, 65, 128, 0, 127, 1000, 300, 33, 63, 31))
    made = [(name, fitted(p, past, past // 2), kind) for (name, p, kind), past in zip(ladder, pasts, strict=False)]
    if problem.seqused:
        made += [(name, windowed(p, 100, 30), kind) for name, p, kind in used_cases(problem, 256)]
    if problem.blocks:
        return [(name, listed(p, turn), kind) for turn, (name, p, kind) in enumerate(made)]
    return [(name, sequenced(p), kind) for name, p, kind in made] if problem.varlen else made


def interpreter_cases(problem: AttentionProblem, config: KernelConfig) -> list[SmallCase]:
    """The small cases of the interpreter, those that find most first. They grow with the config's tiles of BLOCK_M
    queries and BLOCK_N keys, and with the most of its parameters whose names end in STAGES:
    - so many tiles of queries, of two tiles of keys, that each stage of a ring is used a third time, the last tile of
      one query; and so many tiles of keys of one tile of queries and a part;
    - two batches, grouped heads, another layout, rows 2^32 bytes apart and more, and logits that overflow what is not
      taken from the log-sum-exp, on a GPU of one SM, so that persistent blocks take several tiles;
    - one query; one key; whole tiles alone, of two K/V heads as far apart; odd multiples of 64;
    - scores so low that hidden keys overflow; dO large and 0 by turns; O and log-sum-exps of more keys than these;
    - queries that see no key, terms at their extremes, lengths in use, packed sequences, block lists, and edges of
      masks and windows one key or query beside those of tiles, all as in the forward pass;
    - of block lists more blocks of queries than the 32 that a warp looks at together."""
    m, n = (int(config.params[name]) for name in ("BLOCK_M", "BLOCK_N"))
    stages = max([int(value) for name, value in config.params.items() if name.endswith("STAGES")] or [1])
    plain = problem.with_(varlen="")
    one = plain.with_(batch=1, heads=1, kv_heads=1)
    other = plain.with_(batch=2, layout="bshd" if problem.layout == "bhsd" else "bhsd")
    rows, keys = (min((2 * stages + 1) * tile, MOST_ROWS // tile * tile) + 1 for tile in (m, n))
    few_keys, few_rows = n + n // 2 + 1, m + 7
    three_tiles = max(m + 9, 2 * int(config.params.get("PASS_M", 0)) + 1)  # of a launch with tiles of its own
    if problem.masking.ends_lower_right and problem.causal:  # a tile of keys is seen by as many queries as keys follow
        few_keys = rows + 5
    if problem.causal and not problem.masking.ends_lower_right:
        few_rows = keys + 3
    grouped = other.with_(heads=2, kv_heads=1, seqlen_q=max(40, m // 2 + 9), seqlen_k=n + 3)
    whole = plain.with_(batch=1, heads=2, kv_heads=2, seqlen_q=2 * m, seqlen_k=2 * n)
    single = plain.with_(batch=1, heads=6, kv_heads=3, seqlen_q=1, seqlen_k=2 * n - 1)
    threes = other.with_(heads=3, kv_heads=1, seqlen_q=m + 9, seqlen_k=n + 5)
    of_one, pair = (threes.with_(batch=1, heads=heads) for heads in (1, 2))
    block_m, block_n = m, n
    if config.params.get("DQ") == "pass":  # a launch with tiles of its own
        block_m, block_n = lcm(m, int(config.params["PASS_M"])), lcm(n, int(config.params["PASS_N"]))
    if problem.blocks:
        pair = pair.with_(seqlen_q=2 * block_m + 9)
        threes = threes.with_(seqlen_q=2 * lcm(block_m, WARP) + 9, seqlen_k=2 * lcm(block_n, WARP) + 5)
    half = one.with_(seqlen_q=192, seqlen_k=192)
    low = one.with_(seqlen_q=40, seqlen_k=n + 3)
    many = one.with_(seqlen_q=rows, seqlen_k=few_keys)
    cases = [
        SmallCase("ragged, many query tiles", fitted(many, max(1, rows - m - 3), 5)),
        SmallCase(
            "grouped, strided, logits x300, huge keys",
            fitted(grouped, n + 1, 5),
            "large_logits_two_keys",
            sms=1,
            far=can_be_far(grouped),
        ),
        SmallCase("many key tiles", fitted(one.with_(seqlen_q=few_rows, seqlen_k=keys), keys // 2, n)),
        SmallCase("one query", fitted(single, n // 2, 3), late_blocks=True),
        SmallCase("one key", fitted(one.with_(heads=2, seqlen_q=m + 5, seqlen_k=1), 1, 0)),
        SmallCase("whole tiles", fitted(whole, n - 1, n), far=can_be_far(whole)),
        SmallCase("half a tile", fitted(half, 65, 64)),
        SmallCase("three heads a group", fitted(threes, n // 2 - 1, 2), sms=3),
        SmallCase("low scores", fitted(low, n // 2, 1), "low_scores"),
        SmallCase("large gradients beside zeros", fitted(of_one, n, 1), "large_gradients"),
        SmallCase("some of the keys", fitted(pair, n + 3, 3), "parts_of_keys"),
        SmallCase("more queries than keys", fitted(one.with_(heads=2, seqlen_q=three_tiles, seqlen_k=5), 1, 0)),
    ]
    if problem.own_score:  # of which an expression may make anything
        cases = [case for case in cases if case.kind != "low_scores"]
    edges = problem.masking.causal or problem.window or problem.seqused or problem.blocks
    if not edges and (block_m, block_n) == (m, n):
        # Every query sees every key: one key is as few as five, and 192 of either are whole tiles of up to 64;
        # but of a launch with larger tiles of its own other cases may be one of these.
        others = {"more queries than keys"} | ({"half a tile"} if 64 % m == 64 % n == 0 else set())
        cases = [case for case in cases if case.name not in others]
    if problem.term_shapes:
        extreme = plain.with_(batch=2, heads=2, kv_heads=2, seqlen_q=m + 7, seqlen_k=n // 8 * 8 + 8)
        cases.append(SmallCase("extreme terms", fitted(extreme, n, 3), "extreme_terms"))
    if problem.seqused:
        cases += [SmallCase(name, windowed(p, n // 2, 1), kind) for name, p, kind in used_cases(plain, n)]
    cases += [SmallCase("windows that begin at different tiles", p) for p in begin_apart(one, m, n, 1)]
    cases += [SmallCase("edges beside those of tiles", p) for p in (*beside_tiles(one, m, n), *_beside(one, m, n))]
    if problem.blocks:
        made = [replace(case, problem=_listed(case.problem, block_m, block_n, turn)) for turn, case in enumerate(cases)]
        return [*made, SmallCase("over 32 blocks of queries", _many_blocks(one, block_m, block_n))]
    return [case.packed(0, 2 * m, 2 * n) for case in cases] if problem.varlen else cases


def _beside(problem: AttentionProblem, m: int, n: int) -> list[AttentionProblem]:
    """Problems in which the queries that a tile of keys sees begin one before, at or behind the begin of a tile of
    queries, or end so under a window; empty for masks whose edges no length moves."""
    side = 2 * max(m, n) + 5
    square = problem.with_(seqlen_q=side, seqlen_k=side)
    if problem.window:
        return [fitted(square, past, ahead) for past, ahead in ((m - 1, 0), (m, 1), (m + 1, n - 1))]
    if problem.causal and problem.masking.ends_lower_right:
        return [square.with_(seqlen_k=side + shift) for shift in (1, -1)]
    return []


def _many_blocks(problem: AttentionProblem, m: int, n: int) -> AttentionProblem:
    """More blocks of queries than a warp looks at together, and one block of keys, of two heads with own lists."""
    documents = f"{n // 2}+{33 * m}" if parse_blocks(problem.blocks).documents else "0/0/1"
    return problem.with_(heads=2, seqlen_q=33 * m + 5, seqlen_k=n - 3, blocks=f"bh:{m}x{n}:{documents}:mixed")


def _listed(problem: AttentionProblem, m: int, n: int, turn: int) -> AttentionProblem:
    """The case with blocks of one or two tiles, by turns, and documents that begin within them; of some all heads
    have the same lists, of one all batches. Turn 7, of three blocks each way, has whole words of bits."""
    if turn == 7:
        m, n = lcm(m, WARP), lcm(n, WARP)
    rows, keys = m * (2 if turn in (2, 4, 6, 8) else 1), n * (2 - turn // 2 % 2)
    documents = f"{n + 3}+{n // 2 + 1}+{3 * keys}" if parse_blocks(problem.blocks).documents else "1/1/3"
    by = "h" if turn % 8 == 1 else "b" if turn % 8 in (3, 4, 7) else "bh"
    return problem.with_(blocks=f"{by}:{rows}x{keys}:{documents}:mixed")


KINDS = (*inputs.KINDS, "low_scores", "large_gradients", "parts_of_keys")
LOW_SCORE = -400.0
"""Of each query and key in `low_scores`: exp of it is 0 in fp32, and exp of minus it infinite."""
CANCELLING = ("equal_keys", "low_equal_scores", "low_scores")
"""Kinds of which dQ is a sum of dS that is about 0 times one key: what is left of it is the roundings of dS."""
LARGE = 100.0
"""How much larger every other row of dO is in `large_gradients`: fp16 holds what a head_dim of 256 makes of it."""
SOFTCAP_FACTOR, SOFTCAP_ABSOLUTE = 3.0, 3e-4
DIMS = {"dk": ("batch", "head", "key", "dim"), "dbias": ("batch", "head", "query", "key"), "dsinks": ("head",)}
DIMS["dv"] = DIMS["dk"]
OF_ROWS = {"dq": "cu_seqlens_q", "dk": "cu_seqlens_k", "dv": "cu_seqlens_k"}
"""Gradients of packed rows, and what says where they begin."""
OF_TABLES = ("first index", "second", "third", "fourth")


def make_inputs(
    problem: AttentionProblem, seed: int, device: torch.device | str, kind: str = "plain", tile: int = 64
) -> dict[str, torch.Tensor]:
    """q, k, v and the terms as the forward pass has them (`inputs.make_inputs`); `o` and `lse` are its exact answer,
    rounded; `do` and `dlse` are normal. All four are NaN in rows that are nobody's.

    Of kinds beside its own, `low_scores` gives all pairs one score so low that the exponential of a hidden key's 0
    overflows; `large_gradients` makes every other row of dO large and the others 0; `parts_of_keys` says that O and the
    log-sum-exps are of more keys than these, as where several devices have some keys each.
    Raises `ValueError` on an unknown kind."""
    own = {"low_scores": "plain", "large_gradients": "plain", "parts_of_keys": "plain"}
    forward = problem.with_(op="forward", grads="", deterministic=False)
    tensors = inputs.make_inputs(forward, seed, device, own.get(kind, kind), tile)
    if kind == "low_scores":
        side = math.sqrt(-LOW_SCORE / problem.softmax_scale)
        tensors["q"].zero_()
        tensors["q"][..., -1], tensors["k"][..., -1] = -min(side, inputs.MOST_LONE), min(side, inputs.MOST_LONE)
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    wide = torch.float64 if problem.dtype == "fp32" or str(device) == "cpu" else torch.float32
    o, lse = attend(problem, tensors, wide)
    do = torch.randn(o.shape, generator=generator, device=device)
    if kind == "large_gradients":
        do *= LARGE * (torch.arange(do.shape[2], device=device) % 2)[:, None]
    elif (
        kind == "parts_of_keys"
    ):  # a share of 0.1 to 0.9 is of these keys, all of it of the others where there are none
        others = torch.randn(lse.shape, generator=generator, device=device)
        share = (0.1 + 0.8 * torch.rand(lse.shape, generator=generator, device=device)).to(lse)
        o = share[..., None] * o + (1 - share[..., None]) * others[..., None]
        lse = torch.where(lse.isneginf(), others.to(lse), lse - share.log())
    for name, values in (("o", o), ("do", do)):
        tensors[name] = _laid_out(problem, name, values)
    tensors["lse"] = lse.float()
    if problem.lse:
        tensors["dlse"] = torch.randn(lse.shape, generator=generator, device=device)
    for name in ("o", "do", "lse", "dlse"):
        if name in tensors:
            tensors[name][:, :, : rows_of_nobody(tensors, "cu_seqlens_q")] = math.nan
    return {spec.name: tensors[spec.name] for spec in problem.inputs}


def _laid_out(problem: AttentionProblem, name: str, values: torch.Tensor) -> torch.Tensor:
    """The values in the problem's dtype and layout."""
    out = torch.empty(values.numel(), dtype=torch_dtype(problem), device=values.device)
    return out.as_strided(problem.shape(name), problem.strides(name)).copy_(values)


def make_answer(
    problem: AttentionProblem, tensors: dict[str, torch.Tensor], kind: str = "plain", double: bool = False
) -> Answer:
    """The exact gradients of inputs of `kind`, and how far an honest kernel may be from each.

    flash-attention's rule for gradients: max|g − exact| ≤ 2·max|low − exact| + 2·max|(exact + 0.3 − 0.3) − exact|,
    `low` being torch's autograd in the input dtype; with a softcap 3 times and 3e-4 more (hopper/test_flash_attn.py of
    the flash-attention project). As in the forward pass (`reference.Exact`) the largest error may also be `eps` of the
    largest gradient, and the root-mean-square error is bounded by the same rule.

    Scores are fp32, and so are log-sum-exps, so that P has a relative error of that of a score: `units` of 2^-24 of the
    largest (`reference.Exact`). It is multiplied by what a gradient is a sum of, not by the sum: `Gradients.bounds`.
    Of normal inputs this is far below the rest, of logits of 1,000 above it. Of inputs whose gradients cancel out
    (`CANCELLING`) the same holds for the rounding of dS to 16 bits, of which `low` is a sample of few rows."""
    dtype = torch_dtype(problem)
    exact_dtype = torch.float64 if double or not problem.element.on_tensor_cores else torch.float32
    exact = exact_gradients(problem, tensors, exact_dtype)
    low = gradients_of_torch(problem, tensors, whole=kind != "parts_of_keys")
    factor, absolute = (SOFTCAP_FACTOR, SOFTCAP_ABSOLUTE) if problem.softcap else (2.0, 0.0)
    unit = FP32_RELATIVE if problem.dtype == "fp32" else torch.finfo(dtype).eps
    of_scores = (2 + math.sqrt(problem.head_dim) / 3) * FP32_ROUNDING * (1 + largest_score(problem, tensors))
    if kind in CANCELLING and problem.dtype != "fp32":
        of_scores += unit / 2
    info, answer = torch.finfo(dtype), dict[str, Exact]()
    step = info.smallest_normal * info.eps  # of subnormal numbers: what cancels out is rounded to it
    for name, values in exact.values.items():
        rounded, bound = values.to(dtype), of_scores * exact.bounds[name]
        held = rounded.isfinite()  # those of tables, biases and sinks are fp32, which holds more
        nudged = ((rounded + 0.3 - 0.3).to(exact_dtype) - rounded.to(exact_dtype)).where(held, 0)
        difference = low.values[name].to(exact_dtype) - values
        rounding = (rounded.to(exact_dtype) - values).where(held, 0)
        largest = factor * difference.abs().max().item() + 2 * nudged.abs().max().item() + absolute
        mean = factor * rms(difference) + 2 * rms(rounding) + absolute
        largest, mean = max(largest, unit * values.abs().max().item()), max(mean, unit / 2 * rms(values))
        answer[name] = Exact(values, largest + bound.max().item() + step / 2, mean + rms(bound) + step / 2)
        if front := rows_of_nobody(tensors, OF_ROWS.get(name, "")):
            values[:, :, :front] = math.nan
            answer[name] = replace(answer[name], partial=True)
        if name in DIMS or name.startswith("down_"):
            answer[name] = replace(answer[name], dims=DIMS.get(name, OF_TABLES))
    return answer
