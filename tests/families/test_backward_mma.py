"""backward_mma: what `why_invalid` promises; that the kernels that it lets through are right, with no race, on the
interpreter; and that a barrier or guard taken away is found there."""

from __future__ import annotations

import random

import pytest

from evoattn.backends.compiler import compile_source
from evoattn.families.backward_mma.family import BackwardMma
from evoattn.families.backward_mma.resources import key_steps
from evoattn.families.registry import load_space
from evoattn.families.render import render
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

FAMILY, L4, H100 = BackwardMma(), GPUS["l4"], GPUS["h100"]
BASE = dict(
    BLOCK_M=32, BLOCK_N=64, WARPS=4, QUERY_WARPS=1, PART=32, CAUSAL_SKIP=False, STAGES=2, SMEM_LAYOUT="swizzled",
    KV_PLACE="shared", DQ="add", DQ_WARPS=2, QUERY_SPLIT=1, BLOCK_ORDER="keys", BLOCKS_PER_SM=1, PASS_M=64, PASS_N=64,
    PASS_WARPS=4, PASS_STAGES=1,
)  # fmt: skip
PASS = {"DQ": "pass", "DQ_WARPS": 1}
SHARED = {"QUERY_WARPS": 2, "PART": 16, "WARPS": 2, "BLOCK_N": 32}
"""P and dS pass through shared memory."""


def problem(seqlen_q=1024, seqlen_k=1024, head_dim=64, heads=4, kv_heads=2, **rest) -> AttentionProblem:
    return AttentionProblem(1, heads, kv_heads, seqlen_q, seqlen_k, head_dim, op="backward", **rest)


def config(**genes) -> KernelConfig:
    return load_space("backward_mma", L4).make_config(BASE | genes)


