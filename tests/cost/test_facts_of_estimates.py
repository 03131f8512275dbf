"""What the cost model says of kernels by weights and trees that are made up here stays, until a change wants it
otherwise: scores, parts, sentences; what a file of trees is, and what is no such file; what is kept of recorded
campaigns."""

import copy
import itertools
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from evoattn.cost import correction, correction_fit, fitted, measurements, physics
from evoattn.cost.cost import cost, scores
from evoattn.cost.explanation import ANY_CARD, SOURCES, how_far, kinds, sentences
from evoattn.cost.fitted import Fitted, Weights, load
from evoattn.families.gangs import TilesInOrder
from evoattn.families.registry import load_space
from evoattn.families.work import row_steps
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import parse_shape
from tests.cost.made_up_campaigns import H100, H200, campaign
from tests.families.decisions import rows
from tests.support.facts import answer, changed

STEADY = ("flash_scalar", "flash_mma", "flash_wmma")
"""Families whose rows of `tests/data/decisions.json` are asked."""
TREES = {
    "names": ["stages", "block"],
    "depth": 2,
    "base": 0.25,
    "inner": [True, False, False, True, False, False],
    "question": [0, 1],
    "value": [0.5, -0.25, 0.125, 1.0],
    "feature": [0, 1],
    "threshold": [1.5, 64.0],
    "missing_left": [True, False],
}
JUDGED = (
    *(f"{source}, {card}{kind}" for source in SOURCES for card in ("h100", "l4") for kind in ("", ANY_CARD)),
    "in fp32",
)
"""Sets of which a fit says how far its first choices were."""
STEPS = [
    *("B=2,H=2,Sq=5,Sk=9,D=16,varlen=5+0/0+9,layout=bshd", "B=3,H=2,Sq=70,Sk=90,D=16,seqused=0:90"),
    "B=3,H=2,Sq=70,Sk=90,D=16,varlen=0:70/0:90,layout=bshd,mask=causal_lower_right",
    *("B=1,H=2,Sq=300,Sk=500,D=16,mask=causal_upper_left,window=70:0", "B=1,H=2,Sq=500,Sk=300,D=16,window=9:40"),
    *("B=1,H=2,Sq=9000,Sk=9000,D=16,mask=causal_lower_right", "B=1,H=2,S=256,D=16,blocks=b:32x32:100+70"),
]
WRONG = {
    "inner": ([True, False, False, True, False], [1, 0, 0, 1, 0, 0], [True] * 6, "x", []),
    "question": ([0, 2], [0], [0, 1, 1], None),
    "feature": ([0, 2], [0]),
    "value": ([1.0, 2.0, 3.0], ["x"] * 4, [float("inf")] * 4),
    "threshold": ([1.0], [1.0, None], [float("nan"), 1.0]),
    "missing_left": ([True],),
    "depth": (-1, 99, 2.0),
    "base": ("x", float("nan")),
    "names": ([1, 2], "ab"),
}


def _files() -> Iterator[tuple[str, Any]]:
    """Of trees as a file has them."""
    row = {
        "trees": {"flash_mma": TREES},
        "left_out": {"all": [60, 1.25, 1.03], "flash_mma": [30, 1.5, 1.1]},
        "kernels": {},
    }
    right = correction.of_row(json.loads(json.dumps(row)))
    made = right.trees["flash_mma"]
    asked = np.array([[1.0, 32.0], [2.0, 64.0], [1.5, 65.0], [np.nan, np.nan], [3.0, np.nan]])
    yield "trees", [right.to_row(), made.predict(asked).tolist(), correction.row_of(made)]
    yield "columns", [[name, str(column.dtype), column.tolist()] for name, column in made.columns().items()]
    yield "narrow", [str(fitted._small(np.array(counts, np.int64)).dtype) for counts in ([], [255], [256], [70000])]
    wrong = []
    for name, values in WRONG.items():
        for value in values:
            other = copy.deepcopy(row)
            other["trees"]["flash_mma"][name] = value
            wrong.append([name, value, isinstance(answer(correction.of_row, other), str)])
    others: list[Any] = [{}, None, {"trees": {}}, row | {"left_out": {"all": [1.0, 2.0]}}, row | {"trees": {"x": 1}}]
    yield "no trees", wrong + [[isinstance(answer(correction.of_row, other), str)] for other in others]
    found = correction.Correction({}, row["left_out"])
    correction.put(GPUS["l4"], found)
    try:
        yield "a calibrated card", [how_far(GPUS["l4"], sets) for sets in ((), ("flash_mma", "all", "none"))]
    finally:
        correction.forget()


def _fitted() -> Fitted:
    """One that no refit changes."""
    units = dict.fromkeys(next(iter(load().weights.values())).units, 1.25)
    row = {"trees": {"flash_mma": TREES | {"names": ["blocks per SM", "seqlen_k"]}}, "left_out": {}, "kernels": {}}
    weights = {"flash_mma": Weights(units, 1.5, 0.75, 2.0, 3.0), "flash_wmma": Weights(units, 3.0, 1.5, 1.0, 2.0)}
    judged = {name: {"first": 1.05 + n / 50, "worst_first": 1.5 + n / 9} for n, name in enumerate(JUDGED)}
    about = {"cards": ["h100", "l4"], "left_out": judged}
    return Fitted(weights, correction.of_row(row).trees, about)


