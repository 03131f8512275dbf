"""Small problems, inputs and their answers: what catches wrong kernels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle

import torch

from evoattn.backends.interpreter import InterpreterBackend
from evoattn.correctness import reference
from evoattn.correctness.case_shapes import (
    begin_apart,
    beside_tiles,
    by_heads,
    fitted,
    keys_of_three_kernels,
    sequenced,
    used_cases,
    windowed,
)
from evoattn.correctness.far import FarKernel, can_be_far, far_places
from evoattn.families.built import BuiltKernel
from evoattn.families.registry import FAMILIES
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

PACKING = 256
"""Bytes: tensors that are packed into one piece of memory begin at multiples of them."""


@dataclass(frozen=True)
class Case:
    """One problem with inputs: `tensors` q, k, v on the backend's device, and the answer to them."""

    name: str
    problem: AttentionProblem
    tensors: dict[str, torch.Tensor]
    answer: reference.Answer


def make_case(
    name: str,
    problem: AttentionProblem,
    seed: int,
    device: torch.device | str,
    kind: str = "plain",
    double: bool = False,
    tile: int = 64,
) -> Case:
    """Inputs of `kind` and `tile` (see `reference.make_inputs`) and their answer, on `device`."""
    tensors = reference.make_inputs(problem, seed, device, kind, tile)
    return Case(name, problem, tensors, reference.make_answer(problem, tensors, double))


def tensors_of(case: Case) -> list[torch.Tensor]:
    """The inputs and the answer: all that a kernel is never handed."""
    answer = case.answer
    return [*case.tensors.values(), answer.exact, *([] if answer.lse is None else [answer.lse])]


