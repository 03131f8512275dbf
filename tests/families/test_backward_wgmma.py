"""backward_wgmma computes gradients by every order and place that its genes name, by block lists, and with the same
bits in every run where that is asked; and a fault of it is found."""

from dataclasses import replace

import pytest

from evoattn.backends.interpreter import InterpreterBackend
from evoattn.families.registry import FAMILIES, load_space
from evoattn.families.render import render
from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from tests.families.on_interpreter import built, judged, small_faults

H100, FAMILY = GPUS["h100"], FAMILIES["backward_wgmma"]
START = load_space("backward_wgmma", H100).starting_configs()[0]
SHARED = {"P_PLACE": "shared", "DS_PLACE": "shared", "BLOCK_N": 64, "DIM_GROUPS": 2, "DQ_ROWS": "queries"}
ODD = {"BLOCK_M": 80, "DQ_ROWS": "dims", "ORDER": "dv_last", "TERMS_EARLY": False}
"""Tiles of queries that are not whole tiles of 64, which dV behind dS leaves registers for."""
THIRDS = SHARED | {"BLOCK_M": 96, "DIM_GROUPS": 3, "DQ_ROWS": "dims", "DS_STAGES": 1}
ONE = {"BLOCK_M": 64, "DQ_ROWS": "one", "DQ_SUM": "warp", "ORDER": "dv_last", "TERMS_EARLY": False}
SHARES_DIMS = {"BLOCK_M": 48, "P_PLACE": "shared", "DS_PLACE": "shared", "DQ_ROWS": "dims"}
BESIDE, CLAIMED, OWN_FIRST = {"DQ_SUM": "warp"}, {"SCHEDULE": "claimed"}, {"DQ_WHEN": "own_first"}
FEW = replace(H100, sm_count=3)
"""Where blocks claim several tiles of keys each."""
GENES = [
    (ODD | {"QUERY_SPLIT": 3, "ROTATE": True}, "softcap=20"),
    (SHARED | CLAIMED, "window=20:9 softcap=20 bias=hs grads=bias"),
    (
        BESIDE
        | CLAIMED
        | OWN_FIRST
        | {"P_PLACE": "shared", "DS_PLACE": "shared", "DQ_BEGIN": "stored", "BLOCK_ORDER": "sections"},
        "mask=causal lse=1 sink=1 grads=sinks score=s-0.02*(q-k)*(q-k)",
    ),
    (
        SHARED | CLAIMED | {"QUERY_SPLIT": 2, "BLOCK_ORDER": "heads"},
        "mask=causal_lower_right lse=1 alibi=1 varlen=0:200",
    ),
]
SINGLE = {"BLOCK_M": 128, "Q_STAGES": 1, "DO_STAGES": 1, "DS_STAGES": 1, "TERMS_EARLY": True}
ALONE = [
    ({}, "B=2 H=4 S=100 D=128 mask=causal lse=1", ()),
    (SINGLE, "B=2 H=2 S=77 D=64 mask=causal_lower_right", ()),
    (SHARED | SINGLE | {"BLOCK_M": 64}, "B=1 H=4 S=64 D=256 softcap=20 alibi=1", ()),
    ({}, "B=1 H=2 Sq=130 Sk=90 D=72 layout=bshd bias=hs", ()),
    ({}, "B=1 H=2 Sq=130 Sk=100 D=32 deterministic=1", ()),
    (SINGLE | {"BLOCK_M": 80, "DQ_ROWS": "dims"}, "B=1 H=2 S=75 D=96 mask=causal", ()),
    (SINGLE | {"BLOCK_M": 80, "DQ_ROWS": "dims"}, "B=1 H=2 S=75 D=128", (("odd ? low : high", "odd ? high : low"),)),
    ({}, "B=1 H=2 Sq=130 Sk=128 D=128", (("done += BLOCK_M", "done += 0"),)),
    ({}, "B=1 H=4 S=100 D=128", (("block.batch, block.kv_head,\n", "block.batch, 0,\n"),)),
    ({}, "B=1 H=2 S=100 D=96", (("DQ_COLUMNS + lane % 4 * 2;", "DQ_COLUMNS + lane % 2 * 2;"),)),
    ({}, "B=1 H=2 S=100 D=128", (("    named_barrier_sync<128 * WARPGROUPS>(SCORES);  // they are there\n", ""),)),
]
"""One launch, and faults of it."""
WHOLE = CLAIMED | {"LAUNCHES": "two", "BLOCK_ORDER": "keys", "ORDER": "dv_last", "TERMS_EARLY": False}
HEADS = [
    ({}, "B=2 H=3 S=200 D=64 mask=causal lse=1 deterministic=1", ()),
    ({"BLOCK_M": 128}, "B=1 H=5 Sq=130 Sk=300 D=64 softcap=20", ()),
    (ODD | {"DS_PLACE": "shared"}, "B=1 H=8 Hkv=4 Sq=150 Sk=200 D=96 mask=causal_lower_right", ()),
    ({"BLOCK_M": 64, "DQ_ROWS": "queries"}, "B=1 H=7 S=150 D=48 layout=bshd alibi=1", ()),
    ({}, "B=1 H=4 S=300 D=64", (("s[i + 3] = four.w;", "s[i + 3] = four.z;"),)),
    ({}, "B=1 H=4 S=200 D=64", (("next >= mask.seqlen_k || ", ""),)),
    ({}, "B=1 H=4 S=200 D=64 mask=causal", ((" || mask.first_query(next) / BLOCK_M > walk.tile", ""),)),
    ({}, "B=1 H=4 S=200 D=64", (("if (number % at_once == 0)", ""),)),
    ({}, "B=1 H=4 S=200 D=64", (("int64_t(blockIdx.x) * group + walk.head", "walk.head"),)),
    ({}, "B=1 H=4 Hkv=2 S=200 D=64", ((" + walk.head - block.kv_head * group;", ";"),)),
    ({}, "B=1 H=4 S=300 D=64", (("if (block.key_tile > 0) {", "if (true) {"),)),
]
"""Blocks that have all tiles of keys of a head, one after another, and faults of them."""
WAITS = [
    "while (acquire(added_to(walk)) < (IN_ORDER ? turn : STORED)) {}",
    "mbarrier_wait(smem_address + Smem::K_EMPTY, parity ^ 1);",
    "mbarrier_wait(smem_address + scores_of(1 - warpgroup), ds_parity);",
]
PRODUCTS = {"BLOCK_N": 64, "DIM_GROUPS": 2, "DO_STAGES": 1, "GROUP_SHARE": "products"}
PAIR = PRODUCTS | {"DS_STAGES": 1, "PAIR": True}
TURNED = SHARED | PRODUCTS | {"BLOCK_N": 96, "DQ_ROWS": "dims", "DS_STAGES": 1, "DKV_ROWS": "dims"}
PAIRS = [
    (PRODUCTS | {"DS_STAGES": 1, "QUERY_SPLIT": 3}, "softcap=20 lse=1", "D=128", ()),
    (PRODUCTS | {"BLOCK_M": 80, "DQ_ROWS": "dims"}, "mask=causal", "D=192", ()),
    (PRODUCTS | {"Q_STAGES": 1, "DQ_SUM": "warp", "DQ_BEGIN": "stored"}, "mask=causal_lower_right", "D=256", ()),
    (TURNED, "mask=causal lse=1", "D=192 Dv=128", ()),
    (TURNED | {"QUERY_SPLIT": 2, "TERMS_EARLY": False}, "window=20:9 alibi=1", "D=160", ()),
    (TURNED, "", "D=192", ("named_barrier_sync<128>(OWN + warpgroup);  // all warps", "// all warps")),
    (TURNED, "", "D=192", ("named_barrier_sync<128>(OWN + warpgroup);\n#pragma", "#pragma")),
    (TURNED, "", "D=192", ("row += 64", "row += 128")),
    (TURNED, "mask=causal", "D=192", ("key, DKV_BY_DIMS ? BLOCK_N : 64", "key, 64")),
    (TURNED | {"BLOCK_N": 128, "DQ_SUM": "warp", "DS_STAGES": 2}, "mask=causal_lower_right", "D=128", ()),
    (PAIR | {"BLOCK_ORDER": "sections"}, "window=90:9 softcap=20", "D=256", ()),
    (PAIR | {"DQ_ROWS": "dims", "TERMS_EARLY": False, "BLOCK_ORDER": "heads"}, "mask=causal alibi=1", "D=256", ()),
    (PAIR, "", "D=256", ("mbarrier_wait_cluster(smem_address + Smem::OTHER_FULL + 8 * score_stage, ds_parity);", "")),
    (
        PAIR,
        "",
        "D=256",
        ("    mbarrier_wait_cluster(smem_address + Smem::OTHER_EMPTY + 8 * score_stage, ds_parity ^ 1);\n", ""),
    ),
    (PAIR, "", "D=256", ("named_barrier_sync<128 * WARPGROUPS>(PROBABILITIES);  // P is there", "// P is there")),
    (PAIR, "", "D=256", ("key_tile ^ 1;", "key_tile;")),
]
"""Warpgroups with products of their own, pairs of blocks, and faults of these."""
KEYLESS = ["B=1 mask=causal_lower_right", "B=1 window=20:9", "B=3 varlen=40+90+300/5+0+100"]
"""Masks and lengths by which queries see no key."""
SMALL = {"BLOCK_N": 64, "DQ_ROWS": "dims", "PRODUCER": "warp"}
BY_WARP = {"BLOCK_N": 64, "DQ_ROWS": "dims", "ORDER": "dv_last", "DS_PLACE": "shared", "DQ_SUM": "warp"}
MIXED = "B=1 H=4 Hkv=2 Sq=130 Sk=150 D=64 mask=causal_lower_right blocks=h:128x64:100+70:mixed"
SHORT = "B=2 H=2 Sq=130 Sk=150 D=64 blocks=b:64x64:1/1/3 predicate=k-q<reach[b,h] tables=reach:int32:2x2"
"""Heads ask the predicate themselves."""
BITS = (
    "B=1 H=2 Sq=130 Sk=150 D=64 mask=causal_lower_right blocks=64x64:1/1/2 tables=seen:bool:97 "
    "predicate=((k//3+q//5)%7<3)|seen[wrap(k-q)]|(q%2==0)"
)
"""It is asked once for both."""
LISTED = {
    "mixed": (SMALL, MIXED),
    "by a warp": (BY_WARP, MIXED),
    "asked": (BY_WARP, SHORT),
    "bits": (SMALL, BITS),
    "a short block": (SMALL, "B=1 H=2 Hkv=1 Sq=70 Sk=90 D=64 blocks=256x64:40+70"),
}
WRONG = {
    "PARTIAL taken for FULL": ("mixed", ("(of.partial & lowest) != 0", "false")),
    "FULL taken for PARTIAL": ("mixed", ("(of.partial & lowest) != 0", "true")),
    "another head is told": ("mixed", ("make_int2(head, 2", "make_int2(0, 2")),
    "tiles past the last": ("a short block", ("min(tile + tiles, block.tiles)", "tile + tiles")),
    "all lanes add": ("by a warp", ("      if (!issues()) continue;\n", "")),
    "key and query exchanged": ("asked", ("terms.shows(batch, head, key, row)", "terms.shows(batch, head, row, key)")),
    "bits of the key before": ("bits", ("(key + i * 8) * list.bits_row", "(key + i * 8 - 1) * list.bits_row")),
    "bits stored by another key": ("bits", ("bits[int64_t(first_key + lane)", "bits[int64_t(first_key + (lane ^ 1))")),
}


