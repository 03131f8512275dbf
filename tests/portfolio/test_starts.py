"""Where climbs begin beside the kernels of a class: each is valid, and keys are shared out among idle SMs."""

from __future__ import annotations

from evoattn.families import registry
from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig, load_space
from evoattn.portfolio.refine import all_genes
from evoattn.portfolio.starts import other_shapes, tensor_shapes, warp_shapes

H100 = GPUS["h100"]
SPACE = load_space("flash_wgmma", H100)
GENES = all_genes(SPACE)
LONG = parse_shape("B=1,H=20,Sq=256,Sk=11546,D=160,dtype=bf16,mask=causal_lower_right")
MANY = parse_shape("B=33,H=64,Hkv=8,S=1280,D=64,dtype=fp16,mask=full")
SHORT = parse_shape("B=7,H=16,Sq=1,Sk=448,D=80,dtype=fp16,mask=full")
WARP_GENES = all_genes(load_space("flash_mma", H100))
TENSOR_GENES = all_genes(load_space("large_head", H100))


def started(problem):
    start = KernelConfig("flash_wgmma", SPACE.starting_configs()[0].params)
    return other_shapes(start, problem, H100, GENES)


def test_few_tiles_of_rows_share_their_keys_among_the_sms():
    """40 tiles of 128 rows on 132 SMs: three blocks each."""
    shapes = [(c["BLOCK_M"], c["KEY_SPLIT"]) for c in started(LONG)]
    assert (128, 3) in shapes and not any(m == 128 and s > 3 for m, s in shapes)


def test_many_tiles_do_not():
    found = started(MANY)
    assert {c["KEY_SPLIT"] for c in found} == {1} and {c["GROUP_ROWS"] for c in found} == {False, True}
    assert len({c["BLOCK_M"] for c in found}) > 2


def test_all_are_valid_and_have_known_values():
    for problem in (LONG, MANY):
        for config in started(problem):
            assert registry.lookup(config.family).why_invalid(problem, config, H100) is None
            assert all(value in GENES[name] for name, value in config.params.items())


def test_other_families_and_unknown_genes_have_none():
    assert other_shapes(KernelConfig("flash_mma", {}), LONG, H100, GENES) == []
    assert other_shapes(SPACE.starting_configs()[0], LONG, H100, {}) == []


def test_warps_share_the_keys_of_few_queries():
    found = warp_shapes(SHORT, H100, WARP_GENES)
    assert {c["KEY_WARPS"] for c in found} == {1, 2, 4} and {c["BLOCK_M"] for c in found} == {16}
    assert len({c["BLOCK_N"] for c in found}) > 2
    few_keys = warp_shapes(SHORT.with_(seqlen_q=448), H100, WARP_GENES)
    assert {c["WARPS"] for c in few_keys} == {2, 4}
    for problem, configs in ((SHORT, found), (SHORT.with_(seqlen_q=448), few_keys)):
        assert not any(registry.lookup("flash_mma").why_invalid(problem, c, H100) for c in configs)


def test_warp_shapes_are_not_asked_where_they_were_hardly_fastest():
    for changed in ({"kv_heads": 2}, {"batch": 1}, {"seqlen_q": 448, "seqlen_k": 2048}):
        assert warp_shapes(SHORT.with_(**changed), H100, WARP_GENES) == []
    assert warp_shapes(SHORT, H100, {}) == []


def test_fp32_has_tiles_on_tensor_cores():
    """A warp's columns of the answer are 32 or more, so that a head_dim of 72 or 80 has none."""
    problem = parse_shape("B=2,H=12,S=551,D=128,dtype=fp32")
    for dim in (32, 64, 96, 128, 160, 192, 256):
        found = tensor_shapes(problem.with_(head_dim=dim), H100, TENSOR_GENES)
        assert len({c["BLOCK_M"] for c in found}) >= 2 and len({c.id for c in found}) == len(found)
        for config in found:
            assert registry.lookup("large_head").why_invalid(problem.with_(head_dim=dim), config, H100) is None
            assert tuple(config.params) == load_space("large_head", H100).names(), "by their order scores are kept"
            assert all(value in TENSOR_GENES[name] for name, value in config.params.items())
    for changed in ({"head_dim": 72}, {"head_dim": 80}, {"dtype": "bf16"}):
        assert tensor_shapes(problem.with_(**changed), H100, TENSOR_GENES) == []
    assert tensor_shapes(problem, H100, {}) == []
