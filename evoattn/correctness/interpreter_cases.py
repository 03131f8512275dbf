"""The small cases by which the interpreter judges a kernel: they grow with the config's tiles."""

import math
import re
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from evoattn.backends.interpreter import InterpreterBackend
from evoattn.correctness.cases import (
    MOST_HEAD_ROWS,
    Case,
    appended_cases,
    begin_apart,
    beside_tiles,
    by_heads,
    fitted,
    keys_of_three_kernels,
    make_case,
    of_first_split,
    sequenced,
    used_cases,
    windowed,
    with_small_tables,
)
from evoattn.correctness.reference import with_kept_scores
from evoattn.families.block_list import BIT_LINE, packed_mask
from evoattn.families.built import BuiltKernel
from evoattn.families.latent_columns.resources import merged_at_once
from evoattn.families.registry import FAMILIES
from evoattn.families.residency import WARP
from evoattn.families.split_kv.resources import LEAST_STEPS
from evoattn.model.block_list import parse_blocks
from evoattn.model.dtype import DTYPES
from evoattn.model.forward import MAIN
from evoattn.model.launch import KernelLaunch
from evoattn.model.mask import MaskKind
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

_SPAN = 1 << 32
"""Bytes."""
_COMPACT = ("dbias",)
"""Tensors that never lie apart."""
_APART = {"q": (5, 3, 1), "k": (5, 3, 1), "v": (7, 5, 2), "o": (7, 5, 2), "bias": (5, 3, 1)}
"""Spans from one batch, one head, one row to the next: coprime, so that no wrong index lands on another's place, and
not the same of K and V, nor of Q and O. Gradients lie as what they are of. Of K and V with keys in use batches stay
whole rows apart, as tensor maps that slide have them, and rows one span."""
_STRIDE_LIMIT = 1 << 40
"""Bytes, of a tensor map (CUDA driver API, cuTensorMapEncodeTiled)."""
_UNIT = 16
"""Bytes that lie together."""


def _apart(problem: AttentionProblem, tensor: str, batch_rows: int) -> tuple[int, int, int]:
    """`_APART` of a tensor whose batches lie `batch_rows` rows apart. Where there is one batch, nothing lies so far on:
    `batch_rows` rows could be more than the 2^40 bytes of a tensor map's stride."""
    tensor = tensor.removeprefix("d")
    batch, head, row = _APART["k" if tensor == "v" and problem.shared_kv else tensor]
    several = tensor in "kv" and (problem.seqused or problem.page) and problem.shape(tensor)[0] > 1
    return (batch_rows, head, 1) if several else (batch, head, row)


@dataclass(frozen=True)
class FarProblem(AttentionProblem):
    """As told to the launches: only the strides are others."""

    def strides(self, tensor: str) -> tuple[int, int, int, int]:
        """Those of the compact tensor, and whole spans more; 0 stays 0."""
        if tensor in _COMPACT:
            return super().strides(tensor)
        *compact, last = super().strides(tensor)
        spans = (
            apart * _SPAN // self.element_of(tensor).bytes for apart in _apart(self, tensor, compact[0] // compact[2])
        )
        batch, head, row = (stride and stride + span for stride, span in zip(compact, spans, strict=True))
        return batch, head, row, last


@dataclass(frozen=True)
class FarKernel(BuiltKernel):
    """A kernel whose launches are told of far tensors, whatever the problem."""

    def launches(self, problem: AttentionProblem) -> tuple[KernelLaunch, ...]:
        """The launches of the problem with the strides of `FarProblem`."""
        return super().launches(FarProblem(**{f.name: getattr(problem, f.name) for f in fields(problem)}))


def can_be_far(problem: AttentionProblem) -> bool:
    """Whether rows are whole units, and all strides less than those that no tensor map has."""
    far = FarProblem(**{f.name: getattr(problem, f.name) for f in fields(problem)})
    sizes = {tensor: problem.element_of(tensor).bytes for tensor in MAIN}
    if any(max(far.strides(tensor)) * size >= _STRIDE_LIMIT for tensor, size in sizes.items()):
        return False
    return all(problem.shape(tensor)[3] * size % _UNIT == 0 for tensor, size in sizes.items())


