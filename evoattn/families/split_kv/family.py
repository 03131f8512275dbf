"""Attention for few query rows and many keys: the keys are split over warps and blocks, and partial results are added
up."""

import math
from typing import Any, ClassVar

from evoattn.families.base import ZEROED_SUFFIX, Family, attention_args
from evoattn.families.block_list import block_list_constants, list_given
from evoattn.families.given import Given, number, passed, printed, tensor
from evoattn.families.residency import WARP, why_no_memory, why_not_resident, why_same_code, why_too_few_registers
from evoattn.families.split_kv.resources import (
    LEAST_STEPS,
    LIST_GRANULE,
    MAX_BOX_KEYS,
    MMA_KEYS,
    MMA_LANES,
    MMA_ROWS,
    TMA_KEYS,
    TMA_VECTOR,
    SplitKvGenes,
    cluster_blocks,
    kv_bytes,
    launch_work,
    packed_heads,
    packed_rows,
    registers_needed,
    row_blocks,
    smem_bytes,
    split_of,
    split_span,
    tile_heads,
    warp_keys,
)
from evoattn.families.tensor_tiles import tile_map
from evoattn.families.variants import lse_given, scale_constants, scale_given, variant_constants, variant_given
from evoattn.families.work import MERGE_THREADS, LaunchWork
from evoattn.model.append import new_rows
from evoattn.model.block_list import parse_blocks
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import Buffer, KernelArg, KernelLaunch, Scalar, scratch_args
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.model.variant import APPENDED, EIGHT_BITS, KEY_VARIANTS, SCORE_VARIANTS, SMALL_PAGE

MAX_HEAD_DIM = 256
MOST_ROWS_WON = 512
"""Query rows that share a K/V head. The most on which it won a measured problem is 342."""
PARTIAL, STATE, ARRIVED = "partial", "state", "arrived" + ZEROED_SUFFIX


