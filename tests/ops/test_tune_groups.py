"""Which problems `evoattn.tune` searches together, and where its time goes."""

import pytest

from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.ops.runtime import current
from evoattn.ops.shapes import Asked
from evoattn.ops.tune import groups_of
from evoattn.portfolio.pick import pick
from evoattn.portfolio.wins import Win, Wins
from tests.ops.fake_device import FakeDevice, fake_runtime

H100 = GPUS["h100"]
SMALL = AttentionProblem(2, 4, 2, 37, 45, 64)
LARGE = SMALL.with_(batch=8, seqlen_q=2048, seqlen_k=2048)
OTHER = AttentionProblem(1, 8, 8, 512, 512, 128, "bf16", "causal_upper_left")


@pytest.fixture(autouse=True)
def wins(tmp_path):
    """A file of wins of the test's own, behind the op with the picks of today."""
    finds = Wins(tmp_path / "wins.jsonl")
    with current.use(fake_runtime(FakeDevice(), tmp_path, current.best_known), finds):
        yield finds


@pytest.mark.slow
def test_layers_of_several_kinds_are_searched_apart():
    """As gpt-oss, Gemma and DeepSeek have them: one kernel serves no two of these."""
    window = OTHER.with_(window="127:0")
    kinds = [OTHER, window, OTHER.with_(sink=True), window.with_(sink=True), OTHER.with_(value_dim=64)]
    groups = groups_of([Asked(problem, 1) for problem in (*kinds, window.with_(batch=3))], H100)
    assert len({group.name for group in groups}) == len(groups) == len(kinds)
    assert [len(group.problems) for group in groups] == [1, 2, 1, 1, 1]


@pytest.mark.slow
def test_the_passes_of_training_are_searched_apart():
    backward = OTHER.with_(op="backward")
    passes = [OTHER, OTHER.with_(lse=True), backward, backward.with_(lse=True)]
    groups = groups_of([Asked(problem, 1) for problem in passes], H100)
    assert len({group.name for group in groups}) == len(groups) == len(passes)
    for group in groups:
        assert all(name.startswith("backward") == ("backward" in group.name) for name in group.families), group.name


def test_the_time_goes_where_the_calls_are():
    asked = [Asked(SMALL, 100, 4.0), Asked(LARGE, 3, 100.0), Asked(OTHER, 10, 20.0)]
    groups = {group.name: group for group in groups_of(asked, H100)}
    assert groups["fp16 d64 full"].problems == [SMALL, LARGE], "one kernel can serve both"
    gains = [1 - 1 / pick(p, H100).expected_regret for p in (SMALL, LARGE, OTHER)]
    due = [calls * us * gain for calls, us, gain in zip((100, 3, 10), (4.0, 100.0, 20.0), gains)]
    assert groups["fp16 d64 full"].weight == pytest.approx(sum(due[:2]) / sum(due))
    assert groups["bf16 d128 causal_upper_left"].weight == pytest.approx(due[2] / sum(due))
    assert "flash_wgmma" in groups["fp16 d64 full"].families
    assert "three_kernel" not in groups["fp16 d64 full"].families


@pytest.mark.slow
def test_little_time_goes_where_a_search_has_been(wins):
    found = pick(SMALL, H100)
    wins.add([Win("h100", H100.sm_count, SMALL, found.family, found.config.params, 5.0, 9.0)])
    asked = [Asked(problem, 1) for problem in (SMALL, OTHER, OTHER.with_(head_dim=112))]
    weights = {group.name: group.weight for group in groups_of(asked, H100)}
    assert weights["fp16 d64 full"] < weights["bf16 d128 causal_upper_left"] < weights["bf16 d112 causal_upper_left"]
