"""Picks serve problems as people have them, with kernels that can run, on cards that were timed and on others."""

from dataclasses import replace

import pytest

from evoattn.cost.cost import scores
from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import MAX_TENSOR_BYTES, AttentionProblem
from evoattn.model.shape_text import lookup, parse_shape
from evoattn.portfolio.climb import ClimbCache, Climbed
from evoattn.portfolio.pick import (
    canonical,
    grown,
    lasting_pick,
    likely,
    list_for,
    next_picks,
    pick,
    portfolio_kernels,
    whole,
)
from evoattn.portfolio.workload import DRAWS, draw

H100 = GPUS["h100"]
JUDGED = ("h100", "h200")
UNSEEN = (500, 501)
"""Seeds that no list was built from."""
CUT = replace(H100, name="cut", sm_count=114)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [H100, CUT, GPUS["h200"], GPUS["l4"], GPUS["a100"]], ids=lambda g: g.name)
@pytest.mark.sampled(3)
def test_drawn_problems_get_kernels_that_can_run(gpu):
    for problem in (p for seed in UNSEEN for p in draw(seed, 30 if gpu.name in JUDGED else 6)):
        found = pick(problem, gpu)
        assert found and registry.lookup(found.family).why_impossible(problem, found.config, gpu) is None
        assert found.estimated == (gpu.name not in JUDGED) == (found.expected_regret is None)
        assert not found.estimated or f"nothing was timed on {gpu.name}" in found.why


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.sampled(2)
def test_each_kind_of_problems_gets_kernels_that_can_run(kind):
    listed = list_for(H100)
    for problem in DRAWS[kind](600, 10):
        found = pick(problem, H100)
        if found is None:
            assert any(one.covers(problem) for one in listed.skipped)
            continue
        assert registry.lookup(found.family).why_impossible(problem, found.config, H100) is None
        assert found.estimated == (listed.kind_of(problem) not in listed.kinds)


ODD = (
    "B=1,H=1,Sq=1,Sk=1,D=8",
    "B=1,H=1,Sq=1,Sk=1,D=4,dtype=fp32",
    "B=300,H=128,Hkv=1,Sq=5,Sk=1,D=264,dtype=bf16,mask=causal_lower_right",
    "B=2,H=7,Hkv=1,Sq=100000,Sk=2,D=24,window=0:0,softcap=1,sink=1,lse=1",
    "B=3,H=66,Sq=17,Sk=131072,D=40,dtype=fp32,alibi=1,seqused=0:0",
    "B=64,H=3,Sq=1,Sk=7,D=96,Dv=8,dtype=bf16,layout=bshd,seqused=1:7,page=256",
    "B=2,H=2,Sq=2,Sk=3,D=64,dtype=bf16,layout=bshd,varlen=0+2/3+0,window=4096:0",
    "B=1,H=16,Hkv=1,Sq=1,Sk=9,D=576,Dv=512,shared_kv=1,sink=1,dtype=bf16",
)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", JUDGED)
@pytest.mark.parametrize("shape", ODD)
def test_odd_shapes_get_a_kernel_that_can_run_or_none(shape, gpu):
    problem = parse_shape(shape)
    found = pick(problem, GPUS[gpu])
    if found:
        assert not registry.lookup(found.family).why_impossible(problem, found.config, GPUS[gpu])


@pytest.mark.slow
def test_thousands_of_sequences_count_as_few_lengths():
    problem = parse_shape("B=8192,H=32,Hkv=8,Sq=1,Sk=4096,D=128,dtype=bf16,seqused=1:4096")
    assert pick(problem, H100) == pick(problem.with_(seqused="0:4096"), H100)


def test_what_pytorch_does_faster_is_left_to_it():
    few = parse_shape("B=4,H=32,Sq=16,Sk=1000,D=512,dtype=fp32,mask=full")
    assert pick(few, H100) is None and portfolio_kernels(few, H100) == []
    assert pick(few.with_(seqlen_q=1000), H100) and pick(few.with_(dtype="fp16"), H100)


@pytest.mark.slow
def test_wide_heads_get_kernels_for_them():
    families = {pick(problem, H100).family for problem in DRAWS["wide"](700, 40) if problem.dtype != "fp32"}
    assert families == {"large_head_mma"}
    gemma = pick(lookup("gemma4_full"), H100)
    assert gemma.family == "large_head_mma" and not gemma.estimated


