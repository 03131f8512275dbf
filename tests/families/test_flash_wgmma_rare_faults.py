"""flash_wgmma with a fault where only some genes have the place: the interpreter finds every one."""

from __future__ import annotations

import pytest

from tests.families.family_faults import Row, assert_found, outcome
from tests.families.test_flash_wgmma_faults import O_BARRIER

pytestmark = pytest.mark.slow
FIXED, CLAIMED = ({"SCHEDULE": schedule, "Q_IN_REGISTERS": True, "BLOCK_N": 64} for schedule in ("fixed", "claimed"))
Q_FENCE, Q_RELEASE = "fence_proxy_async(), ", "__syncwarp(), release(barrier(Smem::Q_EMPTY, warpgroup));"
REUSED_Q: list[Row] = [
    ("no fence before Q is reused", FIXED, [(Q_FENCE + Q_RELEASE, Q_RELEASE)]),
    ("no fence before Q is reused, claimed tiles", CLAIMED, [(Q_FENCE + Q_RELEASE, Q_RELEASE)]),
    ("Q never released", CLAIMED, [("release(barrier(Smem::Q_EMPTY", "(void)(barrier(Smem::Q_EMPTY", 2)]),
    (
        "O of the last tile of rows is not waited for",
        CLAIMED,
        [("False{}, True{}); finish_pv(); finish_rows(last", "False{}, True{}); finish_rows(last")],
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
HANDED_OVER: list[Row] = [
    ("a result is not waited for", BALANCED, [(TAKE, "")]),
    ("a result is never given", BALANCED, [(GIVE, "")]),
    (
        "a result is taken from another block",
        BALANCED,
        [("(blockIdx.y - 1) * gridDim.x", "blockIdx.y * gridDim.x")],
    ),
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
        [("  if (STORE != Store::ROWS && thread == 0) tma", GIVE_AGAIN + " != Store::ROWS && thread == 0) tma")],
        "did not leave zeros in counters_zeroed",
    ),
}
LAZY_AFTER = {"RESCALE": "lazy_after", "BLOCK_N": 64}
SCORES_AGAIN: list[Row] = [
    (
        "no fence after K was read again",
        LAZY_AFTER,
        [("fence_proxy_async();  // before the copies", "//")],
    ),
]


@pytest.mark.parametrize("row", REUSED_Q, ids=[row[0] for row in REUSED_Q])
def test_flash_wgmma_with_several_tiles_a_block(row):
    """A wave of a GPU with one SM: the persistent blocks go round."""
    assert_found("flash_wgmma", row, sms=1)


@pytest.mark.parametrize("row", SKIPPED, ids=[row[0] for row in SKIPPED])
def test_flash_wgmma_that_skips_keys(row):
    assert_found("flash_wgmma, causal", row, sms=1)


@pytest.mark.parametrize("row", BY_CHUNKS, ids=[row[0] for row in BY_CHUNKS])
def test_flash_wgmma_that_stores_by_chunks(row):
    assert_found("flash_wgmma, three chunks of columns", row, sms=1)


def test_flash_wgmma_that_leaves_claims_to_the_next_launch():
    edits = (("atomicInc(counters_zeroed, tiles - 1)", "atomicInc(counters_zeroed, tiles)"),)
    result = outcome("flash_wgmma", tuple(CLAIMED.items()), edits, "plain", 1)
    assert "did not leave zeros in counters_zeroed" in result.reason


@pytest.mark.parametrize("row", HANDED_OVER, ids=[row[0] for row in HANDED_OVER])
def test_flash_wgmma_with_blocks_that_share_tiles_of_rows(row):
    """Four tiles of rows, three blocks."""
    assert_found("flash_wgmma, shared rows", row, sms=3)


@pytest.mark.parametrize("fault", WRONG_SHARES)
def test_flash_wgmma_that_shares_tiles_of_rows_wrongly(fault):
    edits, word = WRONG_SHARES[fault]
    untouched, result = (
        outcome("flash_wgmma, shared rows", tuple(BALANCED.items()), tuple(e), "plain", 3) for e in ((), edits)
    )
    assert untouched.passed and word in result.reason


@pytest.mark.parametrize("row", SCORES_AGAIN, ids=[row[0] for row in SCORES_AGAIN])
def test_flash_wgmma_that_loses_its_scores(row):
    """Scores far beyond what fp16 probabilities hold: warps compute them again, from K and Q in shared memory."""
    assert_found("flash_wgmma", row, "large_logits")