class ByTurns(InterpreterBackend):
    """Every second run begins some blocks late."""

    def run(self, *launched):
        self.late_blocks = not self.late_blocks
        return super().run(*launched)


def judged_once(params, text, *edits, gpu=H100, **how):
    problem = parse_shape(f"op=backward {text}")
    config = type(START)(START.family, START.params | params)
    assert FAMILY.why_impossible(problem, config, gpu) is None
    return judged(built(FAMILY, problem, config, gpu, *edits), problem, **how)


def faults(params, text, *edits, dims="D=128"):
    """What the cases that find most, and another one, say of a kernel."""
    problem = parse_shape(f"B=1 H=2 Hkv=1 S=200 {dims} op=backward {text}")
    config = type(START)(START.family, START.params | params)
    assert FAMILY.why_impossible(problem, config, FEW) is None
    return small_faults(built(FAMILY, problem, config, FEW, *edits), problem, len(text))


@pytest.mark.slow
@pytest.mark.parametrize("params, text", GENES)
@pytest.mark.sampled(2)
def test_gradients_are_right(params, text):
    assert faults(params, text) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "params, text, dims",
    [
        ({}, "mask=causal", "D=184 Dv=72"),
        (OWN_FIRST, "mask=causal", "D=184 Dv=72"),
        ({"BLOCK_M": 64, "DQ_ROWS": "queries", "DQ_SUM": "warp"}, "mask=causal", "D=48"),
        (THIRDS, "window=20:9 lse=1", "D=192"),
    ],
)
@pytest.mark.sampled(2)
def test_warpgroups_share_dimensions(params, text, dims):
    assert faults(SHARES_DIMS | params, text, dims=dims) == []


