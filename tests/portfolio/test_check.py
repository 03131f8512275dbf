"""What a check says of a pick, a search and peers; peers that compile can be called ahead."""

from dataclasses import replace

import pytest

from evoattn.engine.groups import Kernel
from evoattn.model.gpu import lookup
from evoattn.model.records import Timing
from evoattn.model.shape_text import lookup as lookup_problem
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig
from evoattn.portfolio import campaign
from evoattn.portfolio.pick import pick
from evoattn.portfolio.select import check, final_tables, known_kernels, make_groups
from evoattn.portfolio.workload import draw, draw_all
from evoattn.timing.protocol import FinalResult

H100 = lookup("h100")
PROBLEM = parse_shape("B=2,H=8,Hkv=2,S=500,D=64,dtype=bf16,mask=causal,layout=bshd")


FAULTS = {"disqualified": "it is wrong", "out": "it is far behind"}


class FakeEngine:
    """Every kernel is right and takes 11 µs, or 10 if it is known; those with one of FAULTS have that, and the peer
    `broken` refuses."""

    def final(self, group, index, kernels, protocol, peers):
        assert protocol.proves and protocol.samples == 3
        timings = {p: Timing((20.0,), {}) for p in peers if p != "broken"}
        for kernel in kernels:
            samples = (9.0, 10.0, 11.0) if kernel.params.get("known") else (10.0, 11.0, 12.0)
            faults = {name: said for name, said in FAULTS.items() if kernel.params.get(name)}
            timings[kernel.id] = Timing(() if kernel.params.get("lost") else samples, faults)
        return FinalResult(timings, {"broken": "the context is lost"} if "broken" in peers else {})


def place_of(problem, chosen=None):
    _, (place,) = make_groups([problem], [chosen], H100)
    return place


@pytest.mark.parametrize(("peer", "refusals"), (("flash", {}), ("broken", {"broken": "the context is lost"})))
def test_a_peer_that_refuses_costs_no_regret(peer, refusals):
    chosen = pick(PROBLEM, H100)
    row = check(FakeEngine(), place_of(PROBLEM, chosen), chosen, 3, (peer,))
    assert row.regret == 1.0 and row.refusals == refusals
    assert set(row.peers) == (set() if refusals else {peer})


def test_a_kernel_that_proves_wrong_wins_nothing_and_is_named():
    chosen = pick(PROBLEM, H100)
    wrong = Kernel("flash_mma", {"known": 1, "disqualified": 1})
    row = check(FakeEngine(), place_of(PROBLEM, chosen), chosen, 3, (), [wrong])
    assert row.regret == 1.0 and row.fault == f"flash_mma {wrong.id}: it is wrong" and not row.wrong


@pytest.mark.parametrize(("fault", "said"), [("lost", "It has no time."), *FAULTS.items()])
def test_a_pick_that_has_no_time_says_why(fault, said):
    chosen = pick(PROBLEM, H100)
    chosen = replace(chosen, config=KernelConfig(chosen.family, {fault: 1}))
    row = check(FakeEngine(), place_of(PROBLEM), chosen, 3, ("flash",))
    assert row.wrong == said and not row.fault and row.winner is None
    assert row.pick_us == (11.0 if fault == "out" else None), "the probe's"


def test_known_kernels_take_part():
    chosen = pick(PROBLEM, H100)
    known = Kernel("flash_mma", {"known": 1})
    row = check(FakeEngine(), place_of(PROBLEM, chosen), chosen, 3, ("flash",), [known, known])
    assert row.winner == ("flash_mma", {"known": 1}) and row.best_us == 10.0 and row.pick_us == 11.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "problem, families",
    [
        (PROBLEM, {"flash_wgmma", "flash_mma"}),
        (PROBLEM.with_(seqlen_q=1), {"flash_wgmma", "flash_mma", "split_kv"}),
        (PROBLEM.with_(dtype="fp32"), {"flash_scalar", "split_kv", "large_head"}),
        (PROBLEM.with_(head_dim=4096), {"large_head"}),  # which has won nothing in 16 bits, and serves it alone
        (lookup_problem("gemma4_full"), {"large_head_mma"}),
    ],
)
def test_a_search_has_the_families_that_may_win_the_problem(problem, families):
    assert set(place_of(problem)[0].families) == families


def test_known_kernels_are_completed_or_left_out():
    chosen = pick(PROBLEM, H100)
    assert chosen
    about = {"problem": PROBLEM.to_dict(), "arch": H100.arch}
    rows = [
        about | {"family": chosen.family, "config": dict(chosen.config.params)},
        about | {"family": "flash_mma", "config": {"BLOCK_M": 7}},
    ]
    (kernel,) = known_kernels([(row["family"], row["config"]) for row in rows], PROBLEM, H100)
    assert kernel.params == chosen.config.params


@pytest.mark.slow
def test_problems_that_a_kernel_serves_are_searched_together_and_their_times_are_kept(tmp_path):
    problems = [PROBLEM, PROBLEM.with_(dtype="fp16"), PROBLEM.with_(batch=4), PROBLEM]
    picks = [pick(problem, H100) for problem in problems]
    groups, places = make_groups(problems, picks, H100)
    assert [len(group.problems) for group in groups] == [2, 1] and places[3] == places[0]
    assert [group.problems[i] for group, i in places] == problems
    assert {(one.family, one.config.id) for one in picks} <= {
        (family, Kernel(family, params).id) for group in groups for family, params in group.given
    }
    judged = [(place, check(FakeEngine(), place, one, 3, ())) for place, one in zip(places[:3], picks[:3], strict=True)]
    campaign.save(tmp_path / "c.jsonl.gz", groups, {"device": "NVIDIA H100 80GB HBM3"}, final_tables(judged))
    about, loaded, tables = campaign.load(tmp_path / "c.jsonl.gz")
    assert about["device"] == "NVIDIA H100 80GB HBM3" and [g.problems for g in loaded] == [g.problems for g in groups]
    (first, _, third) = [row.times for _, row in judged]
    table = tables[groups[0].name]
    for us, row in zip(table["us"], (first, third), strict=True):
        assert {name: one for name, one in zip(table["kernels"], us, strict=True) if one} == row


def test_problems_of_several_seeds():
    assert draw_all(["plain"], [71, 72], 5) == [*draw(71, 3), *draw(72, 2)]