def packed(cases: Sequence[Case]) -> tuple[list[Case], torch.Tensor]:
    """The same cases with all their tensors in one piece of memory, and that piece as int64."""
    tensors = [tensor for case in cases for tensor in tensors_of(case)]
    starts = [0, *accumulate(-(-t.untyped_storage().nbytes() // PACKING) * PACKING for t in tensors)]
    whole = torch.zeros(starts[-1], dtype=torch.uint8, device=tensors[0].device)
    kept = []
    for tensor, start in zip(tensors, starts, strict=False):
        offset = start // tensor.element_size() + tensor.storage_offset()
        copy = whole.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), offset)
        kept.append(copy.copy_(tensor))
    left = iter(kept)

    def moved(case: Case) -> Case:
        inputs = {name: next(left) for name in case.tensors}
        exact = next(left)
        lse = None if case.answer.lse is None else next(left)
        return replace(case, tensors=inputs, answer=replace(case.answer, exact=exact, lse=lse))

    return [moved(case) for case in cases], whole.view(torch.int64)


_IN_TURN = re.compile(r"heads_(\d+)")
"""A parameter's value: so many heads take turns in the order of tiles."""
MOST_KEYS, MOST_SQUARE_KEYS, MOST_HEAD_ROWS = 1600, 420, 200
"""Keys of the longest case; the second where a mask asks for as many queries, the third where each is a tile."""


def device_cases(problem: AttentionProblem) -> list[tuple[str, AttentionProblem, str]]:
    """(name, problem, kind of inputs) of the small cases that every candidate passes on a GPU before its own shape;
    cheap ones first.

    All keep the compile-time key of `problem` (head_dim, dtype, mask, variants), so they run the very cubin that is
    timed.
    Lengths divide by no tile; some lie one beside a multiple of 64, and those of the plain cases are odd.
    """
    other = "bshd" if problem.layout == "bhsd" else "bhsd"
    small = problem.with_(varlen="", batch=1, heads=2, kv_heads=1)
    ladder = [
        ("ragged", small.with_(batch=2, heads=4, kv_heads=2, seqlen_q=203, seqlen_k=239), "plain"),
        ("ragged, strided, Sq > Sk", small.with_(seqlen_q=415, seqlen_k=113, layout=other), "plain"),
        ("one query", small.with_(seqlen_q=1, seqlen_k=799), "plain"),
        ("one key", small.with_(seqlen_q=127, seqlen_k=1), "plain"),
        ("logits x30", small.with_(seqlen_q=259, seqlen_k=1023), "large_logits"),
        ("a huge late key", small.with_(seqlen_q=130, seqlen_k=1025), "late_huge_key"),
        ("rising maximum", small.with_(seqlen_q=190, seqlen_k=900), "rising_maximum"),
        ("equal keys", small.with_(seqlen_q=65, seqlen_k=513), "equal_keys"),
    ]
    if problem.term_shapes:
        ladder.append(("extreme terms", small.with_(kv_heads=2, seqlen_q=190, seqlen_k=333), "extreme_terms"))
    if problem.shared_kv:
        ladder.append(("many heads", small.with_(batch=2, heads=142, kv_heads=2, seqlen_q=3, seqlen_k=333), "plain"))
    pasts = cycle((64, 65, 128, 0, 127, 1000, 300, 33, 63, 31))
    made = [(name, fitted(p, past, past // 2), kind) for (name, p, kind), past in zip(ladder, pasts)]
    if problem.seqused:
        made += [(name, windowed(p, 100, 30), kind) for name, p, kind in used_cases(problem, 256)]
    return [(name, sequenced(p), kind) for name, p, kind in made] if problem.varlen else made


@dataclass(frozen=True)
class SmallCase:
    """A case of the interpreter: a problem, the kind of its inputs, how large the GPU is, and where tensors lie."""

    name: str
    problem: AttentionProblem
    kind: str = "plain"
    sms: int | None = None
    """SMs of the GPU that the launches are made for; None: all that it has."""
    far: bool = False
    """Whether strides pass 2^31 (`far.py`)."""
    late_blocks: bool = False
    """Whether blocks that wait for others do so for long (`ptx.run_launch`)."""
    tile: int = 64  # of keys, where the inputs have huge ones

    def placed(self, kernel: BuiltKernel) -> BuiltKernel:
        """The kernel as launched on a GPU of so many SMs, with such strides."""
        gpu = kernel.gpu if self.sms is None else kernel.gpu.with_limits({"sm_count": self.sms})
        make = FarKernel if self.far else BuiltKernel
        return make(kernel.family, kernel.config, gpu, kernel.compiled)

    def backend(self, backend: InterpreterBackend) -> InterpreterBackend:
        """The interpreter with buffers that lie, and blocks that begin, so."""
        return backend.placed(far_places(self.problem) if self.far else None, self.late_blocks)

    def make(self, seed: int) -> Case:
        """Inputs and their answer."""
        return make_case(self.name, self.problem, seed, "cpu", self.kind, double=True, tile=self.tile)


def interpreter_cases(problem: AttentionProblem, config: KernelConfig) -> list[SmallCase]:
    """The small cases that the interpreter runs, those that find most first.

    dtype, head_dim and mask are the problem's. The cases grow with the config's tiles of BLOCK_M queries and BLOCK_N
    keys, its STAGES and its SPLITS or KEY_SPLIT:
    - so many key tiles that each stage of a ring is used a third time in each split, the last of one key, and those
      that `keys_of_three_kernels` wants;
    - two batches, grouped heads, another layout, rows 2^32 bytes apart and more, a tile of keys for each split, and
      logits that overflow what is not rescaled, on a GPU of one SM, so that persistent blocks take several tiles of
      rows. It has 40 rows or more, since the largest error of a few is a small sample: with 13, kernels as coarse as
      torch's own 16-bit scores failed it for 5 to 17 of 100 seeds, with 40 for 1 to 3;
    - one query, a tile that lacks one key, more heads than the order of tiles takes in turn, and blocks that wait long;
    - whole tiles alone, which real lengths often are, of two K/V heads as far apart;
    - just past one tile of rows, and a part of one key tile, of several heads on three SMs; under a mask that ends in
      the lower right corner there are rows that see no key;
    - if shifts rise seldom (RESCALE=lazy…), keys that make them rise after the first tiles, in any order of tiles; if a
      softmax of its own keeps scores, a huge key behind them; packed sequences, of which each of these is the longest
      (`sequenced`); terms beside the product at their extremes (`terms.make_terms`), a bias whose rows have no padding;
    - if heads are rows (GROUP_ROWS), three heads a K/V head, which is no power of two, over several tiles of rows; if
      only some keys are in use, sequences of none, one and two, of whole tiles, of just less and more than a tile, of
      all keys, where a table ends, and of less than none;
    - if V lies within K, groups of more heads than BLOCK_M; if the rows of a tile are heads of one query, as many rows
      as there would be of queries (`by_heads`), and more queries than keys;
    - if there is a window, one in which row blocks begin at different tiles of keys, and with KEY_SPLIT one of which
      some rows of a block see no key (`begin_apart`). The windows of the others end on, beside and within tiles;
    - where lengths or windows say where a mask's edges lie, edges one key beside those of tiles (`beside_tiles`)."""
    block_m, block_n = int(config.params["BLOCK_M"]), int(config.params["BLOCK_N"])
    shares = int(config.params.get("SPLITS", 1)) * int(config.params.get("KEY_SPLIT", 1))
    laps = (2 * int(config.params.get("STAGES", 1)) + 2) * shares
    packs, problem = bool(problem.varlen), problem.with_(varlen="")
    one = problem.with_(batch=1, heads=1, kv_heads=1)
    other = problem.with_(batch=2, layout="bshd" if problem.layout == "bhsd" else "bhsd")

    def rows_for(keys: int) -> int:
        """At least 40, and under a mask so many that one sees the last key."""
        return max(40, problem.masking.queries_to_see_all(keys) + 6)

    heads_are_rows = FAMILIES[config.family].heads_are_rows
    again = (int(config.params.get("STAGES", 1)) + 1) * shares * block_n + 1  # a stage is used a second time
    square = max(2 * block_n + 5, min(again, MOST_HEAD_ROWS)) if heads_are_rows else MOST_SQUARE_KEYS
    most = square if problem.masking.queries_to_see_all(MOST_KEYS) > 1 else MOST_KEYS
    keys = min(max((laps - 1) * block_n + 1, keys_of_three_kernels(config)), max(most, 2 * block_n + 5))
    keys += (1 - keys) % block_n if keys < most else -((keys - 1) % block_n)
    many = one.with_(seqlen_q=rows_for(keys), seqlen_k=keys)
    some = max(block_n + 3, min(shares * block_n + 3, most // 4))
    kv_heads = 2 if heads_are_rows else 1  # heads of a batch that have blocks of their own are two
    grouped = other.with_(heads=2 * kv_heads, kv_heads=kv_heads, seqlen_q=rows_for(some), seqlen_k=some)
    rows = max(block_m + 7, block_n // 2 + 42)
    whole = problem.with_(batch=1, heads=2, kv_heads=2, seqlen_q=max(block_m, 64), seqlen_k=2 * block_n)
    turn = max([int(match[1]) for value in config.params.values() if (match := _IN_TURN.fullmatch(str(value)))] or [1])
    groups = 2 if turn < 4 else 3 if turn < 12 else 5  # no multiple of the turn, which would hide the group of heads
    single = problem.with_(batch=min(turn, 2), heads=2 * groups, kv_heads=groups, seqlen_q=1, seqlen_k=2 * block_n - 1)
    part = one.with_(heads=min(turn + 1, 5), seqlen_q=rows, seqlen_k=block_n // 2 + 1)
    cases = [
        SmallCase("ragged, many key tiles", fitted(many, max(1, keys - block_n - 3), 5)),
        SmallCase(
            "grouped, strided, logits x300, a late huge key",
            fitted(grouped, 2, 1),
            "large_logits" if str(config.params.get("S_TYPE")) in ("fp16", "bf16") else "large_logits_late_key",
            sms=1,
            far=can_be_far(grouped),
        ),
        SmallCase("one query, many heads", fitted(single, block_n // 2, 3), late_blocks=True),
        SmallCase("whole tiles", fitted(whole, block_n - 1, block_n), far=can_be_far(whole)),
        SmallCase("part of one key tile", fitted(part, block_n + 3, 0), sms=3),
    ]
    if str(config.params.get("RESCALE", "")).startswith("lazy"):
        within = min(keys, (int(config.params.get("STAGES", 1)) + 3) * shares * block_n + 1)
        rising = one.with_(seqlen_q=max(64, rows_for(within)), seqlen_k=within)
        cases.append(SmallCase("a shift that rises late", fitted(rising, within, 5), "huge_keys_within", tile=block_n))
    if "KEPT_VECTORS" in config.params:
        coarse = str(config.params["S_TYPE"]) in ("fp16", "bf16") and "tiles" not in str(config.params["SOFTMAX"])
        kind = "late_huge_key" if coarse else "large_logits_late_key"
        cases.append(SmallCase("a huge key behind those that are kept", fitted(many, keys, 5), kind))
    if problem.term_shapes:
        # Three tiles: a part that some block begins in the middle. Kernels of few rows per block need no other batch.
        keys = min(3 * block_n, max(most, 2 * block_n + 5) // 8 * 8) + 8
        extreme = problem.with_(
            batch=2 if block_m > 8 else 1, heads=2, kv_heads=2, seqlen_q=rows_for(keys), seqlen_k=keys
        )
        cases.append(SmallCase("extreme terms", fitted(extreme, block_n, 3), "extreme_terms"))
    if config.params.get("GROUP_ROWS"):
        keys = block_n + block_n // 2 + 1
        rows = max(block_m // 2 + 5, problem.masking.queries_to_see_all(keys) + 6)  # of four slots each
        threes = other.with_(heads=6, kv_heads=2, seqlen_q=rows, seqlen_k=keys)
        cases.append(SmallCase("three heads a group", fitted(threes, block_n // 2 - 1, 2)))
    if problem.seqused:
        cases += [SmallCase(name, windowed(p, block_n // 2, 1), kind) for name, p, kind in used_cases(problem, block_n)]
    if problem.shared_kv:  # of which a group may have more heads than a tile has rows
        heads = problem.with_(batch=1, heads=block_m + 7, kv_heads=1, seqlen_q=2, seqlen_k=block_n + 3)
        cases.append(SmallCase("more heads than a tile", fitted(heads, 1, 1)))
    apart = begin_apart(one, block_m, block_n, int(config.params.get("KEY_SPLIT", 1)))
    cases += [SmallCase("windows that begin at different tiles", p) for p in apart]
    if heads_are_rows:
        cases = [replace(case, problem=by_heads(case.problem, block_m)) for case in cases]
        cases.append(SmallCase("more queries than keys", fitted(one.with_(heads=2, seqlen_q=5, seqlen_k=3), 1, 0)))
    else:
        cases += [SmallCase("edges beside those of tiles", p) for p in beside_tiles(one, block_m, block_n)]
    return [replace(case, problem=sequenced(case.problem)) for case in cases] if packs else cases
