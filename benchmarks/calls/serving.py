"""Steps of a serving engine: packed queries over pages by `evoattn.attention_mixed`, beside what PyTorch has.

    python -m benchmarks.calls.serving [--count 40] [--seed 7] [--part N/M] [--peers gather,fa4,fa3,fi2,fi3]
                                       [--json FILE]
    python -m benchmarks.calls.serving --compile GPU

Draws batches as engines have them: heads of Llama, Qwen, gpt-oss, Mistral and DeepSeek, pages of 16 and 64 keys, 1 to
256 sequences with log-uniform numbers of keys, up to 30 % of them chunks of prompts. Checks sampled rows against
float64. Times each batch in CUDA graphs, evoattn and its peers (`serving_peers.py`) in turns. `--part`: every M-th
batch.

Then the CPU time of a call, and of planning a step, whose sizes were not met before. Prints Markdown."""

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import evoattn
from benchmarks.calls.serving_peers import PEERS
from evoattn.backends.cubins import get_cubin
from evoattn.families import registry
from evoattn.model.gpu import GpuSpec, lookup
from evoattn.model.paths import cubin_cache
from evoattn.model.problem import AttentionProblem
from evoattn.ops.call import out_like
from evoattn.ops.given import call_of
from evoattn.ops.runtime import FOLDER
from evoattn.portfolio.kernels import kind_of
from evoattn.portfolio.pick import pick
from evoattn.portfolio.workload import log_uniform

MODELS: dict[str, dict[str, Any]] = {
    "Llama 3 8B": {"heads": 32, "kv_heads": 8, "head_dim": 128},
    "Llama 3 70B, a card of 4": {"heads": 16, "kv_heads": 2, "head_dim": 128},
    "Qwen 3 30B-A3B": {"heads": 32, "kv_heads": 4, "head_dim": 128},
    "Qwen 2.5 7B": {"heads": 28, "kv_heads": 4, "head_dim": 128},
    "Mistral 7B, window": {"heads": 32, "kv_heads": 8, "head_dim": 128, "window": (4095, 0)},
    "gpt-oss": {"heads": 64, "kv_heads": 8, "head_dim": 64, "sink": True},
    "gpt-oss, window": {"heads": 64, "kv_heads": 8, "head_dim": 64, "sink": True, "window": (127, 0)},
    "DeepSeek V3, a card of 8": {"heads": 16, "kv_heads": 1, "head_dim": 576, "value_dim": 512},
}
LEAST_KEYS, MOST_KEYS, MOST_ALL_KEYS = 64, 16384, 1 << 19
MOST_CHUNK, MOST_PROMPT_ROWS = 2048, 8192
PROMPT_SHARES = (0.0, 0.0, 0.05, 0.1, 0.3)
CHECKED = 12
"""Rows that are compared with float64, of three heads each."""
TOLERANCE = 0.02
"""Of an output of values that are normal: bf16 has 8 bits, and a row of few keys is not much smaller than one."""
ROUNDS, REPLAY_US, MOST_CALLS = 7, 400.0, 40
LAYERS = 24
"""Calls of a step behind the first: as many as the driver takes without a wait."""


