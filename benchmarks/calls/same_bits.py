"""Whether a row has the same bits in every batch (`batch_invariant=True`), and what the promise costs.

    python -m benchmarks.calls.same_bits rows [--kind NAME …] [--sequences 4] [--rows 25] [--only NAME,…] [--free]
    python -m benchmarks.calls.same_bits cost SHAPES.txt [--part N/M] [--warm]

`rows` draws rows of causal sequences. Of each it compares the output and the log-sum-exp in the surroundings of
`SURROUNDINGS` with those of the prompt alone, bit for bit. `--free` makes no promise: what differs then says that the
comparison can fail.

`cost` times the pick under the promise beside the free pick, of each shape of a file, by replays of CUDA graphs in
turns (`serving.times`). `--warm` only compiles, so that several processes can, each a part."""

import argparse
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import evoattn
from benchmarks.calls.serving import times
from evoattn.correctness.arena import bits
from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import parse_shape

KINDS: dict[str, dict[str, Any]] = {
    "llama": dict(heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16),
    "heads of 64": dict(heads=12, kv_heads=12, dim=64, dtype=torch.float16),
    "gemma 2": dict(heads=8, kv_heads=4, dim=256, dtype=torch.bfloat16, softcap=50.0),
    "gpt-oss, window": dict(heads=16, kv_heads=2, dim=64, dtype=torch.bfloat16, window=(127, -1), sinks=True),
    "alibi": dict(heads=16, kv_heads=16, dim=128, dtype=torch.float16, alibi=True),
    "deepseek, 192/128": dict(heads=16, kv_heads=16, dim=192, value_dim=128, dtype=torch.bfloat16),
}
SHORTEST, LONGEST = 40, 6000
"""Keys of a drawn sequence."""
Row = tuple[torch.Tensor, torch.Tensor]
"""The output `[heads, value_dim]` and the log-sum-exp `[heads]`, or no tensor where it was not asked for."""


@dataclass
class Sequence:
    """A prompt: q `[1, heads, length, dim]`, k and v `[1, kv_heads, length, dim]`, and the words of its kind."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    words: dict[str, Any]
    others: random.Random
    promise: dict[str, bool]

    @property
    def length(self) -> int:
        return self.q.shape[2]

    def drawn(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """Another sequence's numbers."""
        return torch.randn(shape, device=like.device, dtype=like.dtype)

    def attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **words: Any) -> Row:
        """The answer and the log-sum-exp of a causal call, lower right."""
        given = dict(causal=True, enable_gqa=True, return_lse=True) | self.words | self.promise | words
        found = evoattn.attention(q, k, v, **given)
        return (found, torch.empty(0)) if isinstance(found, torch.Tensor) else found

    def of_rows(self, answer: Row, rows: list[int], batch: int = 0) -> list[Row]:
        """Of these rows of a batch of an answer."""
        out, lse = answer
        return [(out[batch, :, row], lse[batch, :, row] if lse.numel() else lse) for row in rows]


def drawn(kind: dict[str, Any], seed: int, promise: dict[str, bool]) -> Sequence:
    """A sequence of the kind, of a length that is log-uniform; rows of q are of many lengths, and
    keys drift, so that maxima rise."""
    source = random.Random(seed)
    torch.manual_seed(seed)
    length = round(math.exp(source.uniform(math.log(SHORTEST), math.log(LONGEST))))
    size = dict(device="cuda", dtype=kind["dtype"])
    q = torch.randn(1, kind["heads"], length, kind["dim"], **size) * torch.randint(1, 7, (1, 1, length, 1), **size)
    k = torch.randn(1, kind["kv_heads"], length, kind["dim"], **size)
    k[..., 0] += torch.linspace(-20, 20, length, **size)
    v = torch.randn(1, kind["kv_heads"], length, kind.get("value_dim", kind["dim"]), **size)
    words: dict[str, Any] = {name: kind[name] for name in ("softcap", "window") if name in kind}
    if "sinks" in kind:
        words["sinks"] = torch.randn(kind["heads"], **size)
    if "alibi" in kind:
        words["alibi_slopes"] = torch.rand(kind["heads"], device="cuda")
    return Sequence(q, k, v, words, source, promise)


def alone(of: Sequence, rows: list[int]) -> list[Row]:
    """Decoded: the row's query over its own keys."""
    found = []
    for row in rows:
        upto = slice(0, row + 1)
        found += of.of_rows(of.attended(of.q[:, :, row : row + 1], of.k[:, :, upto], of.v[:, :, upto]), [0])
    return found


def no_lse(of: Sequence, rows: list[int]) -> list[Row]:
    """The prompt without the log-sum-exp."""
    return of.of_rows(of.attended(of.q, of.k, of.v, return_lse=False), rows)