OF_TABLES = "where(a[k//9,i[q]]>9,s,s*g[h,k]+r[q,b]*a[k//9,i[q]]+n[h,min(max(k-q,-30),30)+30]*min(s,a[b,h]))"
TABLES = "g:bf16:4x90+r:fp32:100x1+n:fp32:4x61+a:fp16:10x4+i:int32:100"
"""Of keys, queries, diagonals, and pairs and heads at once."""
LOWER, UPPER = {"mask": "causal_lower_right"}, {"mask": "causal_upper_left"}
RIGHT = [
    (problem(100, 130, 64), {}, "large_logits"),
    (problem(70, 100, 24, layout="bshd", **LOWER), SHARED | {"QUERY_SPLIT": 2, "DQ_WARPS": 4, "BLOCK_M": 64}, "plain"),
    (problem(100, 70, 72, dtype="bf16", **LOWER), PASS | {"STAGES": 1, "PASS_STAGES": 2}, "low_scores"),
    (problem(70, 163, 64, **UPPER), {"KV_PLACE": "registers", "SMEM_LAYOUT": "padded"}, "parts_of_keys"),
    (problem(1, 139, 40), {"BLOCK_M": 16, "PART": 16, "DQ_WARPS": 1, "BLOCK_ORDER": "heads"}, "plain"),
    (problem(40, 70, 256, dtype="bf16"), SHARED | {"STAGES": 1}, "large_gradients"),
    (problem(40, 70, 256), SHARED | PASS | {"STAGES": 1, "PASS_M": 32, "PASS_WARPS": 2, "PASS_N": 32}, "plain"),
    (problem(40, 70, 192, value_dim=128), {"BLOCK_N": 32, "WARPS": 2, "PART": 16, "STAGES": 1}, "plain"),
    (problem(70, 90, 16, value_dim=48, window="20:13"), {"STAGES": 3, "DQ_WARPS": 4, "BLOCK_M": 64}, "plain"),
    (problem(70, 90, softcap=5.0, deterministic=True, **LOWER), PASS | {"PASS_N": 32}, "large_logits"),
    (problem(70, 90, 48, alibi=True, sink=True, grads="sinks", lse=True), {"QUERY_SPLIT": 4}, "plain"),
    (problem(70, 90, 48, bias="bhs", grads="bias", deterministic=True), PASS, "plain"),
    (
        problem(70, 90, 32, bias="s", sink=True, grads="bias+sinks", softcap=5.0),
        PASS | {"BLOCK_ORDER": "heads"},
        "plain",
    ),
    (
        problem(70, 90, 48, score="s+t[h,q,k]", tables="t:fp32:4x70x90", grads="own_t", deterministic=True),
        PASS,
        "plain",
    ),
    (
        problem(100, 90, 32, score=OF_TABLES, tables=TABLES, grads="own_g+own_r+own_n+own_a", softcap=5.0, **LOWER),
        SHARED | {"QUERY_SPLIT": 2, "CAUSAL_SKIP": True, "BLOCK_M": 64},
        "plain",
    ),
    (problem(70, 90, 32, seqused="10:80", window="30:0", **LOWER), {"QUERY_SPLIT": 2}, "plain"),
    (
        problem(70, 90, 48, sink=True, grads="sinks", **LOWER).with_(batch=3, varlen="0+70+5/0+90+9"),
        SHARED,
        "plain",
    ),
    (problem(70, 90, 48, varlen="0:70", alibi=True), PASS | {"PASS_M": 32, "PASS_WARPS": 2}, "plain"),
    (problem(70, 90, 48, score="s*0.9+0.3*b").with_(batch=2, varlen="40+70/90+20"), {}, "plain"),
]
REFUSED = [
    ({"BLOCK_N": 48}, "BLOCK_N=48"),
    ({"BLOCK_M": 48, "QUERY_WARPS": 2}, "BLOCK_M=48"),
    ({"BLOCK_M": 48}, "PART=32"),
    ({"WARPS": 8, "BLOCK_N": 128, "QUERY_WARPS": 4, "BLOCK_M": 128}, "over 16 warps"),
    ({"DQ_WARPS": 8}, "DQ_WARPS=8"),
    ({"WARPS": 8, "BLOCK_N": 128, "DQ_WARPS": 1}, "half or more have none"),
    (PASS | {"PASS_M": 32}, "PASS_M=32"),
    (PASS | {"QUERY_SPLIT": 2}, "QUERY_SPLIT=2"),
    (PASS | {"DQ_WARPS": 2}, "DQ_WARPS=2 does nothing"),
    ({"PASS_N": 32}, "PASS_N=32 does nothing"),
    ({"BLOCK_N": 256}, "registers"),
    ({"BLOCKS_PER_SM": 4}, "102400"),
]
REFUSED_OF = [
    (problem(dtype="fp32"), {}, "fp32"),
    (problem().with_(op="forward"), {}, "computes backward"),
    (problem(head_dim=264), {}, "264"),
    (problem(head_dim=8), {}, "not 8"),
    (problem(16, 1024), {}, "16 queries"),
    (problem(1024, 32), {}, "32 keys"),
    (problem(32, 1024, kv_heads=4), {}, "STAGES=2"),
    (problem(64, 1024), {"QUERY_SPLIT": 8}, "4 tiles"),
    (problem(1024, 64), {"BLOCK_ORDER": "heads"}, "same order"),
    (problem(1024, 1 << 23), {"BLOCK_ORDER": "heads"}, "grid z"),
    (problem(head_dim=256), {}, "shared memory"),
    (problem(deterministic=True), {}, "DQ=pass"),
    (problem(deterministic=True), PASS, None),
    (problem(deterministic=True, bias="hs", grads="bias"), PASS, "any order"),
    (problem(deterministic=True, score="s+t[k]", tables="t:fp32:1024", grads="own_t"), PASS, "down_t of a table"),
    (problem(1 << 20, 1 << 20, 128, 128, 128), {"STAGES": 1}, "GiB"),
]
STARTING = [
    (problem(head_dim=head_dim, **rest), gpu, which)
    for gpu, head_dim, which, rest in (
        (L4, 64, 0, {}),
        (H100, 64, {"BLOCK_N": 128, "DQ": "pass"}, UPPER),
        (L4, 128, {"BLOCK_N": 64, "QUERY_WARPS": 1}, {}),
        (H100, 128, {"BLOCK_N": 128, "QUERY_SPLIT": 1}, {}),
        (L4, 256, 0, {}),
    )
]
DRAWN_FOR = [
    (problem(130, 90, 64, dtype="bf16", lse=True), L4, {}),
    (problem(90, 130, 128, layout="bshd", **UPPER), H100, {"DQ": "add"}),
    (problem(77, 133, 80, window="40:7"), L4, {"DQ": "pass"}),
    (problem(70, 97, 256, dtype="bf16", deterministic=True, **LOWER), H100, {}),
]

