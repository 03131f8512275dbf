"""What a cost says, in sentences: what bounds a kernel, how far the first choices have been from the best."""

from __future__ import annotations

from typing import Any

from evoattn.cost.cost import cost
from evoattn.cost.fitted import Fitted, load
from evoattn.model.gpu import GPUS, GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

ANY_CARD = ", no wgmma, TMA or cluster"
"""Ends the names of judged sets of those kernels that cards before Hopper have too."""
SOURCES = ("landscape", "campaign")
"""Kinds of measurements that begin the names of judged sets; the first was drawn good and bad alike."""

NOT_FITTED = "The cost model was fitted to no times of op={op}: physics alone orders its kernels."
"""In place of how far first choices were."""


def sentences(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, registers: int) -> tuple[str, ...]:
    """Of an estimated kernel: what bounds it and how its score splits; how such first choices were; what is not known.
    Empty where the config is none of today's."""
    try:
        found = cost(problem, config, gpu, registers)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return ()
    judged = how_far(gpu) if problem.op == "forward" else NOT_FITTED.format(op=problem.op)
    return (found.sentence(), judged, *([gpu.note] if gpu.note else [])) if found else ()


def how_far(gpu: GpuSpec, fitted: Fitted | None = None) -> str:
    """How far first choices were from the best measured kernels, on problems left out of the fit."""
    about = (fitted or load()).about
    cards: list[str] = about.get("cards", [])
    any_card = "" if gpu.arch in {GPUS[card].arch for card in cards} else ANY_CARD
    judged = {card: row for card in cards if (row := _judged(card, any_card, about.get("left_out", {})))}
    unknown = "" if gpu.name in cards else f" Nothing was measured on the {gpu.product}."
    if not judged:
        return unknown.strip()
    kind = ", of this card's families," if any_card else ""
    found = " and ".join(
        f"{row['first']:.2f} on an {GPUS[card].product} (at worst {row['worst_first']:.2f})"
        for card, row in judged.items()
    )
    return (
        f"The kernel that the cost model puts first{kind} takes this many times as long as the best: {found}.{unknown}"
    )


def _judged(card: str, any_card: str, left_out: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The judgement of a card by the first kind of measurements that there is."""
    names = (f"{source}, {card}{any_card}" for source in SOURCES)
    return next((left_out[name] for name in names if name in left_out), None)
