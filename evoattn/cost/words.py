"""What a cost says, in sentences: what bounds a kernel, how far the first choices have been from the best."""

from __future__ import annotations

from typing import Any

from evoattn.cost.cost import cost
from evoattn.cost.fitted import Fitted, load
from evoattn.model.gpu import GPUS
from evoattn.model.gpu_spec import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

ANY_CARD = ", no wgmma, TMA or cluster"
"""Ends the names of judged sets of those kernels that cards before Hopper have too."""
SOURCES = ("landscape", "campaign")
"""Kinds of measurements that begin the names of judged sets; the first was drawn good and bad alike."""


def sentences(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, registers: int) -> tuple[str, ...]:
    """Of an estimated kernel: what bounds it and how its score splits; how such first choices were; what is not known.
    Empty where the config is none of today's."""
    try:
        found = cost(problem, config, gpu, registers)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return ()
    return (found.sentence(), how_far(gpu), *([gpu.note] if gpu.note else [])) if found else ()


def how_far(gpu: GpuSpec, fitted: Fitted | None = None) -> str:
    """How far first choices were from the best measured kernels, on problems left out of the fit."""
    about = (fitted or load()).about
    cards: list[str] = about.get("cards", [])
    any_card = "" if gpu.arch in {GPUS[card].arch for card in cards} else ANY_CARD
    judged = [said for card in cards if (said := _of_card(card, any_card, about.get("left_out", {})))]
    unknown = "" if gpu.name in cards else f" None was measured on this card, {gpu.product}: there it is not known."
    if not judged:
        return unknown.strip()
    kind = " of this card's families" if any_card else ""
    return f"First choices{kind} took {'; '.join(judged)}.{unknown}"


def _of_card(card: str, any_card: str, left_out: dict[str, dict[str, Any]]) -> str:
    for source in SOURCES:
        if found := left_out.get(f"{source}, {card}{any_card}"):
            return (
                f"{found['first']:.2f} times the best on an {GPUS[card].product} (at worst {found['worst_first']:.2f}, "
                f"of {found['problems']} problems left out of the fit)"
            )
    return ""
