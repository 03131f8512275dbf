"""A study's course: of each trial what all of them say together, and no more, for studies of 200,000."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from sqlalchemy import Connection, Text, cast, select

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


@dataclass(frozen=True, slots=True)
class Tried:
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
        with without_collections():
            return self._read(lambda connection: _course(connection, study))


@contextmanager
def without_collections() -> Iterator[None]:
    """None of what is made here is garbage, and going through all of it again and again takes a third of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


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
        *columns, configs, parents = zip(*page, strict=True)
        rows = list(zip(*columns, _parsed(configs), _parsed(parents), strict=True))
        try:
            found += _of_page(rows, medians)
        except (TypeError, ValueError, AttributeError):
            found += [checked(f"Trial {row[0]}", partial(_tried, row, medians.get(row[0]))) for row in rows]
    return found


def _of_page(rows: Sequence[Sequence[Any]], medians: Mapping[int, float]) -> list[Tried]:
    """What `_tried` makes of all rows, by checks of all of them at once, in half the time. Raises `TypeError`,
    `ValueError` or `AttributeError` where one may be damaged, or has control characters."""
    _, families, states, costs, operators, dates, configs, parents = zip(*rows, strict=True)
    if not "".join(chain(set(families), set(operators), dates)).isprintable():
        raise ValueError("control characters")
    each((int, float, str), [value for config in configs for value in config.values()], list)
    each(int, [number for older in each(list, parents, tuple) for number in older], list)
    if any(cost is not None and not cost > 0 for cost in costs):
        raise ValueError("a relative cost of 0 or less")
    state_of = {text: TrialState(text) for text in set(states)}
    found = []
    for number, family, text, cost, operator, created_at, config, older in rows:
        state = state_of[text]
        value = cost if state is TrialState.ESTIMATED else medians.get(number) if state is TrialState.COMPLETE else None
        value = value if value is not None and is_positive(value) else None
        found.append(Tried(number, family, config, state, cost, tuple(older), operator, created_at, value))
    return found


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
