"""A drawn question to one of evoattn's other faces, asked twice and judged."""

import asyncio
import math
import random
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

import evoattn
from tests.fuzz.asked import Asked, Draw, bits, poison
from tests.fuzz.faces import FACES, Face
from tests.fuzz.flash import FLASH_FACES
from tests.fuzz.formula import why_far
from tests.fuzz.judged import Judged

ALL: dict[str, Face] = FACES | FLASH_FACES
WAYS = ("eager", "eager", "graph", "stream", "asyncio")
TORCHS = 1.5
"""How much more its own answers may be off than a kernel's: sums of heads are rounded one by one."""
NONE = "what no kernel serves"
LOST = "does not support backward on CPU"


def face_of(number: int, faces: dict[str, Face] = ALL) -> str:
    """The name of the face of a question of that number."""
    return list(faces)[number % len(faces)]


def judged_face(
    seed: int, number: int, device: str, launches: Callable[[], int], faces: dict[str, Face] = ALL
) -> Judged:
    """Asks twice, the second time in a graph, on another stream or in tasks, now and then; nothing that it raises
    passes, but `NoKernel`, and that a CPU has no gradients of FlexAttention. `launches` counts kernels."""
    name = face_of(number, faces)
    way = random.Random(f"evoattn ways of faces {seed} {number}").choice(WAYS)
    words, ran, error, wrong = "", 0, 0.0, ""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            asked = faces[name](Draw.of(seed, number, device))
            words, before = asked.words, launches()
            inputs = [bits(one).clone() for one in asked.inputs]
            poison(device)
            first = asked.ask()
            ran = launches() - before
            poison(device)
            evoattn.settle()
            again = _asked_by("eager" if way == "graph" and not ran else way, asked, device)
            wrong, error = _judged(asked, inputs, first, again, 1 if ran else TORCHS)
        except evoattn.NoKernel as refusal:
            words = f"{words} {refusal}"
        except Exception as failure:  # a device that a kernel broke fails at anything
            sentence = (str(failure).splitlines() or [""])[0]
            wrong = "" if LOST in sentence else f"{type(failure).__name__}: {sentence}"
            error = math.inf if wrong else 0.0
    said = [str(one.message) for one in warned if "evoattn" in str(one.message)]
    return Judged(
        number, f"{way}: {name}: {words}", ran > 0, f"{name if ran > 0 else NONE}", error, wrong or "; ".join(said)
    )


def _judged(
    asked: Asked, inputs: list[Tensor], first: list[Tensor], again: list[Tensor], more: float
) -> tuple[str, float]:
    changed = [number for number, one in enumerate(asked.inputs) if not torch.equal(bits(one), inputs[number])]
    if changed:
        return f"inputs {changed} were changed", math.inf
    exact = asked.right(torch.float64)
    if asked.exactly:
        same = all(torch.equal(one.double().nan_to_num(9e9), two.nan_to_num(9e9)) for one, two in zip(first, exact))
        return ("", 0.0) if same else ("the numbers are others", math.inf)
    low, worst = asked.right(first[0].dtype), 0.0
    least = asked.least * max(
        (one.nan_to_num(posinf=0, neginf=0).abs().max().item() for one in exact if one.numel()), default=0
    )
    for place, (one, two, right, rough) in enumerate(zip(first, again, exact, low, strict=True)):
        for found in (one, two):
            wrong, error = why_far(found, right, rough, more * asked.factor, asked.part, least)
            worst = max(worst, error)
            if wrong:
                return f"answer {place}: {wrong}", worst
    if asked.same_bits and not all(torch.equal(bits(one), bits(two)) for one, two in zip(first, again, strict=True)):
        return "two runs differ", worst
    return "", worst


def _asked_by(way: str, asked: Asked, device: str) -> list[Tensor]:
    """The answers, asked that way; eager stands in where there is none."""
    if way == "asyncio":
        return asyncio.run(_in_tasks(asked))[1]
    if device == "cpu" or way == "eager" or (way == "graph" and not asked.graphs):
        return asked.ask()
    torch.cuda.synchronize()
    if way == "stream":
        with torch.cuda.stream(torch.cuda.Stream()):
            answers = asked.ask()
        torch.cuda.synchronize()
        return answers
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answers = asked.ask()
    for _ in range(2):
        for one in answers:
            one.fill_(math.nan) if one.is_floating_point() else None
        graph.replay()
    answers = [one.clone() for one in answers]
    torch.cuda.synchronize()
    return answers


async def _in_tasks(asked: Asked) -> list[list[Tensor]]:
    """Two tasks of the loop's thread, and one of another thread between."""

    async def task() -> list[Tensor]:
        await asyncio.sleep(0)
        return asked.ask()

    answers = list(await asyncio.gather(task(), asyncio.to_thread(torch.no_grad()(asked.ask)), task()))
    if any(one.is_cuda for one in answers[1]):
        torch.cuda.synchronize()
    return answers
