"""What the kernels of large_head_mma do: see `evoattn.families.work`."""

from __future__ import annotations

from evoattn.families.large_head_mma.genes import LargeHeadMmaGenes
from evoattn.families.large_head_mma.resources import (
    block_warps,
    dim_blocks,
    dim_steps,
    in_cluster,
    registers_needed,
    slice_elements,
    smem_bytes,
    stage_bytes,
)
from evoattn.families.residency import WARP, register_cap
from evoattn.families.work import LaunchWork, Step, row_steps, tensor_bytes, visit_share
from evoattn.model.problem import AttentionProblem

MMA_WAIT, LDMATRIX_WAIT, SHUFFLE_WAIT, BARRIER_WAIT, CLUSTER_WAIT, FIRST_WAIT = 18, 24, 24, 40, 700, 1000


def launch_work(problem: AttentionProblem, genes: LargeHeadMmaGenes, registers: int) -> tuple[LaunchWork, ...]:
    """The one launch: a block has a slice of the columns of O, and all scores or, in a cluster, its share of them."""
    rows, keys = genes.BLOCK_M, genes.BLOCK_N
    warps, scores = block_warps(genes), genes.BLOCK_M * genes.BLOCK_N
    qk_dim = dim_steps(problem, genes) * genes.DIM_CHUNK
    v_dim = dim_blocks(problem, genes) * 16 * genes.COLUMN_WARPS
    own = slice_elements(problem, genes)
    flops = 2.0 * scores * (qk_dim + v_dim)
    q_reads = rows * qk_dim * 2.0 * genes.COLUMN_WARPS
    reads = genes.ROW_WARPS * keys * (qk_dim + v_dim) * 2.0 + q_reads + rows * keys * 2.0 * genes.COLUMN_WARPS
    k_columns = own if in_cluster(genes) else problem.head_dim
    copied = keys * (k_columns + own) * 2.0 + (rows * k_columns * 2.0 if genes.Q_PLACE == "streamed" else 0.0)
    exchanged = scores * 4.0 * (genes.DV_SPLIT + 1) if in_cluster(genes) else 0.0
    rescale = rows * own * {"always": 1.0, "vote": 0.3, "lazy": 0.02}[genes.RESCALE]
    lanes = scores * 4.5 + rescale
    issued = 2 * flops / 4096 + lanes / WARP + scores / WARP + 3 * reads / 512 + 5 * copied / 512 + exchanged / 512
    chunks = dim_steps(problem, genes) + keys // genes.KEY_CHUNK
    waits = chunks * (BARRIER_WAIT + LDMATRIX_WAIT + MMA_WAIT * 2) + 2 * SHUFFLE_WAIT + 60
    waits += (60 if genes.COLUMN_WARPS > 1 else 0) + (CLUSTER_WAIT if in_cluster(genes) else 0)
    mean, most, count = row_steps(problem, rows, keys)
    order = genes.BLOCK_ORDER
    return (
        LaunchWork(
            "large_head_mma",
            count * problem.heads * problem.batch * genes.DV_SPLIT,
            WARP * warps,
            warps,
            smem_bytes(problem, genes),
            registers or min(registers_needed(problem, genes), register_cap(warps, genes.BLOCKS_PER_SM)),
            Step(flops, lanes, scores + rescale / 32, issued, reads + copied + scores * 2.0 + exchanged, copied, waits),
            mean,
            most,
            Step(
                instructions=rows * own / WARP + 60 * warps,
                loaded_bytes=rows * (problem.head_dim + own) * 2.0,
                waits=FIRST_WAIT,
            ),
            longest_first=problem.causal and order == "heads_reversed",
            in_flight_bytes=float((genes.STAGES - 1) * stage_bytes(problem, genes)),
            read_bytes=tensor_bytes(problem, "q", "k", "v"),
            write_bytes=tensor_bytes(problem, "o"),
            sweep_bytes=tensor_bytes(problem, "k", "v"),
            sweepers=float(count * problem.group_size * genes.DV_SPLIT),
            visits=float(count),
            visit_share=visit_share(problem, mean, keys),
            heads_in_turn=problem.kv_heads * problem.batch if order.startswith("heads") else 1.0,
            cluster=genes.DV_SPLIT if in_cluster(genes) else 1,
            genes={
                "rows per warp": rows / genes.ROW_WARPS,
                "column warps": genes.COLUMN_WARPS,
                "dim split": genes.DV_SPLIT,
                "scores once": genes.SCORES == "cluster",
                "stages": genes.STAGES,
                "barriers": chunks,
                "q registers": genes.Q_PLACE == "streamed",
                "padded": genes.SMEM_LAYOUT == "padded",
                "rescale": ("always", "vote", "lazy").index(genes.RESCALE),
                "heads first": order.startswith("heads"),
                "reversed": order.endswith("reversed"),
                "dim chunk": genes.DIM_CHUNK,
                "key chunk": genes.KEY_CHUNK,
            },
        ),
    )
