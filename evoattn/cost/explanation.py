"""What a cost says, in sentences: what bounds a kernel, how far the first choices have been from the best."""

from collections.abc import Sequence
from typing import Any

from evoattn.cost.correction import correction_of
from evoattn.cost.cost import cost
from evoattn.cost.fitted import Fitted, load
from evoattn.model.gpu import GPUS, GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

ANY_CARD = ", no wgmma, TMA or cluster"
"""Ends the names of judged sets of those kernels that cards before Hopper have too."""
SOURCES = ("landscape", "campaign")
"""Kinds of measurements that begin the names of judged sets; the first was drawn good and bad alike."""

VARIANTS = ("window", "sink", "softcap", "varlen", "seqused", "value_dim")
"""Of a problem, each judged by itself."""

NOT_FITTED = "The cost model was fitted to no times of op={op}: physics alone orders its kernels."
"""In place of how far first choices were."""


def sentences(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, registers: int) -> tuple[str, ...]:
    """Of an estimated kernel: what bounds it and how its score splits; how such first choices were; what is not known.
    Empty where the config is none of today's."""
    try:
        found = cost(problem, config, gpu, registers)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return ()
    fitted = problem.op == "forward"
    judged = how_far(gpu, (config.family, *kinds(problem))) if fitted else NOT_FITTED.format(op=problem.op)
    return (found.sentence(), judged, *([gpu.note] if gpu.note else [])) if found else ()


def kinds(problem: AttentionProblem) -> tuple[str, ...]:
    """The sets of problems that this one is of, as a fit's judgement calls them."""
    few = ("of one query",) if problem.seqlen_q == 1 and not problem.varlen else ()
    bits = ("in fp32",) if problem.dtype == "fp32" else ()
    return (*few, *bits, *(f"with {name}" for name in VARIANTS if getattr(problem, name)))


def how_far(gpu: GpuSpec, sets: Sequence[str] = (), fitted: Fitted | None = None) -> str:
    """How far first choices were from the best measured kernels, on problems left out of the fit: by card, and of each
    of these `sets` of problems or kernels that was judged. Of a calibrated card what its calibration says."""
    if own := correction_of(gpu).left_out:
        of_all = "On {:.0f} problems that the calibration of the {} left out, first choices take {:.2f} times the best"
        count, before, after = own["all"]
        of_sets = ", ".join(f"{own[name][2]:.2f} {_spoken(name)}" for name in sets if name in own)
        by_kind = f" By kind: {of_sets}." if of_sets else ""
        return f"{of_all.format(count, gpu.product, after)} that it timed, {before:.2f} before it.{by_kind}"
    about = (fitted or load()).about
    cards: list[str] = about.get("cards", [])
    left_out: dict[str, dict[str, Any]] = about.get("left_out", {})
    any_card = "" if gpu.arch in {GPUS[card].arch for card in cards} else ANY_CARD
    judged = {card: row for card in cards if (row := _judged(card, any_card, left_out))}
    unknown = "" if gpu.name in cards else f" Nothing was measured on the {gpu.product}."
    if not judged:
        return unknown.strip()
    among = "Among this card's families what" if any_card else "What"
    first, *others = [(row, f"on an {GPUS[card].product}") for card, row in judged.items()]
    others += [(left_out[name], _spoken(name)) for name in sets if name in left_out]
    found = [_factors(first[0], f"times the best time {first[1]}"), *(_factors(*other) for other in others)]
    return f"{among} the cost model puts first takes {', '.join(found)}.{unknown}"


def _factors(row: dict[str, Any], where: str) -> str:
    return f"{row['first']:.2f} {where} (worst {row['worst_first']:.2f})"


def _spoken(name: str) -> str:
    return name if " " in name else f"within {name}"


def _judged(card: str, any_card: str, left_out: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The judgement of a card by the first kind of measurements that there is."""
    names = (f"{source}, {card}{any_card}" for source in SOURCES)
    return next((left_out[name] for name in names if name in left_out), None)
