"""A campaign that goes on: which problems it takes, what it recalls, and that its proposals suit the problem."""

import random
from collections import Counter

import pytest

from evoattn.cost.cost import scores
from evoattn.families import registry
from evoattn.model.gpu import lookup
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import load_space
from evoattn.portfolio import campaign
from evoattn.portfolio.again import groups_again
from evoattn.portfolio.emphasis import KINDS, kind_of
from evoattn.portfolio.engine.aimed import AIMS, Aim, AimedBreeder, fill_waves, fit_keys, group_rows, split_keys
from evoattn.portfolio.engine.climbing import ALSO_FAR, BEHIND, KEPT, RIVAL, RIVALS, STEPS, ClimbingBreeder
from evoattn.portfolio.engine.kernel import Group, Kernel
from evoattn.portfolio.features import class_of
from evoattn.portfolio.pick import portfolio_kernels
from evoattn.portfolio.refine import all_genes, climb, neighbours
from evoattn.portfolio.starts import SHAPE
from evoattn.portfolio.workload import draw

H200 = lookup("h200")
SPACE = load_space("flash_wgmma", H200)
CHUNK = parse_shape("B=2,H=2,Sq=128,Sk=8192,D=128,dtype=bf16,mask=causal_lower_right")
GROUPED = parse_shape("B=2,H=32,Hkv=4,Sq=40,Sk=1000,D=128,dtype=bf16,mask=causal_lower_right")


def aim_of(problem, **genes):
    return Aim(problem, SPACE.completed(SPACE.starting[0]) | genes, SPACE, H200, random.Random(0))


def test_keys_are_split_among_as_many_blocks_as_there_are_sms_for():
    """8 tiles of 64 rows leave room for 16 blocks on each one's keys, or 33 where two fit on an SM."""
    one = aim_of(CHUNK, BLOCKS_PER_SM=1, BLOCK_M=64)
    assert {split_keys(one)["KEY_SPLIT"] for _ in range(9)} == {12, 16}
    two = split_keys(aim_of(CHUNK, BLOCKS_PER_SM=2, BLOCK_M=64))
    assert two["KEY_SPLIT"] in {16, 32} and two["STORE"] == "rows" and two["SCHEDULE"] == "single"
    assert not split_keys(aim_of(CHUNK.with_(batch=64)))


def test_heads_of_a_group_are_rows_only_where_there_is_a_group():
    assert group_rows(aim_of(GROUPED)) == {"GROUP_ROWS": True}
    assert group_rows(aim_of(GROUPED, GROUP_ROWS=True)) == {"GROUP_ROWS": False}
    assert not group_rows(aim_of(CHUNK))


def test_tiles_are_drawn_that_fill_the_last_wave():
    """112 heads of 256 rows are one wave of tiles of 256, and four of 64 that are as full; 192 would waste half."""
    problem = parse_shape("B=14,H=8,Sq=256,Sk=4096,D=96,dtype=bf16,mask=full")
    aim = aim_of(problem, BLOCK_M=192, BLOCKS_PER_SM=1)
    drawn = Counter(fill_waves(aim)["BLOCK_M"] for _ in range(200))
    assert drawn[256] > 20 and drawn[64] > 20 and not drawn[192]


def test_tiles_of_keys_suit_the_keys():
    """79 keys: one tile of 80 at one stage, before 96 and twice 48."""
    aim = aim_of(CHUNK.with_(seqlen_k=79, seqlen_q=79), BLOCK_N=128)
    drawn = {fit_keys(aim)["BLOCK_N"] for _ in range(50)}
    assert drawn <= {80, 96, 48} and 80 in drawn
    assert fit_keys(aim_of(CHUNK.with_(seqlen_k=80, seqlen_q=80), BLOCK_N=128, STAGES=4))["STAGES"] == 1


