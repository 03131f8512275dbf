"""The genes of backward_mma, and what they take: threads, shared memory, registers, scratch, work."""

import math
from typing import Any, Literal

from evoattn.families.backward import key_blocks, key_steps
from evoattn.families.block_list import block_state_bytes
from evoattn.families.dealt import batches, row_blocks
from evoattn.families.genes import Genes, gene
from evoattn.families.residency import WARP, register_cap
from evoattn.families.tensor_tiles import ELEMENT_BYTES
from evoattn.families.work import (
    LaunchWork,
    Step,
    bias_bytes,
    blocks_of_sequence,
    row_steps,
    tensor_bytes,
    together,
    up_to,
    variant_step,
    visit_share,
)
from evoattn.model.backward import parse_grads
from evoattn.model.problem import AttentionProblem
from evoattn.model.score import SCORE, Load, Table, depends_on, derivative, elements, loads_pairs
from evoattn.model.score_lines import is_shift, linear


class BackwardMmaGenes(Genes):
    """The parameters of backward_mma."""

    BLOCK_M: int = gene("queries per tile", (16, 32, 48, 64, 96, 128))
    BLOCK_N: int = gene("keys per block", (16, 32, 48, 64, 96, 128, 192, 256))
    WARPS: int = gene(
        "warps that share the keys of a block; each has BLOCK_N / (16 WARPS) tiles of 16 keys", (1, 2, 4, 8)
    )
    QUERY_WARPS: int = gene(
        "warps that share the same keys: each has a part of the queries of P and dS, which pass through shared "
        "memory, and then of the columns of dV and dK; with 1 P and dS stay in registers",
        (1, 2, 4),
    )
    PART: int = gene("queries whose scores a warp has in registers at a time", (16, 32, 48, 64))
    CAUSAL_SKIP: bool = gene("a warp passes over parts of a tile none of whose queries sees one of its keys")
    STAGES: int = gene("tiles of Q and dO in shared memory; those not in use are being copied", (1, 2, 3))
    SMEM_LAYOUT: Literal["swizzled", "padded"] = gene(
        "how rows lie in shared memory without bank conflicts: 16-byte chunks permuted by exclusive-or, or one "
        "chunk of padding per row"
    )
    KV_PLACE: Literal["shared", "v_registers", "registers"] = gene(
        "K and V are read from shared memory for every product with Q and dO, or V is kept in registers "
        "(v_registers), or both are (registers)"
    )
    DQ: Literal["add", "pass"] = gene(
        "dQ is added up in memory by the blocks of keys, in any order (add), or computed by a launch of its own "
        "with blocks of queries (pass), which is deterministic"
    )
    DQ_WARPS: int = gene("add: warps that share the rows of a tile of dQ; the others share its columns", (1, 2, 4, 8))
    QUERY_SPLIT: int = gene(
        "blocks that share the queries of the same keys and add up dK and dV; useful where there are few keys",
        (1, 2, 4, 8, 16, 32),
    )
    BLOCK_ORDER: Literal["keys", "heads"] = gene(
        "neighbouring blocks take the keys of one head (keys), or the same keys of all heads (heads), which under "
        "a causal mask is the longest first"
    )
    BLOCKS_PER_SM: int = gene("blocks of keys that registers and shared memory leave room for on one SM", (1, 2, 3, 4))
    PASS_M: int = gene("pass: queries per block", (16, 32, 64, 128))
    PASS_N: int = gene("pass: keys per tile", (16, 32, 64, 128))
    PASS_WARPS: int = gene("pass: warps that share the queries of a block", (1, 2, 4, 8))
    PASS_STAGES: int = gene("pass: tiles of K and V in shared memory", (1, 2, 3))


CHUNK_BYTES = 16
ROW_THREADS = 256
"""Of a block of the first launch, and of one that converts sums."""


def adds_dq(genes: BackwardMmaGenes) -> bool:
    return genes.DQ == "add"


IDLE = {"DQ_WARPS": 1, "PASS_M": 64, "PASS_N": 64, "PASS_WARPS": 4, "PASS_STAGES": 1}
"""What genes must be that do nothing."""


def idle_as_one(genes: BackwardMmaGenes) -> BackwardMmaGenes:
    """Those genes that do nothing with the others as `IDLE` has them."""
    idle: dict[str, Any] = {name: value for name, value in IDLE.items() if name.startswith("PASS") == adds_dq(genes)}
    return genes.with_(**idle)


