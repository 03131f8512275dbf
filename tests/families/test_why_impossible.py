"""What cannot be is less than what a search passes over, and is what a card or a head_dim forbids."""

import random

import pytest

from evoattn.families.base import MOST_ROWS
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.dtype import DTYPES
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig

SHAPES = (
    "B=1,H=2,S=37,D=64,dtype=bf16,mask=full",
    "B=4,H=16,S=4096,D=64,dtype=bf16,mask=full",
    "B=2,H=8,Hkv=2,Sq=1,Sk=9000,D=128,dtype=bf16,mask=full",
    "B=1,H=4,S=700,D=128,dtype=fp32,mask=causal_lower_right",
)
WITH_REDUNDANT = (
    "append_kv", "backward_mma", "backward_scalar", "backward_wgmma", "flash_mma", "flash_scalar", "flash_wgmma",
    "fp8_wgmma", "latent_wgmma", "merge_parts", "quantize", "split_kv",
)  # fmt: skip
"""Of 2,000 random configs of these some are merely redundant."""


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_impossible_is_invalid_too(family, shape):
    problem, gpu, rng = parse_shape(shape), GPUS["h100"], random.Random(shape)
    space = family.space(problem, gpu)
    only_redundant = 0
    for _ in range(2000):
        config = KernelConfig(family.name, {p.name: rng.choice(p.values) for p in space.parameters})
        impossible, invalid = family.why_impossible(problem, config, gpu), family.why_invalid(problem, config, gpu)
        assert invalid or not impossible, (config, impossible)
        only_redundant += bool(invalid and not impossible)
    supported = not family.why_unsupported(problem, gpu)
    assert only_redundant or not supported or family.name not in WITH_REDUNDANT


def test_a_balanced_schedule_cannot_count_more_tiles_than_a_word_holds():
    family, gpu = FAMILIES["flash_wgmma"], GPUS["h100"]
    config = next(
        KernelConfig("flash_wgmma", params | {"BLOCK_N": 80})
        for params in load_space("flash_wgmma", gpu).starting
        if params["SCHEDULE"] == "balanced"
    )
    longest = parse_shape("B=1,H=1,Sq=64,Sk=2700000,D=64,dtype=bf16,mask=full")
    assert "counts at most" in family.why_impossible(longest, config, gpu)
    assert not family.why_impossible(longest.with_(seqlen_k=2600000), config, gpu)


@pytest.mark.parametrize(
    ("problem", "word"),
    [
        (AttentionProblem(1, 8, 2, 1 << 29, 64, 8), "2147483648 packed rows"),
        (AttentionProblem(1, 1, 1, 1_200_000_000, 1_200_000_000, 8, window="0:999999999"), "keys behind the first"),
    ],
    ids=["rows", "a window of late rows"],
)
def test_split_kv_counts_rows_and_keys_in_int32(problem, word):
    """The end of the last split would be negative, and its keys left out."""
    family, gpu = FAMILIES["split_kv"], GPUS["h100"]
    genes = {"BLOCK_M": 8, "BLOCK_N": 64, "WARPS": 2, "STAGES": 1, "SPLITS": 3, "MERGE": "last_block"}
    config = KernelConfig("split_kv", load_space("split_kv", gpu).starting[0] | genes)
    assert word in family.why_impossible(problem, config, gpu)
    half = problem.with_(seqlen_q=-(-problem.seqlen_q // 2), seqlen_k=-(-problem.seqlen_k // 2))
    assert "int32" not in (family.why_impossible(half, config, gpu) or "")


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_no_family_takes_sequences_that_an_int32_does_not_count_to_the_end_of_the_last_tile(family):
    gpu, dtype = GPUS["h200"], family.dtypes[0]
    longest = {"seqlen_k": (1 << 32) + 8}
    of_four_bytes = DTYPES[dtype].bytes == 4  # 64 GiB and more
    for sizes in ({"seqlen_k": MOST_ROWS + 8}, {"seqlen_q": MOST_ROWS + 8}, *[longest] * (not of_four_bytes)):
        problem = AttentionProblem(1, 1, 1, 64, 64, 4, dtype, op=family.operations[0]).with_(**sizes)
        assert "int32" in family.why_unsupported(problem, gpu)
        fewer = dict.fromkeys(sizes, MOST_ROWS)
        assert "int32" not in (family.why_unsupported(problem.with_(**fewer), gpu) or "")


def test_a_cluster_of_one_block_is_impossible():
    """Few keys come to one split: where that was merely redundant, the op took kernels that do not compile."""
    family, gpu, problem = FAMILIES["split_kv"], GPUS["h100"], parse_shape("B=1,H=6,Hkv=1,Sq=1,Sk=13,D=64,dtype=bf16")
    genes = {"BLOCK_M": 8, "BLOCK_N": 64, "WARPS": 2, "STAGES": 1, "MERGE": "cluster", "DEPENDENT_LAUNCH": "none"}
    base = load_space("split_kv", gpu).starting[0] | genes
    said = [family.why_impossible(problem, KernelConfig("split_kv", base | {"SPLITS": n}), gpu) for n in (1, 2)]
    assert "SPLITS=1 makes none" in said[0] and said[1] is None
