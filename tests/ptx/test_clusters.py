"""Clusters: memory of other blocks, their barriers and mbarriers, and every way to get the order wrong."""

import numpy as np
import pytest

from tests.ptx.golden.harness import run_hopper

KERNEL = """
__device__ void store_remote(uint32_t address, int value) {
  asm volatile("st.shared::cluster.b32 [%0], %1;" :: "r"(address), "r"(value) : "memory");
}
__device__ int load_remote(uint32_t address) {
  int value; asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory"); return value;
}
__device__ void arrive_remote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ void sync_cluster() { asm volatile("barrier.cluster.arrive.aligned; "
  "barrier.cluster.wait.aligned;" ::: "memory"); }
extern "C" __global__ void k(int* out) {
  __shared__ __align__(16) int data[256]; __shared__ __align__(8) unsigned long storage[2];
  const int t = threadIdx.x; int rank, blocks;
  asm("mov.u32 %0, %cluster_ctarank;" : "=r"(rank)); asm("mov.u32 %0, %cluster_nctarank;" : "=r"(blocks));
  const uint32_t barrier = shared_address(storage), mine = shared_address(data + t), next = cluster_address(mine,
    (rank + 1) % blocks);
  BODY
}"""
PUSH = "sync_cluster(); store_remote(next, 100 * rank + t); sync_cluster(); out[blockIdx.x * 64 + t] = data[t];"
PULL = "data[t] = 100 * rank + t; sync_cluster(); out[blockIdx.x * 64 + t] = load_remote(next); sync_cluster();"
SEND = """
if (t == 0) { mbarrier_init(barrier, 1); mbarrier_init_fence(); mbarrier_arrive_expect_tx(barrier, 64 * 16); }
__syncwarp(); cluster_arrive(); cluster_wait();
const float x = 100 * rank + t; const int other = (rank + 1) % blocks;
store_async_16(cluster_address(shared_address(data) + 16 * t, other), cluster_address(barrier, other), x, x, x, x);
mbarrier_wait_cluster(barrier, 0);
out[blockIdx.x * 64 + t] = ((float*)data)[4 * t];"""
SIGNAL = """
if (t == 0) { mbarrier_init(barrier, 64); mbarrier_init_fence(); }
__syncwarp(); sync_cluster();
store_remote(next, 100 * rank + t); arrive_remote(cluster_address(barrier, (rank + 1) % blocks));
mbarrier_wait_cluster(barrier, 0); out[blockIdx.x * 64 + t] = data[t];"""


def run(body, cluster=4, blocks=8):
    out = np.full(64 * blocks, -1, np.int32)
    return out, run_hopper(KERNEL.replace("BODY", body), [out], threads=64, blocks=blocks, cluster=(cluster, 1, 1))


@pytest.mark.parametrize(
    ("body", "step"), [(PUSH, -1), (PULL, 1), (SEND, -1), (SIGNAL, -1)], ids=["store", "load", "async store", "arrival"]
)
@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_blocks_read_and_write_each_other(body, step, cluster):
    out, execution = run(body, cluster)
    rank = np.arange(8) % cluster
    assert not execution.faults
    assert np.array_equal(out.reshape(8, 64), 100 * ((rank + step) % cluster)[:, None] + np.arange(64))


def test_generic_addresses_reach_other_blocks():
    body = PULL.replace("load_remote(next)", "*(int*)other").replace(
        "sync_cluster();",
        (
            "sync_cluster(); uint64_t other; "
            'asm("mapa.u64 %0, %1, %2;" : "=l"(other) : "l"(data + t), "r"((rank + 1) % blocks));'
        ),
        1,
    )
    out, execution = run(body)
    assert not execution.faults and np.array_equal(out[:64], 100 + np.arange(64))


RELAXED = "cluster_arrive(); cluster_wait();"
FAULTS = {
    "push without the second barrier": (PUSH, " sync_cluster(); out", " out", "reads what thread"),
    "push with a relaxed barrier": (PUSH, " sync_cluster(); out", RELAXED + "out", "reads what thread"),
    "pull without the first barrier": (PULL, "sync_cluster(); out", "out", "reads what thread"),
    "pull without the last barrier": (PULL, " sync_cluster();", "", "may end before"),
    "overwritten before it is pulled": (
        PULL,
        "load_remote(next);",
        "load_remote(next); data[t] = 0;",
        "reads what thread",
    ),
    "another block may be gone": (
        PULL,
        "load_remote(next); sync_cluster();",
        "0; if (rank == 1) load_remote(next); ",
        "may end before",
    ),
    "send before the barrier is known": (SEND, "cluster_wait();", "", "initialised, with no barrier between"),
    "send with an unfenced barrier": (SEND, "mbarrier_init_fence();", "", "initialised, with no barrier between"),
    "receive with a wait for the block": (SEND, "wait_cluster(", "wait(", "asynchronous stores"),
    "receive without a wait": (SEND, "mbarrier_wait_cluster(barrier, 0);", "", "asynchronous stores"),
    "receive too much": (SEND, "16); }", "8); }", "wrote last"),
    "wait for too much": (SEND, "16); }", "17); }", "lacks 0 arrivals and 64 bytes"),
    "signal waited for by the block alone": (SIGNAL, "wait_cluster(", "wait(", "reads what thread"),
    "out of bounds": (PUSH, "store_remote(next", "store_remote(next + 900", "outside its 1024 bytes"),
    "out of the cluster": (
        PUSH,
        "store_remote(next",
        "store_remote(cluster_address(mine, 4)",
        "mapped to rank 4 in a cluster of 4",
    ),
    "a wait without arrival": (PUSH, "sync_cluster(); store", "cluster_wait(); store", "without having arrived"),
    "an arrival too many": (
        PUSH,
        "sync_cluster(); store",
        "cluster_arrive(); cluster_arrive(); cluster_wait(); store",
        "arrives twice",
    ),
    "a thread that never arrives": (
        PUSH,
        "sync_cluster(); out",
        "if (t < 32 || rank) sync_cluster(); else named_barrier_sync<64>(3); out",
        "deadlock",
    ),
    "a part of a warp that waits, where the others end": (
        PULL,
        "load_remote(next); sync_cluster();",
        "load_remote(next); cluster_arrive(); if (t % 32 == 0) cluster_wait();",
        "a part of its warp or warpgroup never reaches",
    ),
    "a part of a warp that arrives later": (
        PUSH,
        "sync_cluster(); out",
        "if (t % 32 == 0) sync_cluster(); else sync_cluster(); out",
        "a part of its warp or warpgroup never reaches",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault):
    body, old, new, words = FAULTS[fault]
    assert old in body
    faults = run(body.replace(old, new))[1].faults
    assert any(words in text for text in faults), faults
