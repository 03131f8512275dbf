"""Kernels with one synchronization or guard taken away: the interpreter finds every one, and the same configs pass
untouched. A row says what is wrong, the genes that have the place, and the edits of the rendered source."""

from __future__ import annotations

import math
from functools import cache

import pytest

from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CheckResult
from tests.families import test_backward_mma, test_flash_mma, test_flash_scalar, test_flash_wgmma
from tests.families.on_interpreter import Edit, built, judged

pytestmark = pytest.mark.slow
Row = tuple[str, dict[str, object], list[Edit]]

SCALAR_1, SCALAR_2 = {"BLOCK_N": 32, "KV_STAGES": 1}, {"BLOCK_N": 32, "KV_STAGES": 2}
K_BARRIER, V_BARRIER = (
    "__syncthreads();  // all threads' copies of K",
    "__syncthreads();  // all threads' copies of V",
)
K_WAIT, V_WAIT = f"cp_async_wait<0>();\n    {K_BARRIER}", f"cp_async_wait<0>();\n      {V_BARRIER}"
SCALAR: list[Row] = [
    ("no barrier after the load of K, one stage", SCALAR_1, [(K_BARRIER, "//")]),
    ("no barrier after the load of K, two stages", SCALAR_2, [(K_BARRIER, "//")]),
    ("no barrier after the load of V", SCALAR_1, [(V_BARRIER, "//")]),
    ("V reused before the barrier", SCALAR_1, [(K_BARRIER, "//"), ("    // ---- S = Q Kᵀ\n", "__syncthreads();\n")]),
    (
        "a stage reused before the barrier",
        SCALAR_2,
        [(K_BARRIER, "//"), ("    // ---- S = Q Kᵀ\n", "__syncthreads();\n")],
    ),
    (
        "K reused before the barrier",
        SCALAR_1,
        [(V_BARRIER, "//"), ("copy_k(tile + 1, 0);", "copy_k(tile + 1, 0); __syncthreads();")],
    ),
    ("no __syncwarp before P is read", SCALAR_2, [("__syncwarp();  // the row's P", "//")]),
    ("weak wait for K, one stage", SCALAR_1, [(K_WAIT, K_WAIT.replace("<0>", "<1>"))]),
    ("weak wait for K, two stages", SCALAR_2, [(K_WAIT, K_WAIT.replace("<0>", "<1>"))]),
    ("weak wait for V", SCALAR_1, [(V_WAIT, V_WAIT.replace("<0>", "<1>"))]),
    ("store out of bounds", SCALAR_1, [("if (row >= q_rows) continue;", "")]),
    ("load out of bounds", SCALAR_1, [("const bool valid = row < valid_rows;", "const bool valid = true;")]),
    ("load of Q out of bounds", {**SCALAR_1, "Q_IN_REGISTERS": True}, [("if (row < q_rows) x = load", "x = load")]),
]
SPLIT, TOGETHER, OVERLAPPED = {"SCHEDULE": "split"}, {"SCHEDULE": "together"}, {"SCHEDULE": "overlapped"}
MMA_K_BARRIER = "__syncthreads();  // K[tile] (TOGETHER"
MMA_V_BARRIER = "__syncthreads();  // V[tile] is visible"
NEXT_BARRIER = "__syncthreads();  // V[tile], K[tile + 1]"
MMA: list[Row] = [
    ("no barrier after the load of K", SPLIT, [(MMA_K_BARRIER, "//")]),
    ("no barrier after the load of V", SPLIT, [(MMA_V_BARRIER, "//")]),
    ("no barrier per tile", TOGETHER, [(MMA_K_BARRIER, "//")]),
    ("no barrier per tile, overlapped", OVERLAPPED, [(NEXT_BARRIER, "//")]),
    (
        "no barrier after the load of Q",
        {**SPLIT, "Q_PLACE": "registers", "O_STORE": "shared"},
        [("__syncthreads();  // Q is visible", "//")],
    ),
    (
        "a stage reused before the barrier",
        TOGETHER,
        [
            (MMA_K_BARRIER, "//"),
            ("      if (visible(tile)) scores", "      __syncthreads();\n      if (visible(tile)) scores"),
        ],
    ),
    (
        "K reused before the barrier",
        SPLIT,
        [
            (MMA_V_BARRIER, "//"),
            ("load_k(tile + K_STAGES);\n      }", "load_k(tile + K_STAGES);\n        __syncthreads();\n      }"),
        ],
    ),
    (
        "stages reused before the barrier, overlapped",
        OVERLAPPED,
        [
            (NEXT_BARRIER, "//"),
            ("load_k(tile + K_STAGES);\n      if (!", "load_k(tile + K_STAGES);\n      __syncthreads();\n      if (!"),
        ],
    ),
    ("rings reused for the merge", {"KEY_WARPS": 2}, [("__syncthreads();  // all warps are done", "//")]),
    ("no barrier in the merge", {"KEY_WARPS": 2}, [("__syncthreads();  // the partial", "//")]),
    (
        "results of other blocks before they are there",
        {"KEY_SPLIT": 2},
        [("return *ticket_smem == uint32_t(blocks - 1);", "return true;")],
    ),
    (
        "rings reused for O",
        {"Q_PLACE": "direct", "O_STORE": "shared"},
        [("|| HEAD_DIM != VALUE_DIM) __syncthreads();", "|| HEAD_DIM != VALUE_DIM) ;")],
    ),
    ("no __syncwarp before Q is reused", {"O_STORE": "shared"}, [("else __syncwarp();  ", "//")]),
    ("no __syncwarp before O is read", {"O_STORE": "shared"}, [("__syncwarp();  // the warp's", "//")]),
    (
        "weak wait for K",
        SPLIT,
        [("else cp_async_wait<NEWER_THAN_K>();\n", "else cp_async_wait<NEWER_THAN_K + 1>();\n")],
    ),
    ("weak wait for V", SPLIT, [("cp_async_wait<2 * (V_STAGES - 1)>", "cp_async_wait<2 * V_STAGES - 1>")]),
    ("weak wait, together", TOGETHER, [("cp_async_wait<NEWER_THAN_K - 1>();", "cp_async_wait<NEWER_THAN_K>();")]),
    (
        "weak wait, overlapped",
        OVERLAPPED,
        [("cp_async_wait<NEWER_THAN_K - 2>();", "cp_async_wait<NEWER_THAN_K - 1>();")],
    ),
    (
        "store out of bounds",
        SPLIT,
        [("if (row < valid_rows) *reinterpret_cast<uint32_t*>", "*reinterpret_cast<uint32_t*>")],
    ),
    (
        "store through shared memory out of bounds",
        {"O_STORE": "shared"},
        [("      if (row < valid_rows) {", "      {")],
    ),
    ("load out of bounds", SPLIT, [("row < valid_rows ? 16 : 0", "16")]),
    ("load of Q out of bounds", {"Q_PLACE": "direct"}, [("&& warp_row + lane / 4 + row < seqlen_q", "")]),
]
PLAIN, OVERLAP, ROWS = {"OVERLAP": False, "BLOCK_N": 64}, {"BLOCK_N": 64}, {"STORE": "rows", "BLOCK_N": 64}
CLUSTER = {"KEY_SPLIT": 2, "BLOCK_N": 64}
K_FULL = "mbarrier_wait(barrier(Smem::K_FULL, ring.stage), ring.parity);\n    multiply_qk"
Q_FULL = "mbarrier_wait(barrier(Smem::Q_FULL, warpgroup), round % 2);"
V_FULL = "mbarrier_wait(barrier(Smem::V_FULL, before.stage), before.parity);"
EMPTY = "mbarrier_wait(empty_smem + 8 * at.stage, at.parity ^ 1);"
QK_WAIT = "    wgmma_wait<NEWER>();  // S is there\n    pin_registers(s);\n    if constexpr (!OVERLAP) pass_turn();\n"
PV_WAIT = "    wgmma_wait<0>();  // O is there, and P may be overwritten\n    pin_registers(sum);\n"
RELEASE_V = "    release(barrier(Smem::V_EMPTY, before.stage));\n"
RELEASE_K = "    if constexpr (RESCALE != Rescale::LAZY_AFTER) release(barrier(Smem::K_EMPTY, ring.stage));\n"
O_BARRIER = "named_barrier_sync<128>(O_TILE + warpgroup);  // all rows"
GATHER_WAIT = "mbarrier_wait_cluster(barrier_smem, 0);"
WGMMA: list[Row] = [
    ("no wait for K", PLAIN, [(K_FULL, "multiply_qk")]),
    ("no wait for V", PLAIN, [(V_FULL, "")]),
    ("no wait for V, overlapped", OVERLAP, [(V_FULL, "")]),
    ("no wait for Q", PLAIN, [(Q_FULL, "")]),
    ("no wait before a stage is reused", PLAIN, [(EMPTY, "", 3)]),
    ("V reused when K is released", PLAIN, [("barrier(Smem::LOADED_EMPTY, 0)}", "barrier(Smem::K_EMPTY, 0)}")]),
    ("wait for K of the wrong parity", PLAIN, [(K_FULL, K_FULL.replace("ring.parity", "ring.parity ^ 1"))]),
    ("wait for V of the wrong parity", PLAIN, [(V_FULL, V_FULL.replace("before.parity", "before.parity ^ 1"))]),
    (
        "wait for V of the wrong parity, overlapped",
        OVERLAP,
        [(V_FULL, V_FULL.replace("before.parity", "before.parity ^ 1"))],
    ),
    ("wait for Q of the wrong parity", PLAIN, [(Q_FULL, Q_FULL.replace("round", "(round + 1)"))]),
    ("wait for an empty stage of the wrong parity", PLAIN, [(EMPTY, EMPTY.replace(" ^ 1", ""), 3)]),
    ("K released too early", PLAIN, [(QK_WAIT + RELEASE_K, RELEASE_K + QK_WAIT)]),
    ("V released too early", PLAIN, [(PV_WAIT + RELEASE_V, RELEASE_V + PV_WAIT)]),
    (
        "V released too early, overlapped",
        OVERLAP,
        [(RELEASE_V, ""), (QK_WAIT, "if constexpr (NEWER)" + RELEASE_V + QK_WAIT)],
    ),
    ("K never released", PLAIN, [(RELEASE_K, "")]),
    ("weak wait for Q Kᵀ", PLAIN, [(QK_WAIT, QK_WAIT.replace("<NEWER>", "<1>"))]),
    ("weak wait for P V", PLAIN, [(PV_WAIT, PV_WAIT.replace("<0>", "<1>"))]),
    (
        "no wgmma.fence after P and O are written",
        PLAIN,
        [("    wgmma_fence();\n    const uint64_t v_stage", "    const uint64_t v_stage")],
    ),
    (
        "no wgmma.fence after P is written, overlapped",
        OVERLAP,
        [
            ("    wgmma_fence();\n    const uint64_t v_stage", "    const uint64_t v_stage"),
            ("wgmma_fence();\n    const uint64_t k_stage", "const uint64_t k_stage"),
        ],
    ),
    (
        "no barrier after the mbarriers are made",
        PLAIN,
        [
            ("named_barrier_sync<THREADS>(BARRIERS_READY);", ";", 2),
            ("named_barrier_arrive<THREADS>(BARRIERS_READY);", ";"),
        ],
    ),
    ("no fence after the mbarriers are made", PLAIN, [("    mbarrier_init_fence();\n", "")]),
    ("no fence before the tensor store", PLAIN, [("fence_proxy_async();\n named", "named", 2)]),
    ("no barrier before the tensor store", PLAIN, [(O_BARRIER, "//", 2)]),
    ("no wait for the tensor store", PLAIN, [("tma_store_wait_read();  // shared", "; // shared")]),
    ("no __syncwarp before O is read", ROWS, [("__syncwarp();  // all rows", "//")]),
    (
        "no __syncwarp before Q is reused",
        {**ROWS, "Q_IN_REGISTERS": True},
        [("if constexpr (Q_IN_REGISTERS) __syncwarp();", "")],
    ),
    ("store out of bounds", ROWS, [("    if (row < valid_rows) {", "    {")]),
    (
        "load out of bounds of shared memory",
        PLAIN,
        [("load<ROWS>(tiles_smem + at.stage", "load<ROWS>(tiles_smem + 9 * at.stage")],
    ),
    ("load over another tile", PLAIN, [("load<ROWS>(tiles_smem + at.stage", "load<ROWS>(tiles_smem + 2 * at.stage")]),
    (
        "a tensor copy that expects too much",
        PLAIN,
        [("barrier_smem, bytes(ROWS));", "barrier_smem, bytes(ROWS) + 16);", 2)],
    ),
    ("no wait at the barrier of the cluster", CLUSTER, [("cluster_wait();  // long since", "//")]),
    ("no arrival at the barrier of the cluster", CLUSTER, [("if constexpr (CLUSTER > 1) cluster_arrive();", "", 2)]),
    ("no fence for the cluster", CLUSTER, [("    mbarrier_init_fence();\n", "    fence_proxy_async();\n")]),
    ("no wait for the results of other blocks", CLUSTER, [(GATHER_WAIT, "")]),
    ("a wait of the block's scope for other blocks", CLUSTER, [(GATHER_WAIT, "mbarrier_wait(barrier_smem, 0);")]),
    (
        "results of other blocks of the wrong parity",
        CLUSTER,
        [(GATHER_WAIT, "mbarrier_wait_cluster(barrier_smem, 1);")],
    ),
    ("results out of bounds of another block", CLUSTER, [("(split - 1) * slot_bytes", "split * slot_bytes")]),
    ("more results expected than come", CLUSTER, [("(CLUSTER - 1) * SLOT_BYTES);", "CLUSTER * SLOT_BYTES);")]),
]
FIXED, CLAIMED = ({"SCHEDULE": schedule, "Q_IN_REGISTERS": True, "BLOCK_N": 64} for schedule in ("fixed", "claimed"))
Q_FENCE, Q_RELEASE = "fence_proxy_async(), ", "__syncwarp(), release(barrier(Smem::Q_EMPTY, warpgroup));"
REUSED_Q: list[Row] = [
    ("no fence before Q is reused", FIXED, [(Q_FENCE + Q_RELEASE, Q_RELEASE)]),
    ("no fence before Q is reused, claimed tiles", CLAIMED, [(Q_FENCE + Q_RELEASE, Q_RELEASE)]),
    ("Q never released", CLAIMED, [("release(barrier(Smem::Q_EMPTY", "(void)(barrier(Smem::Q_EMPTY", 2)]),
    (
        "O of the last tile of rows is not waited for",
        CLAIMED,
        [("<true, false, true>(); finish_pv(); complete_output", "<true, false, true>(); complete_output")],
    ),
    ("O of the last tile of rows is stored over", CLAIMED, [("if (end_thread == 0) tma_store_wait_read();", "")]),
]
SKIPS = {
    **CLAIMED,
    "BLOCK_M": 128,
    "BLOCKS_PER_SM": 1,
    "BLOCK_N": 48,
    "STAGES": 3,
    "PRODUCER": "warpgroup",
    "CAUSAL_SKIP": True,
}
SKIPPED_V = "mbarrier_wait(barrier(Smem::V_FULL, skipped.stage), skipped.parity);"
SKIPPED: list[Row] = [
    ("wait for V that is skipped of the wrong parity", SKIPS, [(SKIPPED_V, SKIPPED_V.replace("parity", "parity ^ 1"))]),
    ("V that is skipped never released", SKIPS, [("release(barrier(Smem::V_EMPTY, skipped.stage));", "")]),
    (
        "K that is skipped never released",
        SKIPS,
        [("release(barrier(Smem::K_EMPTY, ring.stage));\n        wait", "wait")],
    ),
]
CHUNKS = {"SCHEDULE": "fixed", "BLOCKS_PER_SM": 1, "BLOCK_N": 64, "STAGES": 1, "OVERLAP": False, "STORE": "chunks"}
CHUNK_WAIT = "if (end_thread == 0) tma_store_wait_read<1>();"
BY_CHUNKS: list[Row] = [
    ("no wait for the chunk before the last", CHUNKS, [(CHUNK_WAIT, "")]),
    ("weak wait for the chunk before the last", CHUNKS, [(CHUNK_WAIT, CHUNK_WAIT.replace("<1>", "<2>"))]),
    ("no wait for the chunks of the last tile", CHUNKS, [("if (end_thread == 0) tma_store_wait_read();", "")]),
    (
        "weak wait for the chunks of the last tile",
        CHUNKS,
        [("if (end_thread == 0) tma_store_wait_read();", CHUNK_WAIT)],
    ),
    (
        "no barrier after the wait for a chunk",
        CHUNKS,
        [("named_barrier_sync<128>(O_TILE + warpgroup);  // the store of the chunk", "//")],
    ),
    ("no fence before a chunk is stored", CHUNKS, [("fence_proxy_async();\n named", "named", 2)]),
    ("no barrier before a chunk is stored", CHUNKS, [(O_BARRIER, "//", 2)]),
]
BALANCED = {"SCHEDULE": "balanced", "BLOCK_N": 64}
GIVE, TAKE = (
    "if (end_thread == 0) give(counters_zeroed + giver);",
    "if (end_thread == 0) take(counters_zeroed + giver);",
)
GIVE_AGAIN = "  if (thread == 0) give(counters_zeroed + blockIdx.x * WARPGROUPS + warpgroup);\n  if (STORE"
LAST_WAIT = "  if (STORE != Store::ROWS && thread == 0) tma_store_wait_read();  // shared memory"
HANDED_OVER: list[Row] = [
    ("a result is not waited for", BALANCED, [(TAKE, "")]),
    ("a result is never given", BALANCED, [(GIVE, "")]),
    ("a result is taken from another block", BALANCED, [("(blockIdx.y - 1) * gridDim.x", "blockIdx.y * gridDim.x")]),
    (
        "no barrier before a result is given",
        BALANCED,
        [
            (
                "named_barrier_sync<128>(O_TILE + warpgroup);  // all threads of the warpgroup have left their part\n"
                "        if (end_thread",
                "if (end_thread",
            )
        ],
    ),
    (
        "no barrier after a result is taken",
        BALANCED,
        [("named_barrier_sync<128>(O_TILE + warpgroup);  // what thread 0", "//")],
    ),
    ("a result is given without a release", BALANCED, [("red.release.gpu", "red.relaxed.gpu")]),
    ("a result is given to the block only", BALANCED, [("red.release.gpu", "red.release.cta")]),
    ("a result is taken without an acquire", BALANCED, [("atom.acquire.gpu", "atom.relaxed.gpu")]),
    (
        "a result is given before it is left",
        BALANCED,
        [(GIVE, ""), ("        Partial::leave(results", GIVE + "\n        Partial::leave(results")],
    ),
    ("results out of bounds", BALANCED, [("results_gmem + giver * ", "results_gmem + (giver + 2) * ", 2)]),
]
# What leaves every access in order, but a wrong answer or a counter that is not zero.
WRONG_SHARES = {
    "a key tile left out": ([("begin = share(block)", "begin = share(block) + (block > 0)")], "error"),
    "a key tile taken twice": ([("end = share(block + 1)", "end = min(steps, share(block + 1) + 1)")], "error"),
    "a result added unscaled": ([("fmaf(other.x, low, o[i])", "other.x + o[i]")], "error"),
    "a result given again later": (
        [(LAST_WAIT, GIVE_AGAIN + LAST_WAIT.removeprefix("  if (STORE"))],
        "did not leave zeros in counters_zeroed",
    ),
}
LAZY_AFTER = {"RESCALE": "lazy_after", "BLOCK_N": 64}
SCORES_AGAIN: list[Row] = [
    ("no fence after K was read again", LAZY_AFTER, [("fence_proxy_async();  // before the copies", "//")])
]


