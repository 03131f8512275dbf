"""Transformers models at real widths, few layers, random weights, bf16: "evoattn" beside "sdpa" and, where installed,
FlashAttention 3.

    python -m benchmarks.models [--layers 6] [--only llama,vit] [--batch 8] [--growing] [--json FILE]

For each model: how far the logits are from "eager"; of a forward pass the time that a user sees, its device time and
that of the attention in it, both by CUDA graphs, and its CPU time and that of a call of attention; and for decoders the
time of a token: with a growing cache (`--growing`: alone), and with a static one under a CUDA graph. Prints Markdown.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import evoattn.integrations.transformers as integration
from benchmarks.models import fa3 as model_fa3
from benchmarks.models.kinds import DECODERS, MODELS
from evoattn.ops.runtime import current

ROUNDS, WARM_UP = 8, 2
REPLAYS = 5
"""Of a graph, one after another: the launch of the first is not hidden."""
TOKENS = 1 + (ROUNDS + WARM_UP) * REPLAYS
"""Steps that a static cache has room for behind the prompt: it counts every replay of a graph of a step, and the one
call before the graph."""


def registry(kind: Any) -> Any:
    """One of transformers' tables, whose constructors have no types."""
    return kind()


class Clock:
    """An implementation of its own around another one: while it is `on`, it keeps the arguments of every call and the
    CPU time that it took, in µs."""

    def __init__(self, name: str) -> None:
        self.name, self.on = f"timed_{name}", False
        self._inner = registry(transformers.AttentionInterface)[name]
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._cpu_us: list[float] = []
        transformers.AttentionInterface.register(self.name, self)
        masks = registry(transformers.AttentionMaskInterface)
        transformers.AttentionMaskInterface.register(self.name, masks[name])

    def __call__(self, *arguments: Any, **others: Any) -> Any:
        if not self.on:
            return self._inner(*arguments, **others)
        begin = time.thread_time()
        answer = self._inner(*arguments, **others)
        self._cpu_us.append((time.thread_time() - begin) * 1e6)
        self._calls.append((arguments, others))
        return answer

    def cpu_us(self, forward: Callable[[], Any]) -> float:
        """Of one call of attention in a forward pass that was made before: the median."""
        self._cpu_us.clear()
        for _ in range(ROUNDS):
            self._record(forward)
        return statistics.median(self._cpu_us)

    def device_ms(self, forward: Callable[[], Any]) -> float:
        """Of all attention in a forward pass, one call after another."""
        self._record(forward)
        calls, self._calls = self._calls, []
        return graph_ms(lambda: [self._inner(*arguments, **others) for arguments, others in calls])

    def _record(self, forward: Callable[[], Any]) -> None:
        torch.cuda.synchronize()
        self._calls.clear()
        self.on = True
        forward()
        self.on = False


def once_ms(call: Callable[[], Any]) -> float:
    """From the first to the last of a call on the GPU, which waits for the CPU in between."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def once_cpu_ms(call: Callable[[], Any]) -> float:
    """CPU time of a call that leaves its work to the GPU: of the thread, without what it waits for."""
    torch.cuda.synchronize()
    begin = time.thread_time()
    call()
    return (time.thread_time() - begin) * 1e3


def medians(calls: Mapping[str, Callable[[], Any]], once: Callable[[Callable[[], Any]], float]) -> dict[str, float]:
    """Of each call, all in turns, so that they meet the same clocks and the same load of the host."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS + WARM_UP):
        for name, call in calls.items():
            times[name].append(once(call))
    return {name: statistics.median(found[WARM_UP:]) for name, found in times.items()}


def median_ms(call: Callable[[], Any]) -> float:
    return medians({"": call}, once_ms)[""]