def _estimates() -> Iterator[tuple[str, Any]]:
    fitted = _fitted()
    for row in rows():
        if row["family"] not in STEADY:
            continue
        gpu, problem = GPUS[row["gpu"]], AttentionProblem(**row["problem"])
        space = load_space(row["family"], gpu)
        config = space.make_config(row["params"])
        many = [config, *space.starting_configs()[:3]]
        name = f"{row['family']} {problem.describe()} {config.id[:6]} {gpu.name}"
        found = [cost(problem, config, gpu, *compiled, fitted=fitted) for compiled in ((0,), (168, 64), (255, 0))]
        said = [one and one.sentence() for one in found]
        yield name, [found, said, kinds(problem), answer(scores, problem, many, gpu, fitted, correction.NONE)]
    sets = "of one query", "in fp32", "with window"
    yield "how far", [[name, how_far(GPUS[name], sets, fitted)] for name in ("h100", "h200", "a100", "l4", "b200")]


def _recordings() -> Iterator[tuple[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "some.npz"
        made = [campaign(H100, "a", range(1, 4)), campaign(H200, "b", range(2, 4))]
        measurements.append(path, made[:1])
        measurements.append(path, made[1:])
        yield "names", measurements.names(path)
        with np.load(path) as stored:
            yield "columns of a file", [[name, str(stored[name].dtype), stored[name].shape] for name in sorted(stored)]
        yield "campaigns", [measurements.campaign(path, "b"), len(measurements.read(path))]


def _one_question(names: Any, columns: Any, over: Any, weights: Any, size: Any) -> fitted.Trees:
    """In place of a fit: a tree that asks the first feature whether it is over its mean."""
    asked = np.nan_to_num(columns[:, 0])
    high = asked > asked.mean()
    means = [float(np.average(over[side], weights=weights[side])) for side in (~high, high)]
    wanted = np.round(means, 4) * (size["learning_rate"] * 20)
    made = {
        "inner": [True, False, False],
        "question": [0],
        "value": wanted,
        "feature": [0],
        "threshold": [asked.mean()],
    }
    columns = {name: np.array(made.get(name, [True])) for name in fitted.COLUMNS}
    return fitted.Trees.of_columns(columns, tuple(names), 1, 0.0)


def _timed() -> list[correction_fit.Timed]:
    """Times on a made-up card: one family's kernels of two stages are slow, and one kernel on causal problems; some
    launches come late, some problems have one kernel."""
    rng, found = random.Random(5), []
    for number in range(62):
        wide, mask = number % 3 == 0, ("full", "causal_upper_left")[number % 2]
        problem = AttentionProblem(1, 1 + number, 1 + number, 64 << number % 5, 64, 128 if wide else 64, mask=mask)
        kernels = [(family, n) for family in ("flash_mma", "flash_wmma") for n in range(6)]
        for family, n in kernels if number < 60 else kernels[:1]:
            score = rng.uniform(10, 14) * (1 + number)
            slow = 1.6 if family == "flash_mma" and n % 2 else 1.3 if n == 4 and mask != "full" else 1.0
            late = 4.0 if (number, n) in ((3, 2), (8, 2), (11, 1), (12, 1), (13, 1)) else 1.0
            us = score * slow * late * rng.uniform(0.98, 1.02)
            asked = {"a stage": 1 + n % 2, "block": 32 << n // 2, "registers": rng.random()} | ({"c": n} if n else {})
            found.append(correction_fit.Timed(problem, family, f"{family[6:]} {n} of the kernels", us, score, asked))
    return found


def _corrected() -> Iterator[tuple[str, Any]]:
    timed = _timed()
    for number, some in enumerate(
        (timed, timed[:180], timed[::7], [row for row in timed if row.family != "flash_mma"])
    ):
        with mock.patch.object(correction_fit, "fit_trees", _one_question):
            yield f"fitted {number}", correction_fit.fit(some, 1 + (number == 0)).to_row()
        table, kinds_of = correction_fit._table(some)
        numbers = {name: getattr(table, name).round(4).tolist() for name in ("us", "scores", "over", "weights")}
        families = {name: [mine, names, asked.tolist()] for name, (mine, names, asked) in table.families.items()}
        places = [table.problem.tolist(), table.kernel.tolist(), table.kernels, table.anywhere.tolist(), table.names]
        yield f"table {number}", [numbers, families, places, kinds_of, len(correction_fit.without_late(some))]


def facts() -> Iterator[tuple[str, Any]]:
    """See `tests.support.facts`."""
    yield from _estimates()
    orders = [TilesInOrder(count, 10**12, sharing) for count in (1, 2, 100, 132, 200) for sharing in (1, 2, 4)]
    yield "bytes apart", [physics._apart_bytes(order, 8.0, GPUS["h100"], 132) for order in orders]
    tiles = [*itertools.product((16, 64), (32, 128), (1, 3))]
    for text in STEPS:
        yield f"steps of {text}", [answer(row_steps, parse_shape(text), *each) for each in tiles]
    yield from _files()
    yield from _corrected()
    yield from _recordings()
    for text in ("B=1,H=2,S=300,D=64", "B=1,H=2,S=300,D=64,op=backward"):
        family = "backward_mma" if "op" in text else "flash_mma"
        problem, gpu = parse_shape(text), GPUS["l4"]
        config = load_space(family, gpu).starting_configs()[0]
        yield f"sentences of {text}", sentences(problem, config, gpu, 96)


def test_what_the_cost_model_says_stays():
    assert not changed("estimates")
