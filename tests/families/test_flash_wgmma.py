"""flash_wgmma: what `why_invalid` promises, and that what it lets through compiles as it should."""

import itertools
import math
import random
from functools import cache

import pytest

from evoattn.backends.compiler import compile_source
from evoattn.families.base import starts_zeroed
from evoattn.families.flash_wgmma.family import FlashWgmma
from evoattn.families.flash_wgmma.resources import FlashWgmmaGenes, begins_ahead, moved_registers, smem_bytes, threads
from evoattn.families.flash_wgmma.text import wgmma_function
from evoattn.families.registry import load_space
from evoattn.families.render import render
from evoattn.model import shape_text as problems
from evoattn.model.gpu import GPUS
from evoattn.model.launch import Buffer, TensorMap
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.samplers.base import ConfigPool
from evoattn.search.starting import starting_configs
from tests.families.covering import covering, gene_pairs

FAMILY, H100 = FlashWgmma(), GPUS["h100"]
SPACE = load_space("flash_wgmma", H100)
BASE = dict(
    BLOCK_M=64, BLOCK_N=128, STAGES=2, BLOCKS_PER_SM=2, PRODUCER="warp", OVERLAP=True, PING_PONG=False,
    RESCALE="always", KEY_SPLIT=1, SCHEDULE="single", TILE_ORDER="by_head", CAUSAL_SKIP=False, POLYNOMIAL_EIGHTHS=0,
    Q_IN_REGISTERS=False, STORE="tensor_map",
)  # fmt: skip
THREE = {"BLOCK_M": 192, "BLOCKS_PER_SM": 1, "PRODUCER": "warpgroup"}
TWO = {**THREE, "BLOCK_M": 128, "BLOCK_N": 64, "RESCALE": "lazy_5"}


def problem(seqlen_q=4096, seqlen_k=4096, head_dim=64, heads=32, kv_heads=8, **rest) -> AttentionProblem:
    return AttentionProblem(1, heads, kv_heads, seqlen_q, seqlen_k, head_dim, **rest)


def config(**genes) -> KernelConfig:
    return SPACE.make_config(BASE | genes)


def named_problems() -> list[AttentionProblem]:
    return [p for p in problems.named_problems().values() if FAMILY.why_unsupported(p, H100) is None]


AHEAD = {**TWO, "BLOCK_N": 96, "STAGES": 3, "RESCALE": "lazy_after", "SCHEDULE": "claimed", "Q_IN_REGISTERS": True}


@pytest.mark.parametrize(
    ("genes", "head_dim", "ahead"),
    [
        ({}, 128, True),
        ({"SCHEDULE": "single"}, 128, False),
        ({"OVERLAP": False}, 128, False),
        ({"Q_IN_REGISTERS": False}, 128, False),
        ({"SCHEDULE": "balanced"}, 128, True),
        ({"SCHEDULE": "balanced", "BLOCK_N": 48, "PRODUCER": "warp"}, 128, False),
        ({"CAUSAL_SKIP": True, "STAGES": 1}, 128, False),
        ({"CAUSAL_SKIP": True, "STAGES": 2}, 128, True),
        ({"BLOCK_N": 112}, 128, False),
        ({"BLOCK_N": 112, "STORE": "rows"}, 128, False),
        ({"STORE": "rows", "BLOCK_N": 64}, 64, True),
        ({"BLOCK_M": 64, "BLOCK_N": 48, "BLOCKS_PER_SM": 3}, 64, False),
        ({"BLOCK_M": 192, "BLOCK_N": 80}, 64, True),
    ],
)
def test_a_tile_of_rows_begins_ahead_where_there_is_room(genes, head_dim, ahead):
    p = problem(head_dim=head_dim, mask="causal_upper_left" if "CAUSAL_SKIP" in genes else "full")
    c = config(**AHEAD | genes)
    assert begins_ahead(p, FlashWgmmaGenes.of(c)) == ahead
    assert f"AHEAD = {str(ahead).lower()};" in render(FAMILY, p, c, H100).source


def test_other_gpus_are_refused():
    assert all(FAMILY.why_unsupported(problem(), gpu) for gpu in GPUS.values() if gpu.arch != "sm_90a")