@pytest.mark.slow
def test_a_kind_that_was_not_timed_is_estimated_and_says_so():
    found = pick(parse_shape("B=2,H=8,S=2000,D=112,dtype=fp16,mask=full"), H100)
    assert found and found.estimated and found.expected_regret is None and "'16 d112'" in found.why
    token = parse_shape("B=4,H=8,S=2000,D=96,dtype=bf16,mask=full,alibi=1")
    assert pick(token, H100).estimated and not pick(token.with_(alibi=False), H100).estimated
    capped = pick(token.with_(alibi=False, sink=True, softcap=9.0), H100)  # which SDPA refuses
    assert not capped.estimated and capped.expected_regret is None


WIDE = (
    "B=1,H=4,Sq=64,Sk=16,D=1024,dtype=fp32",
    "B=1,H=4,S=64,D=2048,dtype=fp32",
    "B=1,H=4,S=16,D=4096,dtype=fp32",
    "B=1,H=4,S=16,D=8192,dtype=fp32",
    "B=2,H=2,S=300,D=3000,dtype=fp32,mask=causal",
    "B=1,H=8,S=1024,D=1024",
    "B=1,H=8,Hkv=2,Sq=5,Sk=4096,D=4096,dtype=bf16,mask=causal_lower_right",
)


@pytest.mark.parametrize("shape", WIDE)
def test_heads_wider_than_all_that_were_measured_get_a_pick_by_the_cost_model(shape):
    problem = parse_shape(shape).with_(dtype="fp32" if "fp32" in shape else "fp16")
    found = pick(problem, H100)
    if found is None:
        assert problem.dtype == "fp32" and problem.seqlen_q <= 128, "PyTorch is faster there"
        return
    assert found.estimated and found.expected_regret is None and "cost model" in found.why
    family = registry.lookup(found.family)
    known = [c for c in load_space(found.family, H100).starting_configs() if not family.why_invalid(problem, c, H100)]
    mine, *others = scores(problem, [found.config, *known], H100)
    assert all(mine < 1.05 * other for other in others), "a climb may begin at any of them"


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["a100", "l4", "l40s", "rtx4090", "rtx5090", "b200"])
def test_a_card_without_a_list_gets_the_cost_models_choice_of_its_own_families(gpu):
    problem = parse_shape("B=4,H=16,S=1024,D=64,mask=causal")
    card = GPUS[gpu]
    found = pick(problem, card)
    assert found and found.estimated and f"nothing was timed on {card.name}" in found.why
    family = registry.lookup(found.family)
    known = [c for c in load_space(found.family, card).starting_configs() if not family.why_invalid(problem, c, card)]
    mine, *others = scores(problem, [found.config, *known], card)
    assert all(mine <= 1.03 * other for other in others)


def test_a_latent_cache_has_kernels_of_its_own():
    problem = lookup("mla_decode")
    found = pick(problem, H100)
    assert found.family == "latent_wgmma" and not found.estimated and found.config["SPLITS"] == 1
    alone, found = problem.with_(batch=1), pick(problem.with_(batch=1), H100)
    launch, *_ = registry.lookup(found.family).work(alone, found.config)
    assert launch.blocks > 100, "one sequence has fewer tiles than there are SMs, so that blocks share its keys"


def test_a_pick_over_a_cache_of_8_bits_races_what_the_one_over_16_becomes():
    wide = parse_shape("B=1,H=32,Hkv=8,Sq=1,Sk=488,D=64,dtype=bf16")
    found, other = pick(wide.with_(kv="e4m3", scales="head"), GPUS["h200"]), pick(wide, GPUS["h200"])
    expected = registry.lookup(other.family).over_eight_bits(wide, other.config, GPUS["h200"])
    assert expected["VECTOR_BYTES"] == 8 and expected["SPLITS"] == other.config["SPLITS"]
    assert expected == found.rivals[0] and found.config != expected


@pytest.mark.parametrize("words", ["", ",kv=e4m3,scales=head", ",kv=int8,scales=token"])
def test_many_queries_over_pages_do_not_get_what_was_timed_for_few_alone(words):
    text = "B=4,H=32,Hkv=8,Sq=256,Sk=4096,D=64,dtype=bf16,seqused=4096:4096,page=64,mask=causal_lower_right,layout=bshd"
    found = pick(parse_shape(text + words), GPUS["h200"])
    assert found.family == "flash_wgmma"
    assert not words or found.config["PRODUCER"] == "warpgroup"
    assert "token" not in words or found.config["RESCALE"] == "always"


