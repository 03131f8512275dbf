"""flash_wgmma with one synchronization or guard taken away: the interpreter finds every one."""

from __future__ import annotations

import pytest

from tests.families.family_faults import Row, assert_found

pytestmark = pytest.mark.slow
PLAIN, OVERLAP, ROWS = {"OVERLAP": False, "BLOCK_N": 64}, {"BLOCK_N": 64}, {"STORE": "rows", "BLOCK_N": 64}
CLUSTER = {"KEY_SPLIT": 2, "BLOCK_N": 64}
K_FULL = "mbarrier_wait(barrier(Smem::K_FULL, ring.stage), ring.parity);\n    multiply_qk"
Q_FULL = "mbarrier_wait(barrier(Smem::Q_FULL, warpgroup), round % 2);"
V_FULL = "mbarrier_wait(barrier(Smem::V_FULL, before.stage), before.parity);"
EMPTY = "mbarrier_wait(empty_smem + 8 * at.stage, at.parity ^ 1);"
QK_WAIT = "    wgmma_wait<decltype(newer)::value>();  // S is there\n    pin_registers(s);\n"
PV_WAIT = "    wgmma_wait<0>();  // O is there, and P may be overwritten\n    pin_registers(o);\n"
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
    ("V reused when K is released", PLAIN, [("barrier(Smem::V_EMPTY, 0)}", "barrier(Smem::K_EMPTY, 0)}")]),
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
        [(RELEASE_V, ""), (QK_WAIT, "if constexpr (decltype(newer)::value)" + RELEASE_V + QK_WAIT)],
    ),
    ("K never released", PLAIN, [(RELEASE_K, "")]),
    ("weak wait for Q Kᵀ", PLAIN, [(QK_WAIT, QK_WAIT.replace("<decltype(newer)::value>", "<1>"))]),
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
    (
        "no __syncwarp before O is read",
        ROWS,
        [("__syncwarp();  // all rows", "//")],
    ),
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


@pytest.mark.parametrize("row", WGMMA, ids=[row[0] for row in WGMMA])
def test_flash_wgmma(row):
    assert_found("flash_wgmma", row)
