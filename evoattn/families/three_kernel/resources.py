"""The genes of three_kernel, and what they take: threads, shared memory, registers, work."""

import math
from dataclasses import dataclass
from typing import Literal

from evoattn.families.genes import SINCE_HOPPER, Genes, gene
from evoattn.families.residency import WARP, register_cap
from evoattn.families.tensor_tiles import CHUNK_COLUMNS, ELEMENT_BYTES, ROW_BYTES
from evoattn.families.work import LaunchWork, Step, row_steps, tensor_bytes, up_to
from evoattn.model.dtype import DTYPES
from evoattn.model.problem import AttentionProblem


class ThreeKernelGenes(Genes):
    """The parameters of three_kernel."""

    PRODUCT: Literal["mma", "wgmma"] = gene(
        "instructions of both products: mma.sync, or Hopper's wgmma with tensor copies", only={"wgmma": ("sm_90a",)}
    )
    BLOCK_M: int = gene("queries per tile of S", (32, 64, 128, 256))
    BLOCK_N: int = gene("keys per tile of S", (32, 64, 128, 256))
    BLOCK_K: int = gene("head_dim columns of Q and K per step of the first product", (32, 64, 128))
    WARPS_M: int = gene("warps that share the queries of a tile of S", (1, 2, 4, 8, 16))
    WARPS_N: int = gene("warps that share its keys", (1, 2, 4))
    TILES_A_BLOCK: int = gene(
        "tiles of S per block, made one after another while the next K is copied (wgmma)", (1, 2, 4, 8)
    )
    S_TYPE: Literal["fp16", "bf16", "fp32"] = gene("type of S in memory")
    SOFTMAX: Literal["rewrite", "statistics", "tiles", "tiles_late"] = gene(
        "rewrite: the softmax kernel replaces S by P; statistics: it finds only the maximum and sum of each row, "
        "and P V takes the exponentials; tiles: Q Kᵀ takes them relative to the row maxima of each tile, which "
        "the softmax kernel merges; tiles_late: P V merges them itself, in two launches"
    )
    P_PLACE: Literal["in_place", "own"] = gene("P replaces S in its buffer, or has a buffer of its own")
    THREADS_PER_ROW: int = gene("threads of the softmax that share a row", (1, 8, 16, 32, 64, 128, 256))
    ROWS_PER_BLOCK: int = gene("rows per block of the softmax", (1, 2, 4, 8, 16, 32, 128))
    VECTOR_WIDTH: int = gene("scores per load of the softmax", (4, 8))
    KEPT_VECTORS: int = gene("loads that each softmax thread keeps in registers; longer rows are read twice", (1, 2, 4))
    PV_BLOCK_M: int = gene("queries per tile of P V", (16, 32, 64, 128))
    PV_BLOCK_K: int = gene("keys per step of P V", (32, 64, 128))
    PV_WARPS: int = gene("warps that share the queries of a tile of P V", (1, 2, 4, 8))
    PV_STAGES: int = gene("steps of P and V in shared memory", (2, 3, 4))
    HEAD_ORDER: Literal["forward", "zigzag"] = gene(
        "each kernel takes the heads in the same order (forward), or in the reverse of the kernel before "
        "(zigzag), so that what was written last is read first"
    )
    DEPENDENT_LAUNCH: Literal["none", "early", "late"] = gene(
        "when the softmax and P V begin: after the launch before has ended (none); before that, once all its "
        "blocks have begun (early) or have read their inputs (late); they then wait for its results",
        only={"early": SINCE_HOPPER, "late": SINCE_HOPPER},
    )


SCORES_REGISTERS = 40
"""Addresses and fragments of Q and K beside the accumulators of a thread; as the next two, no spill in random configs
from here on."""
VALUES_REGISTERS = 48
FACTOR_REGISTERS = 72
"""More of them where P V rescales O for each tile."""
SOFTMAX_REGISTERS = 24
WGMMA_REGISTERS = 40


def uses_wgmma(genes: ThreeKernelGenes) -> bool:
    """Whether both products are by wgmma, else by mma.sync."""
    return genes.PRODUCT == "wgmma"


def has_tile_softmax(genes: ThreeKernelGenes) -> bool:
    """Whether Q Kᵀ writes probabilities relative to the maxima of each tile."""
    return genes.SOFTMAX in ("tiles", "tiles_late")


def smem_row_bytes(problem: AttentionProblem) -> int:
    """Bytes of a row of Q, K, V or O in shared memory: head_dim up to whole k16 steps."""
    return math.ceil(problem.head_dim / 16) * 16 * ELEMENT_BYTES


