"""Picks for a token over a cache that grows: few climbs, kernels that serve each length, scores near a climb's own."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from evoattn.cost.cost import scores
from evoattn.families import registry
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.portfolio.climb import ClimbCache, climbed
from evoattn.portfolio.pick import lasting_pick, likely, list_for, pick, ranked

H100 = GPUS["h100"]
pytestmark = pytest.mark.slow
GROUPED = AttentionProblem(1, 32, 8, 1, 1024, 128, "bf16")
HEADS = AttentionProblem(1, 32, 32, 1, 1024, 128)
LATENT = AttentionProblem(1, 128, 128, 1, 1024, 192, "bf16", value_dim=128)
WIDE = AttentionProblem(1, 8, 8, 1, 1024, 520, "bf16")


def test_a_pick_is_the_same_whatever_came_before() -> None:
    grown, lengths = ClimbCache(), (1500, 1100, 700, 701, 1024, 1025)
    for keys in range(690, 1510, 30):
        pick(HEADS.with_(seqlen_k=keys), H100, grown)
    for keys in lengths:
        assert pick(HEADS.with_(seqlen_k=keys), H100, grown) == pick(HEADS.with_(seqlen_k=keys), H100, ClimbCache())


@pytest.mark.parametrize("token", [GROUPED, HEADS], ids=["grouped", "heads"])
@pytest.mark.parametrize("keys", [600, 1300, 5000])
def test_it_costs_little_more_than_the_end_of_a_climb_of_its_own(token: AttentionProblem, keys: int) -> None:
    """A little less than 1.1 is the most of 200 drawn problems."""
    problem = token.with_(seqlen_k=keys)
    listed = list_for(H100)
    assert listed
    own = climbed(ranked(problem, H100), likely(problem), H100, listed.genes).config
    mine, its = scores(problem, [pick(problem, H100).config, own], H100)
    assert mine < 1.1 * its


@pytest.mark.parametrize("token", [GROUPED, HEADS, LATENT, WIDE], ids=["grouped", "heads", "latent", "wide"])
def test_each_length_has_a_kernel_that_serves_it(token: AttentionProblem) -> None:
    for keys in (*range(1, 70), *range(990, 1100, 7)):
        problem = token.with_(seqlen_k=keys)
        for found in (pick(problem, H100), lasting_pick(problem, H100)):
            assert found and registry.lookup(found.family).why_impossible(problem, found.config, H100) is None


def test_threads_get_the_same_picks() -> None:
    shared, lengths = ClimbCache(), [*range(800, 1000, 9), *range(1000, 800, -9)]
    alone = ClimbCache()
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda keys: pick(GROUPED.with_(seqlen_k=keys), H100, shared), lengths)
        assert list(found) == [pick(GROUPED.with_(seqlen_k=keys), H100, alone) for keys in lengths]