PART_OF_V = {"DQ_ROWS": "dims", "DQ_SUM": "registers"}
OPERANDS = [
    ({}, "mask=causal", "D=72", ()),
    (CLAIMED | {"DQ_BEGIN": "stored"}, "mask=causal_lower_right", "D=64", ()),
    ({"QUERY_SPLIT": 2}, "window=20:9 lse=1", "D=80 Dv=40", ()),
    (
        {"DQ_ROWS": "queries", "DQ_SUM": "registers"},
        "",
        "D=64",
        ("Smem::V + step / 4", "Smem::K + step / 4"),
    ),
    ({}, "", "D=96", ("int row = keys * 64 + warp * 16 + lane % 16;", "int row = warp * 16 + lane % 16;")),
    ({}, "", "D=80", ("key_tile_of<true, true, false>", "key_tile_of<true, true, true>")),
    (
        {"DQ_ROWS": "queries", "SCHEDULE": "claimed"},
        "mask=causal",
        "D=64",
        ("fence_proxy_async(), __syncwarp();  // the next ones may come", ";"),
    ),
    (PART_OF_V, "window=20:9", "D=128", ()),
    (PART_OF_V | OWN_FIRST, "mask=causal_lower_right", "D=120", ()),
    (PART_OF_V, "", "D=128", ("registers[step], b, step > 0", "registers[step / 2], b, step > 0")),
]
"""V or a part of it in registers, dQ of one warpgroup, and faults of these."""


