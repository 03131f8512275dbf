"""Faults planted in kernels of packed sequences, all of which the interpreter's cases find (`test_variants.py` has the
kernels as they are)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoattn.backends.interpreter import InterpreterBackend
from evoattn.correctness.cases import make_case
from evoattn.correctness.validate import check
from evoattn.families.registry import lookup
from evoattn.families.row_blocks import row_blocks
from evoattn.families.work import row_steps
from evoattn.model.problem import AttentionProblem
from evoattn.model.sequences import starts
from evoattn.model.space import load_space
from tests.families.on_interpreter import built
from tests.families.test_split_kv import config
from tests.families.test_variants import H100, PLAIN, faults

PACKED = ("flash_wgmma", "persistent, rows begin ahead", "packed")
SPLIT, SPLIT_BY_MAP = (("split_kv", structure, "packed") for structure in ("mma, a ring", "mma by tensor maps"))
PACKED_BY_ROWS = ("flash_wgmma", "scores again, a cluster", "packed")
WRONG = [
    ("a slot too few for each sequence", PACKED, ("[sequence]) / ROWS) + sequence;", "[sequence]) / ROWS);")),
    ("a block without a tile waits for one", PACKED, ("if (take_tile(0) || !VARLEN) {", "if (take_tile(0) || true) {")),
    ("slots without a tile make no claim", PACKED, ("index = next_index(++turn)) {", "++index) {")),
    (
        "rows end where those of the next tile's sequence do",
        PACKED,
        ("last_sequence, last_range, last_state);", "sequence, last_range, last_state);"),
    ),
    (
        "the diagonal of the longest sequence",
        PACKED,
        ("mask = Mask(seqlen_q, seqlen_k,", "mask = Mask(packed.most_queries, seqlen_k,"),
    ),
    (
        "keys a row too late",
        PACKED,
        ("k_ring.load_sliding(ring, key_tile * BLOCK_N,", "k_ring.load_sliding(ring, key_tile * BLOCK_N + 1,"),
    ),
    (
        "V of the sequence behind",
        PACKED,
        (
            "v_ring.load_sliding(ring, key_tile * BLOCK_N, sequence.keys, sequence.end_key(), kv_head);",
            "v_ring.load_sliding(ring, key_tile * BLOCK_N, sequence.keys + 5, sequence.end_key() + 5, kv_head);",
        ),
    ),
    (
        "O over the sequence behind, by the copy engine",
        PACKED,
        (
            "0, ValueTiles::CHUNKS, first_row(of), of_sequence.queries,\n" + " " * 38 + "of_sequence.end_query(),",
            "0, ValueTiles::CHUNKS, first_row(of), of_sequence.queries + 1, of_sequence.end_query() + 1,",
        ),
    ),
    (
        "O over the sequence behind",
        PACKED_BY_ROWS,
        ("VARLEN ? of_sequence.queries : seqlen_q;", "VARLEN ? of_sequence.queries + 1 : seqlen_q;"),
    ),
    (
        "K of a sequence where its Q begins",
        ("flash_mma", "together", "packed"),
        ("k_gmem += sequence.first_key *", "k_gmem += sequence.first_query *"),
    ),
    (
        "rows of the longest sequence",
        ("flash_mma", "split", "packed"),
        ("seqlen_q = sequence.queries, seqlen_k = sequence.keys;", "seqlen_k = sequence.keys;"),
    ),
    ("K of split_kv where its Q begins", SPLIT, ("sequence.first_key + warp_key,", "sequence.first_query + warp_key,")),
    ("a NaN of the sequence behind", SPLIT_BY_MAP, ("STAGES, SEQUSED || VARLEN, PAGED>", "STAGES, SEQUSED, PAGED>")),
    (
        "the diagonal of the longest sequence in split_kv",
        SPLIT,
        ("seqlen_q = sequence.queries, seqlen_k = sequence.keys;", "seqlen_k = sequence.keys;"),
    ),
    (
        "rows are merged that a sequence has not",
        SPLIT_BY_MAP,
        ("if (VARLEN && row >= group_heads * seqlen_q) return;", ""),
    ),
    (
        "all sequences are merged into the first",
        SPLIT_BY_MAP,
        ("o_batch_stride = 0;\n    o_gmem += sequence.first_query * o_row_stride;", "o_batch_stride = 0;"),
    ),
    (
        "slopes from the first key",
        ("flash_wgmma", "one warpgroup", "packed, alibi, sink"),
        ("CAUSAL && !CAUSAL_LOWER_RIGHT ? 0 : seqlen_k - seqlen_q;", "seqlen_k - seqlen_q;"),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "edit"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_a_wrong_one_is_found(kernel, edit):
    assert faults(*kernel, (edit,))


def test_a_merge_without_rows_ends_after_the_launch_before_it():
    """As in a graph that serves no sequence this time: lengths are on the device, and all are 0."""
    family, problem = lookup("split_kv"), PLAIN.with_(batch=2, seqlen_q=1, varlen="1+1/100+512", head_dim=16)
    genes = config(MERGE="kernel").params | {"DEPENDENT_LAUNCH": "early"}
    early = load_space("split_kv", H100).make_config(genes)
    case = make_case("no sequence", problem, 1, "cpu", double=True)
    case.tensors["cu_seqlens_q"].zero_()
    assert "griddepcontrol" not in check(InterpreterBackend(), built(family, problem, early, H100), case).reason


@given(st.lists(st.integers(0, 300), min_size=1, max_size=9).filter(any), st.sampled_from((16, 64, 192)))
def test_there_are_slots_for_every_tile_and_few_more(lengths, rows):
    """As `sequences.cuh` counts them."""
    problem = AttentionProblem(len(lengths), 1, 1, 300, 300, 64, varlen="+".join(map(str, lengths)))
    first = [start // rows + i for i, start in enumerate(starts(tuple(lengths)))]
    tiles = [-(-length // rows) for length in lengths]
    assert row_blocks(problem, rows) == first[-1]
    assert all(count <= end - begin <= count + 1 for begin, end, count in zip(first, first[1:], tiles, strict=False))


def test_steps_are_those_of_the_sequences():
    problem = AttentionProblem(3, 1, 1, 300, 300, 64, mask="causal_lower_right", varlen="200+0+100")
    assert row_steps(problem, 100, 50) == ((2 + 4 + 2) / 3, 4, 3)
    assert row_steps(problem.with_(mask="full"), 100, 50) == ((4 + 4 + 2) / 3, 4, 3)