def graph_ms(call: Callable[[], Any]) -> float:
    """Device time of a call, by replays of a CUDA graph of it: nothing waits for the CPU. Raises `RuntimeError` where
    none can be made."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which may still make what the call reads
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replays() -> None:
        for _ in range(REPLAYS):
            graph.replay()

    return median_ms(replays) / REPLAYS


def output(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    answer = model(**inputs)
    value: torch.Tensor = answer["logits"] if "logits" in answer else answer["last_hidden_state"]
    return value.float() if "attention_mask" not in inputs else value[inputs["attention_mask"] == 1].float()


def growing_cache_ms(model: Any, ids: torch.Tensor, number: int) -> float:
    """A token after a prompt, in ms: the keys grow by one each time, CPU time included. By the `number` of a row its
    prompt is shorter, so that none meets lengths for which another implementation has made something ready."""
    ids = ids[:, : ids.shape[1] - number * (ROUNDS + WARM_UP)]
    cache = transformers.DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache)
    return median_ms(lambda: model(input_ids=ids[:, :1], past_key_values=cache))


def static_cache_ms(model: Any, ids: torch.Tensor, padded: bool = False) -> float:
    """A token in a static cache, captured in a CUDA graph: how many places are filled is known to the device alone, and
    transformers makes a mask tensor of it, or evoattn keys in use. `padded`: with a padding mask, as `generate` gives
    it, though nothing is padded."""
    length = ids.shape[1] + TOKENS
    cache = transformers.StaticCache(config=model.config, max_cache_len=length)
    model(input_ids=ids, past_key_values=cache)
    token, place = ids[:, :1].clone(), torch.full((1, 1), ids.shape[1], device=ids.device)
    mask = torch.ones(len(ids), ids.shape[1] + 1, dtype=torch.long, device=ids.device) if padded else None

    def step() -> Any:
        return model(input_ids=token, past_key_values=cache, position_ids=place, attention_mask=mask).logits

    return graph_ms(step)


TOKEN_TIMES: dict[str, Callable[[Any, torch.Tensor], float]] = {
    "static_ms": static_cache_ms,
    "masked_ms": partial(static_cache_ms, padded=True),
}


def measure(name: str, layers: int, names: list[str], batch: int | None, growing: bool) -> list[dict[str, Any]]:
    """A row for each implementation; with `growing` of a token over a growing cache alone."""
    make, inputs = MODELS[name](layers)
    inputs = {n: (t.bfloat16() if t.is_floating_point() else t)[:batch].cuda() for n, t in inputs.items()}
    expected, models = None, {}
    rows: list[dict[str, Any]] = []
    for implementation in names:  # "eager" first, which has all that a model asks for
        clock = None if implementation == "eager" else Clock(implementation)  # that one is of each model's own code
        torch.manual_seed(0)
        try:
            with torch.device("cuda"):
                model = make(clock.name if clock else implementation).eval()
            found = output(model, inputs)
        except (RuntimeError, ValueError, ImportError) as error:
            print(f"{name} with {implementation}: {str(error).splitlines()[0][:120]}", flush=True)
            continue
        expected = found if expected is None else expected
        rows.append(dict(model=name, implementation=implementation, error=(found - expected).abs().max().item()))
        models[implementation] = model, clock
    forwards = {implementation: partial(model, **inputs) for implementation, (model, _) in models.items()}
    passes = {} if growing else {"forward_ms": once_ms, "forward_cpu_ms": once_cpu_ms}
    whole = {what: medians(forwards, once) for what, once in passes.items()}
    for number, row in enumerate(rows):
        forward, (model, clock) = forwards[row["implementation"]], models[row["implementation"]]
        times = {} if growing else {"forward_graph_ms": partial(graph_ms, forward)}
        row |= {what: found[row["implementation"]] for what, found in whole.items()}
        if clock and not growing:
            row["call_cpu_us"] = clock.cpu_us(forward)
            times["attention_ms"] = partial(clock.device_ms, forward)
        if name in DECODERS:
            of_tokens = {"growing_ms": partial(growing_cache_ms, number=number)} | ({} if growing else TOKEN_TIMES)
            times |= {what: partial(token_ms, model, inputs["input_ids"]) for what, token_ms in of_tokens.items()}
        for what, measure_ms in times.items():
            try:
                row[what] = measure_ms()
            except Exception as error:  # one time costs no other
                print(f"{name} with {row['implementation']}, {what}: {str(error)[:200]}", flush=True)
    return rows


COLUMNS = {
    "model": "model",
    "implementation": "attention by",
    "error": "largest difference from eager",
    "attention_ms": "attention, device ms",
    "call_cpu_us": "a call of attention, CPU µs",
    "forward_ms": "forward, ms",
    "forward_graph_ms": "forward, device ms",
    "forward_cpu_ms": "forward, CPU ms",
    "growing_ms": "token, growing cache, ms",
    "static_ms": "token, static cache in a graph, ms",
    "masked_ms": "the same with a padding mask, ms",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--batch", type=int, help="take so many sequences or images of those that there are")
    parser.add_argument("--growing", action="store_true", help="a token over a growing cache alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--estimated", action="store_true", help="also kernels that were measured on no such GPU")
    arguments = parser.parse_args()
    current.runtime().estimated = arguments.estimated
    integration.register()
    names = ["eager", "sdpa", *([model_fa3.NAME] if model_fa3.register() else []), integration.NAME]
    rows = []
    with torch.no_grad():
        for name in arguments.only.split(","):
            try:
                made = measure(name, arguments.layers, names, arguments.batch, arguments.growing)
            except Exception as error:  # one model costs no other
                print(f"{name}: {' '.join(str(error).split())[:200]}", flush=True)
                continue
            print(json.dumps(made), flush=True)
            rows += made
            torch.cuda.empty_cache()
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}\n")
    print("| " + " | ".join(COLUMNS.values()) + " |\n|" + "---|" * len(COLUMNS))
    for row in rows:
        cells = (row.get(column, "") for column in COLUMNS)
        print("| " + " | ".join(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells) + " |")
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
