"""latent_columns: right on the interpreter's cases, wrong where a place that matters is changed, and refusals that know
the problem."""

import pytest

from evoattn.families.registry import FAMILIES
from evoattn.model.gpu import GPUS
from evoattn.model.named_problems import lookup
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import load_space
from tests.families.on_interpreter import built, small_faults

H100, FAMILY = GPUS["h100"], FAMILIES["latent_columns"]
NARROW = parse_shape("B=2,H=8,Hkv=1,Sq=1,Sk=3000,D=192,Dv=128,dtype=bf16,shared_kv=1")
BASE = dict(BLOCK_M=16, QUERIES=1, BLOCK_N=64, STAGES=2)


def config(**genes):
    return load_space("latent_columns", H100).make_config(BASE | genes)


CASES = {
    "alone": (NARROW.with_(lse=True), {}),
    "causal": (NARROW.with_(mask="causal_lower_right", dtype="fp16"), {"STAGES": 3}),
    "32 heads, pages of 16": (
        NARROW.with_(seqused="0:3000", page=16, layout="bshd", lse=True),
        {"BLOCK_M": 32, "STAGES": 3},
    ),
    "queries, causal": (
        NARROW.with_(seqlen_q=5, mask="causal_lower_right", lse=True, seqused="0:3000"),
        {"BLOCK_M": 32, "QUERIES": 4},
    ),
    "keys in use": (NARROW.with_(seqused="0:3000", batch=3, mask="causal_upper_left"), {}),
    "rotary columns apart": (NARROW.with_(shared_kv=False, rotary_apart=True, lse=True), {}),
    "rotary columns apart, pages": (
        NARROW.with_(shared_kv=False, rotary_apart=True, seqused="0:3000", page=16, layout="bshd"),
        {"STAGES": 3},
    ),
    "DeepSeek's widths": (lookup("mla_decode").with_(seqused="0:2000", page=64, layout="bshd"), {}),
}


def faults(name: str, edits: tuple[tuple[str, str], ...] = (), cases: slice = slice(None)) -> list[str]:
    """What the interpreter's cases find in the kernel with these edits; empty for a right one."""
    problem, genes = CASES[name]
    return small_faults(built(FAMILY, problem, config(**genes), H100, *edits), problem, cases)


@pytest.mark.slow
@pytest.mark.parametrize(("turn", "name"), list(enumerate(CASES)))
@pytest.mark.sampled(3)
def test_it_is_right(turn, name):
    """On every third small case, in turns."""
    assert faults(name, cases=slice(turn % 3, None, 3)) == []


WRONG = {
    "P is read before it is written": (
        "alone",
        "sum[column_of(i)] += s[i];\n    named_barrier_sync<CONSUMERS>(P_READY);",
        "sum[column_of(i)] += s[i];",
    ),
    "maxima of other warps before they are there": ("alone", "named_barrier_sync<CONSUMERS>(WARPS_DONE);", ";"),
    "K is given back while P V reads it": (
        "alone",
        "multiply_vp();\n      wgmma_wait<0>();\n",
        "multiply_vp();\n",
    ),
    "groups that are not waited for": ("alone", "__syncthreads();  // the sums of all groups", "// the sums"),
    "O is stored before all of it is there": (
        "alone",
        "named_barrier_sync<CONSUMERS>(P_READY);\n    constexpr int PIECES",
        "constexpr int PIECES",
    ),
    "two results in one place": ("alone", "leave(2 * blockIdx.x + (sharers > 0));", "leave(2 * blockIdx.x);"),
    "a block too few adds up": ("alone", "- int(blockIdx.x) + 1; }", "- int(blockIdx.x); }"),
    "a merge that does not wait": (
        "keys in use",
        "grid_dependency_wait();  // for the results",
        ";  // for the results",
    ),
    "a merged sum without its shift": ("alone", "log_sum(share.shift, share.sum)", "log_sum(0.f, share.sum)"),
    "the last keys are not hidden": ("causal", ">= seen) s[i]", "> seen) s[i]"),
    "keys of the first query": ("queries, causal", "first_keys + row_of(column_of(i)) / HEADS", "first_keys"),
    "a merge of other rows": (
        "queries, causal",
        "query % QUERIES * HEADS + group_head % HEADS;",
        "group_head % HEADS;",
    ),
    "all keys are in use": ("keys in use", "return used;", "return seqlen_k;"),
    "batches of one head": ("keys in use", "tile.batch * given.kv_rows;", "tile.batch * used;"),
    "one table for all sequences": ("32 heads, pages of 16", "given.table + tile.batch *", "given.table + 0 *"),
    "K is used before V is there": ("rotary columns apart", "APART ? 2 : 1)", "1)"),
    "O does not follow the shift": ("alone", "o[chunk][i] *= factor[column_of(i)];", "{}"),
    "sequences of the next 32 lanes": ("keys in use", "row_begin += before_it;", "row_begin += before_it + 1;"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.sampled(6)
def test_a_wrong_one_is_found(fault):
    name, old, new = WRONG[fault]
    assert faults(name, ((old, new),))


REFUSED_OF = [
    (NARROW.with_(**changes), *row)
    for changes, *row in (
        ({}, {}, None),
        ({"shared_kv": False}, {}, "first columns of K"),
        ({"value_dim": 96}, {}, "of V of whole 64, not 192 and 96"),
        ({"head_dim": 640, "value_dim": 640}, {}, "at most 512"),
        ({"head_dim": 576, "value_dim": 512}, {"STAGES": 3}, "shared memory"),
        ({}, {"BLOCK_M": 32}, "BLOCK_M=32 and QUERIES=1 have 32 heads"),
        ({"seqlen_k": 100}, {"STAGES": 4}, "STAGES=4 is more than the 2 tiles"),
    )
]