@pytest.mark.slow
@pytest.mark.parametrize("params, text, dims, edit", OPERANDS)
@pytest.mark.sampled(2, edits=True)
def test_v_in_registers_and_dq_of_one_warpgroup(params, text, dims, edit):
    assert bool(faults(ONE | params, text, *[edit] * bool(edit), dims=dims)) == bool(edit)


BY_TWO = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCKS_PER_SM": 2, "PRODUCER": "warp", "DS_STAGES": 1}
BY_THREE = {"BLOCK_M": 48, "BLOCK_N": 64, "DIM_GROUPS": 3, "Q_STAGES": 3, "DO_STAGES": 3}
IN_TURN = {"P_PLACE": "shared", "DS_PLACE": "shared", "DQ_ROWS": "dims", "ORDER": "in_turn", "TERMS_EARLY": False}


@pytest.mark.slow
@pytest.mark.parametrize("params, dims", [(BY_TWO, "D=64"), (BY_THREE, "D=192")])
def test_v_takes_no_registers_that_products_beside_p_in_shared_memory_want(params, dims):
    problem = parse_shape(f"B=2 H=8 S=2048 {dims} op=backward")
    config = type(START)(START.family, START.params | IN_TURN | params)
    assert FAMILY.why_invalid(problem, config, H100) is None
    info = built(FAMILY, problem, config, H100, machine_code=True).compiled.info
    assert (info.spill_bytes, info.warnings) == (0, ())


