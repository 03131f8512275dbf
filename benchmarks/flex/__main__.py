"""FlexAttention's language: `evoattn.flex_attention` beside torch's, compiled by Triton, in one run.

    python -m benchmarks.flex [--drawn N] [--seed S] [--only WORD] [--json FILE] [--tune SECONDS] [--flash]

The first problems are attention-gym's own list (`examples/benchmark.py`, and of `configs/flash_h200.yaml` some
lengths), then come `--drawn` of (function x shape). All sides of a problem are captured in CUDA graphs and replayed by
turns, each time with a cold L2, so that they meet the same clocks: medians. Both are compared with torch's formula in
float32, of the first batch and head. `first` is the time of our first call in this process, with what it compiles;
`again` that of a call of new functions and a new mask of the same kind. `--tune` searches each problem for so long and
times what it found, too. `--flash` also asks for torch's backend of FlashAttention 4, where it is installed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import evoattn
from benchmarks.flex.mods import MODS, Shape, Written, causal
from evoattn.ops import block_masks, flex

ROUNDS, WARM = 25, 3
FLUSH_BYTES = 1 << 28
"""More than any L2 cache has."""
MOST_SCORES = 1 << 29
"""Of the head that is compared."""
Call = Callable[[], Tensor]


@dataclass
class Problem:
    """A function of `MODS`, or of attention-gym's list, and a shape."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    dtype: str = "bfloat16"

    @property
    def shape(self) -> Shape:
        return Shape(self.batch, self.heads, self.queries, self.keys, "cuda")

    def describe(self) -> str:
        lengths = f"S={self.queries}" if self.queries == self.keys else f"Sq={self.queries} Sk={self.keys}"
        return f"{self.name} B={self.batch} H={self.heads}/{self.kv_heads} {lengths} D={self.head_dim}"


@dataclass
class Row:
    """What was found of a problem."""

    problem: Problem
    us: dict[str, float] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)
    first_s: float = 0.0
    again_s: float = 0.0
    kernel: str = ""
    """What `explain` says."""
    failed: dict[str, str] = field(default_factory=dict)


def _window_of(size: int) -> Callable[[Shape], Written]:
    return lambda shape: Written(None, lambda b, h, q, k: (q >= k) & (q - k <= size))


def _prefix_of(size: int) -> Callable[[Shape], Written]:
    return lambda shape: Written(None, lambda b, h, q, k: (k < size) | (q >= k))


def _documents_of(count: int) -> Callable[[Shape], Written]:
    def made(shape: Shape) -> Written:
        cuts = sorted(random.Random(1).sample(range(1, shape.longest), count - 1))
        ids = torch.zeros(shape.longest, dtype=torch.int32)
        for cut in cuts:
            ids[cut:] += 1
        ids = ids.to(shape.device)
        return Written(None, lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k))

    return made


GYM: dict[str, Callable[[Shape], Written]] = {
    "gym causal": lambda shape: Written(None, causal),
    "gym alibi": MODS["alibi"],
    "gym window 1024": _window_of(1024),
    "gym prefix 1024": _prefix_of(1024),
    "gym 12 documents": _documents_of(12),
    "gym softcap 30": lambda shape: Written(lambda s, b, h, q, k: 30 * torch.tanh(s / 30)),
    "gym noop": lambda shape: Written(),
}
EVERY = {**MODS, **GYM}


def listed() -> list[Problem]:
    """attention-gym's."""
    found = [Problem(name, 16, 16, 16, 8192, 8192, 64) for name in GYM if name != "gym noop"]
    names = ("gym noop", "gym causal", "gym alibi", "gym window 1024", "gym 12 documents")
    found += [
        Problem(name, 4, 16, kv_heads, length, length, dim)
        for length, kv_heads, dim in ((2048, 4, 128), (8192, 16, 64), (8192, 4, 128), (16384, 16, 128))
        for name in names
    ]
    return found


