"""The lists of a `BlockMask` out of a predicate: the source of its kernels, and their launches. No family: it computes
no attention, and there is nothing to choose."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from evoattn.families.block_list import BITS, Packed, list_given, packed_mask
from evoattn.families.given import passed, printed
from evoattn.families.includes import resolve
from evoattn.families.residency import WARP
from evoattn.families.variants import members, table_given, variant_given
from evoattn.families.work import LaunchWork, Step
from evoattn.model.block_list import blocks_of_rows, parse_blocks, partial_share
from evoattn.model.gpu import MAX_GRID_YZ
from evoattn.model.launch import Buffer, KernelArg, KernelLaunch, Scalar
from evoattn.model.paths import TEMPLATES
from evoattn.model.problem import AttentionProblem
from evoattn.model.score import Table, Tree, cost, loads_pairs
from evoattn.model.score_cuda import in_cuda
from evoattn.model.score_lines import lines_of

STATES = "states"
"""The scratch buffer: a byte for each block."""
LISTS = (
    *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
    *("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"),
)
"""What is written, int32, by FlexAttention's names."""
WARPS, LINES = 4, 2
"""Blocks of keys that a block of the first launch looks at; lists of a kind that one of the second makes."""


@dataclass(frozen=True)
class MaskShape:
    """Batches and heads of a mask, its queries and keys, and those of its blocks."""

    batches: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    block_rows: int
    block_keys: int

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks of rows, and of keys."""
        return math.ceil(self.seqlen_q / self.block_rows), math.ceil(self.seqlen_k / self.block_keys)

    @property
    def list_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Those of `LISTS`."""
        rows, keys = self.blocks
        front = self.batches, self.heads
        return ((*front, rows), (*front, rows, keys)) * 2 + ((*front, keys), (*front, keys, rows)) * 2

    def why_not(self) -> str:
        """One reason, without a full stop, why no launch makes the lists; else empty."""
        sizes = self.batches, self.heads, self.seqlen_q, self.seqlen_k, self.block_rows, self.block_keys
        if min(sizes) < 1 or max(sizes) >= 1 << 30:
            return "a size is no number from 1 to 2^30"
        if max(self.batches * self.heads, self.blocks[0]) > MAX_GRID_YZ:
            return f"there are more than {MAX_GRID_YZ} heads or blocks of rows"
        return ""


def source(shown: Tree, tables: Sequence[Table]) -> str:
    """The kernels of a predicate, whole."""
    fields = table_given(tables)
    text = "\n".join(
        (
            '#include "device/ptx/element.cuh"',
            '#include "device/score.cuh"',
            '#include "device/score_range.cuh"',
            "struct Seen {",
            f"  static constexpr bool PAIRED = {'true' if loads_pairs(shown) else 'false'};  // a table of pairs",
            *members(fields),
            "  __device__ __forceinline__ bool shows(int b, int h, int q, int k) const {",
            f"    return {in_cuda(shown, False)};",
            "  }",
            "  template <bool ALIKE>",
            "  __device__ __forceinline__ Range range(Range b, Range h, Range q, Range k, int lane) const {",
            *(f"    {line}" for line in lines_of(shown)),
            "  }",
            "};",
            printed(SEEN=fields)["GIVEN"],
            '#include "device/mask_blocks.cuh"',
            "FIND_BLOCK_STATES_KERNEL",
            "",
        )
    )
    return resolve(text, TEMPLATES)


def launches(shape: MaskShape, tables: Sequence[Table]) -> tuple[KernelLaunch, ...]:
    """What each block is, then the lists. Buffers: `STATES`, those of tables, `LISTS`."""
    rows, keys = shape.blocks
    heads = shape.batches * shape.heads
    sizes = (shape.heads, shape.seqlen_q, shape.seqlen_k, shape.block_rows, shape.block_keys)
    find: tuple[KernelArg, ...] = (
        Buffer(STATES),
        *(Scalar("int32", size) for size in sizes),
        *passed(table_given(tables)),
    )
    counts = Scalar("int32", rows), Scalar("int32", keys)
    make: tuple[KernelArg, ...] = (Buffer(STATES), *counts, *(Buffer(name) for name in LISTS))
    lines = math.ceil(max(rows, keys) / LINES)
    return (
        KernelLaunch("find_block_states", (math.ceil(keys / WARPS), rows, heads), (WARPS * WARP, 1, 1), 0, find),
        KernelLaunch("list_blocks", (lines, 2, heads), (2 * LINES * WARP, 1, 1), 0, make),
    )


KERNEL = "pack_mask"
THREADS, REGISTERS, MOST_BLOCKS = 128, 40, 4096
"""Of a block, of a thread by estimate, and of a launch where its rows leave the choice."""
FIRST_WAIT = 500
"""Clocks of a block's first loads, and of its last stores."""


def packed_bytes(problem: AttentionProblem) -> dict[str, int]:
    """The scratch of `pack_launches`."""
    bits = packed_mask(problem)
    return {BITS: bits.bytes} if bits else {}


def pack_launches(problem: AttentionProblem) -> tuple[KernelLaunch, ...]:
    """The launch before the kernel, if there is one; its block takes PARTIAL blocks of keys of one block of rows."""
    bits = packed_mask(problem)
    if bits is None:
        return ()
    return (KernelLaunch(KERNEL, _grid(problem, bits), (THREADS, 1, 1), 0, _args(problem, bits)),)


def _grid(problem: AttentionProblem, bits: Packed) -> tuple[int, int, int]:
    """Warps for all pieces of a row of blocks that has most of them; lists of another mask may have more, which the
    same warps take in turn."""
    answers, mask = bits.batches * bits.heads, parse_blocks(problem.blocks)
    rows, most = mask.blocks(problem.band)[0], blocks_of_rows(*problem.block_mask)[1]
    shares = math.ceil(most * math.ceil(mask.rows / WARP) * math.ceil(mask.keys / WARP) / (THREADS // WARP))
    return rows, max(1, min(shares, MOST_BLOCKS // (rows * answers))), answers


def _args(problem: AttentionProblem, bits: Packed) -> tuple[KernelArg, ...]:
    counts = (bits.heads, problem.seqlen_q, problem.seqlen_k)
    return *(Scalar("int32", n) for n in counts), *passed(variant_given(problem), list_given(problem))


def pack_work(problem: AttentionProblem) -> tuple[LaunchWork, ...]:
    """What `pack_launches` has to do."""
    bits = packed_mask(problem)
    if bits is None or problem.shown is None:
        return ()
    mask, (rows, shares, answers) = parse_blocks(problem.blocks), _grid(problem, bits)
    mean, most = (n / shares * partial_share(*problem.block_mask) for n in blocks_of_rows(*problem.block_mask))
    pairs, (special, fp32, instructions) = mask.rows * mask.keys, cost(problem.shown)
    step = Step(
        fp32=pairs * fp32, special=pairs * special, instructions=pairs / WARP * (instructions + 4), waits=FIRST_WAIT
    )
    warps = THREADS // WARP
    blocks = rows * shares * answers
    return (LaunchWork(KERNEL, blocks, THREADS, warps, 0, REGISTERS, step, mean, most, Step(waits=FIRST_WAIT)),)