HEADS = (1, 2, 1)
SHARED_ROWS = (test_flash_wgmma, AttentionProblem(*HEADS, 100, 250, 64), "h100", "plain", 3)
"""Four tiles of rows, three blocks."""
WGMMA_PROBLEM = AttentionProblem(*HEADS, 100, 700, 64)
ONE_SM = (test_flash_wgmma, WGMMA_PROBLEM, "h100", "plain", 1)
"""A wave of a GPU with one SM: the persistent blocks go round."""
TABLES = {
    "flash_scalar": (SCALAR, (test_flash_scalar, AttentionProblem(1, 1, 1, 35, 131, 64), "l4", "plain", None)),
    "flash_mma": (MMA, (test_flash_mma, AttentionProblem(*HEADS, 113, 203, 64), "l4", "plain", None)),
    "flash_wgmma": (WGMMA, (test_flash_wgmma, WGMMA_PROBLEM, "h100", "plain", None)),
    "several tiles a block": (REUSED_Q, ONE_SM),
    "skipped keys": (
        SKIPPED,
        (test_flash_wgmma, AttentionProblem(*HEADS, 400, 400, 64, mask="causal_upper_left"), "h100", "plain", 1),
    ),
    "stores of three chunks": (
        BY_CHUNKS,
        (test_flash_wgmma, AttentionProblem(*HEADS, 200, 100, 136), "h100", "plain", 1),
    ),
    "shared rows": (HANDED_OVER, SHARED_ROWS),
    # Far beyond what fp16 probabilities hold: warps compute scores again, from K and Q in shared memory.
    "scores again": (SCORES_AGAIN, (test_flash_wgmma, WGMMA_PROBLEM, "h100", "large_logits", None)),
}
TABLES |= {
    name: (rows, (test_backward_mma, problem, "l4", kind, None))
    for name, (rows, (problem, kind)) in test_backward_mma.PLACES.items()
}
ROWS_OF_ALL = [
    pytest.param(*row, where, id=f"{name}: {row[0]}") for name, (rows, where) in TABLES.items() for row in rows
]