def block_warps(genes: BackwardMmaGenes) -> int:
    """Of a block of keys."""
    return genes.WARPS * genes.QUERY_WARPS


def padded_dim(head_dim: int) -> int:
    """Up to whole k16 steps."""
    return math.ceil(head_dim / 16) * 16


def row_bytes(columns: int, genes: BackwardMmaGenes) -> int:
    """Bytes of a row of so many 16-bit columns in shared memory."""
    return columns * ELEMENT_BYTES + (CHUNK_BYTES if genes.SMEM_LAYOUT == "padded" else 0)


def smem_bytes(problem: AttentionProblem, genes: BackwardMmaGenes) -> int:
    """Dynamic shared memory of a block of keys: K and V as far as they are read there, the rings of Q, dO and of two
    floats for each row, dS and P; in their place later dK and dV."""
    dim, value_dim = (row_bytes(padded_dim(n), genes) for n in (problem.head_dim, problem.head_dim_v))
    keys = genes.BLOCK_N * (dim * (genes.KV_PLACE != "registers" or adds_dq(genes)))
    keys += genes.BLOCK_N * value_dim * (genes.KV_PLACE == "shared")
    scores = genes.BLOCK_N * row_bytes(genes.BLOCK_M, genes)
    shared = genes.QUERY_WARPS > 1
    loop = keys + genes.STAGES * genes.BLOCK_M * (dim + value_dim + 8) + scores * ((shared or adds_dq(genes)) + shared)
    return max(loop, 0 if genes.QUERY_SPLIT > 1 else genes.BLOCK_N * (dim + value_dim))


def pass_smem_bytes(problem: AttentionProblem, genes: BackwardMmaGenes) -> int:
    """Of a block of a launch that computes dQ by itself: Q and dO, the rings of K and V."""
    dim, value_dim = (row_bytes(padded_dim(n), genes) for n in (problem.head_dim, problem.head_dim_v))
    return (genes.PASS_M + genes.PASS_STAGES * genes.PASS_N) * (dim + value_dim)


def scratch_bytes(problem: AttentionProblem, genes: BackwardMmaGenes) -> dict[str, int]:
    """Two floats for each row of Q; the fp32 sums of dQ, and of dK and dV where blocks share their queries; a float for
    each tile of rows where sinks have a gradient; a byte for each block of a block list."""
    tiles = row_blocks(problem, genes.BLOCK_M) * problem.heads * batches(problem)
    scratch, sums = {"row_terms": 8 * tiles * genes.BLOCK_M}, sum_offsets(problem, genes)[-1]
    scratch |= {"sums": 4 * sums} if sums else {}
    scratch |= block_state_bytes(problem)
    return scratch | ({"sink_sums": 4 * tiles} if "sinks" in parse_grads(problem.grads) else {})


def sum_offsets(problem: AttentionProblem, genes: BackwardMmaGenes) -> tuple[int, int, int, int]:
    """Where the sums of dQ, dK and dV begin in their buffer, and where it ends, in floats."""
    dq, dk, dv = _sums(problem, genes)
    return 0, dq, dq + dk, dq + dk + dv


def _sums(problem: AttentionProblem, genes: BackwardMmaGenes) -> tuple[int, int, int]:
    """Floats of the sums of dQ, dK and dV."""
    dim, value_dim = padded_dim(problem.head_dim), padded_dim(problem.head_dim_v)
    rows = row_blocks(problem, genes.BLOCK_M) * genes.BLOCK_M * problem.heads * batches(problem)
    keys = key_blocks(problem, genes.BLOCK_N) * genes.BLOCK_N * problem.kv_heads * batches(problem)
    keys *= genes.QUERY_SPLIT > 1
    return rows * dim * adds_dq(genes), keys * dim, keys * value_dim


FIXED_REGISTERS = 58
"""Addresses, counters, bounds, fragments under way."""


