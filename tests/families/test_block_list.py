"""Block lists: kernels that read them are right on the interpreter's cases, and those with a planted fault are not."""

from dataclasses import replace

import pytest

from evoattn.families import block_list, mask_blocks
from evoattn.families.mask_blocks import MaskShape
from evoattn.families.registry import FAMILIES, load_space
from evoattn.families.render import render
from evoattn.model.block_list import draw, fault_of_blocks, parse_blocks
from evoattn.model.gpu import GPUS
from evoattn.model.mask import Band
from evoattn.model.problem import AttentionProblem
from evoattn.model.score import parse_predicate
from tests.families import test_flash_mma, test_flash_wgmma, test_split_kv
from tests.families.covering import covering
from tests.families.on_interpreter import built, judged, small_faults

H100 = GPUS["h100"]
LISTED = AttentionProblem(1, 2, 1, 512, 512, 64, "bf16", blocks="64x64:300+70")
PROBLEMS = {
    "documents": LISTED,
    "causal, fp16": LISTED.with_(mask="causal_upper_left", dtype="fp16"),
    "lower right, sink": LISTED.with_(mask="causal_lower_right", sink=True),
    "bias, head_dim 40": LISTED.with_(bias="hs", head_dim=40),
    "a predicate of its own": LISTED.with_(
        blocks="64x64:1/2/5",
        mask="causal_lower_right",
        score="s*flag[b]",
        predicate="(kind[h,q]!=kind[1-h,k])|((q+d-k)%3==0)|seen[wrap(k-q)]",
        tables="flag:bf16:2+kind:int64:2x30+seen:bool:97",
    ),
    "no predicate": LISTED.with_(blocks="64x64:1/2/5"),
    "a short predicate": LISTED.with_(blocks="64x64:1/2/5", predicate="k-q<reach[b,h]", tables="reach:int32:2x2"),
    "a predicate that heads share": LISTED.with_(
        blocks="64x64:1/2/5",
        mask="causal_lower_right",
        predicate="((k//3+q//5)%7<3)|seen[wrap(k-q)]|(q%2==b)",
        tables="seen:bool:97",
    ),
    "V narrower, softcap": LISTED.with_(head_dim=96, value_dim=64, softcap=3.0, mask="causal_upper_left"),
}
WGMMA_TWO = {**test_flash_wgmma.TWO, "PING_PONG": True}
STRUCTURES = {
    "flash_mma": {
        "together": {"BLOCK_M": 32},
        "lazy": {"RESCALE": "lazy", "ROW_SUM": "mma", "STAGES": 3},
        "overlapped": {"SCHEDULE": "overlapped", "RESCALE": "lazy", "O_STORE": "shared", "Q_PLACE": "registers"},
        "split": {"SCHEDULE": "split", "RESCALE": "vote", "Q_PLACE": "direct", "BLOCK_N": 16},
        "short ring of V": {"SCHEDULE": "split_short_v", "BLOCK_M": 64, "BLOCK_ORDER": "heads"},
    },
    "flash_wgmma": {
        "one warpgroup": {"BLOCK_N": 64},
        "lazy, two warpgroups": {**WGMMA_TWO, "RESCALE": "lazy_5", "BLOCK_N": 48},
        "persistent, rows begin ahead": {**WGMMA_TWO, "SCHEDULE": "claimed", "Q_IN_REGISTERS": True, "BLOCK_N": 48},
        "fixed, scores again": {"SCHEDULE": "fixed", "RESCALE": "lazy_after", "BLOCK_N": 64, "STORE": "rows"},
    },
    "split_kv": {
        "last block": {},
        "cp_async, a kernel that merges": {**test_split_kv.RING, "MERGE": "kernel"},
        "maps, a cluster": {"LOAD": "tma", "STAGES": 2, "MERGE": "cluster", "SPLITS": 2},
        "CUDA cores": test_split_kv.FMA,
    },
}
MODULES = {"flash_mma": test_flash_mma, "flash_wgmma": test_flash_wgmma, "split_kv": test_split_kv}
WGMMA = ("flash_wgmma", "lazy, two warpgroups", "causal, fp16")
ANY = ("flash_mma", "together", "causal, fp16")
OWN = ("flash_mma", "together", "a predicate of its own")
SHORT = ("flash_mma", "together", "a short predicate")
WGMMA_SHORT = ("flash_wgmma", "lazy, two warpgroups", "a short predicate")
SHARED = ("flash_mma", "together", "a predicate that heads share")
SPLIT = ("split_kv", "cp_async, a kernel that merges", "a predicate of its own")
OF_ROW = "list.batch_stride + head * list.head_stride + block_row"
WRONG = {
    "bits of the lane's first key": (SHARED, ("words[row][i] >>= shift;", "words[row][i] >>= 0;")),
    "bits of the row above": (SHARED, ("(row + i * 8) * bits_row_words", "(row + i * 8 - 1) * bits_row_words")),
    "bits without the diagonal": (SHARED, ("(key < mask.keys_of(query)) &", "(key < seqlen_k) &")),
    "bits of another batch": (SHARED, ("? list.bits + batch * ", "? list.bits + 0 * ")),
    "bits of rows in no order": (SHARED, ("if (lane == i) word", "if (lane == 31 - i) word")),
    "split: the list is ignored": (SPLIT, ("return listed.first_key(key / LIST_GRANULE) +", "return key -")),
    "split: FULL taken for PARTIAL": (SPLIT, ("return terms.own.partial = is_partial(tile);", "return true;")),
    "split: the lists of another head": (SPLIT, ("index, first_head, packed", "index, 0, packed")),
    "split: keys past the last": (SPLIT, ("by_mask || key + WARP_KEYS > seqlen_k :", "by_mask :")),
    "split: rows of K past the last": (SPLIT, ("return keys.end - key;", "return 1 << 20;")),
    "the list is ignored": (ANY, ("return blocks[number] * block_keys", "return number * block_keys")),
    "FULL taken for PARTIAL": (ANY, ("return tile < partial_tiles;", "return true;")),
    "PARTIAL taken for FULL": (ANY, ("return tile < partial_tiles;", "return tile < 0;")),
    "PARTIAL without the predicate's value": (SHORT, ("if (!terms.shows(batch, head, row + m", "if (0 * (row + m")),
    "in a loop: the row above": (ANY, ("row + i * 8, first),", "row + i * 8 - 1, first),")),
    "PARTIAL without the diagonal": (
        ANY,
        ("mask_scores(s, mask.keys_from(", "mask_scores(s, AllKeys(seqlen_q, seqlen_k).keys_from("),
    ),
    "a PARTIAL block too many": (
        ANY,
        ("list.partial_counts[row] * tiles_per_block;", "(list.partial_counts[row] + 1) * tiles_per_block;"),
    ),
    "a FULL block too few": (
        ANY,
        ("list.full_counts[row] * tiles_per_block;", "max(0, list.full_counts[row] - 1) * tiles_per_block;"),
    ),
    "a FULL block too many": (
        ANY,
        ("list.full_counts[row] * tiles_per_block;", "(list.full_counts[row] + 1) * tiles_per_block;"),
    ),
    "the lists of another head": (
        ANY,
        ("head * list.head_stride + block_row", "head / 2 * list.head_stride + block_row"),
    ),
    "the lists of another batch": (ANY, (f"batch * {OF_ROW}", f"0 * {OF_ROW}")),
    "the lists of another block of rows": (
        ANY,
        ("block_row / list.block_rows;", "max(0, block_row / list.block_rows - 1);"),
    ),
    "documents of another batch": (ANY, ("own.shows(batch, head", "own.shows(0, head")),
    "the predicate of the row above": (SHORT, ("row + m * 16 + j / 2 * 8, key", "row + m * 16 + j / 2 * 8 - 1, key")),
    "the predicate of the key before": (SHORT, ("key + n * 8 + j % 2", "key + n * 8 + j % 2 - 1")),
    "the predicate of another diagonal": (OWN, ("query, key, given.diagonal", "query, key, 0")),
    "an index past the table": (OWN, ("return max(0, min(index, size - 1));", "return max(0, index);")),
    "wgmma: the predicate of another head": (WGMMA_SHORT, ("work.rows.head(work.tile, row), row", "0, row")),
    "wgmma: the predicate of the row above": (WGMMA_SHORT, ("row + j / 2 * 8, key", "row + j / 2 * 8 - 1, key")),
    "keys past the last": (
        ("flash_mma", "together", "documents"),
        ("listed_partial || first_key(tile) + WARP_KEYS > seqlen_k", "listed_partial"),
    ),
    "one tile of each block": (ANY, ("tiles_per_block(list.block_keys / BLOCK_N)", "tiles_per_block(1)")),
    "a lazy shift is not raised at the first FULL tile": (
        ("flash_mma", "lazy", "documents"),
        ("tile == key_tiles.partial_tiles", "false"),
    ),
    "wgmma: PARTIAL without the predicate": (
        WGMMA_SHORT,
        ("if (!shows<BY_KEYS>(terms, batch, head, row + j", "if (0 * (row + j"),
    ),
    "wgmma: PARTIAL taken for FULL": (WGMMA, ("whole = !listed.may_hide<Mask>(work.terms, key_tile) &&", "whole =")),
    "wgmma: keys past the last of FULL blocks": (
        WGMMA,
        ("is_any_cut = listed.has_cut_block", "is_any_cut = false && listed.has_cut_block"),
    ),
    "wgmma: keys past the last of PARTIAL blocks that hide nothing": (
        ("flash_wgmma", "one warpgroup", "no predicate"),
        ("SHOWS ? partial : 0", "SHOWS ? partial : partial"),
    ),
    "wgmma: a FULL block counts by its first key": (
        WGMMA,
        (": full_blocks[i - partial]) + 1)", ": full_blocks[i - partial]))"),
    ),
    "wgmma: an empty list shows the first keys": (WGMMA, ("tiles > 0 ? mask.seqlen_k : 0", "mask.seqlen_k")),
    "wgmma: a tile too few": (WGMMA, ("max(0, listed().tiles - 1)", "max(0, listed().tiles - 2)")),
    "wgmma: PARTIAL blocks first": (WGMMA, ("tiles - 1 - (tile - partial_tiles)", "tiles - 1 - tile")),
}


