"""Made-up families for the samplers: no kernels, no database, a cost that a formula knows."""

import math
import random
import statistics

import pytest

from evoattn.model.records import Proposal, Timing, Trial, TrialState
from evoattn.model.space import Parameter, SearchSpace, config_id
from evoattn.samplers.base import SamplerSetup
from evoattn.samplers.registry import SAMPLERS

SLOW = ("tpe",)
"""Take so long to fit that their tests are left to `make test`."""
every_sampler = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in SAMPLERS]
)


def space(family: str, *values: tuple, starting: tuple[dict, ...] = ()) -> SearchSpace:
    """Parameters `TILE`, `<family>_1`, `<family>_2`, … : the families share only the first."""
    names = ["TILE", *(f"{family}_{i}" for i in range(1, len(values)))]
    return SearchSpace(family, tuple(Parameter(n, v, "") for n, v in zip(names, values)), starting)


SPACES = {
    "round": space("round", *[tuple(range(8))] * 6, starting=({"TILE": 7, **{f"round_{i}": 7 for i in range(1, 6)}},)),
    "flat": space("flat", tuple(range(8)), ("x", "y", "z"), (False, True), *[tuple(range(6))] * 3, (4,)),
}


def place(family: str, params: dict) -> list[float]:
    """The config as a point of the unit cube."""
    return [
        p.values.index(params[p.name]) / (len(p.values) - 1) for p in SPACES[family].parameters if len(p.values) > 1
    ]


def why_invalid(family: str, params: dict) -> str | None:
    """About four in five points are invalid."""
    x = place(family, params)
    if x[0] + x[1] > 1.1:
        return f"TILE={params['TILE']} does not go with {family}_1."
    return "The block needs 123 bytes." if abs(x[2] + x[3] - x[4] - x[5]) > 0.35 else None


def cost(family: str, params: dict) -> float:
    """Smooth, with its minimum 20 inside the cube of `round`; `flat` is never below 24."""
    distance = sum((x - 0.3 - 0.1 * i) ** 2 for i, x in enumerate(place(family, params)[:5]))
    return (20 if family == "round" else 24) * math.exp(distance)


def trial(number: int, proposal: Proposal, state: TrialState = TrialState.COMPLETE) -> Trial:
    timings = (
        (Timing((cost(proposal.family, proposal.params),), {"stage": "screen"}),)
        if state is TrialState.COMPLETE
        else ()
    )
    identity = config_id(proposal.family, proposal.params)
    return Trial(
        number,
        1,
        proposal.family,
        proposal.params,
        identity,
        state,
        "",
        None,
        None,
        None,
        timings,
        None,
        proposal.parents,
        proposal.operator,
        "",
        0.0,
    )


def fate(number: int) -> TrialState:
    """Every fifth candidate fails."""
    return (
        TrialState.COMPLETE
        if number % 5
        else (TrialState.WRONG_RESULT, TrialState.DUPLICATE, TrialState.TIMEOUT)[number % 3]
    )


def search(
    name: str, seed: int, count: int, in_flight: int = 6, recorded: tuple[Trial, ...] = (), make=None
) -> list[Trial]:
    """A search with `in_flight` candidates on their way, whose results come in random order."""
    sampler = (make or SAMPLERS[name])(SamplerSetup(SPACES, seed, why_invalid))
    order, flying = random.Random(seed), []
    sampler.restore(recorded)
    trials: list[Trial] = []
    while len(trials) < count:
        flying += sampler.ask(in_flight - len(flying))
        proposal = flying.pop(order.randrange(len(flying)))
        number = len(recorded) + len(trials) + 1
        trials.append(trial(number, proposal, fate(number)))
        sampler.tell(proposal, trials[-1])
    return trials


def best(trials: list[Trial]) -> float:
    return min(t.timing.median_us for t in trials if t.timing)


def typical(trials: list[Trial]) -> float:
    return statistics.median(t.timing.median_us for t in trials if t.timing)
