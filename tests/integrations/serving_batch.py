"""A batch as serving engines have it, packed queries over a cache of pages, and its answer by the formula."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.integrations.flash_attn_formula import Asked, drawn

HEADS, KV_HEADS, DIM = 4, 2, 64
DECODING = [1, 1, 1, 1]
MIXED = [1, 5, 0, 12]


@dataclass
class Batch:
    """Sequence i has `queries[i]` queries and `lengths[i]` keys, the last of which are its queries' own."""

    queries: list[int]
    page: int = 16
    lengths: tuple[int, ...] = (40, 33, 9, 12)
    dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        most = -(-max(self.lengths) // self.page)
        shuffled = torch.randperm(len(self.lengths) * most, generator=torch.Generator().manual_seed(1))
        self.table = shuffled.view(len(self.lengths), most).int()
        self.k, self.v = (self.rows(len(shuffled), self.page, KV_HEADS, DIM, seed=seed) for seed in (2, 3))
        self.bounds = torch.tensor([0, *itertools.accumulate(self.queries)]).int()
        self.used = torch.tensor(self.lengths).int()
        self.q = self.rows(sum(self.queries), HEADS, DIM, seed=4)

    def on(self, device: str) -> Batch:
        """A copy whose tensors are on a device."""
        moved = copy.copy(self)
        for name in ("table", "k", "v", "bounds", "used", "q"):
            setattr(moved, name, getattr(self, name).to(device, copy=True))
        return moved

    def rows(self, *shape: int, seed: int) -> Tensor:
        return drawn(*shape, seed=seed, dtype=self.dtype)

    def slots(self) -> Tensor:
        """Where the last keys lie, one for each query: page · its size + place."""
        places = [
            int(self.table[i, at // self.page]) * self.page + at % self.page
            for i, (some, length) in enumerate(zip(self.queries, self.lengths))
            for at in range(length - some, length)
        ]
        return torch.tensor(places)

    def keys(self, i: int) -> tuple[Tensor, Tensor]:
        k, v = (cache[self.table[i].long()].flatten(0, 1)[: self.lengths[i]] for cache in (self.k, self.v))
        return k, v

    def expected(self, asked: Asked) -> tuple[Tensor, Tensor]:
        """Outputs `[queries, heads, head_dim]` and log-sum-exps `[heads, queries]`, in float64."""
        found = [
            asked.of(self.q[self.bounds[i] : self.bounds[i + 1]], *self.keys(i), i) for i in range(len(self.queries))
        ]
        return torch.cat([one for one, _ in found]), torch.cat([lse for _, lse in found], dim=1)


def near(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), atol=4e-3, rtol=4e-3)
