"""`scripts/portfolio_checked.py` makes a campaign of checks."""

import pytest

from evoattn.cost import measurements
from evoattn.cost.measurements import Campaign
from evoattn.cost.training.measured import read
from evoattn.model.gpu import GPUS
from evoattn.model.named_problems import by_name_or_shape
from evoattn.portfolio.workload import draw
from scripts.portfolio_checked import drawn_problems, groups_of, times_of

MLA = by_name_or_shape("mla_decode")
ONE = by_name_or_shape("B=1,H=128,Hkv=1,Sq=1,Sk=32768,D=576,Dv=512,dtype=bf16,shared_kv=1")
NAME = "16 d576 full+dv512+shared_kv"
OLD = ["latent_wgmma", {"BLOCK_M": 64, "BLOCK_N": 64, "STAGES": 2, "RESCALE": "lazy_8", "SPLITS": 1}]
OVERLAP = ["latent_wgmma", OLD[1] | {"BLOCK_N": 32, "STAGES": 4, "OVERLAP": True}]
THREE = ["latent_wgmma", OLD[1] | {"BLOCK_N": 32, "STAGES": 4, "Q_STEPS": 16, "WARPGROUPS": 3}]


def row(problem, pick_us, winner, best_us, wrong=""):
    times = {"pick_us": pick_us, "best_us": best_us}
    return {"problem": problem.describe(), "pick": OLD, "winner": winner, "wrong": wrong} | times


@pytest.mark.slow
def test_checks_that_ran_alike_are_one_table(tmp_path):
    first = {"rows": [row(MLA, 286.5, OVERLAP, 263.0), row(ONE, 37.0, OVERLAP, 35.0, wrong="it is wrong")]}
    times, kernels = times_of([first, {"rows": [row(MLA, 287.0, THREE, 237.0)]}], [MLA, ONE])
    assert [sorted(row.values()) for row in times.values()] == [[237.0, 263.0, 287.0]], "and no wrong pick's"
    path, about = tmp_path / "h100.npz", {"device": "NVIDIA H100 80GB HBM3", "saved": "2026-11-24"}
    measurements.append(path, [Campaign("x", about, groups_of(times, kernels, GPUS["h100"]))])
    rows = read([path / "x"])
    assert {r.problem for r in rows} == {MLA.with_(name="")} and all(r.registers > 0 for r in rows)
    found = {r.config["WARPGROUPS"]: r.us for r in sorted(rows, key=lambda r: -r.us)}
    assert found == {2: 263.0, 3: 237.0}, "genes that are younger than a check have their defaults"
    assert measurements.campaign(path, "x").groups[0]["group"] == NAME


def test_checks_at_other_clocks_are_refused():
    slow = {"rows": [row(MLA, 358.0, THREE, 304.0)]}
    with pytest.raises(ValueError, match="cannot be taken together"):
        times_of([{"rows": [row(MLA, 286.5, OVERLAP, 263.0)]}, slow], [MLA])


def test_problems_of_seeds_are_drawn_again():
    problems = drawn_problems({"seeds": [109, 110], "rows": [None] * 8})
    assert len(problems) == 8 and len(set(problems) & {*draw(109, 4), *draw(110, 4)}) >= 4
    check = {"rows": [row(p, 5.0, THREE, 4.0) for p in problems]}
    times, _ = times_of([check], problems)
    assert set(times) == {p.with_(name="") for p in problems}


@pytest.mark.slow
def test_each_group_has_its_own_times_of_a_kernel():
    other = ONE.with_(seqlen_q=2, mask="causal_lower_right")
    times, kernels = times_of([{"rows": [row(MLA, 5.0, THREE, 4.0), row(other, 9.0, THREE, 8.0)]}], [MLA, other])
    groups = groups_of(times, kernels, GPUS["h100"])
    assert [sorted(us for k in g["kernels"] for us in k["times"].values()) for g in groups] == [[8, 9], [4, 5]]
