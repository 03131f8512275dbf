"""The final table of a campaign: the best kernels of each group, timed in turns on as many of its problems as there is
time for."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from evoattn.engine.group_search import GroupSearch
from evoattn.engine.groups import Group, Kernel
from evoattn.portfolio.campaign import contenders
from evoattn.timing.protocol import ORDER

SPLITS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of splits that every kernel of split_kv and latent_wgmma is timed with: they cost no compile."""


def with_splits(kernels: list[Kernel], group: Group, engine: GroupSearch) -> list[Kernel]:
    """The kernels, and every number of splits that costs no other compile."""
    found = {k.id: k for k in kernels}
    for kernel in kernels:
        if "SPLITS" not in kernel.params or kernel.params.get("MERGE") == "cluster":
            continue
        for splits in SPLITS:
            other = Kernel(kernel.family, kernel.params | {"SPLITS": splits}, "splits", "right", kernel.registers)
            if engine.serves(group, other):
                found.setdefault(other.id, group.kernels.setdefault(other.id, other))
    return list(found.values())


def in_turn(groups: Sequence[Group]) -> list[tuple[Group, int]]:
    """Every problem of every group as (group, index), in an order that is broken off anywhere with an equal share of
    each group's problems done, drawn at random within a group."""
    order: list[tuple[float, Group, int]] = []
    for group in groups:
        indexes = list(range(len(group.problems)))
        random.Random(group.name).shuffle(indexes)
        order += [((place + 1) / len(indexes), group, index) for place, index in enumerate(indexes)]
    return [(group, index) for _, group, index in sorted(order, key=lambda entry: entry[0])]


def final_tables(engine: GroupSearch, most: int, rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    """{group: {"kernels": [id], "us": [[µs by kernel] by problem]}} of `most` contenders,
    timed in turns on the problems of their group; yielded again and again as rows fill. After `seconds` the problems
    that are left keep rows of None."""
    end = time.monotonic() + seconds
    chosen: dict[str, list[Kernel]] = {}
    for group in engine.groups:
        chosen[group.name] = with_splits(contenders(group, most), group, engine)
    engine.compile_all([(g, k) for g in engine.groups for k in chosen[g.name]])
    able = {g.name: {k.id: set(engine.serves(g, k)) for k in chosen[g.name]} for g in engine.groups}
    table: dict[str, Any] = {}
    for group in engine.groups:
        ids = [k.id for k in chosen[group.name]]
        table[group.name] = {"kernels": ids, "us": [[None] * len(ids) for _ in group.problems]}
    for group, index in in_turn(engine.groups):
        if time.monotonic() > end:
            break
        valid = [k for k in chosen[group.name] if index in able[group.name][k.id]]
        times = engine.final(group, index, valid, replace(ORDER, samples=rounds)).right_us
        table[group.name]["us"][index] = [times.get(k.id) for k in chosen[group.name]]
        yield table
    yield table


def with_peers(
    engine: GroupSearch, table: dict[str, Any], peers: tuple[str, ...], rounds: int, seconds: float
) -> dict[str, Any]:
    """The table, and of each group `peers`: {index: {"ours": µs, name: µs}} of its fastest kernel on a problem and of
    the peers whose answers are right there, in turns, on as many problems as there is time for."""
    end = time.monotonic() + seconds
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in table}
    for group, index in in_turn(engine.groups):
        if time.monotonic() > end:
            break
        row = [
            (us, name)
            for name, us in zip(table[group.name]["kernels"], table[group.name]["us"][index], strict=True)
            if us
        ]
        if row:
            best = group.kernels[min(row)[1]]
            times = engine.final(group, index, [best], replace(ORDER, samples=rounds), peers).right_us
            if ours := times.pop(best.id, None):
                found[group.name][str(index)] = {"ours": ours} | times
    return {name: row | {"peers": found[name]} for name, row in table.items()}