@pytest.mark.slow
@pytest.mark.parametrize(
    "params, text",
    [
        ({}, "varlen=0+5+40 B=3 H=2 S=40"),
        ({}, "varlen=40+20 B=2 H=2 S=40 score=s*0.9+0.3*b"),
        (ODD, "B=2 H=2 Sq=90 Sk=151 bias=s grads=bias"),
        (SHARED, "B=2 H=1 Sq=90 Sk=152 bias=hs grads=bias"),
    ],
)
def test_short_sequences_and_the_gradient_of_a_bias(params, text):
    problem, config = parse_shape(f"D=128 op=backward {text}"), type(START)(START.family, START.params | params)
    assert judged(built(FAMILY, problem, config, H100), problem).passed


@pytest.mark.slow
@pytest.mark.parametrize("params, text, dims, edit", PAIRS)
@pytest.mark.sampled(2, edits=True)
def test_warpgroups_with_products_of_their_own_and_blocks_that_share_dq(params, text, dims, edit):
    assert bool(faults(params, text, *[edit] * bool(edit), dims=dims)) == bool(edit)


def test_a_pair_shares_dimensions_and_no_queries():
    for dim, word in ((128, "a head_dim of 256"), (256, "not queries")):
        genes = PAIR | {"BLOCK_M": 128, "Q_STAGES": 1, "DQ_ROWS": "queries"}
        config, problem = (
            type(START)(START.family, START.params | genes),
            parse_shape(f"B=1 H=1 S=200 D={dim} op=backward"),
        )
        assert word in (FAMILY.why_impossible(problem, config, H100) or "")


@pytest.mark.slow
def test_a_part_that_is_left_out_is_found():
    assert faults({"QUERY_SPLIT": 3}, "", ("part = 1; part < PARTS", "part = 2; part < PARTS"))


@pytest.mark.slow
@pytest.mark.parametrize("edits", [(), (("number % KEY_SHARES, KEY", "0, KEY"),)])
@pytest.mark.sampled(1)
def test_tiles_of_keys_that_are_left_over_are_split_alone(edits):
    """Seven tiles on five SMs: the last two in two parts each."""
    genes, gpu = {"QUERY_SPLIT": 2, "SPLIT": "last"}, replace(H100, sm_count=5)
    assert judged_once(genes, "B=1 H=7 S=100 D=128", *edits, gpu=gpu).passed != bool(edits)


@pytest.mark.slow
@pytest.mark.parametrize("params, text, edits", ALONE)
@pytest.mark.sampled(2, edits=True)
def test_a_block_that_has_all_keys_makes_rows_of_queries_too(params, text, edits):
    params = {"LAUNCHES": "one", "ORDER": "dv_last", "TERMS_EARLY": False} | params
    config = type(START)(START.family, START.params | params)
    assert len(FAMILY.launches(parse_shape(f"op=backward {text}"), config, H100)) == 1
    assert judged_once(params, text, *edits, repeat=True).passed != bool(edits)


def test_three_launches_where_one_block_has_not_all_keys_or_queries_see_none():
    config = type(START)(START.family, START.params | {"LAUNCHES": "one"})
    for text in ("S=200", "Sq=200 Sk=100 mask=causal_lower_right", "H=4 Hkv=2 S=100", "S=100 window=9:9"):
        problem = parse_shape(f"B=1 D=128 op=backward {text}" + " H=4" * ("H=" not in text))
        assert len(FAMILY.launches(problem, config, H100)) == 3
        assert "three" in (FAMILY.why_invalid(problem, config, H100) or "")


