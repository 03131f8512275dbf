"""Campaigns are shared among GPUs, their tables merged, and few kernels kept that cover them."""

import pytest

from evoattn.model.paths import ROOT
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import load_space
from evoattn.portfolio.campaign import (
    VARIANT_PROBLEMS,
    Part,
    card,
    covering,
    make_groups,
    merged,
    shares,
    source_of,
    steady,
)
from evoattn.portfolio.engine.engine import Engine
from evoattn.portfolio.engine.kernel import Group, Kernel
from evoattn.portfolio.final_table import SPLITS, with_splits
from evoattn.portfolio.kind_workload import draw_kind
from evoattn.portfolio.recorded import fastest
from evoattn.portfolio.variant_workload import draw_variants
from evoattn.portfolio.wide_workload import draw_wide
from evoattn.portfolio.workload import draw

LONG, SHORT, ONE = (
    parse_shape(f"B=1,H=8,{lengths},D=64,dtype=bf16,mask=full") for lengths in ("S=4096", "S=256", "Sq=1,Sk=512")
)


def kernel(block_m: int, splits: int = 0) -> Kernel:
    if splits:
        return Kernel("split_kv", {"BLOCK_M": block_m, "SPLITS": splits, "MERGE": "kernel"})
    return Kernel("flash_wgmma", {"BLOCK_M": block_m})


def table_of(problems, rows):
    """A group and its final table. `rows`: [{kernel: µs} per problem]."""
    kernels = {k.id: k for row in rows for k, _ in row}
    times = [{k.id: us for k, us in row} for row in rows]
    group = Group("16 d64 full", problems, ("flash_wgmma", "split_kv"), kernels=kernels)
    return group, {"kernels": list(kernels), "us": [[row.get(k) for k in kernels] for row in times]}


def test_each_class_keeps_the_kernels_that_cover_it():
    wide, narrow, bad, two, four = kernel(128), kernel(64), kernel(192), kernel(8, 2), kernel(8, 4)
    rows = [
        [(wide, 10.0), (narrow, 15.0), (bad, 19.0)],
        [(wide, 3.0), (narrow, 2.0), (bad, 4.0)],
        [(wide, 9.0), (narrow, 8.0), (bad, 9.0), (two, 4.0), (four, 3.0)],
    ]
    group, table = table_of([LONG, SHORT, ONE], rows)
    assert covering(group, table, 2) == [two, wide, narrow], "of one source one kernel, of few and of many queries"
    assert covering(group, table, 1) == [two, wide]


def test_tables_are_merged_by_problem_and_the_last_time_counts():
    wide, narrow = kernel(128), kernel(64)
    h100, h200 = card("NVIDIA H100 80GB HBM3"), card("NVIDIA H200")
    first = Part(*table_of([LONG, SHORT], [[(wide, 10.0)], [(wide, 3.0)]]), h200)
    second = Part(*table_of([SHORT, ONE], [[(wide, 3.5), (narrow, 2.0)], [(narrow, 1.0)]]), h200)
    other = Part(*table_of([ONE], [[(narrow, 1.5)]]), h100)
    group, table, cards = merged([first, second, other])
    assert group.problems == [LONG, SHORT, ONE, ONE]
    assert table == {"kernels": [wide.id, narrow.id], "us": [[10.0, None], [3.5, 2.0], [None, 1.0], [None, 1.5]]}
    assert group.kernels[narrow.id] == narrow
    assert [c.name for c in cards] == ["h200", "h200", "h200", "h100"]


@pytest.mark.parametrize("count", (1, 2, 4))
def test_shares_weigh_about_the_same_and_lose_nothing(count):
    groups = [Group(str(i), [], (), weight) for i, weight in enumerate((3.0, 3.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5))]
    parts = shares(groups, count)
    assert sorted(g.name for part in parts for g in part) == sorted(g.name for g in groups)
    weights = [sum(g.weight for g in part) for part in parts]
    assert max(weights) - min(weights) <= 1.0


def test_a_group_whose_problems_were_all_measured_is_no_group():
    gpu = card("NVIDIA H200")
    groups = make_groups(draw(0, 25), gpu)
    assert groups and all(g.problems for g in groups)
    measured = {p for g in groups[1:] for p in g.problems}
    left = make_groups(draw(0, 25), gpu, without=measured)
    assert [g.name for g in left] == [groups[0].name]
    assert left[0].problems == groups[0].problems