class SplitKv(Family):
    """The `Family` of `templates/split_kv.cu.j2`.

    A row is one query of one head; the rows of all heads that share a K/V head are packed into tiles of BLOCK_M, so
    that each byte of K and V is read once for all of them where they fit into one tile (decoding)."""

    name: ClassVar[str] = "split_kv"
    genes = SplitKvGenes
    summary: ClassVar[str] = (
        "keys split over warps and blocks, partial results merged; few queries and many keys; fp16, bf16 and fp32"
    )
    devices: ClassVar[str] = "sm_80 and newer"
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16", "fp32")
    writes_lse: ClassVar[bool] = True
    variants: ClassVar[tuple[str, ...]] = (*SCORE_VARIANTS, *KEY_VARIANTS, APPENDED, "varlen", "blocks", *EIGHT_BITS)

    def may_win(self, problem: AttentionProblem) -> bool:
        """It reads all keys again for every tile of at most 64 packed rows."""
        return problem.dtype == "fp32" or problem.group_size * problem.seqlen_q <= MOST_ROWS_WON

    def over_eight_bits(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> KernelConfig:
        """With as many columns a lane: by 16 bytes of 8 bits half of the lanes have none of V at head_dim 64."""
        vector = max(4, int(config["VECTOR_BYTES"]) // 2)
        return KernelConfig(self.name, config.params | {"LOAD": "registers", "STAGES": 1, "VECTOR_BYTES": vector})

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if reason := self.why_too_old(gpu):
            return reason
        if problem.head_dim > MAX_HEAD_DIM:
            return f"split_kv takes a head_dim of up to {MAX_HEAD_DIM}, not {problem.head_dim}."
        return self.why_past_grid(max(tile_heads(problem), problem.batch), "K/V heads and batches")

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes = SplitKvGenes.of(config)
        return (
            why_wrong_shape(problem, genes)
            or why_not_listed(problem, genes)
            or why_not_appended(problem, genes)
            or self.why_too_long(problem, config, gpu)
            or why_no_tensor_map(problem, genes, gpu)
            or (why_useless(problem, genes, gpu) if redundant else why_not_on_card(genes, gpu))
            or why_too_big(problem, genes, gpu)
            or why_no_memory(problem, self.workspace(problem, config, gpu), gpu)
        )

    def why_too_long(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        return why_too_long(problem, SplitKvGenes.of(config))

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        genes = SplitKvGenes.of(config)
        return {
            **variant_constants(problem, hides=True),
            **scale_constants(problem),
            **block_list_constants(problem),
            **printed(**given(problem)),
            "CLUSTER": cluster_blocks(genes),
            "CLUSTER_DIMS": f"__cluster_dims__({cluster_blocks(genes)}, 1, 1)" if cluster_blocks(genes) > 1 else "",
            "SWIZZLED": genes.LOAD == "tma",
            "APPENDED": problem.appended,
            "SMALL_PAGES": 0 < problem.page < SMALL_PAGE,
            "SMEM_BYTES": smem_bytes(problem, genes),
            "LEAST_STEPS": LEAST_STEPS,
            "MERGE_THREADS": MERGE_THREADS,
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        genes = SplitKvGenes.of(config)
        (splits, keys), blocks = split_of(problem, genes), row_blocks(problem, genes)
        sizes = (Scalar("int32", n) for n in (packed_heads(problem), blocks, splits, keys))
        scratch = scratch_args(self.workspace(problem, config, gpu), PARTIAL, STATE, ARRIVED)
        args: list[KernelArg] = [*attention_args(problem), *sizes, *scratch]
        args += passed(*given(problem).values())
        if genes.LOAD == "tma":
            args[1:3] = (tile_map(problem, tensor, warp_keys(genes)) for tensor in "kv")
        partial = KernelLaunch(
            self.name,
            (blocks * splits, tile_heads(problem), problem.batch),
            (WARP * genes.WARPS, 1, 1),
            smem_bytes(problem, genes),
            tuple(args),
            (cluster_blocks(genes), 1, 1),
        )
        if splits == 1 or genes.MERGE != "kernel":
            return (partial,)
        merge_args: list[KernelArg] = [Buffer("o")]
        merge_args += [
            Scalar("int32", n) for n in (problem.seqlen_q, tile_heads(problem), packed_heads(problem), blocks, splits)
        ]
        merge_args += [Scalar("int64", stride) for stride in problem.strides("o")[:3]]
        merge_args += [*scratch[:2], *passed(lse_given(problem), variant_given(problem))]
        grid = (packed_rows(problem), tile_heads(problem), problem.batch)
        overlaps = genes.DEPENDENT_LAUNCH != "none"
        return partial, KernelLaunch(
            f"{self.name}_merge", grid, (MERGE_THREADS, 1, 1), 0, tuple(merge_args), overlaps=overlaps
        )

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        genes = SplitKvGenes.of(config)
        (splits, _), tiles = split_of(problem, genes), row_blocks(problem, genes) * tile_heads(problem) * problem.batch
        if splits == 1 or genes.MERGE == "cluster":
            return {}
        rows = tiles * splits * genes.BLOCK_M
        arrived = {ARRIVED: tiles * 4} if genes.MERGE == "last_block" else {}
        return {PARTIAL: rows * problem.head_dim * 4, STATE: rows * 8, **arrived}

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        return launch_work(problem, SplitKvGenes.of(config), registers)


def given(problem: AttentionProblem) -> dict[str, list[Given]]:
    """What kernels take behind their own arguments."""
    return {
        "LSE": lse_given(problem),
        "VARIANT": variant_given(problem),
        "SCALE": scale_given(problem, *"kv"),
        "KEY_LIST": list_given(problem, packs=False),
        "NEW": new_given(problem),
    }


def new_given(problem: AttentionProblem) -> list[Given]:
    """The fields of `NewKeys` in `templates/split_kv/new_keys.cuh`; K and V have heads of one width."""
    needed, strides = problem.appended, new_rows(problem, "k")[1]
    return [
        *(tensor("const Element", f"new_{name}_gmem", f"new_{name}", needed) for name in "kv"),
        *(tensor("Element", f"{name}_cache_gmem", name, needed) for name in "kv"),
        *(
            number("int64_t", f"new_{of}_stride", stride, needed)
            for of, stride in zip(("batch", "head", "row"), strides[:3], strict=True)
        ),
        number("int", "cache_pages", problem.shape("k")[0], needed),
    ]


LEAST_SPLITS = 0.75
"""Share of SPLITS under which a smaller value of the space does the same; nearer ones are told apart by their
launches."""
MAX_CLUSTER = 8
"""Blocks per cluster that every sm_90 schedules (CUDA C++ Programming Guide, thread block clusters)."""
MAX_WAVES = 16
"""Waves of blocks beyond which splitting only adds partial results."""

MAX_COUNT = (1 << 31) - 1
"""Of rows and keys, to the end of the last tile and split: the kernel counts them in int32."""


def why_too_long(problem: AttentionProblem, genes: SplitKvGenes) -> str | None:
    """Rows of a K/V head, or keys, that an int32 does not count."""
    rows, (splits, keys) = row_blocks(problem, genes) * genes.BLOCK_M, split_of(problem, genes)
    if rows > MAX_COUNT:
        return f"{packed_rows(problem)} packed rows are more than an int32 counts, to the end of the last tile."
    begin = max(problem.seqlen_q, problem.seqlen_k) if problem.window else 0  # at most: of the keys that are split
    if (end := begin + splits * keys + genes.BLOCK_N) > MAX_COUNT:
        return f"The last split may end {end} keys behind the first, which is more than an int32 counts."
    return None


def why_wrong_shape(problem: AttentionProblem, genes: SplitKvGenes) -> str | None:
    """Tiles that are not whole for each warp, vectors that no row divides into, a cluster of one block."""
    block_m, block_n, warps, lanes, vector = (
        genes.BLOCK_M,
        genes.BLOCK_N,
        genes.WARPS,
        genes.DOT_LANES,
        genes.VECTOR_BYTES,
    )
    if genes.MERGE == "cluster" and genes.SPLITS == 1:
        return "MERGE=cluster: the splits are the blocks of a cluster, and SPLITS=1 makes none."
    if problem.head_dim * kv_bytes(problem) % vector:
        return f"VECTOR_BYTES={vector} does not divide the {problem.head_dim * kv_bytes(problem)} bytes of a row."
    if genes.COMPUTE == "mma":
        if problem.dtype == "fp32":
            return "COMPUTE=mma needs fp16 or bf16: the tensor cores have no fp32."
        if block_m % MMA_ROWS:
            return f"BLOCK_M={block_m} rows are no multiple of the {MMA_ROWS} that COMPUTE=mma takes at a time."
        if block_n % (warps * MMA_KEYS):
            return f"BLOCK_N={block_n} keys do not divide into steps of {MMA_KEYS} for WARPS={warps}."
        if lanes != MMA_LANES:
            return f"DOT_LANES={lanes}: with COMPUTE=mma the fragments put {MMA_LANES} lanes on a key."
        return None
    if block_n % (warps * WARP // lanes):
        return (
            f"BLOCK_N={block_n} keys do not divide into steps of {WARP // lanes} for WARPS={warps} and "
            f"DOT_LANES={lanes}."
        )
    if lanes * vector >= 2 * problem.head_dim * kv_bytes(problem):
        return (
            f"DOT_LANES={lanes} lanes with vectors of {vector} bytes are twice what a row of {problem.head_dim} "
            "elements needs."
        )
    return None


def why_not_appended(problem: AttentionProblem, genes: SplitKvGenes) -> str | None:
    """What would read new keys that another block writes, or past a cache that does not see a write."""
    if not problem.appended:
        return None
    if row_blocks(problem, genes) > 1:
        return f"BLOCK_M={genes.BLOCK_M} of {packed_rows(problem)} rows: the block that writes new keys has all rows."
    if genes.LOAD == "registers":
        return "LOAD=registers reads K and V as what no kernel changes, and new keys are written before."
    if problem.window and not problem.masking.ends_lower_right:
        return "Splits have the keys of the window alone, and one that counts from the first key has no new ones."
    return None


def why_not_listed(problem: AttentionProblem, genes: SplitKvGenes) -> str | None:
    """Tiles that are no parts of a block."""
    if not problem.blocks:
        return None
    mask, keys = parse_blocks(problem.blocks), warp_keys(genes)
    if mask.rows % genes.BLOCK_M:
        return f"BLOCK_M={genes.BLOCK_M} does not divide the {mask.rows} rows of a listed block."
    if mask.keys % keys or mask.keys % LIST_GRANULE:
        return (
            f"BLOCK_N={genes.BLOCK_N} over WARPS={genes.WARPS} makes tiles of {keys} keys, which do not divide the "
            f"{mask.keys} keys of a listed block, or these no multiple of {LIST_GRANULE}."
        )
    return None


def why_no_tensor_map(problem: AttentionProblem, genes: SplitKvGenes, gpu: GpuSpec) -> str | None:
    """What LOAD=tma asks for: Hopper, tiles that its swizzle fits, and pages that hold a whole one."""
    if genes.LOAD != "tma":
        return None
    if gpu.capability < (9, 0):
        return f"LOAD=tma needs the tensor copy engine of sm_90, and {gpu.name} is {gpu.arch}."
    if genes.VECTOR_BYTES != TMA_VECTOR and (genes.VECTOR_BYTES, kv_bytes(problem)) != (TMA_VECTOR // 2, 1):
        return (
            f"VECTOR_BYTES={genes.VECTOR_BYTES}: with LOAD=tma a lane reads the {TMA_VECTOR}-byte chunks of the "
            "swizzle, or of 8 bits halves of them."
        )
    keys = warp_keys(genes)
    if keys % TMA_KEYS or keys > MAX_BOX_KEYS:
        return (
            f"LOAD=tma: BLOCK_N={genes.BLOCK_N} over WARPS={genes.WARPS} makes boxes of {keys} keys, which must be a "
            f"multiple of {TMA_KEYS} up to {MAX_BOX_KEYS}."
        )
    if problem.page and keys > problem.page:
        return (
            f"LOAD=tma: BLOCK_N={genes.BLOCK_N} over WARPS={genes.WARPS} makes boxes of {keys} keys, which must lie in "
            f"one page of {problem.page}."
        )
    return None


def why_useless(problem: AttentionProblem, genes: SplitKvGenes, gpu: GpuSpec) -> str | None:
    """Genes that do nothing beside the others, and configs that do what a smaller one does."""
    rows, block_m, block_n = packed_rows(problem), genes.BLOCK_M, genes.BLOCK_N
    splits, keys = split_of(problem, genes)
    if genes.LOAD == "registers" and genes.STAGES != 1:
        return f"STAGES={genes.STAGES}: LOAD=registers has room for one tile a warp and takes STAGES=1."
    if block_m > (MMA_ROWS if genes.COMPUTE == "mma" else 1) and block_m >= 2 * rows:
        return f"BLOCK_M={block_m} for {rows} packed rows leaves half of the block or more without work."
    filled = math.ceil(split_span(problem, genes) / keys)
    if filled <= genes.SPLITS * LEAST_SPLITS:
        return f"SPLITS={genes.SPLITS} makes only {filled} of {keys} keys, as fewer SPLITS do."
    if reason := why_not_on_card(genes, gpu):
        return reason
    if keys <= block_n // genes.WARPS * (genes.WARPS - 1):
        return f"WARPS={genes.WARPS}: with {keys} keys per split in tiles of {block_n} the last warp never sees one."
    tiles = math.ceil(keys / block_n)
    if tiles < genes.STAGES:
        return f"STAGES={genes.STAGES} is more than the {tiles} tiles of {block_n} keys that a split makes."
    if genes.DEPENDENT_LAUNCH != "none" and (splits == 1 or genes.MERGE != "kernel"):
        return (
            f"DEPENDENT_LAUNCH={genes.DEPENDENT_LAUNCH}: only MERGE=kernel with several SPLITS has a second launch to "
            "overlap."
        )
    if splits == 1:
        return (
            None
            if genes.MERGE == "kernel"
            else "SPLITS=1 leaves nothing to merge: MERGE must be kernel, which then has no launch."
        )
    blocks = row_blocks(problem, genes) * tile_heads(problem) * problem.batch
    if blocks * (splits - 1) >= MAX_WAVES * gpu.sm_count * genes.BLOCKS_PER_SM:
        return f"SPLITS={genes.SPLITS} of {blocks} blocks are more than {MAX_WAVES} waves on {gpu.sm_count} SMs."
    return None


def why_not_on_card(genes: SplitKvGenes, gpu: GpuSpec) -> str | None:
    """What the card lacks, whatever the problem."""
    if cluster_blocks(genes) > 1 and gpu.capability < (9, 0):
        return f"MERGE=cluster needs the clusters of sm_90, and {gpu.name} is {gpu.arch}."
    if cluster_blocks(genes) > MAX_CLUSTER:
        return f"SPLITS={genes.SPLITS}: with MERGE=cluster they are the blocks of a cluster, at most {MAX_CLUSTER}."
    if genes.DEPENDENT_LAUNCH != "none" and gpu.capability < (9, 0):
        return (
            f"DEPENDENT_LAUNCH={genes.DEPENDENT_LAUNCH} needs griddepcontrol of sm_90 and newer, and {gpu.name} is "
            f"{gpu.arch}."
        )
    return None


def why_too_big(problem: AttentionProblem, genes: SplitKvGenes, gpu: GpuSpec) -> str | None:
    """Shared memory, threads and registers against the limits of the GPU and of BLOCKS_PER_SM."""
    blocks, warps, smem = genes.BLOCKS_PER_SM, genes.WARPS, smem_bytes(problem, genes)
    if smem > gpu.smem_per_block:
        return f"The block needs {smem} bytes of shared memory; {gpu.name} gives a block {gpu.smem_per_block}."
    return (
        why_not_resident(gpu, blocks, warps, smem)
        or why_same_code(blocks, warps)
        or why_too_few_registers(blocks, warps, registers_needed(problem, genes))
    )