def registers_needed(problem: AttentionProblem, genes: BackwardMmaGenes) -> int:
    """Estimate of the registers per thread below which ptxas spills, of the block of keys: accumulators of dK and dV,
    scores and their gradients of a part, K and V where they stay in registers; or dQ in their place."""
    tiles = genes.BLOCK_N // (16 * genes.WARPS)
    steps, value_steps = padded_dim(problem.head_dim) // 16, padded_dim(problem.head_dim_v) // 16
    gradients = 8 * sum(math.ceil(n / genes.QUERY_WARPS) for n in (steps, value_steps))
    kept = 4 * (steps * (genes.KV_PLACE == "registers") + value_steps * (genes.KV_PLACE != "shared"))
    part = genes.PART // 2 * 2 + genes.PART // 4
    if problem.softcap or problem.own_score:
        part += genes.PART // 2
    summed = registers_of(problem, tiles, genes.PART) if problem.grads else 0
    dq = 0
    if adds_dq(genes):
        columns = block_warps(genes) // genes.DQ_WARPS
        dq = genes.BLOCK_M // (16 * genes.DQ_WARPS) * 8 * math.ceil(steps / columns)
    return tiles * (gradients + kept) + max(tiles * part + summed, dq) + FIXED_REGISTERS


def pass_registers_needed(problem: AttentionProblem, genes: BackwardMmaGenes) -> int:
    """The same of the launch that computes dQ by itself."""
    tiles = genes.PASS_M // (16 * genes.PASS_WARPS)
    return tiles * (padded_dim(problem.head_dim) // 2 + genes.PASS_N) + FIXED_REGISTERS


MMA_FLOPS, MMA_WAIT, LDMATRIX_WAIT, BARRIER_WAIT = 4096, 18, 24, 30
"""As in flash_mma."""
SCORE_OPERATIONS = 4.0
"""FP32 and conversion instructions for each score and lane: a multiply-add, a difference, a product, two half
conversions."""
ROW_WAIT, FIRST_WAIT = 1200, 1400
"""Clocks: of a block of rows' loads and sums; of a block's first loads and last stores."""


def launch_work(problem: AttentionProblem, genes: BackwardMmaGenes, registers: int) -> tuple[LaunchWork, ...]:
    """The rows' terms, the blocks of keys, and the launch that ends dQ. `registers`: the most of all; a launch has no
    more of them than its launch bounds leave."""
    last = _converted(problem, genes) if adds_dq(genes) else _query_pass(problem, genes, registers)
    return _row_terms(problem, genes), _key_blocks(problem, genes, registers), last


def _row_terms(problem: AttentionProblem, genes: BackwardMmaGenes) -> LaunchWork:
    """The launch that reads O and dO, and zeroes sums."""
    tiles = row_blocks(problem, genes.BLOCK_M) * problem.heads * batches(problem)
    read, written = 4.0 * problem.head_dim_v * genes.BLOCK_M, scratch_bytes(problem, genes)
    return LaunchWork(
        "backward_mma_rows",
        tiles,
        ROW_THREADS,
        ROW_THREADS // WARP,
        0,
        32,
        Step(),
        0.0,
        0.0,
        Step(
            instructions=(read * 1.5 + sum(written.values()) / tiles) / 16 + 8 * 60,
            loaded_bytes=read + sum(written.values()) / tiles,
            waits=ROW_WAIT,
        ),
        in_flight_bytes=read,
        read_bytes=2 * tensor_bytes(problem, "o"),
        write_bytes=float(sum(written.values())),
    )


def _key_blocks(problem: AttentionProblem, genes: BackwardMmaGenes, registers: int) -> LaunchWork:
    """The launch that makes dK and dV, and adds to dQ."""
    rows, keys, warps, added = genes.BLOCK_M, genes.BLOCK_N, block_warps(genes), adds_dq(genes)
    dim, value_dim, pairs = up_to(problem.head_dim, 16), up_to(problem.head_dim_v, 16), rows * keys
    size, shared_p = problem.element_bytes, genes.QUERY_WARPS > 1
    flops = 2.0 * pairs * ((2 + added) * dim + 2 * value_dim)
    parts = rows // genes.QUERY_WARPS // genes.PART * genes.QUERY_WARPS
    # Fragments: K and V for every part, Q and dO as columns by every warp of keys, twice.
    own = parts * keys * (dim * (genes.KV_PLACE != "registers") + value_dim * (genes.KV_PLACE == "shared")) * size
    columns = 2 * genes.WARPS * rows * (dim + value_dim) * size
    scores = pairs * size * ((1 + shared_p) + 2 * shared_p * genes.QUERY_WARPS) if shared_p or added else 0
    dq_columns = warps // genes.DQ_WARPS
    dq_reads = (dq_columns * pairs + genes.DQ_WARPS * keys * dim) * size * added
    copied = rows * (dim + value_dim) * size
    fragments = own + columns + dq_reads
    sums = rows * dim * 4.0 * added
    lanes = pairs * SCORE_OPERATIONS
    issued = flops / MMA_FLOPS + lanes / WARP + pairs / WARP + fragments / 512 + 3 * copied / 512 + scores / 128
    issued += sums / 16 / WARP * 2 + 30 * warps
    waits = (dim + value_dim) / 16 * MMA_WAIT + 4 * LDMATRIX_WAIT + (1 + (added or shared_p)) * BARRIER_WAIT + 80
    mean, most, count = key_steps(problem, rows, keys)
    split, group = genes.QUERY_SPLIT, problem.group_size
    heads = problem.kv_heads * batches(problem)
    own_bytes = float(keys * (dim + value_dim) * size)
    ends = Step(
        instructions=keys * (dim + value_dim) / WARP * 1.5 + 60 * warps,
        shared_bytes=2 * own_bytes,
        loaded_bytes=own_bytes * (1 + (2 if split > 1 else 1)),
        waits=FIRST_WAIT,
    )
    return LaunchWork(
        "backward_mma",
        count * heads * split,
        WARP * warps,
        warps,
        smem_bytes(problem, genes),
        min(registers or registers_needed(problem, genes), register_cap(warps, genes.BLOCKS_PER_SM)),
        together(
            Step(flops, lanes, float(pairs), issued, fragments + copied + scores, copied + 2 * sums, waits),
            variant_step(problem, pairs, packs=False),
        ),
        mean * group / split,
        math.ceil(most * group / split),
        ends,
        longest_first=problem.causal and genes.BLOCK_ORDER == "heads",
        in_flight_bytes=float((genes.STAGES - 1) * rows * (problem.head_dim + problem.head_dim_v) * size),
        read_bytes=tensor_bytes(problem, "q", "k", "v", "o") + bias_bytes(problem),
        write_bytes=tensor_bytes(problem, "k", "v"),
        sweep_bytes=tensor_bytes(problem, "q", "o"),
        sweepers=float(count),
        visits=float(count),
        visit_share=min(1.0, mean * rows / max(1, problem.seqlen_q)),
        heads_in_turn=heads if genes.BLOCK_ORDER == "heads" else 1.0,
        genes={
            "keys per warp": keys / genes.WARPS,
            "query warps": genes.QUERY_WARPS,
            "causal skip": genes.CAUSAL_SKIP,
            "part": genes.PART,
            "stages": genes.STAGES,
            "padded": genes.SMEM_LAYOUT == "padded",
            "kv place": ("shared", "v_registers", "registers").index(genes.KV_PLACE),
            "dq added": added,
            "dq warps": genes.DQ_WARPS,
            "query split": split,
            "heads first": genes.BLOCK_ORDER == "heads",
            "asked blocks": genes.BLOCKS_PER_SM,
        },
    )


def _query_pass(problem: AttentionProblem, genes: BackwardMmaGenes, registers: int) -> LaunchWork:
    """The launch that computes dQ by itself."""
    rows, keys, warps = genes.PASS_M, genes.PASS_N, genes.PASS_WARPS
    dim, value_dim, pairs = up_to(problem.head_dim, 16), up_to(problem.head_dim_v, 16), rows * keys
    flops, size = 2.0 * pairs * (2 * dim + value_dim), problem.element_bytes
    copied = keys * (dim + value_dim) * size
    fragments = rows * (dim + value_dim) * size + warps * keys * (2 * dim + value_dim) * size
    lanes = pairs * SCORE_OPERATIONS
    issued = flops / MMA_FLOPS + lanes / WARP + pairs / WARP + fragments / 512 + 3 * copied / 512 + 20 * warps
    waits = (dim + value_dim) / 16 * MMA_WAIT + 3 * LDMATRIX_WAIT + BARRIER_WAIT + 60
    mean, most, count = row_steps(problem, rows, keys)
    own = blocks_of_sequence(problem, count)
    return LaunchWork(
        "backward_mma_queries",
        count * problem.heads * batches(problem),
        WARP * warps,
        warps,
        pass_smem_bytes(problem, genes),
        min(registers or pass_registers_needed(problem, genes), register_cap(warps, 1)),
        together(
            Step(flops, lanes, float(pairs), issued, fragments + copied, copied, waits),
            variant_step(problem, pairs, packs=False),
        ),
        mean,
        most,
        Step(
            instructions=rows * dim / WARP * 1.5 + 60 * warps,
            shared_bytes=rows * dim * 4.0,
            loaded_bytes=float(rows * (2 * dim + value_dim) * size),
            waits=FIRST_WAIT,
        ),
        longest_first=problem.causal and genes.BLOCK_ORDER == "heads",
        in_flight_bytes=float((genes.PASS_STAGES - 1) * keys * (problem.head_dim + problem.head_dim_v) * size),
        read_bytes=tensor_bytes(problem, "q", "k", "v", "o") + bias_bytes(problem),
        write_bytes=tensor_bytes(problem, "q"),
        sweep_bytes=tensor_bytes(problem, "k", "v"),
        sweepers=own * problem.group_size,
        visits=own,
        visit_share=visit_share(problem, mean, keys),
        heads_in_turn=problem.kv_heads * batches(problem) if genes.BLOCK_ORDER == "heads" else 1.0,
        genes={"rows per warp": rows / warps, "stages": genes.PASS_STAGES},
    )


def _converted(problem: AttentionProblem, genes: BackwardMmaGenes) -> LaunchWork:
    """The launch that makes rows of the sums of dQ, and of dK and dV where there are any."""
    sums = float(scratch_bytes(problem, genes)["sums"])
    tiles = row_blocks(problem, genes.BLOCK_M) * problem.heads * batches(problem)
    moved = sums * 1.5 / tiles
    return LaunchWork(
        "backward_mma_queries",
        tiles,
        ROW_THREADS,
        ROW_THREADS // WARP,
        0,
        40,
        Step(),
        0.0,
        0.0,
        Step(instructions=moved / 16 / WARP * 8 + 8 * 40, loaded_bytes=moved, waits=ROW_WAIT),
        in_flight_bytes=ROW_THREADS * 64.0,
        read_bytes=sums,
        write_bytes=sums / 2,
        scratch_bytes=sums,
    )


def tables_of(problem: AttentionProblem) -> tuple[Table, ...]:
    """The tables whose gradients are wanted."""
    wanted = parse_grads(problem.grads)
    return tuple(table for table in problem.own_tables if table.buffer in wanted)


def elements_of(problem: AttentionProblem) -> tuple[Load, ...]:
    """Their elements that scores differ by."""
    if problem.own_score is None:
        return ()
    return tuple(one for table in tables_of(problem) for one in elements(problem.own_score.tree, table.buffer))


FEW_ELEMENTS = 16
"""Of a row of `Sharing::FEW`, at most, that a thread has sums of, as in the template."""


def sharing_of(element: Load) -> str:
    """Which scores of a head are of the same element: see `templates/backward_mma/table_gradients.cuh`."""
    of_query, of_key = depends_on(element, "q"), depends_on(element, "k")
    if not of_query or not of_key:
        return "QUERY" if of_query else "KEY" if of_key else "HEAD"
    *front, last = element.indices
    if loads_pairs(last) and not any(depends_on(one, name) for one in front for name in ("q", "k")):
        return "FEW"
    return "DIAGONAL" if is_shift(element) else "PAIR"


def is_apart(element: Load) -> bool:
    """Whether scores side by side, of different diagonals, surely have different elements."""
    return any((line := linear(index)) is not None and line[0] + line[1] == 0 != line[0] for index in element.indices)


def needs_score(problem: AttentionProblem) -> bool:
    """Whether such a gradient differs by the score."""
    score = problem.own_score
    return score is not None and any(depends_on(derivative(score.tree, one), SCORE) for one in elements_of(problem))


def registers_of(problem: AttentionProblem, key_tiles: int, part: int) -> int:
    """Of the sums of a thread, and of the scores that they are made of."""
    halves, parts = 2 * key_tiles, part // 8
    counts = {"HEAD": 1, "KEY": halves, "QUERY": 2 * parts, "DIAGONAL": 2 * (parts + halves - 1)}
    counts |= {"FEW": FEW_ELEMENTS, "PAIR": 0}
    scores = key_tiles * part // 2 * needs_score(problem)
    return scores + sum(counts[sharing_of(one)] for one in elements_of(problem))