def drawn(count: int, seed: int) -> list[Problem]:
    """So many functions, each of another shape."""
    chance = random.Random(seed)
    names = [name for name in MODS if name not in ("nothing", "causal")]
    chance.shuffle(names)
    problems = []
    for number in range(count):
        batch, heads, group = chance.choice((1, 2, 4)), chance.choice((8, 16, 24)), chance.choice((1, 1, 4, 8))
        length, dim = chance.choice((1024, 2048, 3000, 4096, 8192)), chance.choice((64, 128))
        keys = chance.choice((length, length, length, 2 * length))
        rows = chance.choice((1, 16)) if number % 8 == 7 else length
        problems.append(Problem(names[number % len(names)], batch, heads, max(1, heads // group), rows, keys, dim))
    return problems


def timed(calls: dict[str, Call]) -> dict[str, float]:
    """Median device time of each in µs: one call in a graph, replayed by turns behind what empties the L2 cache."""
    graphs, flush = {}, torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for name, call in calls.items():
        for _ in range(WARM):
            call()
        torch.cuda.synchronize()
        graphs[name] = graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
    spans: dict[str, list[tuple[Any, Any]]] = {name: [] for name in graphs}
    for number in range(ROUNDS):
        for name in sorted(graphs, key=lambda name: (number % 2 == 0) == (name == "evoattn")):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            begin.record()
            graphs[name].replay()
            end.record()
            spans[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: 1e3 * statistics.median(begin.elapsed_time(end) for begin, end in spans[name]) for name in spans}


def reference(tensors: Sequence[Tensor], written: Written, mask: BlockMask | None) -> Tensor:
    """Of the first batch and head, in float32, by torch's formula."""
    q, k, v = (tensor[:1, :1].float() for tensor in tensors)
    if mask is not None:
        cut, inner = mask[:1, :1], mask.mask_mod
        cut.mask_mod = inner
        mask = block_masks.authoritative(cut, k.shape[2])
    found: Tensor = flex.TORCH(q, k, v, written.score_mod, mask)
    return found


def measured(problem: Problem, seconds: float, flash: bool) -> Row:
    """All that is asked of a problem."""
    row, shape = Row(problem), problem.shape
    generator = torch.Generator("cuda").manual_seed(1)

    def drawn_of(heads: int, length: int) -> Tensor:
        sizes = problem.batch, heads, length, problem.head_dim
        return torch.randn(sizes, generator=generator, device="cuda").to(getattr(torch, problem.dtype))

    q, k, v = (drawn_of(problem.heads, problem.queries), *(drawn_of(problem.kv_heads, problem.keys) for _ in range(2)))
    written = EVERY[problem.name](shape)
    mask = written.block_mask(shape)
    asked: dict[str, Any] = dict(score_mod=written.score_mod, block_mask=mask, enable_gqa=True)
    row.kernel = evoattn.explain(q, k, v, **asked)

    def ours() -> Tensor:
        found: Tensor = evoattn.flex_attention(q, k, v, **asked)
        return found

    def taken(call: Call) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - started

    row.first_s = taken(ours)
    again = EVERY[problem.name](shape)
    new: dict[str, Any] = dict(score_mod=again.score_mod, block_mask=again.block_mask(shape), enable_gqa=True)
    row.again_s = taken(lambda: evoattn.flex_attention(q, k, v, **new))
    sides: dict[str, Call] = {"evoattn": ours}
    torch.compiler.reset()
    backends: dict[str, dict[str, Any] | None] = {"triton": None} | ({"flash": {"BACKEND": "FLASH"}} if flash else {})
    for name, options in backends.items():
        compiled = torch.compile(flex.TORCH, dynamic=False)

        def theirs(compiled: Any = compiled, options: Any = options) -> Tensor:
            found: Tensor = compiled(q, k, v, **asked, kernel_options=options)
            return found

        try:
            theirs()
            sides[name] = theirs
        except Exception as error:  # what torch's compiler cannot do
            row.failed[name] = str(error).strip().splitlines()[0][:150]
    if problem.queries * problem.keys <= MOST_SCORES:
        exact = reference((q, k, v), written, mask)
        for name, call in sides.items():
            row.error[name] = (call()[:1, :1].float() - exact).abs().max().item()
    row.us = timed(sides)
    if seconds:
        with evoattn.capture() as shapes:
            ours()
        evoattn.tune(shapes, budget=f"{seconds:g}s")
        row.us["tuned"] = timed({"evoattn": ours})["evoattn"]
    return row


def table(rows: Sequence[Row]) -> str:
    """One line for each problem, and the geometric means."""
    lines = ["| problem | evoattn µs | triton µs | ratio | error (triton's) | first s | again s | runs |"]
    lines.append("|" + "---|" * 8)
    for row in rows:
        us, theirs = row.us.get("evoattn", math.nan), row.us.get("triton", math.nan)
        ratio = theirs / us
        errors = [f"{row.error[name]:.1e}" if name in row.error else "-" for name in ("evoattn", "triton")]
        ours = ("runs:" in row.kernel or " races " in row.kernel) and "torch runs" not in row.kernel
        served = row.kernel.split(" ", 1)[0] if ours else "torch"
        more = "".join(f" {name} {us:.1f}" for name, us in row.us.items() if name in ("flash", "tuned"))
        failed = "".join(f" {name}: {why}" for name, why in row.failed.items())
        lines.append(
            f"| {row.problem.describe()} | {us:.1f} | {theirs:.1f} | {ratio:.2f} | {errors[0]} ({errors[1]}) | "
            f"{row.first_s:.2f} | {row.again_s:.3f} | {served}{more}{failed} |"
        )
    for name, others in (("Triton", ("triton",)), ("FLASH", ("flash",)), ("the faster of them", ("triton", "flash"))):
        ratios = [
            min(row.us[one] for one in others if one in row.us) / row.us["evoattn"]
            for row in rows
            if any(one in row.us for one in others) and (name != "the faster of them" or "flash" in row.us)
        ]
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            ahead = sum(ratio > 1 for ratio in ratios)
            counts = f"{ahead} of {len(ratios)}; least {min(ratios):.2f}"
            lines.append(f"\nGeometric mean over {name} {mean:.2f}; ahead on {counts}")
    wrong = [
        row.problem.describe()
        for row in rows
        if row.error and row.error["evoattn"] > 2 * row.error.get("triton", math.inf) + 0.02
    ]
    lines.append(f"Wrong answers: {', '.join(wrong) or 'none'}")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and with `--json` write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drawn", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="problems whose line has this word")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tune", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--flash", action="store_true")
    words = parser.parse_args()
    rows: list[Row] = []
    with torch.no_grad():
        for problem in [*listed(), *drawn(words.drawn, words.seed)]:
            if words.only not in problem.describe():
                continue
            try:
                rows.append(measured(problem, words.tune, words.flash))
            except torch.OutOfMemoryError as error:
                rows.append(Row(problem, failed={"memory": str(error).splitlines()[0][:80]}))
            print(table(rows[-1:]).splitlines()[2], flush=True)
            torch.cuda.empty_cache()
    print("\n" + table(rows))
    if words.json:
        words.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