def faults(
    family: str, structure: str, problem: str, *edits: tuple[str, str], cases: slice | int = slice(None)
) -> list[str]:
    """What the interpreter's cases find in the kernel's source with these edits; empty for a kernel that is right."""
    module, listed = MODULES[family], PROBLEMS[problem]
    config = load_space(family, H100).make_config(module.BASE | STRUCTURES[family][structure])
    return small_faults(built(module.FAMILY, listed, config, H100, *edits), listed, cases)


def shown(kernel: tuple[str, str, str]) -> set[tuple[str, ...]]:
    """The problem in its family, and the structure with the mask, which is what it goes over keys by."""
    family, structure, problem = kernel
    return {(family, problem), (family, structure, PROBLEMS[problem].mask)}


EVERY = [
    (family, structure, problem)
    for family in STRUCTURES
    for structure in STRUCTURES[family]
    for problem in PROBLEMS
    if not (family == "split_kv" and PROBLEMS[problem].value_dim)
]
RIGHT = covering(EVERY, shown, dict.fromkeys(at for at, _ in WRONG.values()))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", RIGHT, ids=": ".join)
@pytest.mark.sampled(5)
def test_kernels_that_read_a_block_list_are_right(kernel):
    """On the first two small cases and, in turns, on one of the others."""
    assert not faults(*kernel, cases=RIGHT.index(kernel) // 5)


@pytest.mark.slow
@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.sampled(6, edits=True)
def test_a_planted_fault_shows(fault):
    at, edit = WRONG[fault]
    assert faults(*at, edit)


@pytest.mark.slow
def test_a_last_block_may_have_whole_tiles_behind_the_last_key():
    """Of 192 keys the second block of 128 has one tile of 64 keys and one without any."""
    problem = LISTED.with_(seqlen_q=128, seqlen_k=192, blocks="128x128:2/0/2")
    config = load_space("flash_wgmma", H100).make_config(test_flash_wgmma.BASE | {"BLOCK_N": 64})
    result = judged(built(test_flash_wgmma.FAMILY, problem, config, H100), problem)
    assert result.passed, result.reason


def test_bits_of_the_first_blocks_of_a_list_where_memory_ends(monkeypatch):
    monkeypatch.setattr(block_list, "MOST_BIT_BYTES", 8192)
    monkeypatch.setattr(block_list, "LEAST_ROOM", 1)
    shared = PROBLEMS["a predicate that heads share"]
    problem = shared.with_(heads=4, seqlen_q=256, seqlen_k=1024, blocks="64x64:12/2/16")
    assert block_list.packed_mask(problem).row_words == 8  # of four blocks


def test_lists_of_batches_and_heads_differ_where_they_are_of_their_own():
    band = Band(512, 512, None, None)
    first, second = draw(parse_blocks("b:64x64:3/2/9"), 2, 1, band, 0)
    assert first != second and len(first) == 1
    assert len(draw(parse_blocks("64x64:3/2/9"), 2, 3, band, 0)) == 1
    ((one, other),) = draw(parse_blocks("h:64x64:3/2/9:mixed"), 1, 2, band, 0)
    assert one != other


def test_a_source_whose_bits_lie_by_keys_is_outdated():
    family, config = FAMILIES["flash_mma"], test_flash_mma.config()
    source = render(family, PROBLEMS["a predicate that heads share"], config, H100).source
    assert family.why_outdated(config, source) is None
    before = source.replace("bits_row_words + first / 32", "bits_row_words + first_key / 32")
    assert "room" in (family.why_outdated(config, before) or "")


def test_tiles_that_are_no_parts_of_a_block_are_refused_in_one_sentence():
    def why(**genes: object) -> str | None:
        config = load_space("flash_mma", H100).make_config(test_flash_mma.BASE | genes)
        return test_flash_mma.FAMILY.why_invalid(LISTED.with_(blocks="64x32:300"), config, H100)

    assert why() is None
    assert why(BLOCK_M=128) == "BLOCK_M=128 does not divide the 64 rows of a listed block."
    assert why(BLOCK_N=64) == "BLOCK_N=64 does not divide the 32 keys of a listed block."
    assert "KEY_WARPS=2" in why(KEY_WARPS=2)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(STRUCTURES)))