@dataclass(frozen=True)
class Step:
    """A batch: (queries, keys) of each sequence, those that decode first."""

    model: str
    page: int
    lengths: tuple[tuple[int, int], ...]
    decodes: int

    @property
    def rows(self) -> int:
        return sum(queries for queries, _ in self.lengths)

    @cached_property
    def longest(self) -> int:
        return max(queries for queries, _ in self.lengths)

    @property
    def table_pages(self) -> int:
        """The width of the page table: the longest sequence's, rounded up as engines round it."""
        most = -(-max(keys for _, keys in self.lengths) // self.page)
        return 1 << (most - 1).bit_length()

    def describe(self) -> str:
        keys = sum(keys for _, keys in self.lengths)
        return f"{self.model}, page {self.page}: {self.decodes} + {len(self.lengths) - self.decodes}, {keys} keys"


def draw(seed: int, count: int) -> list[Step]:
    """The first `count` batches of a seed."""
    rng, names = random.Random(f"evoattn serving {seed}"), list(MODELS)
    found: list[Step] = []
    while len(found) < count:
        model, page = names[len(found) % len(names)], rng.choice((16, 64))
        sequences, longest = log_uniform(rng, 1, 256), log_uniform(rng, 512, MOST_KEYS)
        prompts = 0 if "value_dim" in MODELS[model] else round(sequences * rng.choice(PROMPT_SHARES))
        lengths = [(1, log_uniform(rng, LEAST_KEYS, longest)) for _ in range(sequences - prompts)]
        for _ in range(prompts):
            rows = log_uniform(rng, 16, min(longest, MOST_CHUNK))
            lengths.append((rows, rows + (rng.random() < 0.5) * log_uniform(rng, 1, longest)))
        keys, rows = sum(keys for _, keys in lengths), sum(rows for rows, _ in lengths[sequences - prompts :])
        if keys <= MOST_ALL_KEYS and rows <= MOST_PROMPT_ROWS:
            found.append(Step(model, page, tuple(lengths), sequences - prompts))
    return found


class Batch:
    """The tensors of a step, and the calls that answer it."""

    def __init__(self, step: Step, device: str, alone: bool = False) -> None:
        """`alone`: K and V of one page, for a look at what is asked."""
        self.step, model, dtype = step, MODELS[step.model], torch.bfloat16
        draws = torch.Generator(device).manual_seed(step.rows)
        queries, keys = zip(*step.lengths, strict=True)
        pages = [-(-count // step.page) for count in keys]

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draws, device=device, dtype=dtype)

        self.q = normal(step.rows, model["heads"], model["head_dim"])
        self.k = normal(1 if alone else sum(pages), step.page, model["kv_heads"], model["head_dim"])
        latent = model.get("value_dim")
        self.v = self.k[..., :latent] if latent else normal(*self.k.shape)
        self.table = torch.zeros(len(keys), step.table_pages, dtype=torch.int32, device=device)
        order = torch.randperm(sum(pages), generator=draws, device=device).int()
        for row, part in zip(self.table, order.split(pages), strict=True):
            row[: len(part)] = part
        self.used = torch.tensor(keys, dtype=torch.int32, device=device)
        self.starts = torch.tensor([0, *queries], device=device).cumsum(0, dtype=torch.int32)
        self.words: dict[str, Any] = {"causal": True, "window": model.get("window")}
        if model.get("sink"):
            self.words["sinks"] = normal(model["heads"])
        self.is_latent = bool(latent)
        self.page, self.longest, self.key_counts, self.most_keys = step.page, step.longest, keys, max(keys)

    def mixed(self, strict: bool = True) -> torch.Tensor:
        """evoattn's answer; of a latent cache by `attention_paged`, as all of its sequences decode."""
        if self.is_latent:
            out = evoattn.attention_paged(
                self.q[:, None], self.k, self.v, self.table, self.used, causal=True, strict=strict
            )
            assert isinstance(out, torch.Tensor)
            return out[:, 0]
        step = self.step
        answer = evoattn.attention_mixed(
            self.q, self.k, self.v, self.table, self.used, self.starts, step.longest,
            strict=strict, **self.words,
        )  # fmt: skip
        assert isinstance(answer, torch.Tensor)
        return answer

    def _keys(self, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        count = self.step.lengths[b][1]
        pages = self.table[b, : -(-count // self.step.page)].long()
        k, v = (tensor[pages].flatten(0, 1)[:count] for tensor in (self.k, self.v))
        return k, v

    def expected(self, b: int, row: int, heads: list[int]) -> torch.Tensor:
        """`[heads, head_dim]` of row `row` of sequence `b` in float64, some heads."""
        queries, keys = self.step.lengths[b]
        place = keys - queries + row
        k, v = self._keys(b)
        window = self.words["window"]
        seen = slice(max(0, place - window[0]) if window else 0, place + 1)
        group = self.q.shape[1] // k.shape[1]
        of_group = [head // group for head in heads]
        q = self.q[int(self.starts[b]) + row, heads].double()
        scores = torch.einsum("hd,khd->hk", q, k[seen][:, of_group].double()) / math.sqrt(q.shape[-1])
        if "sinks" in self.words:
            scores = torch.cat((scores, self.words["sinks"][heads].double()[:, None]), 1)
        weights = scores.softmax(-1)[:, : place + 1 - seen.start]
        return torch.einsum("hk,khd->hd", weights, v[seen][:, of_group].double())

    def error(self, out: torch.Tensor) -> float:
        """The largest of sampled rows, those of the first and of the last sequence among them."""
        rng, worst, count = random.Random(1), 0.0, len(self.step.lengths)
        for i in range(CHECKED):
            b = (0, count - 1)[i] if i < 2 else rng.randrange(count)
            row = rng.choice((0, self.step.lengths[b][0] - 1, rng.randrange(self.step.lengths[b][0])))
            heads = sorted(rng.sample(range(self.q.shape[1]), 3))
            found = out[int(self.starts[b]) + row, heads].double()
            worst = max(worst, float((found - self.expected(b, row, heads)).abs().max()))
        return worst


def _graph(call: Callable[[], Any], calls: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


def _once(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Microseconds of a call in a replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * float(begin.elapsed_time(end)) / calls


def times(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Medians in µs, by replays of CUDA graphs in turns."""
    graphs = {}
    for name, call in calls.items():
        one = _graph(call, 1)
        _once(one, 1)
        count = max(1, min(MOST_CALLS, round(REPLAY_US / _once(one, 1))))
        graphs[name] = _graph(call, count), count
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, (graph, count) in graphs.items():
            found[name].append(_once(graph, count))
    return {name: statistics.median(each) for name, each in found.items()}


def row_of(step: Step, names: tuple[str, ...]) -> dict[str, Any]:
    """Times and errors of one batch; why a contestant was not timed."""
    batch = Batch(step, "cuda")
    calls, row = {}, asdict(step) | {"lengths": len(step.lengths), "said": step.describe(), "errors": {}, "why": {}}
    for name in names:
        try:
            call = batch.mixed if name == "evoattn" else PEERS[name](batch)
            row["errors"][name] = batch.error(call())
            if row["errors"][name] > TOLERANCE:
                raise RuntimeError(f"its answer is off by {row['errors'][name]:.3g}")
            calls[name] = call
        except Exception as error:  # whatever another library raises
            row["why"][name] = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return row | {"us": times(calls)}


def cpu_times(steps: int = 40) -> dict[str, float]:
    """CPU time in µs: of a call behind others; of the first of a step, for which the host had waited; and its part for
    planning, which the same call without new sizes does not take. Heads of Llama 3 8B. Each step has sizes of its own,
    which round to known ones. By the clock on the wall: reading a thread's own costs more than a call on some hosts."""
    rng, batches = random.Random(3), list[Batch]()
    cache = [torch.randn(4096, 16, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in "kv"]
    for _ in range(steps):
        lengths = [(1, rng.randrange(600, 900)) for _ in range(rng.randrange(49, 57))]
        lengths += [(rows, rows) for rows in (rng.randrange(417, 449), 300, 200)]
        batches.append(Batch(Step("Llama 3 8B", 16, tuple(lengths), len(lengths) - 3), "cuda"))
        batches[-1].k, batches[-1].v = cache  # one for all, as an engine has it
        batches[-1].mixed()

    def taken(batch: Batch, count: int, waits: bool) -> float:
        if waits:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            batch.mixed()
        return 1e6 * (time.perf_counter() - begin) / count

    rows = [(taken(b, 1, True), taken(b, LAYERS, False), taken(b, 1, True)) for b in batches]
    first, behind, again = (statistics.median(column) for column in zip(*rows, strict=True))
    planning = statistics.median(one - other for one, _, other in rows)
    return {"a call": behind, "a step's first call": first, "the same again": again, "planning a step": planning}


def problems_of(step: Step) -> list[AttentionProblem]:
    """What a kernel is asked for."""
    batch = Batch(step, "cpu", alone=True)
    words = dict(block_table=batch.table, seqused_k=batch.used) | batch.words
    if batch.is_latent:
        calls = [call_of(batch.q[:, None], batch.k, batch.v, words)]
    else:
        calls = [call_of(batch.q, batch.k, batch.v, words | dict(cu_seqlens_q=batch.starts, max_seqlen_q=step.longest))]
    problems = (call.problem(out_like(call.query, call.value).stride()) for call in calls)
    return [problem.as_searched for problem in problems if not isinstance(problem, str)]


def compile_ahead(steps: list[Step], gpu: GpuSpec) -> None:
    """Put the machine code of what the batches will run into the cache of the op, without a GPU."""
    done: set[str] = set()
    for problem in dict.fromkeys(problem for step in steps for problem in problems_of(step)):
        chosen = pick(problem, gpu)
        if chosen is None:
            print(f"no kernel: {problem.describe()}")
            continue
        found = get_cubin(registry.lookup(chosen.family), problem, chosen.config, gpu, cubin_cache() / FOLDER)
        if found.digest not in done:
            print(f"{kind_of(problem)}{' estimated' * chosen.estimated}: {chosen.family} {chosen.config.describe()}")
        done.add(found.digest)


def report(rows: list[dict[str, Any]], names: tuple[str, ...]) -> str:
    """Markdown: a line a batch, then geometric means."""
    lines = ["| batch | " + " | ".join(f"{name}, µs" for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        cells = (f"{row['us'][name]:.1f}" if name in row["us"] else "" for name in names)
        lines.append(f"| {row['said']} | " + " | ".join(cells) + " |")
    for name in names[1:]:
        both = [row["us"][name] / row["us"]["evoattn"] for row in rows if {name, "evoattn"} <= set(row["us"])]
        if both:
            mean, ahead = statistics.geometric_mean(both), sum(ratio > 1 for ratio in both)
            lines.append(f"\n{name} over evoattn: {mean:.3f}, evoattn ahead on {ahead} of {len(both)}")
    best = [min(us for name, us in row["us"].items() if name != "evoattn") for row in rows if len(row["us"]) > 1]
    ours = [row["us"]["evoattn"] for row in rows if len(row["us"]) > 1 and "evoattn" in row["us"]]
    if len(names) > 2 and len(best) == len(ours) > 0:
        both = [them / us for them, us in zip(best, ours, strict=True)]
        mean, ahead = statistics.geometric_mean(both), sum(ratio > 1 for ratio in both)
        lines.append(f"\nthe best peer over evoattn: {mean:.3f}, evoattn ahead on {ahead} of {len(both)}")
    why = sorted({f"{name}: {text}" for row in rows for name, text in row["why"].items()})
    worst = max((error for row in rows for error in row["errors"].values()), default=0.0)
    return "\n".join((*lines, f"\nlargest error {worst:.2g}", *why))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--peers", default="gather", help=f"some of {', '.join(PEERS)}")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile", metavar="GPU", help="only compile what will run there, without a GPU")
    options = parser.parse_args()
    names = "evoattn", *filter(None, options.peers.split(","))
    number, parts = map(int, options.part.split("/"))
    steps = draw(options.seed, options.count)[number::parts]
    if options.compile:
        compile_ahead(steps, lookup(options.compile))
        return
    evoattn.enable(estimated=True)
    rows = []
    for step in steps:
        rows.append(row_of(step, names))
        torch.cuda.empty_cache()
    print(report(rows, names))
    print(", ".join(f"{name}: {us:.1f} µs of CPU" for name, us in cpu_times().items()))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
