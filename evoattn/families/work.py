"""What a launch has to do, in counts that no GPU is part of: the closed forms from which the cost model makes a time.

A block works through steps, one for each tile of keys that it visits. Everything is of the whole block and of one step
unless it says otherwise. Counts are of the steady state: boundary tiles count as whole ones. The classes are not
frozen: a pick makes hundreds of each, and a frozen one takes three times as long to make."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from evoattn.families.block_list import READ_BIT, listed_row_steps, packed_mask
from evoattn.families.dealt import DealtTiles
from evoattn.families.gangs import TilesInOrder
from evoattn.families.residency import WARP
from evoattn.model.block_list import keys_read, partial_share
from evoattn.model.mask import Mask, MaskKind
from evoattn.model.problem import AttentionProblem
from evoattn.model.score import cost
from evoattn.model.sequences import Sequences

SHARED_LINE = 128
"""Bytes that shared memory gives in a clock."""


LAST_PARTS = "last parts"
"""Blocks that share the work of one of those that are left over after whole rounds of the card's places."""
CONVERSION = 1.25
"""Instructions that a pair of numbers of 8 bits takes to be one of fp16, of e4m3 on sm_89."""


@dataclass
class Step:
    """What one step keeps busy, and how long one warp waits in it."""

    tensor_flops: float = 0.0
    """Of tensor cores, padding included."""
    fp32: float = 0.0
    """Lane operations of the FP32 pipe: multiply-adds, additions, maxima."""
    special: float = 0.0
    """Lane operations of the special-function unit: exponentials."""
    instructions: float = 0.0
    """Warp instructions of any kind."""
    shared_bytes: float = 0.0
    """Read and written in shared memory, at `SHARED_LINE` bytes per clock; bank conflicts included."""
    loaded_bytes: float = 0.0
    """Through L2 into the SM, or back."""
    waits: float = 0.0
    """Clocks for which a warp only waits: results that it needs at once, and barriers."""


def together(*steps: Step, times: float = 1.0) -> Step:
    """All of these, one after another, so many times."""
    return Step(*[times * sum(each) for each in zip(*[vars(step).values() for step in steps], strict=True)])


@dataclass
class LaunchWork:
    """One launch: its blocks, and what each of them does."""

    kernel: str
    blocks: int
    threads: int
    warps: int
    """Warps of a block that compute; others only copy."""
    smem_bytes: int
    registers: int
    """Per thread."""
    step: Step
    steps: float
    """Per block, on average over the grid."""
    most_steps: float
    """Of the block that has most."""
    ends: Step
    """Once per block: its first loads, last stores, and merges within it."""
    tensor: Literal["mma", "wgmma", "tf32"] = "mma"
    """Instructions of `tensor_flops`; wgmma runs beside the warp that issued it."""
    schedule: Literal["single", "fixed", "claimed", "balanced"] = "single"
    """Blocks per tile of rows; or one wave of blocks that take tiles of rows in turn."""
    once_waits: float = 0.0
    """Clocks for which each of that wave's blocks waits once, however many tiles of rows it takes."""
    longest_first: bool = False
    """Whether the blocks with most steps begin first."""
    in_flight_bytes: float = 0.0
    """Per block, of loads that are under way while it computes."""
    read_bytes: float = 0.0
    """Different bytes that the launch reads."""
    write_bytes: float = 0.0
    sweep_bytes: float = 0.0
    """Of `read_bytes`, those that several blocks sweep over: K and V."""
    sweepers: float = 1.0
    """Blocks that sweep over the same of these bytes."""
    visits: float = 1.0
    """Times that the order of the blocks comes to the same of these bytes: rows of blocks, one after another."""
    visit_share: float = 1.0
    """Of these bytes, those that such a row of blocks takes, on average: fewer under a mask."""
    heads_in_turn: float = 1.0
    """Heads of which blocks are begun in turn: 1 where all blocks of a head come before those of the next."""
    order: TilesInOrder | None = None
    """Of a balanced schedule: which tiles of rows lie next to one another."""
    dealt: DealtTiles | None = None
    """Of a fixed schedule over sequences of their own lengths: the tiles of rows that blocks get."""
    scratch_bytes: float = 0.0
    """Of `read_bytes`, those that the launch before has just written."""
    others_bytes: float = 0.0
    """Of tensors that only other launches of the call touch: between two calls they go through L2, too."""
    cluster: int = 1
    overlaps: bool = False
    """Whether it may begin before the launch before it has ended."""
    genes: Mapping[str, float] = field(default_factory=dict)
    """What else may matter, by names that families share, as numbers; of them the physical part reads `LAST_PARTS`."""