def _chunked_row_bytes(problem: AttentionProblem) -> int:
    """Bytes of a row of Q, K, V or O in whole chunks."""
    return math.ceil(problem.head_dim / CHUNK_COLUMNS) * ROW_BYTES


def threads_a_block(genes: ThreeKernelGenes) -> tuple[int, int, int]:
    """Threads per block of Q Kᵀ, softmax, P V."""
    return (WARP * genes.WARPS_M * genes.WARPS_N, genes.THREADS_PER_ROW * genes.ROWS_PER_BLOCK, WARP * genes.PV_WARPS)


def scores_smem_bytes(problem: AttentionProblem, genes: ThreeKernelGenes) -> int:
    """Dynamic shared memory of a block of Q Kᵀ: whole rows of Q and K; with wgmma S (that of a
    block's only tile in their place), two stages of K for several tiles, and barriers."""
    if uses_wgmma(genes):
        stages = min(2, genes.TILES_A_BLOCK)
        tiles = (genes.BLOCK_M + stages * genes.BLOCK_N) * _chunked_row_bytes(problem)
        s = genes.BLOCK_M * genes.BLOCK_N * ELEMENT_BYTES
        return (max(tiles, s) if stages == 1 else tiles + s) + 8 * (1 + stages)
    return (genes.BLOCK_M + genes.BLOCK_N) * smem_row_bytes(problem)


def values_smem_bytes(problem: AttentionProblem, genes: ThreeKernelGenes) -> int:
    """Dynamic shared memory of a block of P V: the ring of P and V, in whose place later O; with wgmma a barrier a
    stage."""
    block_m, block_k = genes.PV_BLOCK_M, genes.PV_BLOCK_K
    if uses_wgmma(genes):
        row_bytes = _chunked_row_bytes(problem)
        ring = genes.PV_STAGES * block_k * (block_m * ELEMENT_BYTES + row_bytes)
        return max(ring, block_m * row_bytes) + 8 * genes.PV_STAGES
    ring = genes.PV_STAGES * block_k * (block_m * ELEMENT_BYTES + smem_row_bytes(problem))
    return max(ring, block_m * smem_row_bytes(problem))


