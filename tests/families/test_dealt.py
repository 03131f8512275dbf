"""What a fixed schedule deals to its blocks, against the loops of the kernel written out."""

import pytest

from evoattn.families.dealt import DealtTiles, row_blocks
from evoattn.model.sequences import starts
from evoattn.model.shape_text import parse_shape


def tile_at(index, blocks, heads, turn, last_first):
    """`tile_at` of templates/device/schedule/tile_order.cuh: (row block, head)."""
    size = turn or heads
    first = index // (size * blocks) * size
    inside, taking = index - first * blocks, min(size, heads - first)
    return (blocks - 1 - inside // taking if last_first else inside // taking), first + inside % taking


def steps_of(problem, rows, keys, per_query, row_block, batch):
    """Tiles of keys of a tile of rows; None where there is none."""
    seqlen_q, seqlen_k = problem.sequences[batch]
    if problem.varlen:
        begins = starts(tuple(queries for queries, _ in problem.sequences))
        slots = [begin // rows + i for i, begin in enumerate(begins[:-1])]
        batch = max(i for i, slot in enumerate(slots) if slot <= row_block)
        seqlen_q, seqlen_k = problem.sequences[batch]
        row_block -= slots[batch]
    begin, end = row_block * rows // per_query, min(-(-(row_block + 1) * rows // per_query), seqlen_q)
    if begin >= seqlen_q:
        return None
    seen = problem.masking.band(seqlen_q, seqlen_k).keys(begin, end)
    return -(-seen.stop // keys) - seen.start // keys if seen else 0


SHAPES = {
    "packed, whole tiles": "B=4,H=16,S=1024,D=80,dtype=bf16,layout=bshd,varlen=1024:1024",
    "packed, causal": "B=7,H=6,S=900,D=64,dtype=bf16,layout=bshd,mask=causal_lower_right,varlen=1:900",
    "packed, a window": "B=5,H=9,S=1500,D=64,dtype=bf16,mask=causal_upper_left,window=200:0,varlen=log:20:1500",
    "keys in use": "B=9,H=8,Sq=300,Sk=4000,D=64,dtype=bf16,mask=causal_lower_right,seqused=300:4000",
    "keys in use, all keys": "B=40,H=8,Sq=130,Sk=2000,D=64,dtype=bf16,seqused=0:2000",
}


@pytest.mark.parametrize("turn", [0, 1, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_blocks_get_what_the_kernel_takes(name, turn):
    problem, rows, keys, blocks = parse_shape(SHAPES[name]), 128, 80, 24
    batches = 1 if problem.varlen else problem.batch
    heads, count = problem.heads * batches, row_blocks(problem, rows)
    got, tiles = [0] * blocks, [0] * blocks
    for index in range(count * heads):
        turn_of, place = divmod(index, blocks)
        block = blocks - 1 - place if problem.causal and turn_of % 2 else place
        row_block, head = tile_at(index, count, heads, turn, problem.causal)
        steps = steps_of(problem, rows, keys, 1, row_block, head * batches // heads)
        if steps is not None:
            got[block], tiles[block] = got[block] + steps, tiles[block] + 1
    found = DealtTiles(problem, rows, keys, 1, heads, turn).to(blocks, blocks // 2)
    assert found.steps == max(got) and found.tiles in {t for g, t in zip(got, tiles) if g == max(got)}
    assert found.steps_of_sm == max(got[i] + got[i + blocks // 2] for i in range(blocks // 2))


def test_one_tile_for_a_block_needs_no_dealing():
    problem = parse_shape(SHAPES["packed, whole tiles"])
    assert DealtTiles(problem, 128, 64, 1, 16, 0).to(1000, 100) is None


def test_rows_of_lists_have_no_order():
    """Of 24 heads with 64 tiles of rows each, most of which see twice the mean, some block of 132 gets much more than
    the mean in either order; where rows are alike none does."""
    problem = parse_shape("B=1,H=24,S=8192,D=128,dtype=bf16,blocks=128x128:1/32/64")
    mean = 24 * 64 * 33 / 132
    assert all(1.1 * mean < DealtTiles(problem, 128, 128, 1, 24, turn).to(132, 132).steps < 2 * mean for turn in (1, 0))
    even = parse_shape("B=1,H=24,S=8192,D=128,dtype=bf16,blocks=128x128:1/32/33")
    assert DealtTiles(even, 128, 64, 1, 24, 1).to(132, 132).steps == 12 * 66
