"""The ways in which a drawn call is made a second time: compiled, in a CUDA graph, by threads, on streams, as SDPA."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

import evoattn
from op_calls.calls import Call
from op_calls.made import Made, called

Answer = tuple[Tensor, Tensor | None]
WAYS = ("eager", "graph", "threads", "streams", "sdpa", "compiled")
WEIGHTS = (60, 10, 8, 8, 8, 6)
AT_ONCE = 3
"""Threads or streams that make the same call."""
REPLAYS = 3


def ways(seed: int, count: int) -> list[str]:
    """The way of each of `count` calls of a seed."""
    return random.Random(f"evoattn ways {seed}").choices(WAYS, WEIGHTS, k=count)


def made_by(way: str, call: Call, made: Made) -> list[Answer]:
    """The answers of the call, made that way, with nothing left to wait for. Eager is what stands in for graphs and
    streams on a CPU, and for SDPA where it has no such argument."""
    run = partial(called, call, made, False, made.out)
    alone = made.out is not None  # several would write to the same memory
    if way == "threads":
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return [future.result() for future in [pool.submit(run) for _ in range(1 if alone else AT_ONCE)]]
    if way == "compiled":
        return [_compiled(run)]
    if way == "sdpa" and _is_sdpas(call):
        return [_as_sdpa(call, made)]
    if way == "graph" and made.q.is_cuda:
        return [_replayed(run, 1 if call.out == "query" else REPLAYS)]
    if way == "streams" and made.q.is_cuda:
        return _on_streams(run, 1 if alone else AT_ONCE)
    return [run()]


def has_same_bits(way: str, call: Call) -> bool:
    """Whether that way runs the kernel of the eager call: compiled code may take PyTorch for variants."""
    return way != "compiled" or call.plain


def _compiled(run: Callable[[], Answer]) -> Answer:
    torch._dynamo.reset()
    answer: Answer = torch.compile(lambda: run(), fullgraph=True, backend="aot_eager")()
    return answer


def _is_sdpas(call: Call) -> bool:
    """Whether SDPA has all of the call's arguments."""
    lower = call.is_causal and call.causal == "lower_right"
    return call.plain and not (call.lse or call.out or lower)


def _as_sdpa(call: Call, made: Made) -> Answer:
    """By SDPA's name in `torch.nn.functional`, within blocks that say on, off and on again, one of which fails."""
    words = {"is_causal": call.is_causal, "scale": call.scale, "enable_gqa": True}
    with evoattn.sdpa(), evoattn.sdpa(on=False):
        try:
            with evoattn.sdpa():
                raise KeyError
        except KeyError:
            pass
        with evoattn.sdpa():
            return torch.nn.functional.scaled_dot_product_attention(made.q, made.k, made.v, **words), None


def _replayed(run: Callable[[], Answer], replays: int) -> Answer:
    """By replays of a captured graph, whose memory is full of NaN before each of several."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer, lse = run()
    for _ in range(replays):
        if replays > 1:
            answer.fill_(math.nan)
        if lse is not None:
            lse.fill_(math.nan)
        graph.replay()
    copied = answer.clone(), None if lse is None else lse.clone()
    torch.cuda.synchronize()
    return copied


def _on_streams(run: Callable[[], Answer], count: int) -> list[Answer]:
    """On streams that may run at the same time."""
    torch.cuda.synchronize()
    answers = []
    for _ in range(count):
        with torch.cuda.stream(torch.cuda.Stream()):
            answers.append(run())
    torch.cuda.synchronize()
    return answers