TOP = "__syncthreads();  // this tile is visible to all warps"
SCORES = "__syncthreads();  // dS (and P) are visible to all warps"
WAIT, PASS_WAIT = "cp_async_wait<(STAGES > 1 ? STAGES - 2 : 0)>();", "cp_async_wait<(PASS_STAGES > 1 ? PASS_STAGES"
NOT_ATOMIC = [("red_add(fragment_gmem", "*(fragment_gmem"), ("+ lane, x[m][n][i]);", "+ lane) += x[m][n][i];")]
ONE, THREE = {"STAGES": 1}, {"STAGES": 3}
FAULTS = [
    ("no barrier per tile", {}, [(TOP, "//")]),
    ("no barrier per tile, one stage", ONE, [(TOP, "//")]),
    ("no barrier before dS is read", {}, [(SCORES, ";//")]),
    ("no barrier before P and dS are read", SHARED, [(SCORES, ";//")]),
    ("a stage reused before the barrier", PASS | ONE, [(SCORES, ";//")]),
    (
        "a stage reused before P's product",
        SHARED | ONE,
        [("__syncthreads();  // no warp still reads Q and dO", ";//")],
    ),
    (
        "a tile copied before the barrier",
        SHARED,
        [(TOP, "copy_next();\n" + TOP), ("if constexpr (STAGES > 1) copy_next();", "")],
    ),
    ("weak wait for a tile", {}, [(WAIT, "cp_async_wait<1>();")]),
    ("weak wait for a tile, one stage", ONE, [(WAIT, "cp_async_wait<1>();")]),
    ("weak wait for a tile, three stages", THREE, [(WAIT, "cp_async_wait<2>();")]),
    ("dK stored before all have read", {}, [("__syncthreads();     // no warp still reads what", "//")]),
    ("dK read before all is there", {}, [("__syncthreads();  // all of dK and dV", "//")]),
    ("dK stored out of bounds", {}, [("    if (row < valid_rows) {", "    {")]),
    ("loads out of bounds", {}, [("row < valid_rows ? 16 : 0", "16")]),
    ("loads of V out of bounds", {"KV_PLACE": "v_registers"}, [("&& lane / 4 + row < valid_rows", "")]),
    ("rows of O out of bounds", {}, [("min(first + n * ROWS_BESIDE, rows - 1)", "first + n * ROWS_BESIDE")]),
    ("dQ stored out of bounds", {}, [("if (number < valid_rows) store", "store")]),
    ("dQ added without atomics", {}, NOT_ATOMIC),
    ("dK added without atomics", {"QUERY_SPLIT": 2}, NOT_ATOMIC),
    ("no barrier per tile of keys", PASS, [("__syncthreads();  // this tile of K and V", "//")]),
    ("weak wait for a tile of keys", PASS | {"PASS_STAGES": 2}, [(PASS_WAIT + " - 2 : 0)>();", "cp_async_wait<1>();")]),
    ("keys reused before the barrier", PASS, [("__syncthreads();  // no warp still reads K and V", "//")]),
    ("dQ read before all is there", PASS, [("__syncthreads();  // all of dQ", "//")]),
]  # fmt: skip
TERM_FAULTS = [
    ("no barrier before a tile's sink is summed", {}, [("__syncthreads();  // the tile's terms", "//")]),
    ("no barrier before the sums of warps", {}, [("__syncthreads();  // every warp's sum", "//")]),
    ("the bias read out of bounds", {}, [("      if (query < seqlen_q && key < seqlen_k)", "")]),
    ("its gradient out of bounds", {}, [("if (key < seqlen_k && query < seqlen_q) red_add", "red_add")]),
    ("its gradient out of bounds, next row", {}, [("if (key < seqlen_k && query + 1 < seqlen_q) red_add", "red_add")]),
]
WITHOUT_QUERIES = [
    ("K not waited for", {}, [("cp_async_wait<0>();  // without a query", "//")]),
    ("dK stored before K is there", {}, [("__syncthreads();     // no warp still reads what", "//")]),
]
WITHOUT_KEYS = [
    ("Q not waited for", PASS, [("cp_async_wait<0>();  // without a key", "//")]),
    ("dQ stored before Q is there", PASS, [("__syncthreads();     // no warp still reads Q,", "//")]),
    ("terms of rows out of bounds", PASS, [("if (row < seqlen_q) { const float*", "{ const float*")]),
]
PLACES = {
    "backward_mma": (FAULTS, (problem(113, 203, 64), "plain")),
    "its terms": (TERM_FAULTS, (problem(77, 90, 32, bias="bhs", sink=True, grads="bias+sinks"), "plain")),
    "keys without queries": (WITHOUT_QUERIES, (problem(40, 200, 64, **UPPER), "plain")),
    "queries without keys": (WITHOUT_KEYS, (problem(200, 100, 64, **LOWER), "plain")),
}


