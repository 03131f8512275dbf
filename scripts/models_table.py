"""Transformers models at real widths, few layers, random weights, bf16: "evoattn" beside "sdpa" and, where installed,
FlashAttention 3.

    python scripts/models_table.py [--layers 4] [--only llama,vit] [--json FILE]

For each model: how far the logits are from "eager", the time of one forward pass and of the attention in it by CUDA
events, and for decoders the time of a token: with a growing cache, and with a static cache under a CUDA graph. Prints a
table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import model_fa3
import torch
import transformers
from model_kinds import DECODERS, MODELS

import evoattn.integrations.transformers as integration
from evoattn.ops import current

TOKENS = 16
"""Steps that a static cache has room for behind the prompt."""
ROUNDS = 8


class Clock:
    """An implementation of its own around another one: CUDA events around every attention call, while it is `on`."""

    def __init__(self, name: str) -> None:
        self.name, self.on = f"timed_{name}", False
        self._inner = transformers.AttentionInterface()[name]
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        transformers.AttentionInterface.register(self.name, self)
        masks = transformers.AttentionMaskInterface()
        transformers.AttentionMaskInterface.register(self.name, masks[name])

    def __call__(self, *arguments: Any, **others: Any) -> Any:
        if not self.on:
            return self._inner(*arguments, **others)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        answer = self._inner(*arguments, **others)
        end.record()
        self._events.append((begin, end))
        return answer

    def ms(self, call: Callable[[], Any]) -> float:
        """Of all attention in a call that was made before: the median of some."""
        times = []
        self.on = True
        for _ in range(ROUNDS):
            call()
            torch.cuda.synchronize()
            times.append(sum(begin.elapsed_time(end) for begin, end in self._events))
            self._events.clear()
        self.on = False
        return statistics.median(times)


def median_ms(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(ROUNDS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def output(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    answer = model(**inputs)
    value: torch.Tensor = answer["logits"] if "logits" in answer else answer["last_hidden_state"]
    return value.float()


def growing_cache_ms(model: Any, ids: torch.Tensor) -> float:
    """A token after a prompt, in ms: the keys grow by one each time, CPU time included."""
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

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which still makes the prompt's keys, and `token`
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return median_ms(graph.replay)


TOKEN_TIMES: dict[str, Callable[[Any, torch.Tensor], float]] = {
    "growing_ms": growing_cache_ms,
    "static_ms": static_cache_ms,
    "masked_ms": partial(static_cache_ms, padded=True),
}


def measure(name: str, layers: int, names: list[str]) -> list[dict[str, Any]]:
    """A row for each implementation."""
    make, inputs = MODELS[name](layers)
    inputs = {n: (t.bfloat16() if t.is_floating_point() else t).cuda() for n, t in inputs.items()}
    expected, rows = None, []
    for implementation in names:  # "eager" first, which has all that a model asks for
        clock = None if implementation == "eager" else Clock(implementation)  # that one is of each model's own code
        torch.manual_seed(0)
        row: dict[str, Any] = dict(model=name, implementation=implementation)
        try:
            with torch.device("cuda"):
                model = make(clock.name if clock else implementation).eval()
            found = output(model, inputs)
        except (RuntimeError, ValueError, ImportError) as error:
            print(f"{name} with {implementation}: {str(error).splitlines()[0][:120]}", flush=True)
            continue
        expected = found if expected is None else expected
        row["error"] = (found - expected).abs().max().item()
        if clock:
            row["attention_ms"] = clock.ms(partial(model, **inputs))
        row["forward_ms"] = median_ms(partial(model, **inputs))
        for what, time in TOKEN_TIMES.items() if name in DECODERS else ():
            try:
                row[what] = time(model, inputs["input_ids"])
            except RuntimeError as error:
                print(f"{name} with {implementation}, {what}: {str(error).splitlines()[0]}", flush=True)
        rows.append(row)
    return rows


COLUMNS = dict(
    model="model", implementation="attention by", error="largest difference from eager", attention_ms="attention, ms",
    forward_ms="forward, ms", growing_ms="token, growing cache, ms", static_ms="token, static cache in a graph, ms",
    masked_ms="the same with a padding mask, ms",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--estimated", action="store_true", help="also kernels that were measured on no GPU like this")
    arguments = parser.parse_args()
    current.runtime().estimated = arguments.estimated
    integration.register()
    names = ["eager", "sdpa", *([model_fa3.NAME] if model_fa3.register() else []), integration.NAME]
    rows = []
    with torch.no_grad():
        for name in arguments.only.split(","):
            try:
                made = measure(name, arguments.layers, names)
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
