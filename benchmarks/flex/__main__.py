"""FlexAttention's language: `evoattn.flex_attention` beside torch's, compiled by Triton, in one run.

    python -m benchmarks.flex [--gym] [--drawn N] [--seed S] [--only WORD] [--part I/N] [--json FILE]
                              [--tune SECONDS] [--flash] [--cudnn] [--peers NAME,…] [--processes N] [--seconds S]
    python -m benchmarks.flex --of FILE [FILE …]

The problems are attention-gym's own lists (`--gym`), and `--drawn` of (function x shape). All sides of a problem are
captured in CUDA graphs and replayed by turns, each time with a cold L2, so that they meet the same clocks: medians. All
are compared with torch's formula in float32, of the first batch and head. `first` is the time of our first call in this
process, with what it compiles; `again` that of a call of new functions and a new mask of the same kind. `--tune`
searches each problem for so long and times what it found, too. `--flash` also asks for torch's backend of
FlashAttention 4, where it is installed, `--cudnn` for SDPA by cuDNN with a mask tensor, of masks alone and 4,096
keys at most, `--peers` for peers of `evoattn bench`, such as fa4, of what is a causal mask, a window, a soft cap or
nothing. `--processes` shares the problems, as compilers take most of the time; each
times alone, and begins no problem after `--seconds`. `--part` takes one of so many shares of the list, for several
GPUs, and `--of` prints the table of the files that they wrote."""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, _identity, create_mask, noop_mask

import evoattn
from benchmarks.flex.mods import Shape, Written, causal
from benchmarks.flex.problems import EVERY, Problem, drawn, listed
from benchmarks.flex.processes import alone, run_all, shares
from evoattn.model.problem import AttentionProblem
from evoattn.ops import block_masks, flex
from evoattn.ops.call import Call as OpCall
from evoattn.peers.labels import FLASH_ATTENTION
from evoattn.peers.table import PEERS

ROUNDS, WARM = 25, 3
FLUSH_BYTES = 1 << 28
"""More than any L2 cache has."""
MOST_SCORES = 1 << 28
"""Of the head that is compared."""
MOST_PAIRS = 1 << 24
"""Of queries and keys of a mask tensor."""
LONG_US = 5000
"""Of a call: longer ones have fewer rounds."""
LONG_ROUNDS = 7
Call = Callable[[], Tensor]


@dataclass
class Row:
    """What was found of a problem."""

    problem: Problem
    us: dict[str, float] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)
    first_s: float = 0.0
    again_s: float = 0.0
    peers_s: dict[str, float] = field(default_factory=dict)
    """First calls of peers, with what these compile."""
    kernel: str = ""
    """What `explain` says."""
    failed: dict[str, str] = field(default_factory=dict)


def timed(calls: dict[str, Call]) -> dict[str, float]:
    """Median device time of each in µs: one call in a graph, replayed by turns behind what empties the L2 cache. Raises
    `ValueError` for a call that declines in a capture, as `listed_mask.attention` does."""
    graphs, flush = {}, torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for name, call in calls.items():
        for _ in range(WARM):  # beside the first a kernel is compiled, beside the next one with numbers as constants
            call()
            evoattn.settle()
        torch.cuda.synchronize()
        graphs[name] = graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answer = call()
        if answer is None:
            raise ValueError(f"{name} serves no call in a capture: its graph is empty.")
    spans: dict[str, list[tuple[Any, Any]]] = {name: [] for name in graphs}
    torch.cuda.synchronize()
    started = time.perf_counter()
    graphs["evoattn"].replay()
    torch.cuda.synchronize()
    is_long = 1e6 * (time.perf_counter() - started) > LONG_US
    for number in range(LONG_ROUNDS if is_long else ROUNDS):
        for name in sorted(graphs, key=lambda name: (number % 2 == 0) == (name == "evoattn")):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            begin.record()
            graphs[name].replay()
            end.record()
            spans[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: 1e3 * statistics.median(begin.elapsed_time(end) for begin, end in spans[name]) for name in spans}


