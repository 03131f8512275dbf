"""flash_scalar and flash_mma with one synchronization or guard taken away: the interpreter finds every one."""

from __future__ import annotations

import pytest

from tests.families.family_faults import Row, assert_found

pytestmark = pytest.mark.slow
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
    (
        "rings reused for the merge",
        {"KEY_WARPS": 2},
        [("__syncthreads();  // all warps are done", "//")],
    ),
    (
        "no barrier in the merge",
        {"KEY_WARPS": 2},
        [("__syncthreads();  // the partial", "//")],
    ),
    (
        "rings reused for O",
        {"Q_PLACE": "direct", "O_STORE": "shared"},
        [("|| HEAD_DIM != VALUE_DIM) __syncthreads();", "|| HEAD_DIM != VALUE_DIM) ;")],
    ),
    ("no __syncwarp before Q is reused", {"O_STORE": "shared"}, [("else __syncwarp();  ", "//")]),
    (
        "no __syncwarp before O is read",
        {"O_STORE": "shared"},
        [("__syncwarp();  // the warp's", "//")],
    ),
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


@pytest.mark.parametrize("row", SCALAR, ids=[row[0] for row in SCALAR])
def test_flash_scalar(row):
    assert_found("flash_scalar", row)


@pytest.mark.parametrize("row", MMA, ids=[row[0] for row in MMA])
def test_flash_mma(row):
    assert_found("flash_mma", row)
