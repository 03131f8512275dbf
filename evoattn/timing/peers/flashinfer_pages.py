"""Where the pages of each sequence are, as FlashInfer is told: rows of a table without its unused entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from evoattn.correctness.sequences import NO_PAGE
from evoattn.model.problem import AttentionProblem


@dataclass(frozen=True)
class Pages:
    """int32 tensors on the device of the inputs."""

    size: int
    """Keys of a page."""
    starts: torch.Tensor
    """`[batch + 1]`: where each sequence's part of `table` begins."""
    table: torch.Tensor
    """Pages of all sequences, one after another."""
    lengths: torch.Tensor
    """`[batch]`: keys in use."""

    @property
    def indexes(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(starts, table, keys in each last page)."""
        return self.starts, self.table, torch.where(self.lengths > 0, (self.lengths - 1) % self.size + 1, 0).int()


def pages_of(problem: AttentionProblem, tensors: Mapping[str, torch.Tensor], size: int) -> Pages:
    """Those of the problem's table, or, of a cache without one, pages of `size` keys in the order in which they lie;
    `size` divides seqlen_k then."""
    device = tensors["q"].device
    lengths = torch.tensor(problem.key_lengths, dtype=torch.int32, device=device)
    counts = (lengths + size - 1) // size
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    if problem.page:
        table = tensors["table"]
    else:
        each = problem.seqlen_k // size
        table = torch.arange(problem.batch * each, dtype=torch.int32, device=device).view(problem.batch, each)
    used = torch.arange(table.shape[1], device=device) < counts[:, None]
    assert not (table[used] == NO_PAGE).any()
    return Pages(size, starts, table[used].int(), lengths)
