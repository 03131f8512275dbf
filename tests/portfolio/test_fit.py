"""Constants are fitted, errors carried over, and problems left out."""

from dataclasses import replace

import numpy as np
import pytest

from evoattn.portfolio.fit import Table, View, fit, parts, usual


def test_constants_that_made_the_times_are_found():
    rng = np.random.default_rng(0)
    work = rng.uniform(1, 50, (12, 7))
    constants = np.array([2.0, 0.5, 0.1, 0.0, 1.0, 0.03, 0.0])
    us = work @ constants
    assert fit(work, us) == pytest.approx(constants, abs=1e-6)
    assert fit(work, us, usual(work, us)) == pytest.approx(constants, abs=1e-6)


def test_what_few_times_say_nothing_of_is_as_is_usual():
    rng = np.random.default_rng(1)
    family = rng.uniform(1, 50, (200, 3))
    prior = usual(family, family @ np.array([1.0, 2.0, 3.0]))
    work = np.array([[10.0, 0.0, 0.0], [20.0, 0.0, 0.0]])  # its two times hold nothing of the other terms
    constants = fit(work, work @ np.array([4.0, 0.0, 0.0]), prior)
    assert constants[1:] == pytest.approx([2.0, 3.0], rel=0.05)
    assert 3.0 < constants[0] <= 4.0


def table(count=40, seed=2):
    """Times of one source with two variants and of another kernel, made of constants."""
    rng = np.random.default_rng(seed)
    work = rng.uniform(1, 50, (3, count, 3))
    constants = np.array([[1.0, 2.0, 0.5], [1.0, 2.0, 0.5], [3.0, 0.1, 1.0]])
    us = np.einsum("kpt,kt->pk", work, constants)
    scaled = rng.normal(size=(count, 4))
    return Table(us, work, scaled, ["a", "a", "b"], [[0, 1], [2]]), constants


def test_a_source_is_fitted_over_all_its_variants():
    made, constants = table()
    found = made.fit(range(40))
    assert found.constants == pytest.approx(constants, rel=1e-3)
    assert found.predict(made.work, made.scaled) == pytest.approx(made.us, rel=1e-3)


def test_what_is_left_out_has_no_say():
    made, _ = table()
    wrong = made.us.copy()
    wrong[3] *= 5
    spoilt = Table(wrong, made.work, made.scaled, made.families, made.units)
    place = 3
    assert spoilt.left_out(range(40))[0][place] == pytest.approx(made.us[place], rel=1e-3)
    assert spoilt.fit(range(40)).constants != pytest.approx(made.fit(range(40)).constants, rel=1e-3)


def test_constants_are_of_lengths_that_a_choice_does_not_see():
    made, constants = table()
    seen = View(made.work, made.scaled), View(made.work * 4, made.scaled)
    blind = replace(made, seen=seen)
    assert blind.fit(range(40)).constants == pytest.approx(constants, rel=1e-3)
    times, chosen_by = blind.left_out(range(40))
    assert times == pytest.approx(made.us, rel=1e-3) and chosen_by == pytest.approx(2 * made.us, rel=1e-3)


def test_errors_of_like_problems_are_carried_over():
    made, _ = table()
    near = made.scaled[:, 0] > 0
    slow = Table(
        made.us * np.where(near, 1.2, 1 / 1.2)[:, None], made.work, made.scaled * 3, ["a", "a", "b"], made.units
    )
    without = np.abs(np.log(slow.us / np.einsum("kpt,kt->pk", made.work, slow.fit(range(40)).constants))).mean()
    found = slow.fit(range(40))
    assert np.abs(np.log(slow.us / found.predict(slow.work, slow.scaled))).mean() < 0.6 * without


def test_a_kernel_without_times_is_as_is_usual():
    made, constants = table()
    us = made.us.copy()
    us[:, 0] = np.nan
    alone = Table(us, made.work, made.scaled, ["a", "a", "b"], [[0], [1], [2]])
    assert alone.fit(range(40)).constants[0] == pytest.approx(constants[0], rel=1e-2)


def test_parts_hold_every_number_once():
    found = parts(11, 4)
    assert sorted(n for part in found for n in part) == list(range(11)) and len(found) == 4
    assert found == parts(11, 4)
    assert len(parts(2, 4)) == 2


def test_a_group_of_few_times_leans_on_what_another_one_knows():
    made, _ = table()
    borrowed = {"a": usual(*made.times_of("a")), "b": usual(*made.times_of("b"))}
    rng = np.random.default_rng(3)
    few = np.exp(rng.normal(0, 0.3, (4, 3))) * made.us[:4]  # four problems, timed badly
    alone = Table(few, made.work[:, :4], made.scaled[:4], made.families, made.units)
    leaning = Table(few, made.work[:, :4], made.scaled[:4], made.families, made.units, borrowed)

    def lost(found):
        return np.abs(np.log(found.fit(range(4)).predict(made.work, made.scaled) / made.us)).mean()

    assert lost(leaning) < 0.85 * lost(alone)
    assert len(made.times_of("a")[1]) == 80 and len(made.times_of("c")[1]) == 0
