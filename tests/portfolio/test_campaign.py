"""Campaigns take problems that are new, are shared among GPUs, and go on with what earlier ones found."""

from __future__ import annotations

from collections import Counter

import pytest

from evoattn.engine.group_search import GroupSearch
from evoattn.engine.groups import Group, Kernel
from evoattn.families.registry import load_space
from evoattn.model.gpu import lookup
from evoattn.portfolio import campaign
from evoattn.portfolio.campaign import EMPHASIS, emphasis_of, group_of, make_groups, shares, stand_in
from evoattn.portfolio.measure import SPLITS, Wanted, with_splits
from evoattn.portfolio.pick import portfolio_kernels
from evoattn.portfolio.workload import draw, draw_kind, draw_wide

H200 = lookup("h200")
SPACE = load_space("flash_wgmma", H200)


def kernel(block_m: int, splits: int = 0) -> Kernel:
    if splits:
        return Kernel("split_kv", {"BLOCK_M": block_m, "SPLITS": splits, "MERGE": "kernel"})
    return Kernel("flash_wgmma", {"BLOCK_M": block_m})


@pytest.mark.parametrize("count", (1, 2, 4))
def test_shares_weigh_about_the_same_and_lose_nothing(count):
    groups = [Group(str(i), [], (), weight) for i, weight in enumerate((3.0, 3.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5))]
    parts = shares(groups, count)
    assert sorted(g.name for part in parts for g in part) == sorted(g.name for g in groups)
    weights = [sum(g.weight for g in part) for part in parts]
    assert max(weights) - min(weights) <= 1.0


def test_one_process_measures_all_groups(tmp_path):
    wanted = Wanted(tmp_path / "out.jsonl.gz", count=1, seeds=range(1))
    assert sum(len(group.problems) for group in wanted.groups(H200)) == 1


@pytest.fixture
def earlier(tmp_path):
    """A campaign that searched two problems, and timed the first in its final table."""
    problems = [stand_in(p) for p in draw(0, 400) if group_of(p) == "16 d64 full" and p.dtype == "bf16"][:2]
    group = Group("16 d64 full", problems, ("flash_wgmma",))
    timed = Kernel("flash_wgmma", SPACE.completed(SPACE.starting[1]), "random", "right", 100)
    timed.times = {0: 5.0, 1: 7.0}
    group.kernels[timed.id] = timed
    path = tmp_path / "one.jsonl.gz"
    table = {group.name: {"kernels": [timed.id], "us": [[5.0], [None]]}}
    campaign.save(path, [group], {"device": "NVIDIA H200"}, table)
    return path, problems, timed


@pytest.mark.slow
def test_a_campaign_goes_on_with_problems_that_no_final_table_has(earlier, tmp_path):
    path, problems, timed = earlier
    group = next(g for g in make_groups(draw(0, 30), [path], H200, 30) if g.name == "16 d64 full")
    assert problems[0] not in group.problems and problems[1] in group.problems
    assert group.kernels[timed.id].times == {group.problems.index(problems[1]): 7.0}
    for table, kept in (({}, False), ({group.name: {"kernels": [timed.id], "us": []}}, True)):
        campaign.save(tmp_path / "two.jsonl.gz", [group], {}, table)
        _, (loaded,), _ = campaign.load(tmp_path / "two.jsonl.gz")
        assert (timed.id in loaded.kernels) == kept, "what was recalled is in the earlier file"


@pytest.mark.slow
def test_problems_come_as_they_are_drawn_or_with_emphasis():
    groups = make_groups(draw(0, 400), [], H200, 20)
    problems = [p for group in groups for p in group.problems]
    assert len(problems) == 20
    assert all(group.weight == len(group.problems) and group.given for group in groups)
    dtypes = {group.name: {p.dtype for p in group.problems} for group in groups}
    assert all(len(found) == 1 and (found == {"fp16"}) == name.endswith(" fp16") for name, found in dtypes.items())
    picks = {portfolio_kernels(p, H200)[0].id for p in groups[0].problems}
    assert picks <= {Kernel(family, params).id for family, params in groups[0].given}
    kinds = Counter(emphasis_of(p) for g in make_groups(draw(0, 400), [], H200, 30, True) for p in g.problems)
    assert all(kinds[name] == round(30 * EMPHASIS[name][0]) for name in ("causal, one wave", "fp32"))


@pytest.mark.slow
def test_each_kind_has_its_families():
    drawn = [p for kind in ("latent", "paged") for p in draw_kind(kind, 0, 12)] + draw_wide(0, 6)
    for group in make_groups(drawn, [], H200, 30):
        families = set(group.families)
        assert group.given and {family for family, _ in group.given} <= families
        if "shared_kv" in group.name:
            assert "latent_wgmma" in families
        if int(group.name.split()[1][1:]) in (320, 384, 512):
            assert not {"flash_wgmma", "flash_mma"} & families


class ServesAll(GroupSearch):
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


def test_what_a_group_of_the_same_name_timed_is_taken_over_as_far_as_problems_and_spaces_are_the_same():
    one, two, new = (p.with_(seqlen_k=p.seqlen_k + n) for n, p in enumerate([stand_in(draw(0, 1)[0])] * 3))
    params = SPACE.completed(SPACE.starting[0])

    def kernel_with(state: str, times: dict[int, float], rough: set[int], **changed: object) -> Kernel:
        return Kernel("flash_wgmma", params | changed, "random", state, 99, 8, times, rough)

    given = [
        kernel_with("right", {0: 5.0, 1: 7.0}, {0}),
        kernel_with("right", {0: 6.0}, set(), BLOCK_M=7),  # no value of the space
        kernel_with("wrong: it lies", {1: 4.0}, set(), STAGES=params["STAGES"] + 1),
    ]
    earlier_group = Group("a", [one, two], (), kernels={k.id: k for k in given})
    group, other = Group("a", [two, new], ()), Group("b", [two], ())
    campaign.recall(other, earlier_group, {"flash_wgmma": SPACE})
    assert not other.kernels
    campaign.recall(group, earlier_group, {"flash_wgmma": SPACE})
    (known,) = group.kernels.values()
    assert (known.times, known.rough, known.registers, known.spill_bytes) == ({0: 7.0}, set(), 99, 8)
    earlier_group.kernels[given[0].id] = kernel_with("right", {1: 8.0}, {1})
    campaign.recall(group, earlier_group, {"flash_wgmma": SPACE})
    assert (known.times, known.rough) == ({0: 8.0}, {0})
    earlier_group.kernels[given[0].id] = given[0]
    campaign.recall(group, earlier_group, {"flash_wgmma": SPACE})
    assert (known.times, known.rough) == ({0: 7.0}, set())
