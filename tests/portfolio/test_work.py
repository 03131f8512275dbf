"""What a kernel has to do on a problem."""

import pytest

from evoattn.families.split_kv.resources import SPLIT_GRANULE
from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import load_space
from evoattn.portfolio.work import (
    SPLIT_KEYS,
    Tiles,
    Work,
    block_slots,
    predicted_us,
    tiles_of,
    work_of,
)

GPU = GPUS["h100"]
ROWS = load_space("flash_wgmma", GPU).starting_configs()[0].params | {
    "BLOCK_M": 64,
    "BLOCK_N": 64,
    "STAGES": 2,
    "BLOCKS_PER_SM": 1,
    "SCHEDULE": "single",
    "STORE": "rows",
}


def test_blocks_and_steps_of_a_config():
    full = parse_shape("B=2,H=8,S=1000,D=64,dtype=bf16,mask=full")
    config = {"BLOCK_M": 128, "BLOCK_N": 64, "SCHEDULE": "single", "KEY_SPLIT": 1, "BLOCKS_PER_SM": 1}
    tiles = tiles_of("flash_wgmma", config, full)
    assert (tiles.blocks, tiles.mean, tiles.longest) == (8 * 16, 16, 16)
    causal = tiles_of("flash_wgmma", config, full.with_(mask="causal_upper_left"))
    assert causal.longest == 16 and 8 < causal.mean < 10
    decode = parse_shape("B=2,H=8,Hkv=2,Sq=1,Sk=5000,D=64,dtype=bf16,mask=full")
    heads_as_rows = config | {"BLOCK_M": 64, "GROUP_ROWS": True}
    assert tiles_of("flash_wgmma", heads_as_rows, decode) == Tiles(2 * 2, 79, 79)
    assert tiles_of("flash_wgmma", heads_as_rows, decode.with_(seqlen_q=20)).blocks == 2 * 2 * 2
    assert tiles_of("flash_wgmma", heads_as_rows, decode.with_(heads=200)).blocks == 2 * 2 * 2
    split = {"BLOCK_M": 8, "BLOCK_N": 64, "SPLITS": 4, "MERGE": "kernel"}
    assert tiles_of("split_kv", split, decode).blocks == 2 * 2 * 4
    seen = tiles_of("split_kv", split, decode.with_(window="127:0"))
    assert (seen.blocks, seen.longest) == (2 * 2 * 4, 1), "128 keys, of which a split takes 32"

    wide = {"BLOCK_M": 64, "BLOCK_N": 64, "DV_SPLIT": 4, "SCORES": "recompute"}
    head = parse_shape("B=1,H=2,S=1000,D=512,dtype=bf16,mask=full")
    assert tiles_of("large_head_mma", wide, head) == Tiles(16 * 2 * 4, 16, 16)
    assert tiles_of("large_head_mma", wide | {"SCORES": "cluster"}, head).cluster == 4


def test_keys_that_are_not_in_use_are_no_work():
    decode = parse_shape("B=2,H=8,Hkv=2,Sq=1,Sk=4096,D=64,dtype=bf16,mask=full")
    half = decode.with_(seqused="2048:2048")
    split = {"BLOCK_M": 8, "BLOCK_N": 64, "SPLITS": 4, "MERGE": "kernel"}
    assert tiles_of("split_kv", split, half).blocks == 2 * 2 * 2, "splits of 1024 keys, half of them empty"
    assert tiles_of("split_kv", split, half).splits == 4
    assert tiles_of("split_kv", split | {"SPLITS": 1}, half).longest == 2048 // 64
    rows = {"BLOCK_M": 64, "BLOCK_N": 64, "SCHEDULE": "single", "KEY_SPLIT": 1, "BLOCKS_PER_SM": 1}
    for problem in (half, half.with_(page=16), decode.with_(seqused="0:4096")):
        assert tiles_of("flash_wgmma", rows, problem).longest == 2048 // 64
    packed = decode.with_(seqlen_q=3, varlen="1+3/2048+4096")  # 4 and 12 rows of a group
    assert tiles_of("split_kv", split, packed).blocks == (1 + 2) * 2 * 3
    causal = decode.with_(seqlen_q=128, mask="causal_lower_right")
    assert tiles_of("flash_wgmma", rows, causal.with_(seqused="2048:2048")).longest == 2048 // 64


def test_more_work_is_more_time():
    config = {"BLOCK_M": 64, "BLOCK_N": 64, "SCHEDULE": "single", "KEY_SPLIT": 1, "BLOCKS_PER_SM": 2}
    constants = (1.0, 0.5, 0.2, 0.1, 1.0, 0.01, 0.01, 2.0, 0.1, 1.0, 1.0, 0.1, 0.1, 0.1)
    shape = parse_shape("B=1,H=4,S=512,D=64,dtype=bf16,mask=full")
    times = [
        predicted_us(constants, work_of("flash_wgmma", config, 2, shape.with_(batch=b), GPU)) for b in (1, 4, 16, 64)
    ]
    assert times == sorted(set(times))
    assert len(constants) == len(Work._fields)


