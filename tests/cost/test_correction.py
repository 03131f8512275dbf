"""A correction finds what a card does otherwise than the model says, and does nothing where there is nothing."""

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from evoattn.cost import correction
from evoattn.cost.correction import ANYWHERE, NONE, Correction, class_of, forget, name_of, of_row, put
from evoattn.cost.correction_fit import LEAST_PROBLEMS, LEAST_TIMES, SIZE, Timed, fit, without_late
from evoattn.cost.cost import scores
from evoattn.cost.explanation import how_far
from evoattn.cost.fitted import load
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem

SMALL = SIZE | {"max_iter": 15, "learning_rate": 0.4, "l2_regularization": 1.0, "max_features": 1.0}


def rows(problems, slow=1.0, noise=0.0, seed=1):
    """Kernels of two genes; those of two stages take `slow` times what the model says."""
    rng, found = random.Random(seed), []
    for number in range(problems):
        problem = AttentionProblem(1, 1 + number, 1 + number, 64, 64, 64)
        for stages in (1, 2):
            for block in (32, 64, 128):
                score = 10.0 * rng.uniform(1, 1.3)
                us = score * (slow if stages == 2 else 1.0) * rng.uniform(1 - noise, 1 + noise) * (1 + number)
                asked = {"stages": stages, "block": block, "of nothing": rng.random()}
                found.append(Timed(problem, "flash_mma", f"{stages} {block}", us, score, asked))
    return found


@pytest.fixture(scope="module")
def corrected():
    return fit(rows(60, slow=1.5, noise=0.02), 1, SMALL)


@pytest.mark.slow
def test_a_gene_that_is_slow_on_the_card_is_found(corrected):
    problems, before, after = corrected.left_out["all"]
    assert after < 1.02 < before and problems == 60 and corrected.left_out["flash_mma"] == (60, before, after)
    trees = corrected.trees["flash_mma"]
    one, two = trees.predict(np.array([[{"stages": n, "block": 64}.get(x, 0.5) for x in trees.names] for n in (1, 2)]))
    assert 0.25 < two - one < 0.5  # the logarithm of 1.5 is 0.41


@pytest.mark.slow
def test_a_file_says_the_same_trees(corrected):
    text = json.dumps(corrected.to_row())
    again, trees = of_row(json.loads(text)), corrected.trees["flash_mma"]
    asked = np.random.default_rng(0).uniform(0, 130, (50, len(trees.names)))
    assert (again.trees["flash_mma"].predict(asked) == trees.predict(asked)).all()


@pytest.mark.slow
def test_what_no_gene_says_of_a_kernel_is_known_of_it():
    """Two kernels alike in all that trees may ask, of which one is slow on the card."""
    odd = [replace(row, kernel="odd", us=1.3 * row.us) for row in rows(60, seed=2) if row.kernel == "1 64"]
    found = fit([*rows(60), *odd], 1, SMALL)
    means = found.timed(odd[0].problem)
    assert 0.05 < means["odd"] < 0.26 and -0.13 < means["1 64"] < -0.03
    assert not found.timed(odd[0].problem.with_(head_dim=128)) and found.kernels[ANYWHERE]["odd"] > 0.05
    assert of_row(json.loads(json.dumps(found.to_row()))).kernels == found.kernels
    with pytest.raises(ValueError, match="is no number"):
        of_row(found.to_row() | {"kernels": {"16 d64 dv64": {"odd": "far"}}})


def test_a_kernel_s_own_part_multiplies_its_score_alone():
    l4, problem = GPUS["l4"], AttentionProblem(1, 8, 8, 1024, 1024, 64)
    one, two = load_space("flash_mma", l4).starting_configs()[:2]
    own = Correction(kernels={class_of(problem): {name_of(one): 0.5}, ANYWHERE: {name_of(one): 0.2}})
    before, after = scores(problem, [one, two], l4), scores(problem, [one, two], l4, correction=own)
    assert after == pytest.approx([before[0] * math.exp(0.5), before[1]])
    asked = problem.with_(head_dim=128), [one, two], l4
    for fitted in (load(), replace(load(), trees={})):
        before, after = scores(*asked, fitted), scores(*asked, fitted, own)
        assert after == pytest.approx([before[0] * math.exp(0.2), before[1]]), "timed on other classes"


