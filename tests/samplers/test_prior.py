"""The prior: trees that are stored and evaluated, and what they are told of a config."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from evoattn.cost.cost import cost
from evoattn.families import registry
from evoattn.model import named_problems as problems
from evoattn.model.gpu import GPUS
from evoattn.model.space import KernelConfig, load_space
from evoattn.samplers import prior as priors
from evoattn.samplers.features import LAUNCH, PROBLEM, gene_features, launch_features, problem_features
from evoattn.samplers.pool import ConfigPool
from evoattn.samplers.prior import UNKNOWN, FamilyPrior, Trees, make_prior, prior_for
from evoattn.search.starting import starting_configs

H100, PROBLEM_HERE = GPUS["h100"], problems.lookup("seed_h100")


def stump(feature: int, threshold: float, low: float, high: float) -> Trees:
    """One tree of one split, on a base of 0.5."""
    whole = np.array
    return Trees(
        0.5, whole([0]), whole([feature, -1, -1]), whole([threshold, 0, 0]), whole([1, 0, 0]), whole([2, 0, 0]),
        whole([0.0, low, high]),
    )  # fmt: skip


def configs(family: str, count: int, problem=PROBLEM_HERE, gpu=H100):
    def why_invalid(name, params):
        return registry.lookup(name).why_invalid(problem, KernelConfig(name, params), gpu)

    pool = ConfigPool({family: load_space(family, gpu)}, why_invalid, random.Random(0))
    return [(family, pool.draw(family)[1]) for _ in range(count)]


def test_trees_add_up_and_can_be_stored(tmp_path):
    trees = stump(1, 2.0, -0.25, 0.25)
    rows = np.array([[9.0, 2.0], [9.0, 2.5]])
    assert list(trees.predict(rows)) == [0.25, 0.75]
    priors.save(tmp_path / "p.npz", {"flash_mma": FamilyPrior(("A", "B"), trees)})
    (found,) = priors.load(tmp_path / "p.npz").values()
    assert found.genes == ("A", "B") and list(found.trees.predict(rows)) == [0.25, 0.75]


def test_a_prior_knows_its_families_and_no_others():
    spaces = {name: load_space(name, H100) for name in ("flash_mma", "flash_wmma")}
    names = spaces["flash_mma"].names()
    by_block_m = stump(names.index("BLOCK_M"), 5.5, 0.0, 1.0)  # log2 of 32 and 64
    prior = make_prior({"flash_mma": FamilyPrior(names, by_block_m)}, spaces, PROBLEM_HERE, H100)
    drawn = configs("flash_mma", 20)
    assert prior(drawn) == [0.5 + (params["BLOCK_M"] > 32) for _, params in drawn]
    assert prior(configs("flash_wmma", 2)) == [UNKNOWN, UNKNOWN] and prior([]) == []
    changed = make_prior({"flash_mma": FamilyPrior(names[1:], by_block_m)}, spaces, PROBLEM_HERE, H100)
    assert changed(drawn[:1]) == [UNKNOWN]


@pytest.mark.parametrize("family", registry.FAMILIES)
def test_every_family_has_features(family):
    able = (p for p in problems.named_problems().values() if not registry.lookup(family).why_unsupported(p, H100))
    problem = next(able)
    for name, params in configs(family, 5, problem):
        launch = launch_features(problem, KernelConfig(name, params), H100)
        genes = gene_features(load_space(name, H100), params)
        assert len(launch) == len(LAUNCH) and len(genes) == len(params)
        assert np.isfinite([*launch, *genes, *problem_features(problem, H100)]).all()
    assert len(problem_features(problem, H100)) == len(PROBLEM)


def test_what_ships_knows_good_from_bad():
    spaces = {name: load_space(name, H100) for name in ("flash_scalar", "flash_wgmma")}
    prior = prior_for(spaces, PROBLEM_HERE, H100)
    wgmma = [KernelConfig("flash_wgmma", c.params) for c in spaces["flash_wgmma"].starting_configs()]
    good = prior([(c.family, c.params) for c in wgmma])
    assert np.median(good) < 0.7 < np.median(prior(configs("flash_scalar", 20)))  # twice the best


def test_where_nothing_was_measured_the_cost_model_is_the_prior():
    gpu = GPUS["l4"]
    problem = problems.parse_shape("B=1,H=16,S=1024,D=64,mask=causal")
    spaces = {name: load_space(name, gpu) for name in ("flash_mma", "split_kv")}
    starting = {name: starting_configs(space, problem, gpu) for name, space in spaces.items()}
    spaces = {name: replace(space, starting=tuple(c.params for c in starting[name])) for name, space in spaces.items()}
    prior = prior_for(spaces, problem, gpu)
    found = {name: prior([(name, config.params) for config in configs]) for name, configs in starting.items()}
    assert min(found["flash_mma"]) == 0.0 and min(found["split_kv"]) > 0.4
    best = min(cost(problem, config, gpu).score for config in starting["flash_mma"])
    expected = math.log(cost(problem, starting["split_kv"][0], gpu).score / best)
    assert found["split_kv"][0] == pytest.approx(expected)