def test_splits_cost_a_merge():
    shape = parse_shape("B=1,H=8,Sq=1,Sk=4096,D=64,dtype=bf16,mask=full")
    config = {"BLOCK_M": 8, "BLOCK_N": 64, "MERGE": "kernel"}
    one, four = (work_of("split_kv", config | {"SPLITS": n}, 2, shape, GPU) for n in (1, 4))
    assert (one.merge, one.splits, one.partial) == (0, 0, 0)
    assert (four.merge, four.splits) == (1, 4)
    assert four.partial == pytest.approx(4 * 8 * (64 + 2) * 4 / GPU.dram_gb_per_s / 1e3)
    assert four.longest < one.longest and four.out == one.out


def test_keys_split_among_many_blocks_leave_their_rows_in_memory():
    shape = parse_shape("B=1,H=2,Sq=100,Sk=8192,D=64,dtype=bf16,mask=full")  # 4 tiles of 64 rows
    config = ROWS | {"BLOCKS_PER_SM": 1}
    cluster, memory = (work_of("flash_wgmma", config | {"KEY_SPLIT": n}, 1, shape, GPU) for n in (4, 16))
    assert (cluster.merge, cluster.splits, cluster.partial) == (0, 0, 0)
    assert (memory.merge, memory.splits, memory.merging) == (1, 16, 0)
    assert memory.partial == pytest.approx(16 * 4 * 64 * (64 + 2) * 4 / GPU.dram_gb_per_s / 1e3)
    assert memory.longest == 8 and cluster.longest == 32
    wide = shape.with_(head_dim=256)  # two warpgroups' rows of 256 columns do not fit beside the tiles
    two = config | {"BLOCK_M": 128, "STAGES": 1, "KEY_SPLIT": 2}
    assert work_of("flash_wgmma", two | {"STAGES": 2}, 1, wide, GPU).splits == 2
    assert work_of("flash_wgmma", two, 1, shape, GPU).splits == 0


def test_splits_are_those_of_the_family():
    assert SPLIT_KEYS == SPLIT_GRANULE
    short = parse_shape("B=2,H=2,S=35,D=96,dtype=bf16,mask=full")
    split = {"BLOCK_M": 8, "BLOCK_N": 64, "SPLITS": 2, "MERGE": "kernel"}
    assert tiles_of("split_kv", split, short).splits == 2
    assert work_of("split_kv", split, 1, short, GPU).merging == pytest.approx(2 * 2 * 35 / GPU.sm_count)
    assert work_of("split_kv", split | {"MERGE": "last_block"}, 1, short, GPU).merging == 0


def test_clusters_of_four_leave_some_sms_idle():
    assert block_slots(GPU, 2, 1) == block_slots(GPU, 2, 2) == 264
    assert block_slots(GPU, 1, 4) == 31 * 4 and block_slots(GPU, 2, 4) == 62 * 4
    problem = parse_shape("B=1,H=8,Sq=256,Sk=4096,D=64,dtype=bf16,mask=full")  # 32 tiles of 64 rows
    config = ROWS | {"KEY_SPLIT": 4}
    assert work_of("flash_wgmma", config, 1, problem, GPU).waves == 2
    assert work_of("flash_wgmma", config | {"KEY_SPLIT": 2}, 1, problem, GPU).waves == 1
    decode = parse_shape("B=33,H=8,Hkv=1,Sq=1,Sk=4096,D=64,dtype=fp16,mask=full")  # 132 blocks, of which 124 fit alone
    split = {"BLOCK_M": 8, "BLOCK_N": 64, "SPLITS": 4}
    in_clusters = work_of("split_kv", split | {"MERGE": "cluster"}, 2, decode, GPU)
    apart = work_of("split_kv", split | {"MERGE": "kernel"}, 2, decode, GPU)
    assert in_clusters.waves == apart.waves == 1 and in_clusters.shared == 2 * apart.shared


def test_heads_beside_one_another_are_bytes_apart():
    decode = parse_shape("B=64,H=8,Sq=1,Sk=8192,D=64,dtype=bf16,mask=full")
    split = {"BLOCK_M": 8, "BLOCK_N": 64, "SPLITS": 1, "MERGE": "kernel"}
    assert work_of("split_kv", split, 1, decode, GPU).apart == 0
    beside = work_of("split_kv", split, 1, decode.with_(layout="bshd"), GPU)
    assert beside.apart == beside.dram > 0
