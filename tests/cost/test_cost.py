"""The cost model: every family has a cost on every card, what was ranked absurdly is ranked plausibly, a launch that
fits nowhere has no time; how far its first choices have been, in words."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from evoattn.cost.cost import BOUNDS, MOST_CORRECTION, cost, physical_part, scores
from evoattn.cost.explanation import how_far, kinds
from evoattn.cost.fitted import Fitted, load
from evoattn.cost.physics import physics
from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.families.residency import why_no_memory
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import lookup, parse_shape
from evoattn.model.space import KernelConfig
from evoattn.search.starting import starting_configs

H100, L4 = GPUS["h100"], GPUS["l4"]
ONE_EACH = {spec.arch: spec for spec in GPUS.values()}
PROBLEMS = (
    "seed_h100",
    "llama_gqa_prefill",
    "decode_b16_8k",
    "fa_d256_4k_causal",
    "hdim512_fp32",
    "hdim512_fp16",
    "mla_decode",
)


def candidates(problem, gpu, families=tuple(registry.FAMILIES)):
    return [
        config
        for name in families
        if not registry.lookup(name).why_unsupported(problem, gpu)
        for config in starting_configs(load_space(name, gpu), problem, gpu)
    ]


def best_by_family(problem, gpu):
    """{family: the least score of its starting configs}, the least first."""
    found = {}
    for config in candidates(problem, gpu):
        score = cost(problem, config, gpu).score
        found[config.family] = min(score, found.get(config.family, score))
    return dict(sorted(found.items(), key=lambda item: item[1]))


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ONE_EACH.values(), ids=ONE_EACH)
def test_every_family_has_a_cost_on_every_architecture(gpu):
    seen = set()
    for problem in map(lookup, PROBLEMS):
        some = candidates(problem, gpu)
        for config in (*some[::3], *{config.family: config for config in some}.values()):
            found = cost(problem, config, gpu)
            assert found and 0 < found.score < 1e6 and found.bound in BOUNDS.values(), (problem.name, config)
            assert found.correction > math.exp(-1.01 * MOST_CORRECTION) and found.bound in found.sentence()
            seen.add(config.family)
    serves = {
        name for name, f in registry.FAMILIES.items() for p in map(lookup, PROBLEMS) if not f.why_unsupported(p, gpu)
    }
    assert seen == serves and len(seen) > 5


def test_no_block_that_fits_no_cost():
    config, full = candidates(lookup("seed_h100"), H100, ("flash_mma",))[0], replace(H100, smem_per_sm=1024)
    assert cost(lookup("seed_h100"), config, full) is None
    assert scores(lookup("seed_h100"), [config], full) == [math.inf]


def test_many_at_once_cost_the_same():
    problem = lookup("seed_h100")
    configs = candidates(problem, H100)
    assert scores(problem, configs, H100) == [pytest.approx(cost(problem, c, H100).score) for c in configs]


def test_trees_are_asked_of_the_best_of_each_family_that_is_near():
    problem, names = lookup("seed_h100"), ("flash_wgmma", "flash_mma")
    configs = candidates(problem, H100, names)
    least = [min(physical_part(problem, c, H100, 0, load()).us for c in configs if c.family == n) for n in names]
    apart, asked = max(least) / min(least), scores(problem, configs, H100)
    for within, all_of_them in ((apart**0.6, True), (apart**0.4, False)):
        found = zip(configs, asked, scores(problem, configs, H100, within=within), strict=True)
        assert (len({config.family for config, a, b in found if a == b}) == 2) is all_of_them


def test_three_launches_through_memory_do_not_lead_a_prefill_on_an_l4():
    found = best_by_family(lookup("llama_gqa_prefill"), L4)
    assert next(iter(found)) == "flash_mma" and found["three_kernel"] > 2 * found["flash_mma"]
    three = candidates(lookup("llama_gqa_prefill"), L4, ("three_kernel",))
    assert all(cost(lookup("llama_gqa_prefill"), config, L4).bound == "DRAM" for config in three)


def test_a_split_of_one_warp_does_not_lead_a_causal_kilotoken_on_an_l4():
    found = best_by_family(lookup("seed_h100_causal"), L4)
    assert next(iter(found)) == "flash_mma" and found["split_kv"] > 1.5 * found["flash_mma"]


@pytest.mark.parametrize(
    "shape", ["B=1,H=32,Hkv=8,Sq=1,Sk=65536,D=64", "B=16,H=32,Hkv=8,Sq=1,Sk=8192,D=128,dtype=bf16"]
)
@pytest.mark.parametrize("gpu", [L4, GPUS["a100"], H100], ids=lambda gpu: gpu.name)
def test_a_decoding_problem_costs_at_least_what_its_keys_and_values_take_memory(shape, gpu):
    problem = parse_shape(shape)
    floor = problem.bytes / gpu.dram_gb_per_s / 1e3
    assert problem.bytes > 1.3 * gpu.l2_bytes  # else L2 could hold them
    found = best_by_family(problem, gpu)
    assert min(found.values()) > floor
    assert found["split_kv"] < 1.2 * min(found.values()) and found["split_kv"] < 3 * floor


def test_more_work_costs_more():
    compared = set()
    problems = {name: lookup(name) for name in PROBLEMS}
    few = {op: lookup("seed_h100").with_(op=op) for op in ("backward", "quantize")}
    few |= {name: lookup(name) for name in ("fp8_d128_16k", "mla_decode")}
    few["merge"] = parse_shape("B=1,H=1,Sq=4096,Sk=8,D=128,op=merge")
    few["append"] = parse_shape("B=64,H=32,Hkv=8,Sq=16,Sk=4096,D=128,seqused=0:4000,op=append_halves")
    problems |= few
    for name, problem in problems.items():
        for config in candidates(problem, H100)[:: 1 if name in few else 7]:
            doubled = problem.with_(batch=8 * problem.batch)
            if registry.lookup(config.family).why_invalid(doubled, config, H100) is None:
                assert cost(doubled, config, H100).score > cost(problem, config, H100).score, (name, config)
                compared.add((name, config.family))
    assert {name for name, _ in compared} == set(problems)
    serving = {f.name for f in registry.FAMILIES.values() for p in problems.values() if not f.why_unsupported(p, H100)}
    assert {family for _, family in compared} == serving and len(serving) > 15


def test_scratch_that_the_card_has_no_memory_for_is_refused():
    problem = parse_shape("B=4,H=32,S=16384,D=64")  # S takes 64 GiB
    for name in ("l4", "h200"):
        gpu, family = GPUS[name], registry.lookup("three_kernel")
        config = load_space("three_kernel", gpu).starting_configs()[-1]
        reason = family.why_invalid(problem, config, gpu)
        assert (reason is None) == (name == "h200"), reason
        assert name == "h200" or "GiB" in reason


@pytest.mark.parametrize("variant", ["seqused=1:1", "mask=causal,window=1:0"])
def test_keys_that_nobody_reads_take_memory_too(variant):
    problem = parse_shape(f"B=1,H=1,Sq=1,Sk={1 << 28},D=64,{variant}")  # K and V take 64 GiB
    assert why_no_memory(problem, {"scratch": 1 << 30}, H100) is None
    assert "GiB" in (why_no_memory(problem, {"scratch": 20 << 30}, H100) or "")


MEASURED = json.loads((Path(__file__).parent / "wgmma_pairs.json").read_text())


@pytest.mark.parametrize("pair", MEASURED, ids=lambda pair: pair["problem"])
def test_orders_kernels_as_an_h100_did(pair):
    """The best of a search, and what it left behind: µs on an H100, 2026-11-21."""
    problem = lookup(pair["problem"])
    scores = [
        cost(problem, KernelConfig("flash_wgmma", k["params"]), H100, k["registers"]).score for k in pair["kernels"]
    ]
    assert scores == sorted(scores)
    for kernel, score in zip(pair["kernels"], scores, strict=True):
        assert 0.7 < score / kernel["us"] < 1.4


def test_a_family_that_was_never_fitted_has_a_cost_by_the_means_of_the_others():
    known, problem = load(), lookup("seed_h100")
    (config, *_) = candidates(problem, L4, ("flash_mma",))
    without = Fitted({n: w for n, w in known.weights.items() if n != "flash_mma"}, {}, {})
    found, own = cost(problem, config, L4, fitted=without), cost(problem, config, L4)
    assert found is not None and own is not None and found.correction == 1
    assert own.score / 3 < found.score < own.score * 3


def test_a_call_of_which_one_launch_fits_nowhere_has_no_time():
    gpu, problem = GPUS["h100"], AttentionProblem(1, 8, 8, 256, 256, 64, "fp16")
    config = starting_configs(load_space("three_kernel", gpu), problem, gpu)[0]
    works = registry.lookup("three_kernel").work(problem, config)
    weights = load().weights[config.family]
    assert len(works) > 1 and physics(works, gpu, weights)
    for place in range(len(works)):
        broken = [replace(w, smem_bytes=1 << 30) if i == place else w for i, w in enumerate(works)]
        assert physics(broken, gpu, weights) is None


JUDGED = {"problems": 40, "first": 1.041, "worst_first": 1.62}
ANY = ", no wgmma, TMA or cluster"


def fitted(**left_out):
    names = {
        "lands": "landscape, h100",
        "camp": "campaign, h100",
        "any": f"landscape, h100{ANY}",
        "h200": "campaign, h200",
        "window": "with window",
        "scalar": "flash_scalar",
    }
    return Fitted(
        {}, {}, {"cards": ["h100", "h200"], "left_out": {names[n]: JUDGED | row for n, row in left_out.items()}}
    )


def test_a_measured_card_hears_of_all_families():
    both = fitted(lands={}, camp={"first": 9.0}, h200={"first": 1.2}, any={"first": 5.0})
    text = "What the cost model puts first takes 1.04 times the best time on an H100 (worst 1.62), 1.20 on an H200"
    assert how_far(GPUS["h100"], (), both) == f"{text} (worst 1.62)."


def test_kinds_of_problems_are_told_one_by_one():
    problem = AttentionProblem(1, 8, 8, 1, 512, 64, "fp32", "causal_upper_left", window="64:0")
    assert kinds(problem) == ("of one query", "in fp32", "with window")
    split = fitted(lands={}, window={"first": 1.3}, scalar={"first": 1.2})
    text = how_far(GPUS["h100"], ("flash_scalar", *kinds(problem)), split)
    assert text.endswith("1.20 within flash_scalar (worst 1.62), 1.30 with window (worst 1.62).")


def test_another_card_hears_of_the_families_that_it_has_and_that_nothing_was_measured_on_it():
    text = how_far(GPUS["l4"], (), fitted(lands={}, any={"first": 1.1}))
    assert text.startswith("Among this card's families what the cost model puts first takes")
    assert "1.10 times the best time on an H100 (worst 1.62)" in text and "1.04" not in text
    assert text.endswith("Nothing was measured on the L4.")
    assert "Nothing was measured" in how_far(replace(GPUS["h100"], name="h100-pcie"), (), fitted(lands={}))


def test_without_a_judgement_it_only_says_that_nothing_was_measured():
    assert how_far(GPUS["l4"], (), fitted()) == "Nothing was measured on the L4."