LEAF = {"inner": [False], "question": [], "feature": [], "threshold": [], "missing_left": [], "value": [0.5]}
ROW = {
    "trees": {"flash_mma": LEAF | {"names": [], "depth": 0, "base": 0.0}},
    "left_out": {},
    "kernels": {},
}
SPLIT = {
    "inner": [True, False, False],
    "question": [1],
    "feature": [0, 0],
    "threshold": [1.0, 2.0],
    "missing_left": [0.0, 0.0],
}
SPLIT |= {"names": ["stages"], "value": [0.5, 0.7], "depth": 1, "base": 0.0}


@pytest.mark.parametrize("name", ["question", "value", "threshold", "missing_left"])
def test_a_tree_has_as_many_numbers_of_each_kind_as_it_asks_for(name):
    assert of_row(ROW | {"trees": {"flash_mma": SPLIT}}).trees
    for other in (SPLIT[name][1:], [*SPLIT[name], SPLIT[name][0]]):
        with pytest.raises(ValueError, match="is no table of trees"):
            of_row(ROW | {"trees": {"flash_mma": SPLIT | {name: other}}})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"correction": 1}'])
def test_a_file_that_says_something_else_corrects_nothing(text, tmp_path, monkeypatch):
    monkeypatch.setattr(correction, "calibration_folder", lambda gpu: tmp_path)
    (tmp_path / correction.FILE).write_text(text)
    forget()
    assert correction.correction_of(GPUS["l4"]) is NONE
    forget()


def test_trees_of_a_calibration_multiply_scores():
    """One leaf, of half a logarithm."""
    own = of_row(ROW)
    problem, l4 = AttentionProblem(1, 8, 8, 1024, 1024, 64), GPUS["l4"]
    some = load_space("flash_mma", l4).starting_configs()[:2]
    before, after = scores(problem, some, l4, correction=NONE), scores(problem, some, l4, correction=own)
    assert after == pytest.approx([one * math.exp(0.5) for one in before], rel=1e-3)


def test_how_sure_an_order_is_is_what_the_card_s_calibration_says():
    l4 = GPUS["l4"]
    put(l4, Correction({}, {"all": (320, 1.07, 1.04), "of one query": (40, 1.05, 1.02)}))
    try:
        text = how_far(l4, ("flash_mma", "of one query"))
    finally:
        forget()
    assert text.startswith("On 320 problems that the calibration of the L4 left out, first choices take 1.04 times")
    assert "1.07 before it. By kind: 1.02 of one query." in text and "Nothing was measured" not in text
    assert "Nothing was measured on the L4" in how_far(l4)


@pytest.mark.slow
def test_where_the_model_is_right_nothing_is_corrected():
    found = fit(rows(60), 1, SMALL)
    assert not found.rows and found.left_out["all"] == (60, 1.0, 1.0)


def test_a_late_launch_is_no_time_and_a_slow_kernel_is_slow():
    times = [replace(row, us=5 * row.us) if row.kernel == "2 128" else row for row in rows(20)]
    late = [replace(times[n], us=5 * times[n].us) for n in (0, 7)]
    rest = [row for n, row in enumerate(times) if n not in (0, 7)]
    assert without_late([*late, *rest]) == rest
    own = [row for row in times if row.kernel == times[0].kernel]
    for count, taken in ((2, False), (3, True)):
        late = [replace(row, us=5 * row.us) for row in own[:count]]
        rest = [row for row in times if row not in own[:count]]
        assert without_late([*late, *rest]) == late * taken + rest
    others = [row for row in times if row.kernel != own[0].kernel]
    for count, taken in ((LEAST_TIMES - 1, True), (LEAST_TIMES, False)):
        late, rest = [replace(own[0], us=5 * own[0].us)], [*own[1:count], *others]
        assert without_late([*late, *rest]) == late * taken + rest


@pytest.mark.parametrize("problems", [0, 1, LEAST_PROBLEMS - 1])
def test_few_problems_make_no_correction(problems):
    assert not fit(rows(problems, slow=1.5), 1).rows
