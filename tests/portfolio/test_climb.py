"""Kernels near a portfolio's: each runs on the problem, and a climb by the cost model never ends higher; climbs that
are kept on disk are the same in the next process, and never another's."""

import os
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from evoattn.cost.correction import ANYWHERE, Correction, name_of
from evoattn.cost.cost import scores
from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig
from evoattn.portfolio import climb as module
from evoattn.portfolio.climb import (
    A_GENE,
    AT_ONCE,
    ENOUGH,
    FAR,
    LEAST_GAIN,
    MOST_RIVAL,
    OTHER_FAMILY,
    PACKAGE,
    STARTS,
    ClimbCache,
    Climbed,
    Costs,
    Key,
    Scored,
    all_genes,
    at_once,
    beginnings,
    climb,
    climbed,
    neighbours,
    penalised,
    rivals_of,
    what_decides,
)
from evoattn.portfolio.pick import canonical, filled, list_for, next_picks, pick, portfolio_kernels, ranked

H100 = GPUS["h100"]
MOST_ASKED = 300
SHAPES = {
    "few keys, grouped": AttentionProblem(batch=49, heads=64, kv_heads=16, seqlen_q=39, seqlen_k=39, head_dim=64),
    "prefill": AttentionProblem(
        batch=2, heads=8, kv_heads=8, seqlen_q=1000, seqlen_k=1000, head_dim=128, mask="causal_lower_right"
    ),
    "decode": AttentionProblem(batch=34, heads=1, kv_heads=1, seqlen_q=1, seqlen_k=4160, head_dim=64),
}


@pytest.mark.slow
@pytest.mark.parametrize("problem", SHAPES.values(), ids=SHAPES.keys())
def test_neighbours_run_and_a_climb_falls(problem: AttentionProblem) -> None:
    start = portfolio_kernels(problem, H100)[0]
    genes = all_genes(load_space(start.family, H100))
    near = neighbours(start, problem, H100, genes)
    family = registry.lookup(start.family)
    assert near and start.id not in {c.id for c in near}
    assert not any(family.why_impossible(problem, c, H100) for c in near)
    steps = climb(start, problem, H100, 3, genes)
    assert steps[0].config == start
    assert all(b.score <= a.score * 1.001 for a, b in pairwise(steps))
    assert steps[-1].score == scores(problem, [steps[-1].config], H100)[0]


