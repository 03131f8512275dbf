"""The ways in which a drawn call is made a second time: compiled, in a CUDA graph, by threads, on streams, as SDPA, in
the modes and by the transforms of torch."""

import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import evoattn
from tests.fuzz.calls import Call
from tests.fuzz.made import Made, called

Answer = tuple[Tensor, Tensor | None]
WAYS: tuple[str, ...] = (
    "eager",
    "graph",
    "threads",
    "streams",
    "sdpa",
    "compiled",
    "any size",
    "autocast",
    "inference",
    "vmap",
)
WAYS += ("gradients", "deterministic", "fake")
WEIGHTS = (47, 10, 7, 7, 7, 5, 2, 4, 3, 2, 2, 2, 2)
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
    if way in ("compiled", "any size"):
        return [_compiled(call, made, way == "any size")]
    if way == "autocast":
        return [_under_autocast(call, made)]
    if way == "inference":
        with torch.inference_mode():
            return [run()]
    if way == "vmap" and not alone:
        return [_mapped(call, made)]
    if way == "gradients" and not alone:
        return [_with_gradients(call, made)]
    if way == "deterministic":
        return [_deterministic(run)]
    if way == "fake" and not alone:
        return [_beside_fake(call, made, run())]
    if way == "sdpa" and _is_sdpas(call):
        return [_as_sdpa(call, made)]
    if way == "graph" and made.q.is_cuda:
        return [_replayed(run, 1 if call.out == "query" else REPLAYS)]
    if way == "streams" and made.q.is_cuda:
        return _on_streams(run, 1 if alone else AT_ONCE)
    return [run()]


def has_same_bits(way: str, call: Call) -> bool:
    """Whether that way runs the kernel of the eager call: compiled code may take PyTorch for variants, transforms and
    gradients do, and what autocast makes may lie otherwise in memory."""
    if way in ("compiled", "any size"):
        return call.plain
    return way != "autocast" and (way not in ("vmap", "gradients") or bool(call.out))


def _compiled(call: Call, made: Made, any_size: bool) -> Answer:
    torch._dynamo.reset()
    run = torch.compile(
        lambda made: called(call, made, False, made.out), fullgraph=True, dynamic=any_size, backend="aot_eager"
    )
    answer: Answer = run(made)
    return answer


def _under_autocast(call: Call, made: Made) -> Answer:
    """Of tensors in float32, whose numbers are those of 16 bits; not of slopes, which it rounds."""
    if call.dtype == "fp32" or call.alibi or call.out == "query":
        return called(call, made, False, made.out)
    wide = replace(made, q=made.q.float(), k=made.k.float(), v=made.v.float())
    if made.bias is not None and made.bias.dtype != torch.bool:
        wide.bias = made.bias.float()
    if made.sinks is not None:
        wide.sinks = made.sinks.float()
    with torch.autocast(made.q.device.type, made.q.dtype):
        return called(call, wide, False, made.out)


def _mapped(call: Call, made: Made) -> Answer:
    """The second of two calls that differ in their queries."""

    def run(q: Tensor) -> tuple[Tensor, ...]:
        answer, lse = called(call, replace(made, q=q), False, None)
        return (answer,) if lse is None else (answer, lse)

    answer, *lse = torch.func.vmap(run)(torch.stack((made.q.flip(0), made.q)))
    return answer[1], lse[0][1] if lse else None


def _with_gradients(call: Call, made: Made) -> Answer:
    with torch.enable_grad():
        q = made.q.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        answer, lse = called(call, replace(made, q=q), False, None)
        if answer.numel():
            (gradient,) = torch.autograd.grad(answer.float().sum(), q)
            assert gradient.shape == q.shape
    return answer.detach(), None if lse is None else lse.detach()


def _deterministic(run: Callable[[], Answer]) -> Answer:
    """With new memory full of NaN, as torch has it then."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return run()
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


def _beside_fake(call: Call, made: Made, answer: Answer) -> Answer:
    """The answer, which one of tensors without data has to fit in shape and dtype."""
    with FakeTensorMode() as mode:
        inputs = {name: _faked(mode, value) for name, value in vars(made).items()}
        fake = called(call, Made(**inputs), False, None)
    for real, other in zip(answer, fake, strict=True):
        if real is not None and other is not None:
            same = (real.shape, real.dtype) == (other.shape, other.dtype)
            assert same, f"a fake answer is {other.dtype} {list(other.shape)}"
    return answer


def _faked(mode: FakeTensorMode, value: Any) -> Any:
    if isinstance(value, Tensor):
        return mode.from_tensor(value)
    return tuple(_faked(mode, one) for one in value) if isinstance(value, tuple) else value


def _is_sdpas(call: Call) -> bool:
    """Whether SDPA has all of the call's arguments."""
    lower = call.is_causal and call.causal == "lower_right"
    return call.plain and not (call.lse or call.out or lower)


def _as_sdpa(call: Call, made: Made) -> Answer:
    """By SDPA's name in `torch.nn.functional`, within blocks that say on, off and on again, one of which fails."""
    words: dict[str, Any] = {"is_causal": call.is_causal, "scale": call.scale, "enable_gqa": True}
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
