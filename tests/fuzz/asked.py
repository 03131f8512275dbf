"""What is drawn and asked of evoattn's other faces: the tensors, the question, and the right answers."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

One = TypeVar("One")
DTYPES = (torch.float16, torch.bfloat16, torch.bfloat16, torch.float32)
HEAD_DIMS = (16, 32, 40, 64, 64, 72, 80, 96, 128, 128, 128, 192, 256)
LENGTHS = (1, 2, 7, 16, 31, 64, 65, 113, 128, 129, 203, 256, 257, 400)
PLACES = ("bhsd", "bhsd", "bshd", "bshd", "bshd", "wide", "wide", "every other", "odd start", "columns")
LARGE = 8.0
LEAST = 2e-6
"""Of the largest answer: what a gradient may be off that is 0 as the difference of equal numbers."""


@dataclass(frozen=True)
class Asked:
    """A question: `ask` evoattn; `right` has the answers in the same order by the formula, in a dtype. `inputs` no call
    may change. `factor` and `part` are those of `why_far`, `least` its own as a part of the largest answer."""

    words: str
    ask: Callable[[], list[Tensor]]
    right: Callable[[torch.dtype], list[Tensor]]
    inputs: list[Tensor]
    factor: float = 2
    part: float = 0.0
    least: float = LEAST
    exactly: bool = False
    """Whether answers are to have the very numbers of the formula, NaN where those are."""
    same_bits: bool = True
    """Whether two runs promise the same bits."""
    graphs: bool = True
    """Whether it can be asked in a CUDA graph."""


@dataclass
class Draw:
    """Draws of one question: `numbers` are the same on every device."""

    rng: random.Random
    generator: torch.Generator
    device: str
    dtype: torch.dtype
    places: str
    """How the tensors lie in memory."""
    words: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, seed: int, number: int, device: str) -> "Draw":
        rng = random.Random(f"evoattn faces {seed} {number}")
        generator = torch.Generator().manual_seed(1000 * seed + number)
        return cls(rng, generator, device, rng.choice(DTYPES), rng.choice(PLACES))

    def pick(self, name: str, *values: One) -> One:
        """One of some, and a note of it."""
        value = self.rng.choice(values)
        self.words[name] = value
        return value

    def chance(self, name: str, part: float) -> bool:
        """Whether so, with that probability."""
        so = self.rng.random() < part
        if so:
            self.words[name] = so
        return so

    def numbers(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal ones."""
        return torch.randn(shape, generator=self.generator).to(self.device, dtype or self.dtype)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        """Whole ones, int32, of both ends too."""
        return torch.randint(low, high + 1, shape, generator=self.generator).to(self.device, torch.int32)

    def placed(self, batch: int, heads: int, rows: int, dim: int) -> Tensor:
        """`[batch, heads, rows, dim]`, lying as `places` says."""
        places = self.places
        if places == "bshd":
            return self.numbers(batch, rows, heads, dim).transpose(1, 2)
        if places == "wide":
            return self.numbers(batch, heads, rows, dim + 8)[..., :dim]
        if places == "every other":
            return self.numbers(batch, heads, 2 * rows, dim)[:, :, ::2]
        if places == "odd start":
            return self.numbers(3 + batch * heads * rows * dim)[3:].view(batch, heads, rows, dim)
        if places == "columns":
            return self.numbers(batch, heads, dim, rows).mT
        return self.numbers(batch, heads, rows, dim)

    def shape(self) -> tuple[int, int, int, int, int, int]:
        """Batch, heads, K/V heads, queries, keys, head_dim."""
        kv_heads = self.pick("kv_heads", 1, 2, 3, 4)
        heads = kv_heads * self.pick("group", 1, 1, 2, 4, 8)
        queries = self.pick("queries", *LENGTHS)
        keys = queries if self.chance("square", 0.4) else self.pick("keys", *LENGTHS)
        return self.pick("batch", 1, 2, 3), heads, kv_heads, queries, keys, self.pick("dim", *HEAD_DIMS)

    def qkv(self, *, value_dims: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value `[batch, heads, rows, dim]`, now and then with large scores."""
        batch, heads, kv_heads, queries, keys, dim = self.shape()
        wide = self.pick("value_dim", 64, 128) if value_dims and self.chance("other value_dim", 0.15) else dim
        sizes = (heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, wide)
        q, k, v = (self.placed(batch, *size) for size in sizes)
        if self.chance("large", 0.15):
            q.mul_(LARGE)
        return q, k, v

    def describe(self) -> str:
        """What was drawn."""
        said = (f"{name}={value}" for name, value in self.words.items())
        return " ".join([str(self.dtype).removeprefix("torch."), self.places, *said])


def poison(device: str) -> None:
    """Fill memory that the next allocations may get with NaN, of many sizes."""
    blocks = [torch.full((1 << size,), 255, dtype=torch.uint8, device=device) for size in range(9, 24) for _ in "ab"]
    del blocks


def bits(tensor: Tensor) -> Tensor:
    """As bytes."""
    return (
        torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device).copy_(tensor.flatten()).view(torch.uint8)
    )
