"""A study's course: of each trial what all of them say together, and no more, for studies of 200,000."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from sqlalchemy import Connection, Text, cast, select

from evoattn.model.collector import paused
from evoattn.model.records import Study, TrialState, is_positive
from evoattn.storage.database import Database
from evoattn.storage.rows import checked, each, plain_text
from evoattn.storage.schema import samples, trials
from evoattn.storage.trials import FINAL

AT_A_TIME = 20_000
"""Rows that are held beside what becomes of them."""
_COLUMNS = [trials.c[name] for name in ("number", "family", "state", "relative_cost", "operator", "created_at")]
_JSON = [cast(trials.c[name], Text) for name in ("config", "parents")]
"""As text: that of many rows is parsed at once, in a quarter of the time, and their configs share the names of
parameters."""


class Tried(NamedTuple):
    """A trial without its evidence and its samples. The fields are those of `Trial`."""

    number: int
    family: str
    config: dict[str, Any]
    state: TrialState
    relative_cost: float | None
    parents: tuple[int, ...]
    operator: str
    created_at: str
    value: float | None


class Courses(Database):
    """Reading the course of a study."""

    def course(self, study: Study) -> list[Tried]:
        """All trials of the study by number. Raises `DamagedRecord` for one that is not as evoattn writes it."""
        with paused():  # none of what is made here is garbage
            return self._read(lambda connection: _course(connection, study))


def _course(connection: Connection, study: Study) -> list[Tried]:
    of_study = select(trials.c.number).where(trials.c.study_id == study.id)
    trusted = (
        select(samples.c.trial_number, samples.c.median_us)
        .where(samples.c.trial_number.in_(of_study), samples.c.median_us < math.inf)
        .order_by(samples.c.trial_number, samples.c.stage, samples.c.id)
    )
    medians: dict[int, float] = dict(map(tuple, connection.execute(trusted)))  # the last, as `Trial.timing`
    lost = select(samples.c.trial_number).where(
        samples.c.trial_number.in_(of_study),
        samples.c.stage == FINAL,
        samples.c.protocol["disqualified"].as_string().is_not(None),
    )
    for number in connection.scalars(lost):
        medians.pop(number, None)
    found: list[Tried] = []
    query = select(*_COLUMNS, *_JSON).where(trials.c.study_id == study.id).order_by(trials.c.number)
    for page in connection.execute(query).partitions(AT_A_TIME):
        *plain, configs, parents = zip(*page, strict=True)
        columns = [*plain, _parsed(configs), _parsed(parents)]
        try:
            found += _of_page(columns, medians)
        except (TypeError, ValueError, AttributeError):
            rows = zip(*columns, strict=True)
            found += [checked(f"Trial {row[0]}", partial(_tried, row, medians.get(row[0]))) for row in rows]
    return found


def _of_page(columns: Sequence[Sequence[Any]], medians: Mapping[int, float]) -> Iterable[Tried]:
    """What `_tried` makes of all rows, by checks of all of them at once, in a third of the time. Raises `TypeError`,
    `ValueError` or `AttributeError` where one may be damaged, or has control characters."""
    numbers, families, states, costs, operators, dates, configs, parents = columns
    if not "".join(chain(set(families), set(operators), dates)).isprintable():
        raise ValueError("control characters")
    each(dict, configs, list)
    each((int, float, str), list(chain.from_iterable(map(dict.values, configs))), list)
    each(int, list(chain.from_iterable(each(list, parents, list))), list)
    if any(cost is not None and not cost > 0 for cost in costs):
        raise ValueError("a relative cost of 0 or less")
    state_of = {text: TrialState(text) for text in set(states)}
    values = [
        cost if text == TrialState.ESTIMATED else median if text == TrialState.COMPLETE else None
        for text, cost, median in zip(states, costs, map(medians.get, numbers), strict=True)
    ]
    values = [value if value is not None and 0 < value < math.inf else None for value in values]
    names = {name: name for name in chain(set(families), set(operators))}  # one text for all rows
    shared = [map(names.get, families), configs, map(state_of.get, states), costs, map(tuple, parents)]
    return map(Tried._make, zip(numbers, *shared, map(names.get, operators), dates, values, strict=True))


def _parsed(texts: Sequence[str]) -> list[Any]:
    """Raises `JSONDecodeError` where one of them is not JSON, or is several values."""
    joined = f"[{','.join(texts)}]"
    values: list[Any] = json.loads(joined)
    if len(values) != len(texts):
        raise json.JSONDecodeError("Several values in one place", joined, 0)
    return values


def _tried(row: Sequence[Any], median_us: float | None) -> Tried:
    number, family, state, cost, operator, created_at, config, parents = row
    state = TrialState(state)
    if cost is not None and not cost > 0:
        raise ValueError(f"a relative cost of {cost}")
    value = cost if state is TrialState.ESTIMATED else median_us if state is TrialState.COMPLETE else None
    return Tried(
        number,
        plain_text(family),
        each((int, float, str), config, dict),
        state,
        cost,
        tuple(each(int, parents, list)),
        plain_text(operator),
        plain_text(created_at),
        value if value is not None and is_positive(value) else None,
    )