@pytest.mark.slow
@pytest.mark.parametrize("params, text, edits", HEADS)
@pytest.mark.sampled(2, edits=True)
def test_blocks_that_claim_heads_have_sums_of_their_own_and_make_rows_of_queries(params, text, edits):
    config = type(START)(START.family, START.params | WHOLE | params)
    assert len(FAMILY.launches(parse_shape(f"op=backward {text}"), config, FEW)) == 2
    assert judged_once(WHOLE | params, text, *edits, repeat=True, gpu=FEW).passed != bool(edits)


def test_blocks_that_claim_heads_take_as_much_memory_as_they_are():
    """And none of queries that see no key, whose dQ they would not write."""
    config = type(START)(START.family, START.params | WHOLE)
    for heads, blocks in ((2, 2), (100, 3)):
        problem = parse_shape(f"B=1 H={heads} S=1024 D=64 op=backward")
        assert FAMILY.workspace(problem, config, FEW)["dq_sums"] == blocks * 1024 * 64 * 4
    for text, reason in (
        ("S=200", ""),
        ("Sq=300 Sk=200", ""),
        ("Sq=300 Sk=200 mask=causal_lower_right", "before the first key"),
        ("S=200 window=9:9", "windows"),
        ("S=200 bias=hs grads=bias", "gradients"),
    ):
        why = FAMILY.why_impossible(parse_shape(f"B=1 H=2 D=64 op=backward {text}"), config, H100)
        assert reason in why if reason else why is None
    for gene in (
        {"DQ_SUM": "warp"},
        {"SCHEDULE": "single"},
        {"BLOCK_N": 64, "DIM_GROUPS": 2, "P_PLACE": "shared", "DS_PLACE": "shared"},
    ):
        other = type(START)(START.family, config.params | gene)
        problem = parse_shape("B=1 H=2 S=200 D=128 op=backward")
        assert "LAUNCHES=two" in (FAMILY.why_impossible(problem, other, H100) or ""), gene


@pytest.mark.slow
@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.sampled(3, edits=True)
def test_a_missing_wait_is_found(wait):
    assert faults(BESIDE | CLAIMED | OWN_FIRST | {"DQ_BEGIN": "stored"}, "", (wait, ""))


@pytest.mark.slow
@pytest.mark.parametrize(
    "edits",
    [
        (),
        (
            ("tile * BLOCK_M < mask.end_query(seqlen_k - 1)", "true"),
            ("seqlen_k > 0 && tile >= mask.first_query(0) / BLOCK_M", "true"),
        ),
    ],
)
@pytest.mark.parametrize("text", KEYLESS)
@pytest.mark.sampled(3, edits=True)
def test_sums_of_queries_to_which_no_block_comes_are_cleared(text, edits):
    genes = BESIDE | {"DQ_BEGIN": "stored"}
    assert judged_once(genes, f"H=2 Sq=300 Sk=100 D=128 {text}", *edits).passed != bool(edits)


@pytest.mark.slow
@pytest.mark.parametrize("at", LISTED)
@pytest.mark.sampled(3)
def test_gradients_by_a_block_list_are_right(at):
    assert judged_once(*LISTED[at]).passed


@pytest.mark.slow
@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.sampled(5, edits=True)
def test_a_fault_of_a_block_list_shows(fault):
    at, edit = WRONG[fault]
    assert not judged_once(*LISTED[at], edit).passed


@pytest.mark.slow
@pytest.mark.parametrize(
    "genes, text, edits",
    [
        ({"ROTATE": True}, "Sq=130 Sk=300", ()),
        ({}, "S=300 mask=causal", ()),
        ({"DQ_BEGIN": "stored"}, "S=300", [("        tma_store_wait();\n", "        tma_store_wait_read();\n")]),
        ({}, "S=300", [(f"        {WAITS[0]}\n", "")]),
        ({}, "Sq=130 Sk=300 blocks=64x64:1/4/5", ()),
        ({"ROTATE": True}, "Sq=130 Sk=300", [("(tile + tiles - block.key", "(tile + block.key")]),
    ],
)
@pytest.mark.sampled(3, edits=True)
def test_gradients_have_the_same_bits_whichever_blocks_are_late(genes, text, edits):
    """They wait for one another; `edits` do away with that."""
    gpu = replace(H100, sm_count=4) if "causal" in text else H100  # last keys first, as they may not all run at once
    how = {"repeat": True, "backend": ByTurns(late_blocks=True), "gpu": gpu}
    result = judged_once(BY_WARP | genes, f"B=1 H=1 D=64 deterministic=1 {text}", *edits, **how)
    assert result.passed != bool(edits)