def registers_needed(problem: AttentionProblem, genes: ThreeKernelGenes) -> tuple[int, int, int]:
    """Estimates of the registers per thread of Q Kᵀ, softmax and P V below which ptxas spills: accumulators or kept
    scores, and the rest."""
    kept = genes.KEPT_VECTORS * genes.VECTOR_WIDTH
    if uses_wgmma(genes):
        return (genes.BLOCK_N // 2 + WGMMA_REGISTERS, SOFTMAX_REGISTERS + kept, problem.head_dim // 2 + WGMMA_REGISTERS)
    row_tiles, key_tiles = genes.BLOCK_M // (16 * genes.WARPS_M), genes.BLOCK_N // (8 * genes.WARPS_N)
    value_tiles = genes.PV_BLOCK_M // (16 * genes.PV_WARPS)
    factors = FACTOR_REGISTERS if has_tile_softmax(genes) else 0
    return (
        row_tiles * (4 * key_tiles + 4) + SCORES_REGISTERS,
        SOFTMAX_REGISTERS + kept,
        value_tiles * (problem.head_dim // 2 + 8) + VALUES_REGISTERS + factors,
    )


def exponents_late(genes: ThreeKernelGenes) -> bool:
    return genes.SOFTMAX == "statistics"


def merges_late(genes: ThreeKernelGenes) -> bool:
    """Whether P V merges the maxima of tiles, in two launches."""
    return genes.SOFTMAX == "tiles_late"


def may_overlap(genes: ThreeKernelGenes) -> bool:
    return genes.DEPENDENT_LAUNCH != "none"


MMA_WAIT, LDMATRIX_WAIT, SHUFFLE_WAIT, BARRIER_WAIT, FIRST_WAIT = 18, 24, 24, 40, 1100


def launch_work(problem: AttentionProblem, genes: ThreeKernelGenes, registers: int) -> tuple[LaunchWork, ...]:
    """Q Kᵀ, softmax unless P V merges the maxima, P V. S and P go through memory."""
    needed, threads = registers_needed(problem, genes), threads_a_block(genes)
    a, b, c = (min(n, register_cap(t // WARP or 1, 1), registers or 255) for n, t in zip(needed, threads, strict=True))
    call = _Call(problem, genes)
    softmax = () if merges_late(genes) else (call.softmax(b),)
    return call.scores(a), *softmax, call.values(c)


@dataclass(frozen=True)
class _Call:
    """What the launches of one call have in common. Bytes are those that the mask lets a kernel touch."""

    problem: AttentionProblem
    genes: ThreeKernelGenes

    @property
    def dim(self) -> int:
        return up_to(self.problem.head_dim, 16)

    @property
    def queries(self) -> int:
        return self.problem.heads * self.problem.batch * self.problem.seqlen_q

    @property
    def seen(self) -> float:
        """The share of the keys that a query sees."""
        return self.problem.visible_pairs / (self.queries * self.problem.seqlen_k)

    @property
    def score_bytes(self) -> int:
        """Of one score."""
        return 2 if has_tile_softmax(self.genes) else DTYPES[self.genes.S_TYPE].bytes

    @property
    def s_bytes(self) -> float:
        return self.queries * up_to(self.problem.seqlen_k, 8) * self.seen * self.score_bytes

    @property
    def p_bytes(self) -> float:
        return self.queries * up_to(self.problem.seqlen_k, 8) * self.seen * ELEMENT_BYTES

    @property
    def tile_sums(self) -> float:
        """Bytes of the maxima and sums of tiles."""
        if not has_tile_softmax(self.genes):
            return 0.0
        references = math.ceil(self.problem.seqlen_k / (self.genes.BLOCK_N // self.genes.WARPS_N))
        return 8.0 * self.queries * references * self.seen

    @property
    def tensor(self) -> Literal["mma", "wgmma"]:
        return "wgmma" if uses_wgmma(self.genes) else "mma"

    @property
    def named(self) -> dict[str, float]:
        """The genes as features."""
        genes = self.genes
        return {
            "products by wgmma": uses_wgmma(genes),
            "softmax": ("rewrite", "statistics", "tiles", "tiles_late").index(genes.SOFTMAX),
            "own p": genes.P_PLACE == "own",
            "score bytes": self.score_bytes,
            "zigzag": genes.HEAD_ORDER == "zigzag",
            "dependent": ("none", "early", "late").index(genes.DEPENDENT_LAUNCH),
            "stages": genes.PV_STAGES,
            "tiles per block": genes.TILES_A_BLOCK,
            "warps n": genes.WARPS_N,
            "rows per warp": genes.PV_BLOCK_M / genes.PV_WARPS,
            "dot lanes": genes.THREADS_PER_ROW,
            "vector bytes": genes.VECTOR_WIDTH * self.score_bytes,
            "kept": genes.KEPT_VECTORS * genes.VECTOR_WIDTH * genes.THREADS_PER_ROW / self.problem.seqlen_k,
            "dim chunk": genes.BLOCK_K,
            "key chunk": genes.PV_BLOCK_K,
        }

    def scores(self, registers: int) -> LaunchWork:
        """Q Kᵀ."""
        problem, genes, dim, size = self.problem, self.genes, self.dim, self.problem.element_bytes
        rows, keys, threads = genes.BLOCK_M, genes.BLOCK_N, threads_a_block(genes)[0]
        scores, warps = rows * keys, threads // WARP
        tiles = math.ceil(problem.seqlen_k / keys)
        blocks = math.ceil(tiles / genes.TILES_A_BLOCK) * math.ceil(problem.seqlen_q / rows)
        flops = 2.0 * scores * dim
        lanes = scores * (5.0 if has_tile_softmax(genes) else 2.0)
        exponentials = scores if has_tile_softmax(genes) else 0
        loaded = keys * problem.head_dim * size
        reads = genes.WARPS_M * keys * dim * size + genes.WARPS_N * rows * dim * size
        if uses_wgmma(genes):
            reads = (rows // 64 + 1) * keys * dim * size + rows * dim * size
        store = scores * self.score_bytes
        issued = flops / 4096 + (lanes + exponentials) / WARP + reads / 512 + loaded / 170 + scores / WARP
        waits = (dim / 16 * 0.5 + 1) * MMA_WAIT + LDMATRIX_WAIT + 2 * BARRIER_WAIT + 4 * SHUFFLE_WAIT + 60
        return LaunchWork(
            "three_kernel_scores",
            blocks * problem.heads * problem.batch,
            threads,
            warps,
            scores_smem_bytes(problem, genes),
            registers,
            Step(flops, lanes, exponentials, issued, reads + loaded + store, loaded + store, waits),
            min(tiles, genes.TILES_A_BLOCK) * min(1.0, self.seen + 0.5 * keys / problem.seqlen_k * problem.causal),
            min(tiles, genes.TILES_A_BLOCK),
            Step(
                instructions=80.0 * warps + 3 * rows * dim * size / 512, loaded_bytes=rows * problem.head_dim * size,
                waits=FIRST_WAIT,
            ),
            self.tensor,
            in_flight_bytes=(rows + keys) * dim * size,
            read_bytes=tensor_bytes(problem, "q", "k"),
            write_bytes=self.s_bytes + self.tile_sums,
            sweep_bytes=tensor_bytes(problem, "k"),
            sweepers=blocks / max(1, tiles // genes.TILES_A_BLOCK) * problem.group_size,
            others_bytes=tensor_bytes(problem, "v", "o"),
            genes=self.named,
        )  # fmt: skip

    def softmax(self, registers: int) -> LaunchWork:
        """Softmax by itself."""
        genes, named, queries, threads = self.genes, self.named, self.queries, threads_a_block(self.genes)[1]
        s_bytes, tile_sums = self.s_bytes, self.tile_sums
        blocks = math.ceil(queries / genes.ROWS_PER_BLOCK)
        if has_tile_softmax(genes):
            read, written, exponentials = tile_sums, 8.0 * queries, tile_sums / 8
            vectors = tile_sums / 8 / queries / genes.THREADS_PER_ROW
        else:
            again = named["kept"] < 1 and genes.SOFTMAX == "rewrite"
            read = s_bytes * (2 if again else 1)
            written = self.p_bytes if genes.SOFTMAX == "rewrite" else 8.0 * queries
            exponentials = s_bytes / named["score bytes"] * (2 if again else 1)
            vectors = exponentials / queries / genes.THREADS_PER_ROW / genes.VECTOR_WIDTH
        per_block = exponentials / blocks
        return LaunchWork(
            "three_kernel_softmax",
            blocks,
            threads,
            max(1, threads // WARP),
            0,
            registers,
            Step(),
            0.0,
            0.0,
            Step(
                fp32=per_block * 4,
                special=per_block,
                instructions=per_block * 6 / WARP + 60 * threads / WARP,
                loaded_bytes=(read + written) / blocks,
                waits=FIRST_WAIT + math.log2(genes.THREADS_PER_ROW) * 2 * SHUFFLE_WAIT + 120 * vectors,
            ),
            in_flight_bytes=min(genes.KEPT_VECTORS, max(1.0, vectors)) * named["vector bytes"] * threads,
            read_bytes=read,
            write_bytes=written,
            scratch_bytes=read,
            overlaps=may_overlap(genes),
            genes=named,
        )

    def values(self, registers: int) -> LaunchWork:
        """P V."""
        problem, genes, dim, size = self.problem, self.genes, self.dim, self.problem.element_bytes
        p_read = (self.s_bytes if genes.SOFTMAX == "statistics" else self.p_bytes) + self.tile_sums
        rows, keys, warps = genes.PV_BLOCK_M, genes.PV_BLOCK_K, genes.PV_WARPS
        flops = 2.0 * rows * keys * dim
        loaded = keys * problem.head_dim * size + rows * keys * size
        reads = (
            warps * keys * dim * size + rows * keys * size
            if self.tensor == "mma"
            else (keys * dim + rows * keys) * size
        )
        late = {"statistics": 4.0, "tiles": 0.5, "tiles_late": 0.6}.get(genes.SOFTMAX, 0.0)
        lanes = rows * keys * late + (rows * dim * 1.0 if has_tile_softmax(genes) else 0.0)
        exponentials = rows * keys if genes.SOFTMAX == "statistics" else 0
        issued = flops / 4096 + (lanes + exponentials) / WARP + reads / 512 + 3 * loaded / 512
        mean, most, count = row_steps(problem, rows, keys)
        return LaunchWork(
            "three_kernel_values",
            count * problem.heads * problem.batch,
            WARP * warps,
            warps,
            values_smem_bytes(problem, genes),
            registers,
            Step(
                flops, lanes, exponentials, issued, reads + loaded, loaded,
                (keys / 16 * 0.5 + 1) * MMA_WAIT + LDMATRIX_WAIT + BARRIER_WAIT + 40,
            ),
            mean,
            most,
            Step(
                instructions=rows * dim / WARP + 60 * warps, shared_bytes=rows * dim * 4.0,
                loaded_bytes=rows * problem.head_dim * size, waits=FIRST_WAIT,
            ),
            self.tensor,
            in_flight_bytes=(genes.PV_STAGES - 1) * loaded,
            read_bytes=tensor_bytes(problem, "v") + p_read,
            write_bytes=tensor_bytes(problem, "o"),
            sweep_bytes=tensor_bytes(problem, "v"),
            sweepers=float(count * problem.group_size),
            scratch_bytes=p_read,
            others_bytes=tensor_bytes(problem, "q", "k"),
            overlaps=may_overlap(genes),
            genes=self.named,
        )  # fmt: skip