@lru_cache(maxsize=1024)
def row_steps(problem: AttentionProblem, rows: int, keys: int, rows_per_query: int = 1) -> tuple[float, int, int]:
    """(mean, most, count): tiles of `keys` keys that the blocks of `rows` rows of one head of one of `batches` visit,
    and how many blocks there are. Rows are queries, or as many of each query as its heads take."""
    if problem.varlen:
        return _packed_row_steps(problem, rows, keys, rows_per_query)
    if problem.blocks:
        return listed_row_steps(problem, rows, keys)
    count = math.ceil(problem.seqlen_q * rows_per_query / rows)
    if not problem.seqused:
        return *_steps(problem.masking, problem.seqlen_q, problem.seqlen_k, rows, keys, rows_per_query), count
    lengths = Counter(sorted(problem.key_lengths)[:: math.ceil(problem.batch / MOST_SAMPLED)])
    found = [
        (_steps(problem.masking, problem.seqlen_q, max(1, length), rows, keys, rows_per_query), times)
        for length, times in lengths.items()
    ]
    mean = sum(mean * times for (mean, _), times in found) / lengths.total()
    return mean, max(most for (_, most), _ in found), count


def _steps(mask: Mask, seqlen_q: int, seqlen_k: int, rows: int, keys: int, rows_per_query: int) -> tuple[float, int]:
    """(mean, most) of `row_steps` of a sequence."""
    if mask.kind is MaskKind.FULL:
        tiles = math.ceil(seqlen_k / keys)
        return float(tiles), tiles
    return _masked_steps(mask, seqlen_q, seqlen_k, rows, keys, rows_per_query)