def timed_alone(calls: dict[str, Call], lock: Path | None) -> dict[str, float]:
    """As `timed`, the better of two turns where there is a lock: another process may run what it has compiled."""
    turns: list[dict[str, float]] = []
    for _ in range(2 if lock else 1):
        with alone(lock):
            turns.append(timed(calls))
    return min(turns, key=lambda us: sum(us.values()))


def mask_of(written: Written, shape: Shape) -> BlockMask | None:
    """The block mask of a problem, with torch's lists: of longer ones torch's way to make them holds gigabytes."""
    return written.block_mask(shape, create=evoattn.create_block_mask)


def reference(tensors: Sequence[Tensor], written: Written, mask: BlockMask | None) -> Tensor:
    """Of the first batch and head, in float32, by torch's formula."""
    q, k, v = (tensor[:1, :1].float() for tensor in tensors)
    lists: tuple[Any, ...] = (noop_mask,)
    if mask is not None:
        cut, inner = mask[:1, :1], mask.mask_mod
        cut.mask_mod = inner
        lists = block_masks.authoritative(cut, k.shape[2]).as_tuple()
    found: Tensor = math_attention(q, k, v, written.score_mod or _identity, lists, q.shape[-1] ** -0.5, {})[0]
    return found


def with_tensor(q: Tensor, k: Tensor, v: Tensor, written: Written, shape: Shape) -> Call | None:
    """SDPA by cuDNN, with the mask as a tensor of bools; None where it cannot say a problem, or the tensor is large."""
    if written.score_mod or written.lists or not written.mask_mod or shape.queries * shape.keys > MOST_PAIRS:
        return None
    batch, heads = shape.batch if written.by_batch else 1, shape.heads if written.by_head else 1
    seen = create_mask(written.mask_mod, batch, heads, shape.queries, shape.keys, shape.device)

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)

    return call


def problem_of(q: Tensor, k: Tensor, v: Tensor, written: Written, mask: BlockMask | None) -> AttentionProblem | None:
    """What peers that know variants by their names are asked for; None where no such name says it."""
    made = flex.calls(OpCall(q, k, v, enable_gqa=True, strict=True), written.score_mod, mask)
    call = None if isinstance(made, str) else made[0]()
    if call is None or call.score is not None or call.blocks or any(term is not None for term in call.terms):
        return None
    problem = call.problem(q.stride())
    return None if isinstance(problem, str) else problem.as_searched


