"""Small problems, inputs and their answers: what catches wrong kernels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import accumulate, cycle
from typing import Any, Protocol, cast

import torch

from evoattn.correctness import reference, sequences
from evoattn.model.block_list import parse_blocks
from evoattn.model.mask import MASKS
from evoattn.model.problem import AttentionProblem
from evoattn.model.scales import ROUNDED
from evoattn.model.score import parse_tables
from evoattn.model.space import KernelConfig

MOST_IN_A_TABLE = 1 << 18
"""Elements that checks draw of a table."""
MOST_SPLIT_KEYS = 512
"""Of the keys before a tile of rows that begins behind as many tiles as a split has, where rows are as many."""
MOST_HEAD_ROWS, MOST_HEAD_BLOCKS, SEVERAL_HEADS = 200, 1300, 24
"""Where each query is a tile of heads: queries of a case, blocks of a case whose first split has several tiles, and
heads of a query: those of two warps, one of them half full."""


def windowed(problem: AttentionProblem, past: int, ahead: int) -> AttentionProblem:
    """The problem with another window, if it has one: a kernel serves all. `ahead` is for masks that show such keys."""
    if not problem.window:
        return problem
    return problem.with_(window=f"{past}:{0 if MASKS[problem.mask].causal else ahead}")


def fitted(problem: AttentionProblem, past: int, ahead: int) -> AttentionProblem:
    """As `windowed`, and with lengths from a third to seven eighths of all keys, if only some are in use."""
    keys = problem.seqlen_k
    used = problem.with_(seqused=f"{keys // 3}:{-(-keys * 7 // 8)}") if problem.seqused else problem
    return windowed(used, past, ahead)


def begin_apart(problem: AttentionProblem, rows: int, tile: int, split: int) -> list[AttentionProblem]:
    """Problems under a window whose tiles of `rows` queries begin at different tiles of keys; empty without a window.

    If `split` blocks take every `split`-th tile of keys each, also some in which the first 64 rows of a tile see none
    of the keys of a block which its other rows see: by a window of one key."""
    if not problem.window:
        return []
    side = rows + tile + 5
    found = [fitted(problem.with_(seqlen_q=side, seqlen_k=side), tile // 2, tile)]
    if split > 1 and problem.masking.corner == "lower_right":  # the first 64 rows see those before tile `split`
        keys = rows + split * tile - min(rows, 64)
        found.append(fitted(problem.with_(seqlen_q=rows, seqlen_k=keys), 0, 0))
    elif split > 1:
        side = 2 * rows + min(split * tile, MOST_SPLIT_KEYS)
        found.append(fitted(problem.with_(seqlen_q=side, seqlen_k=side), 0, 0))
    return found


def beside_tiles(problem: AttentionProblem, rows: int, tile: int, split: int = 1) -> list[AttentionProblem]:
    """Problems of a few tiles of `rows` queries and `tile` keys, in which the keys that a tile of rows sees end one or
    two before the end of a tile of keys, or one behind it; and begin, under a window, one or two behind or one before
    it. A kernel whose edge is a key off passes over a tile that is seen, or does not mask one that is not, or does not
    raise the maximum of a row that sees its first key there, here alone. Where keys end behind a tile, of a mask that
    ends in the lower right corner, there are three tiles of rows.

    Of a causal mask in the upper left corner alone the last row moves an edge: it is the only one that sees a tile,
    which is not the first of one of `split` blocks that share the keys.
    Empty for masks whose edges no length moves."""
    mask, side = problem.masking, 2 * max(rows, 2 * tile) + 5
    if not mask.causal:
        return []
    if mask.corner == "upper_left" and not problem.window:
        round_of_tiles = tile * split if tile * split <= MOST_SPLIT_KEYS else tile
        last = -(-(rows + 1) // round_of_tiles) * round_of_tiles
        return [fitted(problem.with_(seqlen_q=last + 1, seqlen_k=last + tile + 3), 0, 0)]
    if mask.corner == "upper_left":
        square = problem.with_(seqlen_q=side, seqlen_k=side)
        return [windowed(square, past, 0) for past in (3 * tile - 2, 3 * tile + 1, 3 * tile - 1)]
    found = []
    for end, begin, ahead in ((-2, 2, tile - 2), (1, -1, 1), (-1, 1, 3)):
        ahead = 0 if MASKS[problem.mask].causal else ahead
        diagonal = (5 if problem.window else 1) * tile + end - ahead  # a window has whole tiles between its edges
        queries = (1 if end < 0 else 2) * rows + 7  # of three tiles each sees keys, in whatever order blocks come
        shifted = problem.with_(seqlen_q=queries, seqlen_k=queries + diagonal)
        found.append(fitted(shifted, max(0, diagonal - tile - begin), ahead))
    return found


def by_heads(problem: AttentionProblem, tile: int) -> AttentionProblem:
    """As many rows a K/V head, but of heads instead of queries: for kernels of which each query takes a tile of `tile`
    heads. Where the mask asks for many queries, one head keeps them, and gets others beside it."""
    rows = problem.seqlen_q * problem.heads // problem.kv_heads
    queries = 1 if rows % tile == 0 else 2
    wanted = problem.masking.queries_to_see_all(problem.seqlen_k)
    if problem.seqlen_q <= queries:
        return problem
    if problem.heads == 1 and wanted > queries:
        return problem.with_(heads=min(tile, SEVERAL_HEADS))
    return problem.with_(seqlen_q=queries, heads=problem.kv_heads * -(-rows // queries))


def of_first_split(stages: int, splits: int, tile: int, rows: int = 1) -> tuple[int, int] | None:
    """(queries, keys) under a mask that ends in the upper left corner, where `rows` queries are a tile: the queries
    see so many tiles of keys of the first of `splits` that a stage is used again, or two, and the first of the next.
    Less than `splits` splits have keys then, and queries none of most of them. None if that is too many blocks."""
    most = max(2, (MOST_HEAD_ROWS * min(rows, 2) - 5) // tile)
    for tiles in range(min(stages + 1, most), 1, -1):
        queries, every = tiles * tile + 5, (tiles - 1) * splits + 1  # the fewest of which a split has so many
        if queries <= 2 * MOST_HEAD_ROWS and -(-queries // rows) * -(-every // tiles) <= MOST_HEAD_BLOCKS:
            return queries, (every - 1) * tile + 1
    return None


def used_cases(problem: AttentionProblem, tile: int) -> list[tuple[str, AttentionProblem, str]]:
    """(name, problem, kind of inputs) of batches of sequences whose keys in use end at, beside and far from the ends of
    tiles, or number less than none."""
    some = problem.with_(heads=2, kv_heads=1, seqlen_q=7)
    whole = -(-(tile + 2) // max(1, problem.page)) * max(1, problem.page)  # nothing is left of the last page
    rows = {
        "sequences of 0, 1 and 2 keys": (3, 0, 2, tile + 1, "plain"),
        "sequences of whole tiles": (4, 0, 3 * tile, 3 * tile + 7, "plain"),
        "sequences of about a tile": (5, tile - 2, tile + 2, 2 * tile, "plain"),
        "sequences of all keys": (2, whole, whole, whole, "plain"),
        "less than no keys, and more than all": (4, 0, 1, 1, "extreme_terms"),
    }
    return [
        (name, some.with_(batch=batch, seqused=f"{low}:{high}", seqlen_k=keys), kind)
        for name, (batch, low, high, keys, kind) in rows.items()
    ]


def appended_cases(problem: AttentionProblem, rows: int, tile: int) -> list[tuple[str, AttentionProblem, str]]:
    """As `used_cases`, of new keys: for kernels of which a tile of `rows` has all rows of a K/V head."""
    group, queries = (2, rows // 2) if 4 <= rows <= 8 else (4, 2) if rows > 8 else (1, rows)
    other = "bshd" if problem.layout == "bhsd" else "bhsd"
    one = problem.with_(batch=5, heads=2, kv_heads=2, seqlen_q=1)
    several = one.with_(heads=2 * group, seqlen_q=queries)
    made = {
        "new keys, the first ones": (several, 0, queries + 2, tile + 1),
        "a new key beside a tile's end": (one, tile - 1, tile + 2, 2 * tile + 3),
        "new keys, strided": (several.with_(layout=other), 3 * tile - 1, 3 * tile + 5, 3 * tile + 7),
        "a new key behind many": (one.with_(batch=2), 800, 1000, 1030),
    }
    return [
        (name, windowed(p.with_(seqused=f"{low}:{high}", seqlen_k=keys), 100, 30), "plain")
        for name, (p, low, high, keys) in made.items()
    ]


def sequenced(problem: AttentionProblem, page: int = 0, front: tuple[int, int] = (0, 0)) -> AttentionProblem:
    """Packed sequences of which the longest has the problem's lengths: others have one query, no queries or no keys.

    The one without queries has keys that are NaN (`reference.make_inputs`), right behind those of the longest. The
    first has more than `front` queries and keys: of inputs at their extremes all but its last ones are nobody's."""
    rows, keys = problem.seqlen_q, problem.seqlen_k
    queries = (max(rows // 2, front[0]) + 1, rows, 0, 1, rows // 3 + 1)
    held = (max(keys // 3, front[1]) + 1, keys, min(5, keys), keys // 2 + 1, 0)
    lengths = "/".join("+".join(map(str, of)) for of in (queries, held))
    return problem.with_(batch=len(queries), seqlen_q=max(queries), seqlen_k=max(held), varlen=lengths, page=page)


def with_small_tables(problem: AttentionProblem) -> AttentionProblem:
    """The problem with tables of its expressions cut to so many elements: kernels of all sizes are the same, and an
    index outside is one at the edge."""
    cut = []
    for table in parse_tables(problem.tables):
        sizes = list(table.shape)
        while math.prod(sizes) > MOST_IN_A_TABLE:
            longest = sizes.index(max(sizes))
            sizes[longest] = (sizes[longest] + 1) // 2
        cut.append(table._replace(shape=tuple(sizes)))
    return problem.with_(tables="+".join(table.describe() for table in cut)) if cut else problem


def listed(problem: AttentionProblem, turn: int = 1) -> AttentionProblem:
    """Block lists of blocks as large, of each batch and by turns of each head their own, that are not what the
    predicate gives."""
    mask = parse_blocks(problem.blocks)
    documents = f"{mask.keys + 3}+{mask.keys // 2 + 1}+{3 * mask.keys}" if mask.documents else "1/1/3"
    by = "bh" if turn % 2 else "b"
    return problem.with_(blocks=f"{by}:{mask.rows}x{mask.keys}:{documents}:mixed")


def keys_of_three_kernels(config: KernelConfig) -> int:
    """Keys with which softmax reads scores that it did not keep, the second product uses its ring a third time, the
    first has more tiles than a block of it makes, and maxima of tiles are merged in a third round of eight or a second
    of sixteen (`templates/three_kernel/tiles.cuh`); 0 for families of other kernels."""
    genes = config.params
    if "PV_BLOCK_K" not in genes:
        return 0
    kept = int(genes["THREADS_PER_ROW"]) * int(genes["VECTOR_WIDTH"]) * int(genes["KEPT_VECTORS"])
    values = (2 * int(genes["PV_STAGES"]) + 1) * int(genes["PV_BLOCK_K"])
    scores = (int(genes["TILES_A_BLOCK"]) + 1) * int(genes["BLOCK_N"])
    merged = 16 * int(genes["BLOCK_N"]) // int(genes["WARPS_N"]) if "tiles" in str(genes["SOFTMAX"]) else 0
    return max(kept + 9, values + 1, scores + 1, merged + 1)


PACKING = 256
"""Bytes: tensors that are packed into one piece of memory begin at multiples of them."""


@dataclass(frozen=True)
class Case:
    """One problem with inputs: `tensors` on the backend's device, by their names, and the answer to them."""

    name: str
    problem: AttentionProblem
    tensors: dict[str, torch.Tensor]
    answer: reference.Answer

    def changed(self) -> dict[str, torch.Tensor]:
        """The inputs that a kernel changes, as it leaves them."""
        after = sequences.with_new_keys(self.problem, self.tensors)
        return {name: after[name] for name in ("kv" if self.problem.appended else "")}


class Proof(Protocol):
    """What makes an operation's inputs and answers, and its small cases: a module, `Operation.proof`."""

    def make_inputs(
        self, problem: AttentionProblem, seed: int, device: torch.device | str, kind: str = ..., tile: int = ...
    ) -> dict[str, torch.Tensor]:
        """The inputs by name, each of its spec's shape, strides and dtype. `kind` is one of those of the cases, `plain`
        for all operations; `tile` a number of keys that inputs may have something huge in each of."""

    def make_answer(
        self, problem: AttentionProblem, tensors: dict[str, torch.Tensor], kind: str, double: bool
    ) -> reference.Answer:
        """The exact outputs of inputs of `kind`, and the errors that are allowed; in float64 with `double`."""

    def device_cases(self, problem: AttentionProblem) -> list[tuple[str, AttentionProblem, str]]:
        """(name, problem, kind of inputs) of the small cases on a GPU, cheap ones first."""

    def interpreter_cases(self, problem: AttentionProblem, config: KernelConfig) -> list[Any]:
        """Those of the interpreter, `interpreter_cases.SmallCase`, which grow with the config."""


def proof_of(problem: AttentionProblem) -> Proof:
    """That of the problem's operation."""
    return cast(Proof, import_module(problem.operation.proof))


def make_case(
    name: str,
    problem: AttentionProblem,
    seed: int,
    device: torch.device | str,
    kind: str = "plain",
    double: bool = False,
    tile: int = 64,
) -> Case:
    """Inputs of `kind` and `tile` and their answer, on `device`; see `Proof`."""
    proof = proof_of(problem)
    tensors = proof.make_inputs(problem, seed, device, kind, tile)
    return Case(name, problem, tensors, proof.make_answer(problem, tensors, kind, double))


def unanswered(problem: AttentionProblem, seed: int, device: torch.device | str) -> Case:
    """Plain inputs whose answer nobody asks for: the reference takes longer than many a timing."""
    tensors = proof_of(problem).make_inputs(problem, seed, device)
    return Case(
        "the problem's own shape", problem, tensors, {"none": reference.Exact(torch.empty(0, device=device), 0.0)}
    )


def tensors_of(case: Case) -> list[torch.Tensor]:
    """The inputs and the answer: all that a kernel is never handed."""
    return [*case.tensors.values(), *(exact.values for exact in case.answer.values())]


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
        answer = {name: replace(exact, values=next(left)) for name, exact in case.answer.items()}
        return replace(case, tensors=inputs, answer=answer)

    return [moved(case) for case in cases], whole.view(torch.int64)


def device_cases(problem: AttentionProblem) -> list[tuple[str, AttentionProblem, str]]:
    """(name, problem, kind of inputs) of the small cases that every candidate passes on a GPU before its own shape;
    cheap ones first.

    All keep the compile-time key of `problem` (head_dim, dtype, mask, variants), so they run the very cubin that is
    timed.
    Lengths divide by no tile; some lie one beside a multiple of 64, and those of the plain cases are odd."""
    if problem.appended:
        return appended_cases(problem, 1, 64)
    other = "bshd" if problem.layout == "bhsd" else "bhsd"
    page = problem.page if problem.varlen else 0
    plain = problem.with_(varlen="", page=0 if page else problem.page)
    small = with_small_tables(plain).with_(batch=1, heads=2, kv_heads=1)
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
    if problem.op in ROUNDED:  # a row of this kind has an infinity
        ladder.append(("logits x300, no number in Q", small.with_(seqlen_q=130, seqlen_k=333), "large_logits_two_keys"))
    if problem.shared_kv or problem.rotary_apart:
        ladder.append(("many heads", small.with_(batch=2, heads=142, kv_heads=2, seqlen_q=3, seqlen_k=333), "plain"))
    pasts = cycle((64, 65, 128, 0, 127, 1000, 300, 33, 63, 31))
    made = [(name, fitted(p, past, past // 2), kind) for (name, p, kind), past in zip(ladder, pasts)]
    if problem.seqused:
        made += [(name, windowed(p, 100, 30), kind) for name, p, kind in used_cases(problem, 256)]
    if problem.blocks:
        return [(name, listed(p, turn), kind) for turn, (name, p, kind) in enumerate(made)]
    return [(name, sequenced(p, page), kind) for name, p, kind in made] if problem.varlen else made
