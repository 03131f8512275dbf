"""The fit and its judgement: trees are copied as they are, factors and correlations are what they say, and the shipped
fit orders measured kernels as the targets of reports/cost_model.md ask."""

import math

import numpy as np
import pytest

from evoattn.cost.cost import cost
from evoattn.cost.explanation import ANY_CARD
from evoattn.cost.fitted import load
from evoattn.cost.training import fit as fits
from evoattn.cost.training.fit import TREES, fit_trees
from evoattn.cost.training.judge import LEAST, for_all_cards, judge, problem_keys
from evoattn.cost.training.rows import Row, files, is_landscape, read, thinned
from evoattn.cost.training.table import make_table
from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig

H100, PROBLEM = GPUS["h100"], parse_shape("B=1,H=16,S=1024,D=64")


@pytest.mark.slow
def test_the_tables_say_what_scikit_learn_says():
    from sklearn.ensemble import HistGradientBoostingRegressor  # four seconds, of every run that collects this file

    rng = np.random.default_rng(0)
    table = rng.normal(size=(400, 3))
    table[::5, 1] = math.nan
    measured = np.exp(np.where(table[:, 0] > 0, 1.0, 0.2) * np.nan_to_num(table[:, 1], nan=2.0) + table[:, 2] ** 2)
    trees = fit_trees(("a", "b", "c"), table, np.log(measured), np.ones(400))
    model = HistGradientBoostingRegressor(**TREES, early_stopping=False, random_state=0).fit(table, np.log(measured))
    assert trees.names == ("a", "b", "c")
    assert trees.predict(table) == pytest.approx(model.predict(table), abs=1e-4)


@pytest.mark.slow
def test_a_judgement_counts_factors_over_the_best():
    measured = [float(n) for n in range(100, 100 + LEAST)]
    right = judge(measured, measured, [0] * LEAST)
    found = (right.spearman, right.first, right.best_of_eight, right.fastest_tenth)
    assert found == pytest.approx((1.0, 1.0, 1.0, 1.0))
    wrong = judge([-m for m in measured], measured, [0] * LEAST)
    assert wrong.spearman == pytest.approx(-1.0) and wrong.first == pytest.approx(119 / 100)
    assert wrong.best_of_eight == pytest.approx(112 / 100), "the best of the eight slowest"
    both = judge([*measured, *(-m for m in measured)], measured * 2, [0] * LEAST + [1] * LEAST)
    assert both.problems == 2 and both.first == pytest.approx(math.sqrt(1.19)) and both.worst_spearman < -0.99
    assert judge(measured * 2, measured * 2, [0] * LEAST + [1] * 5 + [2] * 15).problems == 1, "too few kernels"


def fit(rows):
    return fits.fit(make_table(rows, "both"), np.arange(len(rows)))


def predict(rows, fitted):
    return fits.predict(make_table(rows), np.arange(len(rows)), fitted)


def test_families_of_any_card():
    def of(family, **params):
        return Row(H100, PROBLEM, KernelConfig(family, params), 0, 0, 1.0, "campaign")

    assert for_all_cards(of("split_kv", LOAD="cp_async", MERGE="kernel")) and for_all_cards(of("flash_mma"))
    assert not for_all_cards(of("split_kv", LOAD="tma")) and not for_all_cards(of("split_kv", MERGE="cluster"))
    assert not for_all_cards(of("flash_wgmma")) and not for_all_cards(of("three_kernel", PRODUCT="wgmma"))


@pytest.mark.slow
def test_a_fit_learns_what_the_terms_do_not_know():
    """Times in which O_STORE=shared costs a half more than the physical part says."""
    configs = [
        KernelConfig("flash_mma", c.params | {"O_STORE": store, "BLOCK_ORDER": order})
        for c in load_space("flash_mma", H100).starting_configs()
        for store in ("direct", "shared")
        for order in ("rows", "heads", "rows_reversed", "heads_reversed")
    ]
    problems = [PROBLEM.with_(batch=b) for b in (1, 3)]
    plain = [Row(H100, p, c, 128, 0, 1.0, "campaign") for p in problems for c in configs]
    base = predict(plain, fit([Row(H100, r.problem, r.config, 128, 0, 20.0, "campaign") for r in plain[::2]]))
    slow = [1.5 if r.config["O_STORE"] == "shared" else 1.0 for r in plain]
    taught = [
        Row(H100, r.problem, r.config, 128, 0, float(us * f), "campaign")
        for r, us, f in zip(plain, base, slow, strict=True)
    ]
    learnt = predict(taught, fit(taught))
    errors = np.abs(np.log(learnt / np.array([row.us for row in taught])))
    assert np.median(errors) < 0.1


LISTED = "B=2,H=8,S=1024,D=64,mask=causal_upper_left,op=backward,blocks=128x128:1024"
"""What the main launch reads of the mask is made by a launch of its own: four in all."""


def test_the_fit_predicts_what_the_cost_model_says(monkeypatch):
    monkeypatch.setattr("evoattn.cost.training.table.CHUNK", 4)
    several = [
        Row(H100, problem, config, registers, 8, 20.0, "campaign")
        for problem, families in (
            (PROBLEM, ("flash_mma", "flash_wgmma", "three_kernel")),
            (parse_shape("B=3,H=8,Hkv=2,Sq=1,Sk=3000,D=80,layout=bshd"), ("split_kv",)),
            (parse_shape(LISTED), ("backward_wgmma",)),
        )
        for family in families
        for config in load_space(family, H100).starting_configs()[:5]
        for registers in (96, 0)
        if registry.lookup(family).why_invalid(problem, config, H100) is None
    ]
    scores = predict(several, load())
    families = {"flash_mma", "flash_wgmma", "three_kernel", "split_kv", "backward_wgmma"}
    assert {row.family for row in several} == families
    for row, score in zip(several, scores, strict=True):
        assert score == pytest.approx(cost(row.problem, row.config, H100, row.registers, 8).score)


EACH = 4
"""An eighth of the rows of a landscape's problem that are looked at. A correlation of fewer says little: of one problem
it is 0.96 over its 1,363 rows, 0.81 and 0.74 by two fits over 24 of them, 0.90 and 0.86 at worst over 32."""


def assert_good(found):
    """`found`: a `Judgement`, or its fields as the fit keeps them."""
    assert found["spearman"] >= 0.92
    assert found["first"] <= 1.15 and found["best_of_eight"] <= 1.04


@pytest.fixture(scope="module")
def landscapes():
    return read(filter(is_landscape, files()))


@pytest.mark.slow
@pytest.mark.parametrize("any_card", [False, True], ids=["all families", "families of any card"])
def test_kernels_of_landscapes_are_ordered_as_measured(landscapes, any_card):
    rows = thinned((row for row in landscapes if for_all_cards(row) or not any_card), EACH)
    found = judge(predict(rows, load()), [row.us for row in rows], problem_keys(rows))
    assert found.problems >= 30
    assert_good(vars(found))
    assert found.worst_spearman >= 0.75 and found.worst_first <= 1.6 and found.fastest_tenth >= 0.6


@pytest.mark.parametrize("card", ["h100", "h200"])
@pytest.mark.parametrize("kind", ["", ANY_CARD], ids=["all families", "families of any card"])
def test_problems_left_out_of_the_fit_were_ordered_well(card, kind):
    assert_good(load().about["left_out"][f"campaign, {card}{kind}"])


def test_landscapes_left_out_of_the_fit_were_ordered_well():
    for kind in ("", ANY_CARD):
        found = load().about["left_out"][f"landscape, h100{kind}"]
        assert_good(found)
        assert found["worst_spearman"] >= 0.75