def measured(problem: Problem, words: argparse.Namespace) -> Row:
    """All that is asked of a problem."""
    lock: Path | None = words.lock
    row, shape = Row(problem), problem.shape
    q, k, v = problem.tensors()
    written = EVERY[problem.name](shape)
    with alone(lock):
        mask = mask_of(written, shape)
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
    new: dict[str, Any] = dict(score_mod=again.score_mod, block_mask=mask_of(again, shape), enable_gqa=True)
    row.again_s = taken(lambda: evoattn.flex_attention(q, k, v, **new))
    sides: dict[str, Call] = {"evoattn": ours}
    torch.compiler.reset()
    backends: dict[str, dict[str, Any] | None] = {"triton": None} | (
        {"flash": {"BACKEND": "FLASH"}} if words.flash else {}
    )
    for name, options in backends.items():
        compiled = torch.compile(flex.TORCH, dynamic=False)

        def theirs(compiled: Any = compiled, options: Any = options) -> Tensor:
            found: Tensor = compiled(q, k, v, **asked, kernel_options=options)
            return found

        try:
            row.peers_s[name] = taken(theirs)
            sides[name] = theirs
        except Exception as error:  # what torch's compiler cannot do
            row.failed[name] = str(error).strip().splitlines()[0][:150]
    if words.cudnn and (masked := with_tensor(q, k, v, written, shape)):
        try:
            masked()
            sides["cudnn"] = masked
        except Exception as error:
            row.failed["cudnn"] = str(error).strip().splitlines()[0][:150]
    named = problem_of(q, k, v, written, mask) if words.peers else None
    for name in words.peers.split(","):
        if named is None:
            break
        try:
            sides[name] = their = cast(Call, PEERS[name].make(named, {"q": q, "k": k, "v": v}))
            their()
        except Exception as error:
            sides.pop(name, None)
            row.failed[name] = (str(error).strip().splitlines() or [type(error).__name__])[0][:150]
    with alone(lock):
        if problem.queries * problem.keys <= MOST_SCORES:
            exact = reference((q, k, v), written, mask)
            for name, call in sides.items():
                row.error[name] = (call()[:1, :1].float() - exact).abs().max().item()
    row.us = timed_alone(sides, lock)
    if words.tune:
        with evoattn.capture() as shapes:
            ours()
        evoattn.tune(shapes, budget=f"{words.tune:g}s")
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
        more = "".join(f" {name} {us:.1f}" for name, us in row.us.items() if name not in ("evoattn", "triton"))
        failed = "".join(f" {name}: {why}" for name, why in row.failed.items())
        lines.append(
            f"| {row.problem.describe()} | {us:.1f} | {theirs:.1f} | {ratio:.2f} | {errors[0]} ({errors[1]}) | "
            f"{row.first_s:.2f} | {row.again_s:.3f} | {served}{more}{failed} |"
        )
    peers = {"Triton": ["triton"], "FLASH": ["flash"], "cuDNN": ["cudnn"]}
    peers |= {label: [name] for name, label in FLASH_ATTENTION.items() if any(name in row.us for row in rows)}
    peers["the fastest that ran"] = [one for some in peers.values() for one in some]
    for name, others in peers.items():
        ratios = [
            min(row.us[one] for one in others if one in row.us) / row.us["evoattn"]
            for row in rows
            if any(one in row.us for one in others)
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


def rows_of(problems: Sequence[Problem], words: argparse.Namespace) -> list[Row]:
    """What this process finds of its problems, each printed and written at once."""
    rows: list[Row] = []
    number, count = (int(one) for one in (words.share or "0/1").split("/"))
    block_masks.TORCH(causal, None, None, 128, 128, "cuda")  # imports torch's compilers: not while others wait
    started = time.perf_counter()
    for place in shares(problems, count)[number] if words.share else range(len(problems)):
        if time.perf_counter() - started > words.seconds:
            break
        try:
            rows.append(measured(problems[place], words))
        except Exception as error:  # the others are measured all the same
            rows.append(Row(problems[place], failed={"all": str(error).splitlines()[0][:150]}))
        print(table(rows[-1:]).splitlines()[2], flush=True)
        torch.cuda.empty_cache()
        if words.json:
            words.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    return rows


def read(files: Iterable[Path]) -> list[Row]:
    """What files of `--json` hold."""
    rows = [row for file in files for row in json.loads(file.read_text("utf-8"))]
    return [Row(Problem(**row.pop("problem")), **row) for row in rows]


def main() -> None:
    """Measure, print, and with `--json` write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gym", action="store_true", help="attention-gym's lists")
    parser.add_argument("--drawn", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="problems whose line has this word")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="one of so many shares of the list")
    parser.add_argument("--of", type=Path, nargs="+", default=[], metavar="FILE", help="what earlier runs wrote")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tune", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--flash", action="store_true")
    parser.add_argument("--cudnn", action="store_true")
    parser.add_argument("--peers", default="", metavar="NAME,…", help="peers that know variants by their names")
    parser.add_argument("--processes", type=int, default=1, metavar="N")
    parser.add_argument("--seconds", type=float, default=math.inf, metavar="S")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    words = parser.parse_args()
    problems = [*(listed() if words.gym else []), *drawn(words.drawn, words.seed)]
    part, parts = map(int, words.part.split("/"))
    problems = [problems[place] for place in sorted(shares(problems, parts)[part - 1])]
    problems = [one for one in problems if words.only in one.describe()]
    if words.of:
        print(table(read(words.of)))
        return
    if words.processes > 1 and not words.share:
        rows = read(run_all("benchmarks.flex", sys.argv[1:], words.processes, words.seconds))
        rows.sort(key=lambda row: problems.index(row.problem))
        if words.json:
            words.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    else:
        with torch.no_grad():
            rows = rows_of(problems, words)
    if not words.share:
        print(f"\n{table(rows)}\n{len(rows)} of {len(problems)} problems ran")


if __name__ == "__main__":
    main()