def test_shared_memory_and_registers_of_the_prototype():
    """Numbers that ran on an H100 (reports/sources.md)."""
    barriers = 8 * (2 * 1 + 4 * 2 + 1) + 32
    assert smem_bytes(problem(), FlashWgmmaGenes.of(config())) == (64 + 2 * 2 * 128) * 64 * 2 + barriers
    own_output = config(**THREE, BLOCK_N=80, SCHEDULE="fixed")
    assert smem_bytes(problem(head_dim=128), FlashWgmmaGenes.of(own_output)) == 180224 + 8 * (2 * 3 + 4 * 2 + 1) + 32
    by_chunks = config(**TWO, SCHEDULE="claimed", STORE="chunks")
    assert (
        smem_bytes(problem(head_dim=256), FlashWgmmaGenes.of(by_chunks))
        == 64 * 1024 + 2 * 64 * 1024 + 32 * 1024 + 8 * (2 * 2 + 4 * 2 + 1) + 32
    )
    assert smem_bytes(problem(head_dim=96), FlashWgmmaGenes.of(own_output)) == smem_bytes(
        problem(head_dim=128), FlashWgmmaGenes.of(own_output)
    )
    for genes, registers, count in (
        (THREE, (32, 160), 512),
        ({**THREE, "BLOCK_M": 128}, (24, 240), 384),
        ({**THREE, "BLOCK_M": 256}, (24, 112), 640),
        ({"PRODUCER": "warpgroup"}, (40, 216), 256),
        ({}, (0, 0), 160),
    ):
        assert (moved_registers(FlashWgmmaGenes.of(config(**genes))), threads(FlashWgmmaGenes.of(config(**genes)))) == (
            registers,
            count,
        )


