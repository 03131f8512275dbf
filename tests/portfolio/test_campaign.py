"""Campaigns search problems as they are drawn, in groups that one kernel serves."""

import pytest

from evoattn.engine.groups import Group, Kernel
from evoattn.families.registry import load_space
from evoattn.model.gpu import DetectedDevice, lookup
from evoattn.portfolio import campaign
from evoattn.portfolio.campaign import by_group, chosen, group_of, make_groups, stand_in
from evoattn.portfolio.measure import Wanted, measure
from evoattn.portfolio.pick import portfolio_kernels
from evoattn.portfolio.workload import DRAWS, SCORES, WIDE, draw
from tests.portfolio.calibrate_fakes import TOOLS

H200 = lookup("h200")
SPACE = load_space("flash_wgmma", H200)


@pytest.mark.slow
def test_problems_come_as_they_are_drawn():
    groups = make_groups(draw(0, 400), H200, 20)
    problems = [p for group in groups for p in group.problems]
    assert set(problems) == set(chosen(draw(0, 400), 20)) and len(problems) == 20
    assert all(group.weight == len(group.problems) and group.given for group in groups)
    dtypes = {group.name: {p.dtype for p in group.problems} for group in groups}
    assert all(len(found) == 1 and (found == {"fp16"}) == name.endswith(" fp16") for name, found in dtypes.items())
    picks = {portfolio_kernels(p, H200)[0].id for p in groups[0].problems}
    assert picks <= {Kernel(family, params).id for family, params in groups[0].given}


def test_a_problem_stands_for_its_group_with_its_variants():
    groups = by_group(DRAWS[SCORES](1, 400))
    assert {"16 d64 causal+window+sink", "16 d128 causal+window", "16 d256 causal+softcap"} <= groups.keys()
    for name, problems in groups.items():
        assert all(group_of(p) == name for p in problems)


@pytest.mark.slow
def test_each_kind_has_its_families():
    drawn = [p for kind in ("latent", "paged") for p in DRAWS[kind](0, 12)] + DRAWS[WIDE](0, 6)
    for group in make_groups(drawn, H200, 30):
        families = set(group.families)
        assert group.given and {family for family, _ in group.given} <= families
        if "shared_kv" in group.name:
            assert "latent_wgmma" in families
        if int(group.name.split()[1][1:]) in (320, 384, 512):
            assert not {"flash_wgmma", "flash_mma"} & families


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


@pytest.mark.slow
def test_a_campaign_keeps_all_times(tmp_path):
    wanted = Wanted(tmp_path / "out.jsonl.gz", seconds=2, count=2, seeds=range(1), jobs=1)
    device, said = DetectedDevice(0, "NVIDIA H200", (9, 0), "13.0"), list[str]()
    measure(wanted, device, said.append, TOOLS)
    about, groups, tables = campaign.load(wanted.output)
    right = [k for group in groups for k in group.kernels.values() if k.state == "right" and k.times]
    assert said[0] == f"{len(groups)} groups, 2 problems" and right and not tables
    assert about["device"] == "NVIDIA H200" and about["measured"] == sum(len(k.times) for k in right)
