"""The problems that `python -m benchmarks.flex` times: attention-gym's own lists, and drawn ones.

attention-gym has two: `examples/benchmark.py`, float16 and `[16, 16, 8192, 64]`, and `benchmarks/flex_perf.py` with
`configs/flash_h200.yaml`, bfloat16, tensors `[4, S, heads, D]` that are turned, and documents that lie behind one
another in one sequence of 4 · S. The functions are written anew after what these say."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, or_masks

from benchmarks.flex.mods import MODS, Shape, Written, causal


@dataclass(frozen=True)
class Problem:
    """A function of `EVERY`, and a shape."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    dtype: str = "bfloat16"
    turned: bool = False
    """Whether tensors lie as `[batch, length, heads, head_dim]`."""

    @property
    def shape(self) -> Shape:
        return Shape(self.batch, self.heads, self.queries, self.keys, "cuda")

    @property
    def compiled_as(self) -> tuple[str, int, bool]:
        """What FLASH compiles one kernel for."""
        return self.name, self.head_dim, self.heads == self.kv_heads

    def describe(self) -> str:
        lengths = f"S={self.queries}" if self.queries == self.keys else f"Sq={self.queries} Sk={self.keys}"
        return f"{self.name} B={self.batch} H={self.heads}/{self.kv_heads} {lengths} D={self.head_dim}"

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of random numbers, always the same ones."""
        generator = torch.Generator("cuda").manual_seed(1)

        def drawn_of(heads: int, length: int) -> Tensor:
            sizes = (self.batch, length, heads) if self.turned else (self.batch, heads, length)
            made = torch.randn(*sizes, self.head_dim, generator=generator, device="cuda", dtype=torch.float32)
            made = made.to(getattr(torch, self.dtype))
            return made.transpose(1, 2) if self.turned else made

        q, kv = (self.heads, self.queries), (self.kv_heads, self.keys)
        return drawn_of(*q), drawn_of(*kv), drawn_of(*kv)


def _window_of(size: int) -> Callable[[Shape], Written]:
    return lambda shape: Written(None, and_masks(lambda b, h, q, k: q - k <= size, causal))


def _prefix_of(size: int) -> Callable[[Shape], Written]:
    return lambda shape: Written(None, or_masks(lambda b, h, q, k: k < size, causal))


def _sink_of(size: int) -> Callable[[Shape], Written]:
    seen = or_masks(lambda b, h, q, k: q - k <= size, lambda b, h, q, k: k < 4)
    return lambda shape: Written(None, and_masks(seen, causal))


def _documents_of(count: int) -> Callable[[Shape], Written]:
    """Of random lengths, each causal by its own places."""

    def made(shape: Shape) -> Written:
        chance, lengths = random.Random(0), [1] * count
        for _ in range(shape.longest - count):
            lengths[chance.randint(0, count - 1)] += 1
        sizes = torch.tensor(lengths, device=shape.device)
        ids = torch.repeat_interleave(torch.arange(count, device=shape.device, dtype=torch.int32), sizes)
        starts = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int()

        def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (ids[q] == ids[k]) & (q - starts[ids[q]] >= k - starts[ids[k]])

        return Written(None, seen)

    return made


def _alibi(shape: Shape) -> Written:
    return Written(MODS["alibi"](shape).score_mod, causal)


GYM: dict[str, Callable[[Shape], Written]] = {
    "gym noop": lambda shape: Written(),
    "gym causal": lambda shape: Written(None, causal),
    "gym alibi": MODS["alibi"],
    "gym causal alibi": _alibi,
    "gym window 1024": _window_of(1024),
    "gym window 512": _window_of(512),
    "gym prefix 1024": _prefix_of(1024),
    "gym sink 1024": _sink_of(1024),
    "gym 12 documents": _documents_of(12),
    "gym 4 documents": _documents_of(4),
    "gym softcap 30": lambda shape: Written(lambda s, b, h, q, k: 30 * torch.tanh(s / 30)),
}
EVERY = {**MODS, **GYM}
EXAMPLES = ("gym causal", "gym alibi", "gym window 1024", "gym prefix 1024", "gym softcap 30", "gym sink 1024")
SWEPT = ("gym noop", "gym causal", "gym causal alibi", "gym window 512", "gym 4 documents")


def listed() -> list[Problem]:
    """attention-gym's, the short ones first; without its soft cap by an instruction of its own."""
    found = [Problem(name, 16, 16, 16, 8192, 8192, 64, "float16") for name in EXAMPLES]
    for length in (2048, 4096, 8192, 16384, 32768):
        for dim in (64, 128):
            for kv_heads in (4, 16):
                found += [Problem(name, 4, 16, kv_heads, length, length, dim, turned=True) for name in SWEPT]
    found = [
        replace(one, batch=1, queries=4 * one.queries, keys=4 * one.keys) if one.name == "gym 4 documents" else one
        for one in found
    ]
    return [*found, Problem("gym 12 documents", 16, 16, 16, 32768, 32768, 64, "float16")]


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