def test_setmaxnreg_never_asks_for_more_than_the_block_owns():
    valid = 0
    for block_m, blocks in itertools.product((64, 128, 192, 256), (1, 2, 3)):
        c = config(BLOCK_M=block_m, BLOCKS_PER_SM=blocks, PRODUCER="warpgroup", BLOCK_N=48)
        if FAMILY.why_invalid(problem(), c, H100) is None:
            producer, consumer = moved_registers(FlashWgmmaGenes.of(c))
            owned = 65536 // (blocks * threads(FlashWgmmaGenes.of(c))) // 8 * 8 * threads(FlashWgmmaGenes.of(c))
            assert 24 <= producer < consumer <= 240 and producer % 8 == consumer % 8 == 0
            assert 128 * (block_m // 64 * consumer + producer) <= owned
            valid += 1
    assert valid >= 4


def test_starting_configs_are_valid_and_differ():
    for p in named_problems():
        configs = starting_configs(SPACE, p, H100)
        assert configs or p.seqlen_q < 512, p.describe()
        assert len({c.id for c in configs}) == len(configs)


def test_wgmma_text_counts_its_operands():
    text = wgmma_function("multiply", 96, "bf16", a_in_registers=True, b_transposed=True)
    assert (
        text.count("+f") == 48
        and "m64n96k16.f32.bf16.bf16" in text
        and "{%48, %49, %50, %51}, %52, p, 1, 1, 1;" in text
    )
    assert max(map(len, text.splitlines())) <= 140
    with pytest.raises(ValueError, match="in registers"):
        wgmma_function("multiply", 96, "bf16", a_in_registers=True, b_transposed=True, a_transposed=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["seed_h100", "seed_l4_s512", "fa_d64_2k_causal", "fa_d128_4k", "llama_gqa_prefill", "fa_d256_4k"]
)
@pytest.mark.sampled(2)
def test_a_starting_config_compiles_as_the_estimate_says(name):
    p = problems.lookup(name)
    assert not fault((p, starting_configs(SPACE, p, H100)[-1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "genes",
    [{"RESCALE": "lazy_after", "BLOCK_N": 112, "STORE": "rows"}, {"KEY_SPLIT": 4, "BLOCK_N": 64, "BLOCKS_PER_SM": 1}],
)
def test_rare_genes_compile_as_the_estimate_says(genes):
    p = problem(64, 512)
    assert FAMILY.why_invalid(p, config(**genes), H100) is None
    assert not fault((p, config(**genes)))


def test_tensor_maps_keep_to_the_limits():
    """Rank, box and stride limits of reports/sources.md, and that every box fits the tile it fills."""
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
    """(row block, head of all) of a block, as `templates/flash_wgmma/block_tile.cuh` reads its grid."""
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


DRAWN, CONFIGS, SEED = 200, 5, 20261121
"""The tests that share the configs, so that all cores have some."""
OTHER_HEAD_DIMS = [
    AttentionProblem(1, 32, 8, 4096, 4096, 96, "fp16", "causal_lower_right"),
    AttentionProblem(2, 8, 8, 600, 700, 192, "bf16", "causal_upper_left"),
    AttentionProblem(1, 4, 4, 333, 203, 200, "fp16"),
    AttentionProblem(1, 32, 8, 2048, 2048, 40, "bf16"),
]
# Forms of the best known configs that leave hardly a register unused (see `wgmma_registers`).
TIGHT = [
    ("fa_d64_2k", {"BLOCK_M": 192, "BLOCK_N": 128, "PRODUCER": "warpgroup", "SCHEDULE": "fixed", "PING_PONG": True}),
    ("fa_d64_2k", {"BLOCK_M": 256, "BLOCK_N": 64, "PRODUCER": "warpgroup", "SCHEDULE": "fixed", "RESCALE": "lazy_8"}),
    (
        "fa_d128_4k",
        {
            "BLOCK_M": 128,
            "BLOCK_N": 112,
            "PRODUCER": "warpgroup",
            "SCHEDULE": "fixed",
            "RESCALE": "lazy_after",
            "Q_IN_REGISTERS": True,
        },
    ),
    (
        "fa_d128_16k",
        {
            "BLOCK_M": 128,
            "BLOCK_N": 112,
            "PRODUCER": "warpgroup",
            "SCHEDULE": "balanced",
            "PING_PONG": True,
            "RESCALE": "lazy_after",
            "Q_IN_REGISTERS": True,
            "STORE": "rows",
        },
    ),
    (
        "fa_d64_2k",
        {
            "BLOCK_M": 192,
            "BLOCK_N": 80,
            "STAGES": 4,
            "PRODUCER": "warpgroup",
            "SCHEDULE": "balanced",
            "PING_PONG": True,
            "RESCALE": "lazy_after",
            "Q_IN_REGISTERS": True,
        },
    ),
    ("fa_d256_4k", {"BLOCK_M": 128, "BLOCK_N": 80, "PRODUCER": "warpgroup", "RESCALE": "lazy_5"}),
]


@cache
def draw() -> list[tuple[AttentionProblem, KernelConfig]]:
    """CONFIGS of DRAWN random pairs of a problem and a valid config: those that have most pairs of values of genes, and
    values of genes at a head_dim; and the TIGHT ones."""
    rng = random.Random(SEED)
    choices = named_problems() + OTHER_HEAD_DIMS
    pools = [
        ConfigPool(
            {"flash_wgmma": SPACE},
            lambda name, params, p=p: FAMILY.why_invalid(p, KernelConfig(name, params), H100),
            rng,
        )
        for p in choices
    ]
    drawn = [(choices[i], KernelConfig(*pools[i].draw())) for i in rng.choices(range(len(choices)), k=DRAWN)]
    chosen = covering(drawn, gene_pairs, most=CONFIGS)
    tight = [(problems.lookup(name), config(**{"BLOCKS_PER_SM": 1} | genes)) for name, genes in TIGHT]
    assert all(FAMILY.why_invalid(p, c, H100) is None for p, c in tight)
    return chosen + tight


VARIANT_SPILL_BYTES = 16
"""Of stores and of loads that a variant may spill: a window's bounds are two registers beside the rest, and the best
kernels of head_dim 256 leave none."""


def fault(pair: tuple[AttentionProblem, KernelConfig]) -> str:
    """What is wrong with a compile: a spill, wgmma serialized or setmaxnreg ignored (C7508, C7511, C7512), static
    shared memory. Dynamic shared memory is proved by the static_assert of the source."""
    problem, config = pair
    info = compile_source(render(FAMILY, problem, config, H100).source, H100.arch).info
    spilled = max(info.spill_store_bytes, info.spill_load_bytes)
    if spilled <= (VARIANT_SPILL_BYTES if problem.variants else 0) and not info.warnings and not info.static_smem_bytes:
        return ""
    return f"{problem.describe()} {config.describe()}: {info.spill_store_bytes} bytes spilled, {info.warnings}"


@pytest.mark.slow
def test_accepted_configs_compile_without_a_spill():
    assert not [text for text in map(fault, draw()) if text]