@pytest.mark.slow
def test_proposals_are_valid_and_draw_the_genes_that_matter():
    group = Group(class_of(CHUNK).rpartition(" ")[0], [CHUNK, GROUPED], ("flash_wgmma", "split_kv"))
    group.given = [("flash_wgmma", params) for params in SPACE.starting]
    breeder, genes = AimedBreeder(group, H200, 0), Counter()
    for _ in range(120):
        if not (made := breeder.propose()):
            continue
        kernel, target = made
        family = registry.lookup(kernel.family)
        assert not family.why_invalid(group.problems[target], kernel.config, H200)
        if kernel.origin == "aimed":
            genes["aimed"] += 1
            genes["split"] += kernel.params["KEY_SPLIT"] > 1
            genes["grouped"] += kernel.params["GROUP_ROWS"]
    assert genes["aimed"] > 30 and genes["split"] > 15 and genes["grouped"] > 8, genes
    assert len(AIMS) == 4


def test_a_climb_begins_at_the_pick_and_goes_on_beside_the_fastest():
    group = Group(class_of(CHUNK).rpartition(" ")[0], [CHUNK], ("flash_wgmma", "split_kv"))
    breeder, climbed = ClimbingBreeder(group, H200, 0), []
    for _ in range(12):
        kernel, _ = breeder.propose()
        group.kernels[kernel.id] = kernel
        if kernel.origin in ("climbed", "rival", "behind", "beside"):
            climbed.append(kernel)
    pick = portfolio_kernels(CHUNK, H200)[0]
    end = climb(pick, CHUNK, H200, STEPS, all_genes(SPACE))[-1].config
    assert end.id in group.kernels and len(climbed) > 4
    shapes = {tuple(k.params.get(name) for name in (*SHAPE, "KEY_SPLIT")) for k in climbed}
    assert len(shapes) > 1, "other shapes, too"
    assert all(not registry.lookup(k.family).why_invalid(CHUNK, k.config, H200) for k in climbed)
    group.kernels[pick.id] = Kernel(pick.family, pick.params, "given", "right", times={0: 1.0})
    breeder._target = 0
    beside = breeder._beside(CHUNK)
    assert beside is not None and beside[0].id not in group.kernels
    near = neighbours(pick, CHUNK, H200, all_genes(SPACE))
    drawn = [breeder._of_a_gene(pick, near) for _ in range(20)]
    assert len({len(found) for found in drawn}) > 1 and all(0 < len(found) < len(near) for found in drawn)


def test_what_is_tried_first_errs_on_both_sides_of_the_least_cost():
    """The pick, the ends, then kernels that score about as much or somewhat more and differ from these in many genes;
    and another family's best, where it is not far behind."""
    group = Group(class_of(CHUNK).rpartition(" ")[0], [CHUNK], ("flash_wgmma", "split_kv", "flash_mma"))
    steps = ClimbingBreeder(group, H200, 0).steps(0)
    configs = [config for config, _ in steps]
    assert steps[0] == (portfolio_kernels(CHUNK, H200)[0], "given")
    assert len({config.id for config in configs}) == len(steps) <= KEPT
    costs = dict(zip((c.id for c in configs), scores(CHUNK, configs, H200), strict=True))
    least = min(costs.values())
    by_origin = {
        origin: [costs[c.id] / least for c, other in steps if other == origin]
        for origin in ("climbed", "rival", "behind")
    }
    assert len(by_origin["rival"]) == RIVALS and max(by_origin["rival"]) <= RIVAL
    assert by_origin["behind"] and all(BEHIND[0] <= cost <= BEHIND[1] for cost in by_origin["behind"])
    assert max(by_origin["climbed"]) <= ALSO_FAR
    rivals = [config for config, origin in steps if origin == "rival"]
    others = rivals[1:]
    assert max(len(set(rivals[0].params.items()) ^ set(other.params.items())) for other in others) >= 4


