"""flash_wgmma: its launches and tensor maps."""

from __future__ import annotations

import itertools
import math

import pytest

from evoattn.families.base import starts_zeroed
from evoattn.model.launch import Buffer, TensorMap
from evoattn.model.problem import AttentionProblem
from tests.families.test_flash_wgmma import FAMILY, H100, TWO, config, problem


def test_tensor_maps_keep_to_the_limits():
    """Rank, box and stride limits of docs/sources.md, and that every box fits the tile it fills."""
    for head_dim, layout in itertools.product(range(8, 257, 8), ("bhsd", "bshd")):
        p = problem(113, 203, head_dim, layout=layout)
        maps = [a for a in FAMILY.launches(p, config(), H100)[-1].args if isinstance(a, TensorMap)]
        assert [m.buffer for m in maps] == list("qkvo")
        for m in maps:
            assert len(m.shape) == len(m.box) == len(m.strides_bytes) + 1 <= 5
            assert math.prod(m.shape) == math.prod(p.shape(m.buffer)) and m.box[0] * 2 == m.swizzle_bytes == 128
            assert all(stride % 16 == 0 for stride in m.strides_bytes) and max(m.box) <= 256
            assert math.prod(m.box) == (64 if m.buffer in "qo" else 128) * (head_dim if head_dim % 64 == 0 else 64)


def test_output_by_chunks_has_boxes_of_one_chunk():
    q, k, v, o = (
        a
        for a in FAMILY.launches(problem(head_dim=256), config(**TWO, SCHEDULE="claimed", STORE="chunks"), H100)[0].args
        if isinstance(a, TensorMap)
    )
    assert o.box == (64, 64, 1, 1, 1) and o.shape == q.shape and q.box == k.box == v.box == (64, 64, 4, 1, 1)


def test_a_persistent_grid_is_one_wave_and_claims_from_a_counter_that_every_launch_leaves_at_zero():
    p = problem(1000)
    assert [n.grid[0] for n in FAMILY.launches(p, config(SCHEDULE="fixed"), H100)] == [2 * 132]
    assert [n.grid[0] for n in FAMILY.launches(problem(64), config(SCHEDULE="fixed"), H100)] == [32]
    (launch,) = FAMILY.launches(p, config(SCHEDULE="claimed"), H100)
    (scratch,) = FAMILY.workspace(p, config(SCHEDULE="claimed"), H100)
    assert starts_zeroed(scratch) and Buffer(scratch) in launch.args and not FAMILY.workspace(p, config(), H100)


def block_tile(order: str, block: tuple[int, int, int], p: AttentionProblem, split: int) -> tuple[int, int]:
    """(row block, head of all) of a block, as `templates/device/schedule/block_tile.cuh` reads its grid."""
    x, y, z = block[0] // split, *block[1:]
    return {
        "by_head": (x, z * p.heads + y),
        "all_heads": (z, y * p.heads + x),
        "heads_4": (y, z * 4 + x),
        "heads_8": (y, z * 8 + x),
    }[order]


@pytest.mark.parametrize("order", ["by_head", "all_heads", "heads_4", "heads_8"])
@pytest.mark.parametrize("split", [1, 4])
def test_a_grid_has_every_tile_once_a_block_of_the_cluster(order, split):
    p = AttentionProblem(3, 6, 2, 200, 1000, 64)
    launch = FAMILY.launches(p, config(TILE_ORDER=order, KEY_SPLIT=split, BLOCKS_PER_SM=1), H100)[0]
    assert launch.cluster == (split, 1, 1) and launch.grid[0] % split == 0
    tiles = [block_tile(order, block, p, split) for block in itertools.product(*map(range, launch.grid))]
    assert sorted(tile for tile in tiles if tile[1] < 18) == sorted([*itertools.product(range(4), range(18))] * split)