def test_other_families_say_that_they_have_no_block_lists(family):
    reason = FAMILIES[family].why_unsupported(LISTED, H100)
    assert reason and reason.count(". ") == 0


@pytest.mark.parametrize("genes", [{"KEY_SPLIT": 2}, {"SCHEDULE": "balanced"}, {"GROUP_ROWS": True}])
def test_blocks_of_wgmma_that_share_a_list_are_refused_in_one_sentence(genes):
    config = load_space("flash_wgmma", H100).make_config(test_flash_wgmma.BASE | genes)
    reason = test_flash_wgmma.FAMILY.why_invalid(LISTED.with_(blocks="1024x1024:300", seqlen_k=2048), config, H100)
    assert reason and "block list" in reason


@pytest.mark.parametrize("name", ["batches", "heads", "seqlen_q", "seqlen_k", "block_rows", "block_keys"])
def test_lists_are_made_of_sizes_that_there_are(name):
    shape = MaskShape(1, 1, 300, 200, 128, 64)
    assert not shape.why_not()
    for size in (0, 1 << 30):
        assert replace(shape, **{name: size}).why_not() == "a size is no number from 1 to 2^30"
    assert "more than 65535 heads or blocks of rows" in replace(shape, batches=300, heads=300).why_not()
    assert "more than 65535 heads or blocks of rows" in replace(shape, seqlen_q=128 * 65536).why_not()
    assert not replace(shape, seqlen_q=128 * 65535, seqlen_k=64 * 65536).why_not()


@pytest.mark.parametrize("other", ["window", "seqused", "page", "varlen", "kv"])
def test_lists_are_beside_no_other_word_on_which_keys_there_are(other):
    assert fault_of_blocks("64x64:1/2/5", ("sink",)) == ""
    assert f"blocks and {other} exclude each other" in fault_of_blocks("64x64:1/2/5", ("sink", other))


def test_lists_of_a_table_of_pairs_are_made_along_its_rows():
    of = [parse_predicate(text, "t:bool:9x9") for text in ("t[q,k]", "t[q,3]|(k>3)")]
    assert [("PAIRED = true" in mask_blocks.source(one.tree, one.tables)) for one in of] == [True, False]