def test_what_adds_in_any_order_is_not_deterministic():
    problem = parse_shape("B=2 H=4 S=1000 D=128 op=backward deterministic=1")
    ask = type(START)(START.family, START.params | {"DQ_SUM": "warp"})
    assert FAMILY.why_invalid(problem, ask, H100) is None and FAMILY.unordered(problem, ask) == ()
    for gene in ({"DQ_SUM": "registers"}, {"QUERY_SPLIT": 2, "ROTATE": True}):
        other = type(START)(START.family, ask.params | gene)
        assert f"{next(iter(gene))}" in (FAMILY.why_invalid(problem, other, H100) or "")
    by_registers = type(START)(START.family, START.params | {"DQ_SUM": "registers"})
    assert (
        FAMILY.why_invalid(parse_shape("B=2 H=4 S=100 D=128 op=backward deterministic=1"), by_registers, H100) is None
    )
    rotated = type(START)(START.family, ask.params | {"ROTATE": True})
    long = parse_shape("B=2 H=4 S=20000 D=128 op=backward deterministic=1")
    assert FAMILY.why_invalid(problem, rotated, H100) is None
    assert "at once" in (FAMILY.why_invalid(long, rotated, H100) or "")
    asked = parse_shape("B=2 H=4 S=1000 D=128 op=backward deterministic=1 bias=hs grads=bias")
    assert "order" in (FAMILY.why_unsupported(asked, H100) or "")


def test_the_gradient_of_a_bias_beside_an_expression_is_left_to_another_family():
    """Its dS has no factors here, and the bias comes before the expression."""
    asked = parse_shape("B=2 H=4 S=64 D=128 op=backward bias=hs grads=bias score=s*gate[h] tables=gate:fp32:4")
    assert "backward_scalar" in (FAMILY.why_unsupported(asked, H100) or "")


def test_a_source_of_other_launches_or_sums_is_outdated():
    source = render(FAMILY, parse_shape("B=1 H=2 S=200 D=32 op=backward"), START, H100).source
    assert FAMILY.why_outdated(START, source) is None
    before = source.replace("DQ_ALL_COLUMNS = 32", "DQ_ALL_COLUMNS = (HEAD_DIM + 63) / 64 * 64")
    assert "memory" in (FAMILY.why_outdated(START, before) or "")
    before = source.replace("TERM_PARTS", "ROW_PARTS")
    assert "first launch" in (FAMILY.why_outdated(START, before) or "")
    by_bulk = type(START)(START.family, START.params | {"DQ_SUM": "bulk"})
    assert "shared memory" in (FAMILY.why_outdated(by_bulk, source) or "")


@pytest.mark.parametrize(
    ("dims", "fits"), [("128 128", 1), ("256 128", 1), ("256 192", 0), ("128 64", 0), ("192 128", 0)]
)
def test_warpgroups_that_share_dimensions_need_whole_chunks_of_keys_and_values(dims, fits):
    dim, value_dim = dims.split()
    problem = parse_shape(f"B=1,H=4,S=1024,D={dim},Dv={value_dim},dtype=bf16,mask=full,op=backward")
    configs = load_space("backward_wgmma", H100).starting_configs()
    config = next(one for one in configs if (one["DIM_GROUPS"], one["GROUP_SHARE"]) == (2, "dims"))
    why = FAMILY.why_invalid(problem, config, H100)
    assert why is None if fits else why.startswith("DIM_GROUPS=2 needs head_dims of 2 times 64")