def far_places(problem: AttentionProblem) -> dict[str, NDArray[np.uint16]]:
    """By tensor, for each unit of its compact memory: the span that it lies in, `[bytes / 16]`."""
    places = {}
    for tensor, shape, strides, _ in (*problem.inputs, *problem.outputs):
        if tensor.removeprefix("d") not in _APART or tensor in _COMPACT:
            continue
        element_bytes = problem.element_of(tensor).bytes
        units = shape[3] * element_bytes // _UNIT
        spans = np.zeros(int(np.prod(shape[:3])) * units, np.uint16)
        rows = [stride * element_bytes // _UNIT * spans.itemsize for stride in strides[:3]]
        view = np.ndarray((*shape[:3], units), np.uint16, spans.data, 0, (*rows, spans.itemsize))
        counts = np.indices(shape[:3])
        apart = _apart(problem, tensor, strides[0] // strides[2])
        view[...] = sum(count * spans_apart for count, spans_apart in zip(counts, apart, strict=True))[..., None]
        places[tensor] = spans
    return places


_IN_TURN = re.compile(r"heads_(\d+)")
"""A parameter's value: so many heads take turns in the order of tiles."""
MOST_ROOM = 6000
"""Keys of a case of one query."""
MOST_KEYS, MOST_SQUARE_KEYS, MOST_STEPS = 1600, 420, 1400
"""Keys of the longest case; the second where a mask asks for as many queries. Where each of these is a tile, they are
`case_shapes.MOST_HEAD_ROWS`. More where splits are many, so long as all blocks take so many steps at most."""

MOST_BLOCKS = 128
"""Of a case of splits that lengths cut, where as many queries as keys are needed."""
FEW_HEAD_ROWS = 48
"""Rows of a K/V head in the case of two batches where rows are heads: several tiles of 8 and 16, and of 32 most of one
for each of two queries. Of a larger tile they are a part."""
ENOUGH_SMS = 24
"""For a block for each tile of keys of a small case, and some that have none."""


@dataclass(frozen=True)
class SmallCase:
    """A case of the interpreter: a problem, the kind of its inputs, how large the GPU is, and where tensors lie."""

    name: str
    problem: AttentionProblem
    kind: str = "plain"
    sms: int | None = None
    """SMs of the GPU that the launches are made for; None: all that it has."""
    cold: bool = False
    """Whether L2 of that GPU holds nothing, so that blocks are in gangs (`evoattn/families/gangs.py`)."""
    far: bool = False
    """Whether strides pass 2^31 (`far.py`)."""
    late_blocks: bool = False
    """Whether blocks that wait for others do so for long (`ptx.run_launch`)."""
    tile: int = 64  # of keys, where the inputs have huge ones
    kept: str = ""
    """The dtype of 16 bits in which the kernel keeps scores in memory, if it does."""

    def placed(self, kernel: BuiltKernel) -> BuiltKernel:
        """The kernel as launched on a GPU of so many SMs, with such strides."""
        limits = {} if self.sms is None else {"sm_count": self.sms}
        gpu = kernel.gpu.with_limits(limits | ({"l2_bytes": 1} if self.cold else {}))
        make = FarKernel if self.far else BuiltKernel
        return make(kernel.family, kernel.config, gpu, kernel.compiled)

    def backend(self, backend: InterpreterBackend) -> InterpreterBackend:
        """The interpreter with buffers that lie, and blocks that begin, so."""
        return backend.placed(far_places(self.problem) if self.far else None, self.late_blocks)

    def packed(self, page: int, rows: int, keys: int) -> "SmallCase":
        """With packed sequences; in front of those with terms at their extremes lie so many rows of nobody."""
        front = (rows, keys) if self.kind == "extreme_terms" else (0, 0)
        return replace(self, problem=sequenced(self.problem, page, front))

    def make(self, seed: int) -> Case:
        """Inputs and their answer."""
        case = make_case(self.name, self.problem, seed, "cpu", self.kind, double=True, tile=self.tile)
        if not self.kept:
            return case
        return replace(case, answer=with_kept_scores(case.answer, case.problem, case.tensors, self.kept))


def interpreter_cases(problem: AttentionProblem, config: KernelConfig) -> list[SmallCase]:
    """The small cases that the interpreter runs, those that find most first.

    dtype, head_dim and mask are the problem's. The cases grow with the config's tiles of BLOCK_M queries and BLOCK_N
    keys, its STAGES and its SPLITS or KEY_SPLIT:
    - so many key tiles that each stage of a ring is used a third time in each split, or a second time where splits are
      many, the last of one key, and those that `keys_of_three_kernels` wants;
    - two batches, grouped heads, another layout, rows 2^32 bytes apart and more, a tile of keys for each split, and
      logits that overflow what is not rescaled, on a GPU of one SM, so that persistent blocks take several tiles of
      rows. It has 40 rows or more, since the largest error of a few is a small sample: with 13, kernels as coarse as
      torch's own 16-bit scores failed it for 5 to 17 of 100 seeds, with 40 for 1 to 3;
    - one query, a tile that lacks one key, more heads than the order of tiles takes in turn, and blocks that wait long;
    - whole tiles alone, which real lengths often are, of two K/V heads as far apart;
    - scores far below 0, so that hidden keys count where theirs is no infinity;
    - just past two tiles of rows, or past one where several heads take turns, and a part of one key tile, of three or
      more heads on three SMs; under a mask that ends in the lower right corner there are rows that see no key;
    - if shifts rise seldom (RESCALE=lazy…), keys that make them rise after the first tiles, in any order of tiles, else
      a maximum that rises in a whole tile; if a softmax of its own keeps scores, a huge key behind them; packed
      sequences, of which each of these is the longest (`sequenced`); terms beside the product at their extremes
      (`terms.make_terms`), a bias whose rows have no padding;
    - if heads are rows (GROUP_ROWS), three, five or nine heads a K/V head, no power of two, over several tiles of rows;
      if only some keys are in use, sequences of none, one and two, of whole tiles, of just less and more than a tile,
      of all keys, where a table ends, and of less than none, and one of so many keys that a split has fewer than there
      is room for;
    - if blocks share keys evenly (latent_columns), one row that more blocks have than are merged at once;
    - if V lies within K, groups of more heads than BLOCK_M; if the rows of a tile are heads of one query, as many rows
      as there would be of queries (`by_heads`); of splits under a mask that asks for many queries one that has several
      tiles (`of_first_split`), or as many queries as it takes where blocks take every KEY_SPLIT-th tile;
    - if blocks share tiles evenly, gangs of two that hand over, of a group of heads or of two tiles of rows;
    - most of a tile of keys, where a window or lengths end within tiles; where every query sees every key ("alike") the
      scores far below 0 have it, and the case of two batches a maximum that rises in a whole tile;
    - more queries than keys, of which there is one alone, or three where heads are rows; packed sequences lie behind
      two tiles of nobody's rows, and over pages some say that less than none are in use, or more than all;
    - if there is a window, one in which row blocks begin at different tiles of keys, and with KEY_SPLIT one of which
      some rows of a block see no key (`begin_apart`). The windows of the others end on, beside and within tiles;
    - where lengths or windows say where a mask's edges lie, edges one key beside those of tiles (`beside_tiles`);
    - of block lists, blocks of one and two tiles, and lists that are not what the predicate gives, of each batch and
      by turns of each head their own (`mixed` in `model/block_list.py`), and long ones (`long_lists`)."""
    if problem.appended:
        rows, tile = int(config.params["BLOCK_M"]), int(config.params["BLOCK_N"])
        return [SmallCase(*case) for case in appended_cases(problem, rows, tile)]
    page = problem.page if problem.varlen else 0
    made = _Maker(with_small_tables(problem.with_(varlen="", page=0 if page else problem.page)), config)
    cases = [*made.usual(), *made.of_the_softmax(), *made.of_terms(), *made.of_heads(), *made.of_edges()]
    queries, keys = (5, 3) if made.heads_are_rows else (2, 1)
    few = fitted(made.one.with_(heads=2, seqlen_q=queries, seqlen_k=keys), 1, 0)
    if made.heads_are_rows:
        cases = [replace(case, problem=by_heads(case.problem, made.block_m)) for case in cases]
        if "SPLITS" not in config.params:  # a block for each SM takes its share of all tiles: most of many had none
            cases = [replace(case, sms=case.sms or ENOUGH_SMS) for case in cases]
    else:
        beside = beside_tiles(made.one, made.block_m, made.block_n, made.number("KEY_SPLIT"))
        plain = problem.window or made.coarse_scores  # whose large ones a rounding alone takes past what is allowed
        kind = "plain" if plain else "rising_maximum"  # the last keys weigh most
        cases += [SmallCase("edges beside those of tiles", p, kind) for p in beside]
    cases.append(SmallCase("more queries than keys", few, "extreme_terms" if problem.varlen else "plain"))
    if made.kept:
        return [replace(case, kept=made.kept) for case in cases]
    if problem.blocks:
        cases = [replace(case, problem=made.listed(case.problem, turn)) for turn, case in enumerate(cases)]
        return [*cases, made.long_lists()]
    tiles = 2 * made.block_m, 2 * made.block_n
    return [case.packed(page, *tiles) for case in cases] if problem.varlen else cases


class _Maker:
    """Makes the cases of a problem that is not packed, for a config."""

    def __init__(self, problem: AttentionProblem, config: KernelConfig) -> None:
        self.problem, self.params = problem, config.params
        self.block_m = self.number("BLOCK_M")
        self.block_n = int(self.params.get("KEYS_AT_ONCE") or self.number("BLOCK_N"))
        in_chunks = "DIM_CHUNK" in self.params  # of which each tile of keys takes all stages
        self.stages = 1 if in_chunks else self.number("STAGES")
        self.shares = self.number("SPLITS") * self.number("KEY_SPLIT")
        self.heads_are_rows = FAMILIES[config.family].heads_are_rows
        self.one = problem.with_(batch=1, heads=1, kv_heads=1)
        self.other = problem.with_(batch=2, layout="bshd" if problem.layout == "bhsd" else "bhsd")
        again = (self.stages + 1) * self.shares * self.block_n + 1  # a stage is used a second time
        square = max(2 * self.block_n + 5, min(again, MOST_HEAD_ROWS)) if self.heads_are_rows else MOST_SQUARE_KEYS
        if problem.masking.queries_to_see_all(MOST_KEYS) > 1:
            self.most = square
        else:  # a split uses a stage again, where that is not too many blocks
            tiles = self.stages * self.shares + 1
            few = tiles * max(1, 40 // self.block_m) <= MOST_STEPS
            self.most = max(MOST_KEYS, tiles * self.block_n) if few else MOST_KEYS
        laps = (2 * self.stages + 2) * self.shares
        most = max(self.most, 2 * self.block_n + 5)
        keys = min(max((laps - 1) * self.block_n + 1, keys_of_three_kernels(config)), most)
        keys += (1 - keys) % self.block_n if keys < self.most else -((keys - 1) % self.block_n)
        self.keys = keys
        """Of the case of many key tiles."""
        rows = self._rows_for(keys) if self.sides else min(40, max(16, 2 * self.block_m + 1))
        self.many = self.one.with_(seqlen_q=rows, seqlen_k=keys)
        interleaved = again - self.block_n * self.shares + 5  # of blocks that take every KEY_SPLIT-th tile of keys
        if self.number("KEY_SPLIT") > 1 and self.keys < interleaved <= MOST_KEYS and self.most == square:
            self.many = self.one.with_(seqlen_q=interleaved + 5, seqlen_k=interleaved)
        elif (self.heads_are_rows or self.number("SPLITS") > 1) and self.most < min(again, MOST_KEYS):
            rows = 1 if self.heads_are_rows else self.block_m
            found = of_first_split(self.stages, self.shares, self.block_n, rows)
            self.many = self.one.with_(seqlen_q=found[0], seqlen_k=found[1]) if found else self.many

    def number(self, name: str) -> int:
        return int(self.params.get(name, 1))

    def _rows_for(self, keys: int) -> int:
        """At least 40, and under a mask so many that one sees the last key."""
        return max(40, self.problem.masking.queries_to_see_all(keys) + 6)

    def sees_all_alone(self, keys: int) -> bool:
        """Whether one query does."""
        return self.problem.masking.queries_to_see_all(keys) == 1

    @property
    def sides(self) -> bool:
        """Whether queries see different keys; else a case has no more of them than three tiles of rows."""
        return self.problem.masking.kind is not MaskKind.FULL

    @property
    def alike(self) -> bool:
        """Whether every query sees every key that there is: no case has to find an edge of its own."""
        problem = self.problem
        return not (self.sides or problem.window or problem.seqused or problem.blocks)

    @property
    def coarse_scores(self) -> bool:
        return str(self.params.get("S_TYPE")) in ("fp16", "bf16")

    @property
    def rises_in_grouped(self) -> bool:
        """Whether the case of two batches has two whole tiles of keys, and a maximum that rises in the second."""
        lazy = str(self.params.get("RESCALE", "")).startswith("lazy")
        return self.alike and not lazy and "KEPT_VECTORS" not in self.params

    @property
    def kept(self) -> str:
        """The torch dtype of the scores that are kept, where they have 16 bits."""
        keeps = self.coarse_scores and "tiles" not in str(self.params["SOFTMAX"])
        return DTYPES[str(self.params["S_TYPE"])].torch if keeps else ""

    def usual(self) -> list[SmallCase]:
        """Of every config."""
        problem, block_m, block_n = self.problem, self.block_m, self.block_n
        some = max(block_n + 3, min(self.shares * block_n + 3, min(self.most, MOST_KEYS) // 4))
        some = max(some, 2 * block_n + 3) if self.rises_in_grouped else some
        kv_heads = 2 if self.heads_are_rows else 1  # heads of a batch that have blocks of their own are two
        few = min(40, max(16, 2 * block_m))  # rows of a case of several heads, or of inputs all alike
        few = few // 2 if self.heads_are_rows else few  # each has two heads
        rows = few if self.alike else self._rows_for(some)
        if self.heads_are_rows and block_m < FEW_HEAD_ROWS:  # `by_heads` makes heads of queries, of which two are left
            rows = min(rows, FEW_HEAD_ROWS // 2)  # each has two heads
        grouped = self.other.with_(heads=2 * kv_heads, kv_heads=kv_heads, seqlen_q=rows, seqlen_k=some)
        rows = max(block_m, 64 if self.sides else 16)
        whole = problem.with_(batch=1, heads=2, kv_heads=2, seqlen_q=rows, seqlen_k=2 * block_n)
        found = (_IN_TURN.fullmatch(str(value)) for value in self.params.values())
        turn = max([int(match[1]) for match in found if match] or [1])
        groups = 3 if turn < 12 else 5  # no multiple of the turn: it would hide the group of heads
        heads = 2 * groups
        single = problem.with_(batch=min(turn, 2), heads=heads, kv_heads=groups, seqlen_q=1, seqlen_k=2 * block_n - 1)
        rows = (2 if turn == 1 or problem.blocks else 1) * block_m + 7  # three tiles of rows, or more heads
        rows = max(rows, 2 * self.number("PV_BLOCK_M") + 1)
        rows = max(rows, block_n // 2 + 42) if self.sides else rows
        heads = min(max(turn + 1, 3), 5)
        if self.alike and self.shares > 1:  # a block for each share
            rows, heads = block_m + 7, 2
        part = self.one.with_(heads=heads, seqlen_q=rows, seqlen_k=block_n // 2 + 1)
        part = part.with_(layout="bshd")  # in which rows of Q lie further apart than those of K
        low = self.one.with_(seqlen_q=5 if self.heads_are_rows else 40, seqlen_k=block_n + 3)
        if self.alike:  # the case that tells hidden keys best has most of a tile too
            low = low.with_(seqlen_q=min(low.seqlen_q, few), seqlen_k=block_n + max(3, block_n * 13 // 16))
        return [
            SmallCase("ragged, many key tiles", fitted(self.many, max(1, self.keys - block_n - 3), 5)),
            SmallCase(
                "grouped, strided, logits x300, huge keys",
                fitted(grouped, 2, 1),
                "late_huge_key" if self.coarse_scores else "large_logits_two_keys",
                sms=1,
                far=can_be_far(grouped),
            ),
            SmallCase("one query, many heads", fitted(single, block_n // 2, 3), late_blocks=True),
            SmallCase("whole tiles", fitted(whole, block_n - 1, block_n), far=can_be_far(whole)),
            SmallCase("part of one key tile", fitted(part, block_n + 3, 0), sms=3),
            SmallCase("scores far below 0", fitted(low, block_n // 2, 1), "low_equal_scores"),
        ]

    def of_the_softmax(self) -> list[SmallCase]:
        """Where shifts rise seldom, and where a softmax of its own keeps scores."""
        cases = []
        if str(self.params.get("RESCALE", "")).startswith("lazy"):
            within = min(self.keys, (self.stages + 3) * self.shares * self.block_n + 1)
            rows = self._rows_for(within)
            if self.most == MOST_SQUARE_KEYS:
                rows += 58  # 64 that see whole tiles alone
            elif self.problem.masking.corner == "lower_right":
                within = max(within, max(64, rows) + 3 * self.block_n + 1)
            rising = self.one.with_(seqlen_q=max(64, rows), seqlen_k=within)
            masked = self.problem.masking.causal or self.problem.window  # "grouped" has whole tiles of other masks
            if masked and not self.heads_are_rows and not self.params.get("GROUP_ROWS"):
                rising = rising.with_(heads=2)
            rising = fitted(self.many if self.many.seqlen_k > self.keys else rising, within, 5)
            cases.append(SmallCase("a shift that rises late", rising, "huge_keys_within", tile=self.block_n))
        elif "KEPT_VECTORS" in self.params:
            kind = "scores_past_fp16" if self.kept else "large_logits_late_key"
            cases.append(SmallCase("a huge key behind those that are kept", fitted(self.many, self.keys, 5), kind))
        elif not self.rises_in_grouped:
            cases.append(SmallCase("a maximum that rises in a whole tile", self._whole_rise(), "large_logits_two_keys"))
        return cases

    def _whole_rise(self) -> AttentionProblem:
        """One head, of which a tile of rows sees two tiles of keys whole, and some keys of another."""
        masking, keys = self.problem.masking, 2 * self.block_n + 3
        rows = 40
        if masking.queries_to_see_all(keys) > 1:  # the first row of the last tile of rows sees two whole tiles
            tile = 1 if self.heads_are_rows else self.block_m
            rows = -(-2 * self.block_n // tile) * tile + 7
        elif masking.corner == "lower_right":
            keys += rows
        seen = self.one.with_(seqlen_q=rows, seqlen_k=keys)
        return windowed(seen.with_(seqused=f"{keys}:{keys}") if seen.seqused else seen, keys, 5)

    def of_terms(self) -> list[SmallCase]:
        """Where scores have terms beside the product."""
        if not self.problem.term_shapes:
            return []
        # Three tiles: a part that some block begins in the middle. Kernels of few rows per block need no other batch.
        keys = min(3 * self.block_n, max(self.most, 2 * self.block_n + 5) // 8 * 8) + 8
        batch = 2 if self.block_m > 8 else 1
        extreme = self.problem.with_(batch=batch, heads=2, kv_heads=2, seqlen_q=self._rows_for(keys), seqlen_k=keys)
        return [SmallCase("extreme terms", fitted(extreme, self.block_n, 3), "extreme_terms")]

    def of_heads(self) -> list[SmallCase]:
        """Where heads are rows, some keys are in use, or V lies within K."""
        problem, block_m, block_n, cases = self.problem, self.block_m, self.block_n, []
        if self.params.get("GROUP_ROWS"):
            keys = block_n + block_n // 2 + 1
            each = 3 if problem.group_size <= 4 else 5 if problem.group_size <= 8 else 9  # rows 8 apart: other heads
            rows = max(2 * block_m // (1 << each.bit_length()) + 5, problem.masking.queries_to_see_all(keys) + 6)
            threes = self.other.with_(heads=2 * each, kv_heads=2, seqlen_q=rows, seqlen_k=keys)
            cases.append(SmallCase("three heads a group", fitted(threes, block_n // 2 - 1, 2)))
        if self.params.get("SCHEDULE") == "balanced" and self.params["TILE_ORDER"] in ("by_head", "all_heads"):
            queries = block_m // 2 + 3 if self.params.get("GROUP_ROWS") else 40  # two tiles of rows for each K/V head
            of_sm, gangs = self.number("BLOCKS_PER_SM"), max(2, self.number("BLOCKS_PER_SM"))
            kv_heads = 2 * gangs + 1  # a whole round of tiles, then more than one for each gang
            pairs = problem.with_(batch=1, heads=2 * kv_heads, kv_heads=kv_heads, seqlen_q=queries)
            pairs = pairs.with_(seqlen_k=block_n + 1)
            cases.append(SmallCase("gangs", pairs, sms=math.ceil(2 * gangs / of_sm), cold=True))
        if problem.seqused:
            used = used_cases(problem, block_n)
            cases += [SmallCase(name, windowed(p, block_n // 2, 1), kind) for name, p, kind in used]
            steps = block_n * self.shares
            if self.number("SPLITS") > 1 and LEAST_STEPS * steps < MOST_ROOM:
                keys = LEAST_STEPS * steps - 3  # of which splits have fewer than of all that there is room for
                room, rows = keys + steps, 1
                if not self.sees_all_alone(MOST_ROOM):  # as many queries as see a second split
                    keys = LEAST_STEPS * block_n + 3
                    rows = problem.masking.queries_to_see_all(keys) + 6
                short = self.one.with_(seqlen_q=rows, seqlen_k=room, seqused=f"{keys}:{keys}")
                if math.ceil(rows / block_m) * self.shares <= MOST_BLOCKS:
                    cases.append(SmallCase("splits that lengths cut", windowed(short, keys, 0)))
        if problem.shared_kv or problem.rotary_apart:  # of which a group may have more heads than a tile has rows
            heads = problem.with_(batch=1, heads=block_m + 7, kv_heads=1, seqlen_q=2, seqlen_k=block_n + 3)
            cases.append(SmallCase("more heads than a tile", fitted(heads, 1, 1)))
        if "LOADED" in self.params:
            tiles = merged_at_once(problem.head_dim_v) + 2
            keys, rows = (tiles - 1) * block_n + 5, self.block_m // self.number("QUERIES")
            if self.sees_all_alone(keys):
                shared = self.one.with_(
                    heads=rows, seqlen_k=keys, seqlen_q=1, seqused=problem.seqused and f"{keys}:{keys}"
                )
                cases.append(SmallCase("a row of many blocks", shared, "late_huge_key", sms=max(tiles, ENOUGH_SMS)))
        return cases

    def listed(self, case: AttentionProblem, turn: int) -> AttentionProblem:
        """The case with blocks of one or two tiles, by turns, and documents that begin within them. Some have lists
        that heads share, for which a launch may ask the predicate once: turn 7, with two batches, blocks of whole warps
        of keys, so that it does."""
        in_words = self.block_n % WARP == 0 or turn != 7
        return self._with_lists(
            case, "b" if turn in (3, 7) else "bh", 1 + turn % 2, 1 + (turn % 4 == 0 or not in_words)
        )

    def _with_lists(self, case: AttentionProblem, by: str, row_tiles: int, key_tiles: int) -> AttentionProblem:
        rows, keys = self.block_m * row_tiles, self.block_n * key_tiles
        documents = f"{self.block_n + 3}+{self.block_n // 2 + 1}+{3 * keys}"
        if not parse_blocks(case.blocks).documents:
            documents = "1/1/3"
        return case.with_(blocks=f"{by}:{rows}x{keys}:{documents}:mixed")

    def long_lists(self) -> SmallCase:
        """Lists of so many blocks that a launch does not ask the predicate of all PARTIAL ones, where it asks of any:
        then batches share them, or heads. Two batches, two heads, and a third block of rows with all blocks."""
        key_tiles = 1 if self.block_n % WARP == 0 else 2
        keys = self.block_n * key_tiles
        room = max(2, BIT_LINE // keys)
        pairs = self.other.with_(heads=2, kv_heads=1, seqlen_q=2 * self.block_m + 9)
        pairs = pairs.with_(seqlen_k=2 * room * keys + keys // 2 + 1)
        by = {by: self._with_lists(pairs, by, 1, key_tiles) for by in ("h", "b", "bh")}
        found = next((listed for listed in by.values() if packed_mask(listed)), by["bh"])
        return SmallCase("long lists", found.with_(blocks=f"{found.blocks}2"))

    def of_edges(self) -> list[SmallCase]:
        """Where a window begins, and where keys end within a tile: causal masks end at many places of their own."""
        apart = begin_apart(self.one, self.block_m, self.block_n, self.number("KEY_SPLIT"))
        cases = [SmallCase("windows that begin at different tiles", p) for p in apart]
        if not self.problem.masking.causal and not self.alike:
            most = self.one.with_(seqlen_q=40, seqlen_k=max(1, self.block_n * 13 // 16))
            cases.append(SmallCase("most of a key tile", fitted(most, self.block_n, self.block_n)))
        return cases