def test_a_latent_cache_of_8_bits_has_tiles_for_its_heads():
    problem = parse_shape("B=64,Hkv=1,Sq=1,Sk=4096,D=576,Dv=512,dtype=bf16,rotary_apart=1,kv=e4m3,scales=columns,H=16")
    for one in (problem, problem.with_(seqused="4096:4096", page=64)):
        sizes = {heads: pick(one.with_(heads=heads), GPUS["h200"]).config["BLOCK_M"] for heads in (8, 16, 32, 64)}
        assert sizes == {8: 16, 16: 16, 32: 32, 64: 32}


def test_a_pick_races_its_own_code_with_more_and_with_fewer_splits():
    text = "B=6,H=128,Hkv=1,Sq=1,Sk=27173,D=576,Dv=512,dtype=bf16,shared_kv=1,seqused=27173:27173,page=64"
    found = pick(parse_shape(text), GPUS["h200"])
    assert found.family == "latent_wgmma"
    alike = [one for one in found.rivals if whole(one) == whole(found.config)]
    numbers, own = sorted(one["SPLITS"] for one in alike), found.config["SPLITS"]
    assert 3 <= len(alike) < len(found.rivals) and own / 2 <= numbers[0] < own < numbers[-2] < numbers[-1] <= 2.1 * own
    assert all(found.config != one for one in alike) and len(set(numbers)) == len(numbers)


def test_a_search_begins_at_the_pick_and_at_what_comes_next():
    problem = draw(503, 1)[0]
    kernels, following = portfolio_kernels(problem, H100), [one.config for one in next_picks(problem, H100)]
    assert kernels[0] == pick(problem, H100).config
    assert len({c.id for c in kernels}) == len(kernels) > 1
    assert kernels[1:] == [c for c in following if c != kernels[0]][: len(kernels) - 1]
    assert all(registry.lookup(c.family).why_impossible(problem, c, H100) is None for c in following)


def test_few_tiles_of_rows_share_their_keys():
    """40 tiles of 128 rows and 11,546 keys: three blocks each fill 120 of 132 SMs, where one leaves 92 idle."""
    problem = parse_shape("B=1,H=20,Sq=256,Sk=11546,D=160,dtype=bf16,mask=causal_lower_right")
    found = pick(problem, H100)
    assert found and found.config["BLOCK_M"] == 128 and found.config["KEY_SPLIT"] == 3


def test_what_is_picked_can_serve_the_very_problem():
    problem, gpu = AttentionProblem(1, 8, 8, 512, 512, 64, "fp16"), GPUS["l4"]
    config = load_space("flash_wgmma", GPUS["h100"]).starting_configs()[0]
    assert registry.lookup("flash_wgmma").why_impossible(problem, config, gpu)
    climbs = ClimbCache()
    climbs.add((canonical(problem), gpu), Climbed(config, 8.0, 1.25, 1))
    found = lasting_pick(problem, gpu, climbs)
    assert found.config == config and "should take 20% less time" in found.why
    picked = pick(problem, gpu, climbs)
    assert not registry.lookup(picked.family).why_impossible(problem, picked.config, gpu)


TOKEN = AttentionProblem(batch=34, heads=1, kv_heads=1, seqlen_q=1, seqlen_k=4160, head_dim=64)


def test_lengths_are_rounded_up_by_little() -> None:
    for queries, keys in ((17, 257), (1000, 1025), (65537, 131071)):
        problem = TOKEN.with_(seqlen_q=queries, seqlen_k=keys, mask="causal_lower_right")
        about = canonical(problem)
        assert queries <= about.seqlen_q <= queries * 1.04 + 3 and keys <= about.seqlen_k <= keys * 1.04 + 3
        assert canonical(about) == about


def test_a_length_that_cannot_be_rounded_stays() -> None:
    keys = MAX_TENSOR_BYTES // (96 * 2)
    problem = AttentionProblem(batch=1, heads=1, kv_heads=1, seqlen_q=1, seqlen_k=keys, head_dim=96)
    assert canonical(problem) == problem


@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, 16])
def test_few_queries_are_picked_for_with_a_little_more_keys(queries: int) -> None:
    for keys in range(1, 9000, 1 if queries == 1 else 13):
        about = canonical(TOKEN.with_(seqlen_q=queries, seqlen_k=keys))
        most = max(16, min(keys * 9 / 8, keys + 64) if keys < 1024 else keys * 9 / 8, 2 * keys - 1)
        assert about.seqlen_q == queries and keys <= about.seqlen_k <= most


