"""backward_mma: what `why_invalid` promises, and which outputs may differ."""

import pytest

from evoattn.families.backward_mma.family import BackwardMma
from evoattn.families.backward_mma.resources import key_steps
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from tests.families.on_interpreter import configs

FAMILY, L4, H100 = BackwardMma(), GPUS["l4"], GPUS["h100"]
BASE = dict(
    BLOCK_M=32, BLOCK_N=64, WARPS=4, QUERY_WARPS=1, PART=32, CAUSAL_SKIP=False, STAGES=2, SMEM_LAYOUT="swizzled",
    KV_PLACE="shared", DQ="add", DQ_WARPS=2, QUERY_SPLIT=1, BLOCK_ORDER="keys", BLOCKS_PER_SM=1, PASS_M=64, PASS_N=64,
    PASS_WARPS=4, PASS_STAGES=1,
)  # fmt: skip
PASS = {"DQ": "pass", "DQ_WARPS": 1}


def problem(seqlen_q=1024, seqlen_k=1024, head_dim=64, heads=4, kv_heads=2, **rest) -> AttentionProblem:
    return AttentionProblem(1, heads, kv_heads, seqlen_q, seqlen_k, head_dim, op="backward", **rest)


config = configs("backward_mma", L4, BASE)


LOWER, UPPER = {"mask": "causal_lower_right"}, {"mask": "causal_upper_left"}
REFUSED_OF = [
    (problem(1024, 1 << 23), {"BLOCK_ORDER": "heads"}, "grid z"),
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