def test_few_keys_get_tiles_that_fit() -> None:
    problem = AttentionProblem(batch=37, heads=14, kv_heads=2, seqlen_q=90, seqlen_k=90, head_dim=160)
    start = portfolio_kernels(problem, H100)[0]
    steps = climb(start, problem, H100, 3, all_genes(load_space(start.family, H100)))
    assert -(-90 // int(steps[-1].config["BLOCK_N"])) * int(steps[-1].config["BLOCK_N"]) < 128


def test_what_costs_little_more_than_the_least_is_known() -> None:
    """Of all scores, whatever the climb made of them; campaigns time some of these."""
    problem = SHAPES["prefill"]
    start = portfolio_kernels(problem, H100)[0]
    costs = Costs(problem, H100)
    assert costs.within(1.03) == []
    every = costs.of(neighbours(start, problem, H100, all_genes(load_space(start.family, H100))))
    least = min(one.score for one in every)
    assert sorted(one.score for one in costs.within(1.03)) == sorted(s.score for s in every if s.score <= 1.03 * least)


def test_the_cost_of_a_config_is_computed_once() -> None:
    problem = SHAPES["prefill"]
    start = portfolio_kernels(problem, H100)[0]
    near = neighbours(start, problem, H100, all_genes(load_space(start.family, H100)))
    costs = Costs(problem, H100)
    some, all_of_them = costs.of(near[5:8]), costs.of(near)
    assert len(costs) == len(near) and all_of_them[5:8] == some
    assert [one.config for one in all_of_them] == near
    assert [one.score for one in all_of_them] == scores(problem, near, H100)
    assert costs.of(near[::-1]) == all_of_them[::-1] and len(costs) == len(near)
    climb(start, problem, H100, 0, {}, costs)
    assert len(costs) == len(near) + 1


def test_a_sequence_that_grows_keeps_its_kernel_for_a_while() -> None:
    one = SHAPES["decode"]
    kernels = {pick(one.with_(seqlen_k=n), H100).config.id for n in range(4097, 4225)}
    assert len(kernels) == 1


def test_a_step_makes_several_changes_that_save_time_each() -> None:
    """Each config has one change more than the one before, of other genes; none that costs more is among them."""
    problem = SHAPES["prefill"]
    start = portfolio_kernels(problem, H100)[-1]
    listed = list_for(H100)
    assert listed
    costs = Costs(problem, H100)
    (first,) = costs.of([start])
    near = costs.of(neighbours(start, problem, H100, listed.genes[start.family]))
    made = at_once(first, near, problem, H100)
    saving = [one.config.params.items() - start.params.items() for one in near if one.score < first.score]
    assert 1 <= len(made) < AT_ONCE
    for fewer, more in pairwise([min(near, key=lambda one: one.score).config, *made]):
        added = more.params.items() - fewer.params.items()
        assert any(added == change for change in saving)
        assert not registry.lookup(more.family).why_invalid(problem, more, H100)
    assert at_once(first, [one for one in near if one.score >= first.score], problem, H100) == []


@pytest.mark.slow
@pytest.mark.parametrize("problem", SHAPES.values(), ids=SHAPES.keys())
def test_a_climb_saves_what_it_says_and_asks_for_few_costs(problem: AttentionProblem) -> None:
    """The first call of a shape waits for them: some 0.15 ms each."""
    listed, about = list_for(H100), canonical(problem)
    assert listed
    kernels = ranked(about, H100)
    found = climbed(kernels, about, H100, listed.genes)
    first, end = min(scores(about, kernels, H100)), scores(about, [found.config], H100)[0]
    assert len(kernels) < found.asked <= MOST_ASKED
    assert found.gain == 1 or (found.gain == pytest.approx(first / end) and found.gain > 1 / (1 - LEAST_GAIN))
    genes = listed.genes[found.config.family]
    assert all(value in genes[name] for name, value in found.config.params.items() if name in genes)
    again = climbed([found.config], about, H100, {})
    assert again.config == found.config and again.gain == 1 and again.asked == 1


def scored(family: str, score: float, **params: int) -> Scored:
    return Scored(KernelConfig(family, params), score)


def test_each_family_that_is_not_far_behind_has_a_start() -> None:
    near, far = scored("near", 10 * FAR), scored("far", 10.1 * FAR)
    firsts = [scored("first", 10.0 + i / 100, GENE=i) for i in range(STARTS + 1)]
    found = beginnings([*firsts, near, far])
    assert found == [*firsts[: STARTS - 1], near]
    assert beginnings(firsts[:1]) == firsts[:1]


def test_rivals_are_slow_for_other_reasons_than_the_pick() -> None:
    first, near = scored("one", 10.0, BLOCK_M=64, BLOCK_N=64), scored("one", 10.1, BLOCK_M=64, BLOCK_N=64, STAGES=3)
    wide, rows = scored("one", 10.2, BLOCK_M=64, BLOCK_N=96), scored("one", 10.3, BLOCK_M=128, BLOCK_N=64)
    split, other = scored("one", 10.4, BLOCK_M=64, BLOCK_N=64, SPLITS=4), scored("other", 10.5, BLOCK_M=64)
    every = [other, split, rows, wide, near, first]
    assert rivals_of(first, every, lambda one: one.score) == [rows, wide, near]
    assert rivals_of(first, [*every[:2], near], lambda one: one.score) == [split, other, near]
    assert rivals_of(first, every, lambda one: one.score + (one is rows)) == [split, wide, near]
    assert rivals_of(first, [wide, near, first], lambda one: one.score) == [wide, near], "one tile more"
    assert rivals_of(first, [near, first], lambda one: one.score) == [near]
    assert rivals_of(first, [first], lambda one: one.score) == []
    assert rivals_of(first, every, lambda one: one.score, [wide, other, split]) == [rows, wide, split]


@pytest.mark.parametrize(
    ("text", "most", "part"),
    [
        ("B=12,H=128,Hkv=1,Sq=1,Sk=8768,D=576,Dv=512,dtype=bf16,shared_kv=1,seqused=175:8768,page=64", "seqused", 0.9),
        (
            "B=3,H=8,Sq=64,Sk=2048,D=128,dtype=bf16,mask=causal_lower_right,page=64,varlen=1+64+9/90+64+900",
            "varlen",
            1.01,
        ),
    ],
)
def test_the_last_rival_is_for_all_keys_in_use_where_these_are_a_guess(text: str, most: str, part: float) -> None:
    about, listed = canonical(parse_shape(text)), list_for(H100)
    full = filled(about)
    assert listed and full and not filled(about.with_(seqused="", varlen="", page=0))
    assert (
        getattr(full, most).endswith(f"{about.seqlen_k}:{about.seqlen_k}") and full.visible_pairs > about.visible_pairs
    )
    kernels = ranked(about, H100)
    guessed, found = (climbed(kernels, about, H100, listed.genes, (), one) for one in (None, full))
    assert found.config == guessed.config and found.rivals[:-1] == guessed.rivals[:-1] != guessed.rivals
    least, before = (min(scores(full, [one.config, *one.rivals], H100)) for one in (found, guessed))
    assert least <= part * before


@pytest.mark.parametrize("problem", SHAPES.values(), ids=SHAPES.keys())
def test_rivals_score_little_more(problem: AttentionProblem) -> None:
    about, found = canonical(problem), pick(problem, H100)
    assert found and found.config not in found.rivals
    assert max(scores(about, found.rivals, H100), default=0) <= MOST_RIVAL * scores(about, [found.config], H100)[0]


def test_one_climb_is_made_however_many_kernels_there_are_to_begin_at() -> None:
    problem = SHAPES["prefill"]
    start = portfolio_kernels(problem, H100)[0]
    genes = all_genes(load_space(start.family, H100))
    near = neighbours(start, problem, H100, genes)
    kernels = list({c.id: c for one in near[:20] for c in neighbours(one, problem, H100, genes)}.values())
    assert len(kernels) > ENOUGH
    assert climbed(kernels, problem, H100, {}).asked == len(kernels)


def test_a_calibrated_card_has_all_climbs(monkeypatch: pytest.MonkeyPatch) -> None:
    listed, about = list_for(H100), canonical(SHAPES["prefill"])
    assert listed
    kernels = ranked(about, H100)
    few = climbed(kernels, about, H100, listed.genes).asked
    monkeypatch.setattr("evoattn.portfolio.climb.correction_of", lambda gpu: Correction(kernels={ANYWHERE: {"": 0.0}}))
    assert climbed(kernels, about, H100, listed.genes).asked > few >= ENOUGH


def test_a_config_must_save_something_for_each_gene_that_was_not_timed() -> None:
    kernels = [KernelConfig("one", {"A": 1, "B": 1, "C": 1}), KernelConfig("one", {"A": 2, "B": 2, "C": 1})]
    cost = penalised(kernels)
    assert cost(scored("one", 10.0, A=2, B=2, C=1)) == 10.0
    assert cost(scored("one", 10.0, A=2, B=2, C=3)) == pytest.approx(10 * (1 + A_GENE))
    assert cost(scored("one", 10.0, A=1, B=2, C=3)) == pytest.approx(10 * (1 + 2 * A_GENE))
    assert cost(scored("other", 10.0, A=1)) == pytest.approx(10 * (1 + OTHER_FAMILY * A_GENE))
    other = scored("other", 10.0, A=1)
    assert penalised(kernels, {name_of(other.config)})(other) == 10.0, "a calibration has timed it"


@pytest.mark.slow
def test_gradients_leave_the_list_for_twice_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = list_for(H100)
    assert listed
    problems = [
        canonical(parse_shape(f"{text},dtype=bf16,op=backward"))
        for text in ("B=2,H=16,S=1024,D=64", "B=16,H=8,S=700,D=128,mask=causal", "B=1,H=4,S=1500,D=192")
    ]

    def gains() -> float:
        return sum(climbed(ranked(one, H100), one, H100, listed.genes).gain for one in problems)

    careful = gains()
    monkeypatch.setattr("evoattn.portfolio.climb.OF_GRADIENTS", 1)
    assert careful < gains()


PROBLEM = AttentionProblem(batch=49, heads=64, kv_heads=16, seqlen_q=39, seqlen_k=39, head_dim=64)
LATER_NS = 1 << 62
CONFIG = KernelConfig("flash_wgmma", {"BLOCK_M": 64, "OVERLAP": True, "STORE": "rows"})


def key(number: int) -> Key:
    return replace(PROBLEM, batch=number + 1), H100


def climb_it(number: int) -> Climbed:
    return Climbed(
        CONFIG, 3 / 7 + number, 1 + number / 7, number, (KernelConfig("other", {"A": number}),) * (number % 3)
    )


def file_of(climbs: ClimbCache) -> Path:
    assert climbs.path
    return climbs.path


class Told(ClimbCache):
    """What an earlier process has found."""

    def add(self, key: Key, climb_it: Climbed) -> None:
        raise AssertionError("this was known")


def test_the_next_process_has_the_same_pick_without_a_climb(tmp_path: Path) -> None:
    first = pick(PROBLEM, H100, ClimbCache(tmp_path))
    assert pick(PROBLEM, H100, Told(tmp_path)) == first == pick(PROBLEM, H100)
    longer = replace(PROBLEM, seqlen_q=40, seqlen_k=40)
    assert canonical(longer) == canonical(PROBLEM) and pick(longer, H100, Told(tmp_path)) == first


def test_another_problem_or_gpu_is_another_climb(tmp_path: Path) -> None:
    about, gpu = key(0)
    ClimbCache(tmp_path).add(key(0), climb_it(0))
    others: list[Key] = [(replace(about, lse=True), gpu), (about, replace(gpu, sm_count=114))]
    assert [ClimbCache(tmp_path).get(other) for other in others] == [None] * 2
    again = ClimbCache(tmp_path)
    assert again.get(key(0)) == climb_it(0) and again.get(key(0)) is again.get(key(0)), "a file is read once"


def test_a_config_that_cannot_serve_is_not_taken(tmp_path: Path) -> None:
    """Whatever the file says: each end of a climb is asked again whether it can run."""
    following = next(next_picks(PROBLEM, H100))
    wrong = KernelConfig(following.family, following.config.params | {"BLOCK_M": 4096})
    assert registry.lookup(following.family).why_impossible(PROBLEM, wrong, H100)
    kept = ClimbCache(tmp_path)
    kept.add((canonical(PROBLEM), H100), Climbed(wrong, 5.0, 2.0, 9))
    assert pick(PROBLEM, H100, ClimbCache(tmp_path)) == following


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of what decides a climb."""
    for room in module.ROOMS:
        shutil.copytree(PACKAGE / room, tmp_path / "evoattn" / room, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "spaces").mkdir()
    return tmp_path / "evoattn"


def state(package: Path) -> str:
    what_decides.cache_clear()
    return what_decides(package, package.parent / "spaces", LATER_NS)


@pytest.mark.parametrize("name", ["portfolio/data/sm_90a.json", "cost/data/fitted.npz"])
def test_other_data_of_the_same_size_and_age_are_another_state(package: Path, name: str) -> None:
    before, file = state(package), package / name
    data, about = bytearray(file.read_bytes()), file.stat()
    assert state(package) == before
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert state(package) != before


@pytest.mark.parametrize("name", ["portfolio/climb.py", "families/flash_wgmma/family.py", "cost/new.py", "model/x.py"])
def test_other_source_is_another_state(package: Path, name: str) -> None:
    before = state(package)
    (package / name).write_text("changed = True\n")
    assert state(package) != before


def test_other_search_spaces_are_another_state(package: Path) -> None:
    before = state(package)
    (package.parent / "spaces" / "one.yaml").write_text("{}")
    assert state(package) != before


def test_source_that_changed_under_a_process_is_no_state(package: Path) -> None:
    """Its climbs are by other code than lies on disk, and would be taken for those of that code."""
    spaces, file = package.parent / "spaces", package / "portfolio" / "climb.py"
    changed_ns = max(about[2] for room in module.ROOMS for about in module._source_files(str(package / room))) + 1
    os.utime(file, ns=(changed_ns, changed_ns))
    assert what_decides(package, spaces, changed_ns)
    assert what_decides(package, spaces, changed_ns - 1) == ""


def test_without_a_state_climbs_are_kept_in_memory(tmp_path: Path) -> None:
    def vanished() -> str:
        raise FileNotFoundError

    for kept in (ClimbCache(tmp_path / "op", str), ClimbCache(tmp_path / "op", vanished), ClimbCache()):
        kept.add(key(0), climb_it(0))
        assert kept.path is None and kept.get(key(0)) == climb_it(0) and kept.get(key(1)) is None
    assert not (tmp_path / "op").exists()


def test_a_folder_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = ClimbCache(tmp_path / "file" / "op")
    assert kept.get(key(0)) is None
    kept.add(key(0), climb_it(0))
    assert kept.get(key(0)) == climb_it(0)
