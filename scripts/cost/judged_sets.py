"""Which sets of measured kernels are judged: all, each card and source, families of any card alone, each family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from numpy import float64
from numpy.typing import NDArray

from scripts.cost.judge import LEAST, Judgement, judge
from scripts.cost.measured import Row

HOPPER_ONLY = ("wgmma", "tma", "cluster")


def for_all_cards(row: Row) -> bool:
    """Whether a card without wgmma, tensor copies and clusters has this config too."""
    values = {str(v) for v in row.config.params.values()}
    return row.family not in ("flash_wgmma", "latent_wgmma") and not values & set(HOPPER_ONLY)


def problem_keys(rows: Sequence[Row]) -> list[Hashable]:
    """What tells the problems of rows apart that are ranked by themselves."""
    return [(row.gpu.name, row.problem, row.source) for row in rows]


def judged_sets(rows: Sequence[Row], score: NDArray[float64]) -> dict[str, Judgement]:
    """The judgement of each set, by what it is called."""
    sets: list[tuple[str, list[int]]] = [("all", list(range(len(rows))))]
    for source in sorted({row.source for row in rows}):
        for card in sorted({row.gpu.name for row in rows}):
            here = [i for i, row in enumerate(rows) if row.source == source and row.gpu.name == card]
            sets += [(f"{source}, {card}", here)]
            sets += [(f"{source}, {card}, no wgmma, TMA or cluster", [i for i in here if for_all_cards(rows[i])])]
    for variant in ("window", "sink", "softcap", "varlen", "seqused", "value_dim"):
        sets.append((f"with {variant}", [i for i, row in enumerate(rows) if getattr(row.problem, variant)]))
    for family in sorted({row.family for row in rows}):
        sets.append((family, [i for i, row in enumerate(rows) if row.family == family]))
    judged = {}
    for label, chosen in sets:
        keys = problem_keys([rows[i] for i in chosen])
        if max(Counter(keys).values(), default=0) >= LEAST:
            judged[label] = judge(score[chosen], [rows[i].us for i in chosen], keys)
    return judged