def chunk(of: Sequence, rows: list[int]) -> list[Row]:
    """At some place of a chunk of the prompt."""
    found = []
    for row in rows:
        before = of.others.randint(0, min(row, 700))
        behind = of.others.randint(0, min(of.length - 1 - row, 90))
        own, upto = slice(row - before, row + behind + 1), slice(0, row + behind + 1)
        found += of.of_rows(of.attended(of.q[:, :, own], of.k[:, :, upto], of.v[:, :, upto]), [before])
    return found


def batch(of: Sequence, rows: list[int]) -> list[Row]:
    """The prompt among four others."""
    q, k, v = (torch.cat((of.drawn(x, 3, *x.shape[1:]), x, of.drawn(x, 1, *x.shape[1:]))) for x in (of.q, of.k, of.v))
    return of.of_rows(of.attended(q, k, v), rows, batch=3)


def transposed(of: Sequence, rows: list[int]) -> list[Row]:
    """The prompt in the memory order of models."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (of.q, of.k, of.v))
    return of.of_rows(of.attended(q, k, v), rows)


def padded(of: Sequence, rows: list[int]) -> list[Row]:
    """Decoded in a batch of caches with room for more keys than are in use."""
    used = torch.tensor([row + 1 for row in rows], dtype=torch.int32, device="cuda")
    q = of.q[0, :, rows].transpose(0, 1)[:, :, None].contiguous()
    room = of.length + of.others.randint(0, 900)
    k, v = (of.drawn(x, len(rows), x.shape[1], room, x.shape[3]) for x in (of.k, of.v))
    for i, row in enumerate(rows):
        k[i, :, : row + 1], v[i, :, : row + 1] = of.k[0, :, : row + 1], of.v[0, :, : row + 1]
    answer = of.attended(q, k, v, seqused_k=used)
    return [of.of_rows(answer, [0], batch=i)[0] for i in range(len(rows))]


def packed(of: Sequence, rows: list[int]) -> list[Row]:
    """The prompt packed between two others."""
    before, behind = of.others.randint(1, 1500), of.others.randint(1, 1500)
    starts = torch.tensor(
        [0, before, before + of.length, before + of.length + behind], dtype=torch.int32, device="cuda"
    )
    q, k, v = (
        torch.cat((of.drawn(x, before, *x.shape[1::2]), x[0].transpose(0, 1), of.drawn(x, behind, *x.shape[1::2])))
        for x in (of.q, of.k, of.v)
    )
    longest = max(before, of.length, behind)
    words = dict(causal=True, return_lse=True) | of.words | of.promise
    out, lse = evoattn.attention_varlen(q, k, v, starts, starts, longest, longest, **words)
    return [(out[before + row], lse[:, before + row]) for row in rows]


def paged(of: Sequence, rows: list[int]) -> list[Row]:
    """Decoded over pages that lie anywhere, each row a batch."""
    page = of.others.choice((16, 64, 128))
    most = -(-of.length // page)
    table = torch.randperm(most * 2, device="cuda").to(torch.int32)[:most].repeat(len(rows), 1)
    caches = []
    for x in (of.k, of.v):
        cache = of.drawn(x, 2 * most, page, x.shape[1], x.shape[3])
        rest = most * page - of.length
        whole = torch.cat((x[0].transpose(0, 1), of.drawn(x, rest, x.shape[1], x.shape[3])))
        cache[table[0].long()] = whole.view(most, page, x.shape[1], x.shape[3])
        caches.append(cache)
    used = torch.tensor([row + 1 for row in rows], dtype=torch.int32, device="cuda")
    q = of.q[0, :, rows].transpose(0, 1)[:, None].contiguous()
    words = dict(causal=True, return_lse=True) | of.words | of.promise
    out, lse = evoattn.attention_paged(q, caches[0], caches[1], table, used, **words)
    return [(out[i, 0], lse[i, :, 0]) for i in range(len(rows))]


def crowd(of: Sequence, rows: list[int]) -> list[Row]:
    """Decoded as one of 64, which fill the card."""
    found = []
    for row in rows[:: max(1, len(rows) // 5)]:
        k, v = (torch.cat((of.drawn(x, 63, x.shape[1], row + 1, x.shape[3]), x[:, :, : row + 1])) for x in (of.k, of.v))
        q = of.q[:, :, row : row + 1].expand(64, -1, -1, -1).contiguous()
        found += of.of_rows(of.attended(q, k, v), [0], batch=63)
    return found


def training(of: Sequence, rows: list[int]) -> list[Row]:
    """In a forward pass that wants gradients."""
    leaves = [x.clone().requires_grad_() for x in (of.q, of.k, of.v)]
    out, lse = of.attended(*leaves)
    return of.of_rows((out.detach(), lse.detach()), rows)


SURROUNDINGS: tuple[Callable[[Sequence, list[int]], list[Row]], ...] = (
    alone, no_lse, chunk, batch, transposed, padded, packed, paged, crowd, training,
)  # fmt: skip


def differences(
    kind: dict[str, Any], seed: int, count: int, promised: bool = True, only: str = ""
) -> Iterator[tuple[str, int, int, int]]:
    """Of a drawn sequence, for each surroundings, or those that `only` names: its name, the rows, those of other bits,
    and keys of the sequence."""
    of = drawn(kind, seed, {"batch_invariant": True} if promised else {})
    rows = sorted(of.others.sample(range(of.length), min(count, of.length)))
    expected = of.of_rows(of.attended(of.q, of.k, of.v), rows)
    for surrounded in SURROUNDINGS:
        if only and surrounded.__name__ not in only.split(","):
            continue
        try:
            found = surrounded(of, rows)
        except evoattn.NoKernel as error:
            print(f"{surrounded.__name__}: {error}", flush=True)
            continue
        wanted = expected[:: max(1, len(rows) // 5)] if surrounded is crowd else expected
        other = sum(not _equal(one, two) for one, two in zip(wanted, found, strict=True))
        yield surrounded.__name__, len(found), other, of.length


def _equal(one: Row, two: Row) -> bool:
    """Bit for bit; a log-sum-exp that was not asked for is passed over."""
    pairs = [pair for pair in zip(one, two, strict=True) if pair[1].numel()]
    return all(torch.equal(bits(x.contiguous()), bits(y.contiguous())) for x, y in pairs)


def rows_command(options: argparse.Namespace) -> int:
    """Print a line for each kind and surroundings; 1 if a promise was broken."""
    broken = 0
    for name in options.kind or KINDS:
        sums: dict[str, list[int]] = {}
        for seed in range(options.sequences):
            print(f"{name}: sequence {seed}", flush=True)
            for where, rows, other, _ in differences(KINDS[name], seed, options.rows, not options.free, options.only):
                total = sums.setdefault(where, [0, 0])
                total[0], total[1] = total[0] + rows, total[1] + other
                if other:
                    print(f"{name}, sequence {seed}: {other} of {rows} rows differ: {where}", flush=True)
            line = ", ".join(f"{where} {other}/{rows}" for where, (rows, other) in sums.items())
            print(f"{name}: rows of other bits: {line}", flush=True)
        broken += sum(other for _, other in sums.values())
    return int(broken > 0 and not options.free)


def timed_call(problem: AttentionProblem, promised: bool) -> Callable[[], torch.Tensor]:
    """A call of the problem, ready to be captured."""
    size = dict(device="cuda", dtype=getattr(torch, problem.element.torch))

    def made(tensor: str) -> torch.Tensor:
        batches, heads, rows, dim = problem.shape(tensor)
        if problem.layout == "bshd":
            return torch.randn(batches, rows, heads, dim, **size).transpose(1, 2)
        return torch.randn(batches, heads, rows, dim, **size)

    q, k, v = map(made, "qkv")
    causal = problem.mask.removeprefix("causal_") if problem.mask != "full" else None
    words: dict[str, Any] = dict(causal=causal, enable_gqa=True, batch_invariant=promised)
    return lambda: evoattn.attention(q, k, v, **words)


def cost_command(options: argparse.Namespace) -> int:
    """Print each shape's times and their ratio, and the geometric mean."""
    number, parts = map(int, options.part.split("/"))
    shapes = Path(options.shapes).read_text(encoding="utf-8").split("\n")[number::parts]
    ratios: list[float] = []
    for text in filter(None, shapes):
        problem = parse_shape(text)
        try:
            free, promised = (timed_call(problem, flag) for flag in (False, True))
            free(), promised()
            if options.warm:
                continue
            found = times({"free": free, "promised": promised})
        except evoattn.NoKernel as error:
            print(f"{text}: {error}", flush=True)
            continue
        ratios.append(found["promised"] / found["free"])
        print(f"{text}: free {found['free']:.1f} us, promised {found['promised']:.1f} us, {ratios[-1]:.3f}", flush=True)
        del free, promised
        torch.cuda.empty_cache()
    if ratios:
        mean = statistics.geometric_mean(ratios)
        print(f"geometric mean of {len(ratios)}: {mean:.3f}, worst {max(ratios):.2f}")
    return 0


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    commands = parser.add_subparsers(dest="command", required=True)
    rows = commands.add_parser("rows")
    rows.add_argument("--kind", action="append", choices=list(KINDS))
    rows.add_argument("--sequences", type=int, default=4)
    rows.add_argument("--rows", type=int, default=25)
    rows.add_argument("--only", default="", help="names of surroundings: so several processes share the compiling")
    rows.add_argument("--free", action="store_true")
    cost = commands.add_parser("cost")
    cost.add_argument("shapes")
    cost.add_argument("--part", default="0/1")
    cost.add_argument("--warm", action="store_true")
    options = parser.parse_args(words)
    return rows_command(options) if options.command == "rows" else cost_command(options)


if __name__ == "__main__":
    sys.exit(main())