@lru_cache(maxsize=1024)  # candidates of one problem have few tiles
def _masked_steps(
    mask: Mask, seqlen_q: int, seqlen_k: int, rows: int, keys: int, rows_per_query: int
) -> tuple[float, int]:
    """(mean, most) of `row_steps` of a sequence."""
    count = math.ceil(seqlen_q * rows_per_query / rows)
    band, looked_at = mask.band(seqlen_q, seqlen_k), min(count, MOST_SAMPLED)
    visited = []
    for i in range(looked_at):
        block = i * (count - 1) // max(1, looked_at - 1)
        end = min(math.ceil((block + 1) * rows / rows_per_query), seqlen_q)
        seen = band.keys(block * rows // rows_per_query, end)
        visited.append(math.ceil(seen.stop / keys) - seen.start // keys if seen else 0)
    return sum(visited) / len(visited), max(visited)


@lru_cache(maxsize=64)
def _counted(sequences: Sequences) -> tuple[tuple[tuple[int, int], int], ...]:
    """The different lengths, and how often each occurs."""
    return tuple(Counter(sequences).items())


def _packed_row_steps(problem: AttentionProblem, rows: int, keys: int, rows_per_query: int) -> tuple[float, int, int]:
    """As `row_steps`, over all sequences that have queries; blocks without a tile of rows are not counted."""
    total, most, count = 0.0, 0, 0
    for (seqlen_q, seqlen_k), times in _counted(problem.sequences):
        if seqlen_q and seqlen_k:
            mean, longest = _steps(problem.masking, seqlen_q, seqlen_k, rows, keys, rows_per_query)
            blocks = math.ceil(seqlen_q * rows_per_query / rows)
            total, most, count = total + times * mean * blocks, max(most, longest), count + times * blocks
    return (total / count, most, count) if count else (1.0, 1, 1)


def blocks_of_sequence(problem: AttentionProblem, count: int) -> float:
    """Of the `count` blocks of a head that `row_steps` tells, those that sweep over the same keys: each packed sequence
    has its own."""
    return count / max(1, sum(rows > 0 and keys > 0 for rows, keys in problem.sequences)) if problem.varlen else count


MOST_SAMPLED = 33
"""Row blocks that are looked at where there are more: under the masks that there are, steps rise evenly between."""


def visit_share(problem: AttentionProblem, mean_steps: float, keys: int) -> float:
    """The part of a head's K and V that a row of blocks takes on average, of `mean_steps` tiles of `keys` keys."""
    count, total = _swept_keys(problem)
    return min(1.0, mean_steps * keys * count / max(1, total))


@lru_cache(maxsize=64)
def _swept_keys(problem: AttentionProblem) -> tuple[int, int]:
    """(count, keys in all) of the sequences that have queries."""
    lengths = [count for rows, count in problem.sequences if rows] or [1]
    return len(lengths), sum(lengths)


def bank_conflicts(lanes: int, stride_bytes: int, width_bytes: int) -> float:
    """How many times longer than without conflicts `lanes` neighbouring lanes take to read `width_bytes` each,
    `stride_bytes` apart, from 32 banks of 4 bytes. Lanes of 16 bytes are served eight at a time, of 8 bytes sixteen."""
    at_once = max(1, min(lanes, SHARED_LINE // max(4, width_bytes)))
    banks: dict[int, int] = {}
    for lane in range(at_once):
        first = lane * stride_bytes // 4
        for word in range(max(1, width_bytes // 4)):
            bank = (first + word) % 32
            banks[bank] = banks.get(bank, 0) + 1
    return float(max(banks.values()))


def bytes_of(problem: AttentionProblem, *tensors: str) -> int:
    """Bytes of some of q, k, v and o; none of a V that lies within K, nor of keys that are not in use, that no query
    sees through a window, or, in the forward pass, that no list names."""
    own = [t for t in tensors if t != "v" or not problem.shared_kv]
    listed = problem.blocks and problem.op == "forward"
    if not (problem.seqused or problem.page or problem.window or listed):
        return sum(problem.element_of(t).bytes * math.prod(problem.shape(t)) for t in own)
    if listed:
        mask, batch, heads, band, diagonal = problem.block_mask
        keys = keys_read(mask, batch, heads, problem.kv_heads, band, diagonal)
    else:
        seen = (len(problem.masking.band(rows, keys).keys(0, rows)) for rows, keys in problem.sequences if rows)
        keys = problem.kv_heads * (sum(seen) if problem.window else sum(problem.key_lengths))
    rows = dict.fromkeys("kv", keys)
    counts = {t: rows[t] * problem.shape(t)[3] if t in rows else math.prod(problem.shape(t)) for t in own}
    return sum(problem.element_of(t).bytes * count for t, count in counts.items())


@lru_cache(maxsize=256)
def tensor_bytes(problem: AttentionProblem, *tensors: str) -> float:
    """`bytes_of`, kept for the last problems."""
    return float(bytes_of(problem, *tensors))


def up_to(count: float, step: int) -> int:
    """`count` up to a multiple of `step`."""
    return math.ceil(count / step) * step


SOFTCAP, ALIBI, BIAS = (1.0, 1.0, 2.0), (0.0, 2.0, 3.3), (0.0, 2.0, 6.2)
"""(exponentials, FP32 operations, instructions) for each score, as the interpreter counts them in kernels of flash_mma
and flash_wgmma: a hyperbolic tangent with two factors; a distance times a slope; a load with its address."""


def variant_step(problem: AttentionProblem, scores: float, lanes: float = 1.0, packs: bool = True) -> Step:
    """Of `scores` scores of a block, of each of which so many lanes find the place; `packs`: bits may say what the
    predicate of a block list does."""
    if not (problem.softcap or problem.alibi or problem.bias or problem.own_score or problem.blocks):
        return Step()
    chosen = [SOFTCAP] * bool(problem.softcap) + [tuple(lanes * n for n in ALIBI)] * problem.alibi
    chosen += [tuple(lanes * n for n in BIAS)] * bool(problem.bias)
    if problem.own_score:
        chosen.append(cost(problem.own_score.tree))
    if problem.shown:  # and where it is false another score
        share, asked = partial_share(*problem.block_mask), cost(problem.shown)
        bits = packs and packed_mask(problem)
        chosen.append((0.0, 0.0, share * READ_BIT) if bits else tuple(share * (n + 1) for n in asked))
    special, fp32, instructions = (scores * sum(each[i] for each in chosen) for i in range(3))
    loaded = scores * problem.element_bytes * bool(problem.bias)
    return Step(fp32=fp32, special=special, instructions=instructions / WARP, loaded_bytes=loaded)


def bias_bytes(problem: AttentionProblem) -> float:
    """Of the bias, 0 without one."""
    if not problem.bias:
        return 0.0
    return float(problem.element_bytes * math.prod(problem.term_shapes.get("bias", (0,))))


MERGE_THREADS = 128
"""Of a block, which merges one row."""
COLUMNS, AT_ONCE = 4, 8
"""Of O, that a thread merges; splits whose results it loads together."""
MERGE_WAIT, LOAD_WAIT = 1400, 700
"""Clocks: of a block's first loads, sums and stores; of each later round of loads."""
LAST_BLOCK_WAIT = 2500
"""Clocks until the sums of other blocks are there for the last one: a counter and their results in L2."""
REGISTERS, SMEM_BYTES = 32, 4096
"""Estimates, per thread and per block."""


def merge_work(
    kernel: str,
    problem: AttentionProblem,
    splits: int,
    scratch_bytes: float,
    genes: Mapping[str, float],
    overlaps: bool = False,
) -> LaunchWork:
    """The launch of `kernel`, with a block for each row of O, over `scratch_bytes` of partial results in fp32 and their
    maxima and sums. Groups of threads take a row's splits in turn."""
    dim = problem.head_dim_v
    taken = math.ceil(splits / max(1, MERGE_THREADS * COLUMNS // dim))
    rounds = math.ceil(taken / AT_ONCE)
    merge = Step(
        fp32=splits * dim * 2.0,
        special=MERGE_THREADS * ((AT_ONCE + 1.0) * rounds + 1),
        instructions=740.0 + 60 * taken,
        loaded_bytes=splits * (dim * 4 + 8) + dim * problem.element_bytes,
        waits=MERGE_WAIT + LOAD_WAIT * (rounds - 1),
    )
    return LaunchWork(
        kernel,
        problem.heads * problem.seqlen_q * problem.batch,
        MERGE_THREADS,
        MERGE_THREADS // WARP,
        SMEM_BYTES,
        REGISTERS,
        Step(),
        0.0,
        0.0,
        merge,
        in_flight_bytes=MERGE_THREADS * 16.0,
        read_bytes=scratch_bytes,
        write_bytes=tensor_bytes(problem, "o"),
        scratch_bytes=scratch_bytes,
        overlaps=overlaps,
        genes=genes,
    )