@cache
def outcome(where: tuple, genes: tuple[tuple[str, object], ...], edits: tuple[Edit, ...]) -> CheckResult:
    """What the interpreter says of the config's source with these edits. `where` is (module, problem, GPU, kind of
    inputs, SMs of the GPU if not the table's)."""
    module, problem, name, kind, sms = where
    gpu = GPUS[name].with_limits({"sm_count": sms} if sms else {})
    return judged(built(module.FAMILY, problem, module.config(**dict(genes)), gpu, *edits), problem, kind)


@pytest.mark.parametrize(("words", "genes", "edits", "where"), ROWS_OF_ALL)
@pytest.mark.sampled(6)
def test_it_is_found(words, genes, edits, where):
    untouched = outcome(where, tuple(genes.items()), ())
    assert untouched.passed, untouched.reason
    result = outcome(where, tuple(genes.items()), tuple(edits))
    assert not result.passed and math.isnan(result.max_error), result  # stopped by a fault, not by a wrong answer


def test_claims_that_are_left_to_the_next_launch_are_found():
    edits = (("atomicInc(counters_zeroed, work.tiles - 1)", "atomicInc(counters_zeroed, work.tiles)"),)
    assert "did not leave zeros in counters_zeroed" in outcome(ONE_SM, tuple(CLAIMED.items()), edits).reason


@pytest.mark.parametrize("fault", WRONG_SHARES)
def test_rows_shared_wrongly_are_found(fault):
    edits, word = WRONG_SHARES[fault]
    untouched, result = (outcome(SHARED_ROWS, tuple(BALANCED.items()), tuple(e)) for e in ((), edits))
    assert untouched.passed and word in result.reason
