"""flash_wgmma: whatever `why_invalid` accepts compiles for sm_90a as the estimates say: 100 random configs over the
problems, some 40 seconds of one core."""

from __future__ import annotations

import random
from functools import cache

import pytest

from evoattn.backends.compiler import compile_source
from evoattn.families.flash_wgmma.family import FlashWgmma
from evoattn.families.render import render
from evoattn.model import named_problems as problems
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, load_space
from evoattn.samplers.pool import ConfigPool

FAMILY, H100 = FlashWgmma(), GPUS["h100"]
CONFIGS, SEED = 100, 20261121
PARTS = 4
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
REST = {
    "STAGES": 2,
    "BLOCKS_PER_SM": 1,
    "OVERLAP": True,
    "PING_PONG": False,
    "RESCALE": "always",
    "KEY_SPLIT": 1,
    "SCHEDULE": "single",
    "TILE_ORDER": "by_head",
    "CAUSAL_SKIP": False,
    "POLYNOMIAL_EIGHTHS": 0,
    "Q_IN_REGISTERS": False,
    "STORE": "tensor_map",
}


@cache
def draw() -> list[tuple[AttentionProblem, KernelConfig]]:
    """CONFIGS pairs: a problem at random, a valid config of it at random."""
    rng, space = random.Random(SEED), load_space("flash_wgmma", H100)
    choices = [
        p for p in problems.named_problems().values() if FAMILY.why_unsupported(p, H100) is None
    ] + OTHER_HEAD_DIMS
    pools = [
        ConfigPool(
            {"flash_wgmma": space},
            lambda name, params, p=p: FAMILY.why_invalid(p, KernelConfig(name, params), H100),
            rng,
        )
        for p in choices
    ]
    drawn = rng.choices(range(len(choices)), k=CONFIGS)
    pairs = [(choices[i], KernelConfig(*pools[i].draw())) for i in drawn]
    tight = [(problems.lookup(name), space.make_config(REST | genes)) for name, genes in TIGHT]
    assert all(FAMILY.why_invalid(p, c, H100) is None for p, c in tight)
    return pairs + tight


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
@pytest.mark.parametrize("part", range(PARTS))
def test_accepted_configs_compile_without_a_spill(part):
    assert not [text for text in map(fault, draw()[part::PARTS]) if text]