@pytest.mark.slow
def test_shared_memory_of_python_is_that_of_cuda():
    """The static_assert of the kernel over draws of all genes that it depends on; the kernels themselves are left
    out."""
    draw, cases = random.Random(0), []
    for i in range(24):
        p = problem(head_dim=draw.choice((16, 24, 64, 72, 256)), value_dim=draw.choice((0, 16, 40, 128)))
        genes = {
            "QUERY_WARPS": draw.choice((1, 2)),
            "STAGES": draw.choice((1, 2, 3)),
            "SMEM_LAYOUT": draw.choice(("swizzled", "padded")),
            "KV_PLACE": draw.choice(("shared", "v_registers", "registers")),
            "DQ": draw.choice(("add", "pass")),
            "QUERY_SPLIT": draw.choice((1, 2)),
        }
        genes |= {"PART": 16, "QUERY_SPLIT": 1 if genes["DQ"] == "pass" else genes["QUERY_SPLIT"]}
        text = render(FAMILY, p, config(**genes), L4).source.partition('extern "C" __global__')[0]
        cases.append(f"namespace case{i} {{\n{text}\n}}")
    compile_source("\n".join(cases), L4.arch)


@pytest.mark.parametrize(
    ("rest", "mean", "most", "count"),
    [
        ({}, 4.0, 4, 3),
        (UPPER, (4 + 2 + 0) / 3, 4, 3),  # queries from 0, from 64 and from 128 on: of the latter there are none
        (LOWER, (4 + 4 + 2) / 3, 4, 3),  # the last query sees the last key
        ({"window": "0:0"}, (0 + 2 + 2) / 3, 2, 3),  # from the query that sees the tile's first key to that of its last
        ({"varlen": "128+0/192+64"}, (4 + 4 + 4 + 0) / 4, 4, 4),
    ],
)
def test_tiles_of_queries_of_a_block_of_keys(rest, mean, most, count):
    p = AttentionProblem(2 if "varlen" in rest else 1, 2, 1, 128, 192, 64, op="backward", **rest)
    assert key_steps(p, 32, 64) == (pytest.approx(mean), most, count)


@pytest.mark.parametrize(
    "asked, genes, names",
    [
        ({}, PASS, ()),
        ({}, {}, ("dq",)),
        ({}, {"QUERY_SPLIT": 2}, ("dq", "dk", "dv")),
        ({"bias": "bhs", "grads": "bias"}, PASS, ()),
        ({"bias": "hs", "grads": "bias"}, PASS, ("dbias",)),
        ({"deterministic": True}, PASS, ()),
        ({"score": "s+t[h,q,k]", "tables": "t:fp32:4x1024x1024", "grads": "own_t"}, PASS, ()),
        ({"score": "s+t[h,q,k]", "tables": "t:fp32:4x1024x1023", "grads": "own_t"}, PASS, ("down_t",)),
    ],
)
def test_which_outputs_may_differ_from_run_to_run(asked, genes, names):
    assert FAMILY.unordered(problem(**asked), config(**genes)) == names


def test_the_compiler_s_registers_are_the_most_of_launches_with_bounds_of_their_own():
    blocks_of_keys, dq = FAMILY.work(
        problem(head_dim=128), config(**PASS, BLOCK_N=128, WARPS=8, QUERY_WARPS=2, PART=16, PASS_WARPS=2), 255
    )[1:]
    assert (blocks_of_keys.threads, blocks_of_keys.registers, dq.registers) == (512, 128, 255)