@pytest.mark.slow
def test_few_queries_are_picked_for_with_few_numbers_of_keys() -> None:
    lengths = {canonical(TOKEN.with_(seqlen_k=keys)).seqlen_k for keys in range(1, 8193)}
    assert len(lengths) == 3 + 15 + 3 * 8 and all(canonical(TOKEN.with_(seqlen_k=n)).seqlen_k == n for n in lengths)


@pytest.mark.slow
def test_a_growing_problem_comes_by_every_pick() -> None:
    begin, most = TOKEN.with_(seqlen_k=100), 9000
    found = list(grown(begin, most))
    picks = {canonical(begin.with_(seqlen_k=keys)): keys for keys in range(most, 99, -1)}
    assert [problem.seqlen_k for problem in found] == sorted(picks.values())
    assert list(grown(begin, 0)) == list(grown(begin, 112)) == [begin]


@pytest.mark.parametrize("kind", ("packed", "cached", "paged"))
def test_what_only_the_device_knows_changes_nothing(kind: str) -> None:
    for problem in DRAWS[kind](601, 60):
        told = {"seqused": f"0:{problem.seqlen_k}"} if problem.seqused else {}
        if problem.varlen:
            rows = [problem.shape(name)[2] for name in "qk"]
            told = {"varlen": f"sum:{rows[0]}/sum:{rows[1]}"}
        as_called = problem.with_(**told)
        assert likely(problem) == likely(as_called) and canonical(problem) == canonical(as_called)
        seen = likely(problem)
        assert seen.key_lengths and max(keys for _, keys in seen.sequences) <= problem.seqlen_k


def test_packed_sequences_are_as_long_as_they_are_in_the_mean() -> None:
    problem = TOKEN.with_(batch=8, seqlen_q=900, seqlen_k=900, varlen="sum:3200/sum:3200")
    lengths = [rows for rows, _ in likely(problem).sequences]
    assert sum(lengths) == pytest.approx(3200, rel=0.05) and max(lengths) - min(lengths) == 128
    whole = problem.with_(varlen="sum:7200/sum:7200")
    assert set(likely(whole).sequences) == {(900, 900)}, "all of them are as long as can be"


def test_a_step_with_prompts_is_taken_for_single_tokens_beside_few_prompts() -> None:
    step = "B=13,H=8/2,Sq=1839,Sk=4096,D=128,layout=bshd,page=64,mask=causal_lower_right,varlen=sum:{}/sum:20000"
    for rows, prompts in ((1851, 1), (3001, 3), (12 * 1839, 13)):
        queries, keys = zip(*likely(parse_shape(step.format(rows))).sequences, strict=True)
        assert sum(queries) == rows and max(queries) == 1839 and sum(n > 1 for n in queries) == prompts
        assert all(few <= many for few, many in zip(queries, keys, strict=True)) and max(keys) <= 4096


def test_batches_of_packed_sequences_share_picks() -> None:
    batches = [TOKEN.with_(batch=b, seqlen_q=1000, seqlen_k=1000, varlen=f"sum:{b * 250}") for b in range(33, 37)]
    assert len({canonical(problem) for problem in batches}) == 1


def test_single_tokens_over_pages_stay_so_where_some_sequences_have_none() -> None:
    step = TOKEN.with_(batch=4, page=64, layout="bshd", varlen="sum:3/sum:9000")
    assert canonical(step).varlen.startswith("log:1:1/log:")


def test_expressions_and_block_lists_share_picks() -> None:
    def made(length: int, blocks: str) -> AttentionProblem:
        words = f"predicate=t0[b,q]==t0[b,k],tables=t0:int64:1x{length}"
        return canonical(parse_shape(f"B=1,H=8,S={length},D=64,dtype=bf16,blocks={blocks},{words}"))

    assert made(4090, "128x128:1/3/7") == made(4096, "128x128:1/4/8")
    for blocks, rounded in (("0/3/3", "0/4/4"), ("3/5/8", "4/4/8"), ("1/32/64", "1/32/66"), ("0/1/5", "0/1/4")):
        assert made(4096, f"128x128:{blocks}").blocks == f"128x128:{rounded}"
    assert made(4096, "128x128:300").blocks == "128x128:300" and made(64, "8x8:1/3/7:mixed").blocks == "8x8:1/3/7:mixed"
    assert made(4096, "128x128:1/3/7").tables == "t0:int64:1x1"