def test_neighbours_of_the_fastest_come_as_often_as_what_climbs_came_to():
    group = Group(class_of(CHUNK).rpartition(" ")[0], [CHUNK], ("flash_wgmma", "split_kv"))
    breeder = ClimbingBreeder(group, H200, 0)
    group.first[0] = breeder.steps(0)
    for timed, least in ((0, 0), (3, 3)):
        group.kernels = {
            k.id: k
            for c in portfolio_kernels(CHUNK, H200)[:timed]
            for k in [Kernel(c.family, c.params, "given", "right", times={0: 1.0})]
        }
        breeder, origins = ClimbingBreeder(group, H200, 0), Counter()
        breeder._steps[0] = list(group.first[0])
        for _ in range(12):
            if made := breeder._breed():
                origins[made[2]] += 1
        assert bool(origins["beside"]) == bool(timed) and origins["beside"] >= least, origins
        assert origins["climbed"] + origins["rival"] + origins["behind"] > 1


@pytest.fixture
def earlier(tmp_path):
    """A campaign that searched two problems, and timed the first in its final table."""
    problems = [p for p in draw(0, 400) if class_of(p).startswith("16 d64 full many")][:2]
    problems = [p.with_(dtype="bf16") for p in problems]
    group = Group("16 d64 full", problems, ("flash_wgmma",))
    kernel = Kernel("flash_wgmma", SPACE.completed(SPACE.starting[1]), "random", "right", 100)
    kernel.times = {0: 5.0, 1: 7.0}
    group.kernels[kernel.id] = kernel
    path = tmp_path / "one.jsonl.gz"
    about = {"device": "NVIDIA H200"}
    campaign.save(path, [group], about, {group.name: {"kernels": [kernel.id], "us": [[5.0], [None]]}})
    return path, problems, kernel


def test_a_campaign_goes_on_with_problems_that_no_final_table_has(earlier):
    path, problems, kernel = earlier
    groups, best = groups_again(draw(0, 400), [path], H200)
    group = next(g for g in groups if g.name == "16 d64 full")
    assert problems[0] not in group.problems
    assert group.problems[group.problems.index(problems[1])] == problems[1]
    assert group.kernels[kernel.id].times == {group.problems.index(problems[1]): 7.0}
    counts = Counter(class_of(p) for g in groups for p in g.problems)
    assert max(counts.values()) <= 9 and counts["16 d32 full many"] <= 4
    assert best[group.name] and (best[group.name][0].family, best[group.name][0].params) in group.given


def test_a_file_leaves_out_what_was_recalled_unless_its_table_has_it(earlier, tmp_path):
    path, _, kernel = earlier
    groups, _ = groups_again(draw(0, 400), [path], H200)
    group = next(g for g in groups if g.name == "16 d64 full")
    for table, kept in (({}, False), ({group.name: {"kernels": [kernel.id], "us": []}}, True)):
        campaign.save(tmp_path / "two.jsonl.gz", [group], {}, table)
        _, (loaded,), _ = campaign.load(tmp_path / "two.jsonl.gz")
        assert (kernel.id in loaded.kernels) == kept


@pytest.mark.slow
def test_with_a_count_problems_come_as_they_are_drawn(earlier):
    path, (timed, _), _ = earlier
    groups, _ = groups_again(draw(0, 400), [path], H200, count=20)
    problems = [p for group in groups for p in group.problems]
    assert len(problems) == 20 and timed not in problems
    assert all(group.weight == len(group.problems) and group.given for group in groups)
    kinds = Counter(kind_of(p) for group in groups_again(draw(0, 400), [], H200, 30, True)[0] for p in group.problems)
    assert all(kinds[name] == round(30 * KINDS[name][0]) for name in ("causal, one wave", "fp32"))
    dtypes = {group.name: {p.dtype for p in group.problems} for group in groups}
    assert all(len(found) == 1 and (found == {"fp16"}) == name.endswith(" fp16") for name, found in dtypes.items())
    assert {"16 d64 full", "16 d64 full fp16"} <= set(dtypes)
    picks = {portfolio_kernels(p, H200)[0].id for p in groups[0].problems}
    assert picks <= {Kernel(family, params).id for family, params in groups[0].given}