def test_a_variant_begins_at_groups_with_a_part_of_its_variants_unless_it_has_kernels_of_its_own():
    plain, own = ("flash_wgmma", {"BLOCK_M": 128}), ("flash_wgmma", {"BLOCK_M": 64})
    given = {"16 d64 causal": [plain], "16 d64 causal+sink": [own]}
    groups = {g.name: g for g in make_groups(draw_variants(0, 200), card("NVIDIA H200"), given)}
    assert groups["16 d64 causal+window+sink"].given == [own, plain], "those that share most come first"
    assert groups["16 d64 causal+window"].given == [plain], "none with a variant that it has not"
    assert groups["16 d64 causal+sink"].given == [own]
    assert len(groups["16 d256 full+softcap"].given) > 1, "the starting configs where nothing is given"
    assert all(len(g.problems) <= VARIANT_PROBLEMS for g in groups.values())


def test_a_variant_has_the_families_for_it_alone_and_kernels_for_few_queries():
    full, causal = ("split_kv", {"BLOCK_M": 8}), ("flash_wgmma", {"BLOCK_M": 64})
    given = {"16 d128 full": [full], "16 d128 causal": [causal]}
    drawn = [p for kind in ("latent", "paged") for p in draw_kind(kind, 0, 60)]
    groups = {g.name: g for g in make_groups(drawn, card("NVIDIA H200"), given, 0.5)}
    assert "latent_wgmma" in groups["16 d576 full+dv512+shared_kv"].families
    assert any(family == "latent_wgmma" for family, _ in groups["16 d576 full+dv512+shared_kv"].given)
    old = "latent_wgmma", {"BLOCK_M": 64, "BLOCK_N": 64, "STAGES": 2, "RESCALE": "always", "SPLITS": 1}
    later = {g.name: g for g in make_groups(drawn, card("NVIDIA H200"), {"16 d576 full+dv512+shared_kv": [old]}, 0.5)}
    begun = later["16 d576 full+dv512+shared_kv"].given
    assert begun[0] == old and any("OVERLAP" in params for _, params in begun), "genes that are younger"
    pages = make_groups(draw_kind("latent_paged", 0, 20), card("NVIDIA H200"), {"16 d576 full+dv512+shared_kv": [old]})
    assert pages[0].given[0] == old, "pages begin at what was found without them"
    assert groups["16 d128 causal+seqused+page"].given == [causal, full]
    assert groups["16 d128 full+seqused+page"].given == [full]
    assert max(len(g.problems) for g in groups.values()) == VARIANT_PROBLEMS // 2


def test_wide_heads_have_a_family_of_their_own_and_begin_at_its_starting_configs():
    gpu = card("NVIDIA H200")
    groups = {g.name: g for g in make_groups((p for seed in range(8) for p in draw_wide(seed, 60)), gpu)}
    assert groups.keys() == {f"16 d{d} {mask}" for d in (320, 384, 512) for mask in ("full", "causal")} | {
        f"32 d512 {mask}" for mask in ("full", "causal")
    }
    for name, group in groups.items():
        family = "large_head" if name.startswith("32") else "large_head_mma"
        assert family in group.families and not {"flash_wgmma", "flash_mma"} & set(group.families)
        assert {params["BLOCK_M"] for own, params in group.given if own == family}


def test_a_campaign_may_begin_at_recorded_times():
    found = fastest([ROOT / "docs/landscapes/h100-d.jsonl.gz"], 1)
    assert set(found) == {"16", "32"}
    for family, params in found["16"]:
        assert load_space(family, card("NVIDIA H200")).make_config(params)
    assert len({str(entry) for entry in found["16"]}) == len(found["16"]) > 8


class ServesAll(Engine):
    """Of which `with_splits` asks nothing else."""

    def __init__(self):
        pass

    def serves(self, group, kernel):
        return [0]


def test_splits_that_cost_no_compile_are_timed_too():
    latent = Kernel("latent_wgmma", {"BLOCK_M": 64, "BLOCK_N": 64, "STAGES": 2, "RESCALE": "always", "SPLITS": 3})
    group = Group("16 d576 full+dv512+shared_kv", [], ())
    found = with_splits([latent, kernel(8, 2), kernel(128)], group, ServesAll())
    assert {k.params["SPLITS"] for k in found if k.family == "latent_wgmma"} == {3, *SPLITS}
    assert {k.params["SPLITS"] for k in found if k.family == "split_kv"} == set(SPLITS)
    assert source_of(found[0]) == source_of(next(k for k in found if k.params.get("SPLITS") == 64))


def test_a_call_that_the_cpu_was_late_with_counts_as_the_search_timed_it():
    late, rough = kernel(128), kernel(8)
    late.times, rough.times, rough.rough = {0: 10.0}, {0: 10.0}, {0}
    assert [steady(us, late, 0) for us in (9.0, 39.0, 3000.0)] == [9.0, 39.0, 10.0]
    assert steady(3000.0, late, 1) == 3000.0 and steady(45.0, rough, 0) == 45.0
