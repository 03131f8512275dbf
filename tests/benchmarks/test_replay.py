"""Replays on a made-up landscape: what a sampler comes upon, what it is told, and when."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from benchmarks.samplers import replay as scripts_replay
from benchmarks.samplers import replay_curves
from benchmarks.samplers.simulation import RecordedPool, replay, spaces_of
from evoattn.cost.landscapes import Config, Landscape
from evoattn.samplers.base import SamplerSetup
from evoattn.samplers.registry import make_sampler
from tests.samplers.made_up_families import PROBLEM, SPACES, cost, every_sampler

GENES = {family: {p.name: p.values for p in s.parameters} for family, s in SPACES.items()}


def config(number: int, family: str, params: dict, state: str = "right") -> Config:
    us = cost(family, params) if state == "right" else None
    return Config(number, family, params, state, "random", us, False, 0, 0, 0.5, 0.01)


def landscape(count: int = 300, seed: int = 0) -> Landscape:
    rng, configs = random.Random(seed), {}
    while len(configs) < count:
        family = rng.choice(list(SPACES))
        params = {p.name: rng.choice(p.values) for p in SPACES[family].parameters}
        state = "wrong: by chance" if rng.random() < 0.1 else "right"
        configs[family, *params.values()] = config(len(configs), family, params, state)
    return Landscape("made up", 0, PROBLEM, {}, GENES, tuple(configs.values()), ())


def run(name: str, seed: int, count: int, land: Landscape, jobs: int = 15):
    def make(make_pool):
        return make_sampler(name, SamplerSetup(spaces_of(land), seed, lambda f, p: None, make_pool=make_pool))

    return replay(land, make, count, jobs)


def test_a_config_becomes_the_nearest_recorded_one_of_its_family_that_is_left():
    base = {f"flat_{i}": v for i, v in enumerate(("x", False, 0, 0, 0, 4), 1)}
    recorded = [config(i, "flat", {"TILE": tile} | base) for i, tile in enumerate((0, 3, 7))]
    recorded.append(config(3, "round", {p.name: 0 for p in SPACES["round"].parameters}))
    land = replace(landscape(), configs=tuple(recorded))
    pool = RecordedPool(land, spaces_of(land), random.Random(0))
    wish = {"TILE": 4} | base
    assert pool.near("flat", wish) == recorded[1].params and pool.near("flat", wish) == recorded[1].params
    assert [pool.claim("flat", wish)["TILE"] for _ in range(3)] == [3, 7, 0]  # 7 is three places off, 0 four
    assert pool.claim("flat", wish) is None and pool.draw("flat") is None
    other_word = {"TILE": 3} | base | {"flat_1": "z"}
    fresh = RecordedPool(land, spaces_of(land), random.Random(0))
    assert fresh.near("flat", other_word)["TILE"] == 3  # one gene differs, in the others two do


@every_sampler
def test_a_replay_goes_through_a_landscape_without_repeating(name):
    land = landscape(120)
    steps = run(name, 1, 500, land)
    assert steps[-1].best_us == land.best == min(c.us for c in land.configs if c.us)
    assert all(s.best_us > land.best for s in steps[:-1])  # it ends at the best
    assert len({s.config.number for s in steps}) == len(steps)
    assert [s.best_us for s in steps] == sorted((s.best_us for s in steps), reverse=True)
    some = min(20, len(steps))
    assert run(name, 1, some, land) == steps[:some] != run(name, 2, some, land)


@every_sampler
def test_a_replay_without_a_right_config_goes_on_to_the_last(name):
    land = landscape(60)
    failed = tuple(replace(c, us=None, state="launch: by design") for c in land.configs)
    steps = run(name, 1, 500, replace(land, configs=failed))
    assert sorted(s.config.number for s in steps) == list(range(60)) and steps[-1].best_us == math.inf


def test_seconds_are_those_of_the_compiles_and_the_device():
    land = landscape(100)
    one, many = run("random", 1, 60, land, jobs=1), run("random", 1, 60, land, jobs=15)
    assert one[-1].seconds == pytest.approx(60 * 0.5 + 0.028, abs=0.1)  # the device works beside the compiles
    assert many[0].seconds == pytest.approx(0.5 + 0.028) and many[-1].seconds < one[-1].seconds / 10


def test_runs_are_kept_and_summed_up(tmp_path):
    one = scripts_replay.Run("l", "random", 1, [(3, 1.5, 1.4), (10, 2.5, 1.01), (60, 4.0, 1.0)], 0.1)
    assert [one.after(n) for n in (2, 3, 9, 10, 500)] == [math.inf, 1.4, 1.4, 1.01, 1.0]
    assert [one.at(s) for s in (1.4, 1.6, 9.0)] == [math.inf, 1.4, 1.0] and one.near == (10, 2.5)
    never = scripts_replay.Run("l", "random", 2, [(3, 1.5, 1.4)], 0.1)
    assert scripts_replay.summary([one, never, never], 50)["candidates to 2 %"] is None
    scripts_replay.keep(tmp_path / "r.gz", "random", [one, never])
    scripts_replay.keep(tmp_path / "r.gz", "portfolio", [one])
    scripts_replay.keep(tmp_path / "r.gz", "random", [one])  # in place of the two
    kept = scripts_replay.read(tmp_path / "r.gz")
    assert {begin: len(runs) for begin, runs in kept.items()} == {"random": 1, "portfolio": 1}
    assert kept["random"][0].near == (10, 2.5)
    assert "<polyline" in replay_curves.picture(kept)


@pytest.mark.slow
def test_the_guided_sampler_needs_fewer_than_random():
    land = landscape(800)
    guided, chance = (
        sum(run(name, seed, 100, land)[-1].best_us / land.best - 1 for seed in range(4))
        for name in ("guided", "random")
    )
    assert guided < 0.7 * chance
