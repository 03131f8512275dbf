"""What the kernels of three_kernel do: see `evoattn.families.work`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from evoattn.families.residency import WARP, register_cap
from evoattn.families.three_kernel.genes import ThreeKernelGenes
from evoattn.families.three_kernel.resources import (
    has_tile_softmax,
    may_overlap,
    merges_late,
    registers_needed,
    scores_smem_bytes,
    threads_a_block,
    uses_wgmma,
    values_smem_bytes,
)
from evoattn.families.work import LaunchWork, Step, row_steps, tensor_bytes, up_to
from evoattn.model.dtype import DTYPES
from evoattn.model.problem import AttentionProblem

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
        return self.queries * up_to(self.problem.seqlen_k, 8) * self.seen * 2.0

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
        problem, genes, dim = self.problem, self.genes, self.dim
        rows, keys, threads = genes.BLOCK_M, genes.BLOCK_N, threads_a_block(genes)[0]
        scores, warps = rows * keys, threads // WARP
        tiles = math.ceil(problem.seqlen_k / keys)
        blocks = math.ceil(tiles / genes.TILES_A_BLOCK) * math.ceil(problem.seqlen_q / rows)
        flops = 2.0 * scores * dim
        lanes = scores * (5.0 if has_tile_softmax(genes) else 2.0)
        exponentials = scores if has_tile_softmax(genes) else 0
        loaded = keys * problem.head_dim * 2.0
        reads = genes.WARPS_M * keys * dim * 2.0 + genes.WARPS_N * rows * dim * 2.0
        if uses_wgmma(genes):
            reads = (rows // 64 + 1) * keys * dim * 2.0 + rows * dim * 2.0
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
                instructions=80.0 * warps + 3 * rows * dim * 2 / 512, loaded_bytes=rows * problem.head_dim * 2.0,
                waits=FIRST_WAIT,
            ),
            self.tensor,
            in_flight_bytes=(rows + keys) * dim * 2.0,
            read_bytes=tensor_bytes(problem, "q", "k"),
            write_bytes=self.s_bytes + self.tile_sums,
            sweep_bytes=tensor_bytes(problem, "k"),
            sweepers=blocks / max(1, tiles // genes.TILES_A_BLOCK) * problem.group_size,
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
        problem, genes, dim = self.problem, self.genes, self.dim
        p_read = (self.s_bytes if genes.SOFTMAX == "statistics" else self.p_bytes) + self.tile_sums
        rows, keys, warps = genes.PV_BLOCK_M, genes.PV_BLOCK_K, genes.PV_WARPS
        flops = 2.0 * rows * keys * dim
        loaded = keys * problem.head_dim * 2.0 + rows * keys * 2.0
        reads = (
            warps * keys * dim * 2.0 + rows * keys * 2.0 if self.tensor == "mma" else (keys * dim + rows * keys) * 2.0
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
                loaded_bytes=rows * problem.head_dim * 2.0, waits=FIRST_WAIT,
            ),
            self.tensor,
            in_flight_bytes=(genes.PV_STAGES - 1) * loaded,
            read_bytes=tensor_bytes(problem, "v") + p_read,
            write_bytes=tensor_bytes(problem, "o"),
            sweep_bytes=tensor_bytes(problem, "v"),
            sweepers=float(count * problem.group_size),
            scratch_bytes=p_read,
            overlaps=may_overlap(genes),
            genes=self.named,
        )  # fmt: skip
