"""Block lists as tensors: the inputs that a text makes, and which keys they show."""

from collections.abc import Mapping
from typing import Any

import torch

from evoattn.model.block_list import document_of, draw, positions
from evoattn.model.problem import AttentionProblem
from evoattn.model.score import evaluate

NO_BLOCK = 0x3FFFFFFF
"""Behind the last block that a list names: far outside of all keys."""


def make_block_terms(problem: AttentionProblem, device: torch.device | str) -> dict[str, torch.Tensor]:
    """The inputs of `BlockMask.shapes`, empty without a block list."""
    if not problem.blocks:
        return {}
    mask, batch, _, band, diagonal = problem.block_mask
    lists, made = draw(*problem.block_mask), {}
    for name, kind in (("", "partial"), ("full_", "full")):
        rows = [[[getattr(row, kind) for row in of_head] for of_head in of_batch] for of_batch in lists]
        blocks = mask.blocks(band)[1]
        counts = [[[len(row) for row in of_head] for of_head in of_batch] for of_batch in rows]
        indices = [
            [[[*row, *[NO_BLOCK] * (blocks - len(row))] for row in of_head] for of_head in of_batch]
            for of_batch in rows
        ]
        made[f"{name}kv_num_blocks"] = torch.tensor(counts, dtype=torch.int32, device=device)
        made[f"{name}kv_indices"] = torch.tensor(indices, dtype=torch.int32, device=device)
    of = {"query_documents": positions(band, diagonal), "key_documents": range(band.seqlen_k)}
    for name, (batches, _) in mask.document_shapes(batch, band).items():
        starts = [mask.starts(b, max(band.seqlen_k, of[name].stop)) for b in range(batches)]
        documents = [[document_of(of_batch, place) for place in of[name]] for of_batch in starts]
        made[name] = torch.tensor(documents, dtype=torch.int32, device=device)
    return made


def visible(problem: AttentionProblem, given: Mapping[str, Any], batch: int, heads: slice, rows: slice) -> torch.Tensor:
    """Bool `[heads or 1, rows, seqlen_k]` of a batch: keys in a FULL block, or in a PARTIAL one where the predicate
    shows them. The lists decide, whatever the text says."""
    mask, _, _, band, _ = problem.block_mask
    device = given["kv_indices"].device
    queries = torch.arange(rows.start, rows.stop, device=device)[:, None]
    keys = torch.arange(band.seqlen_k, device=device)
    named = (_named(given[f"{n}kv_num_blocks"], given[f"{n}kv_indices"], batch, heads) for n in ("full_", ""))
    full, partial = (blocks[:, queries // mask.rows, keys // mask.keys] for blocks in named)
    shown = band.sees(queries, keys)
    if problem.shown is not None:
        indices = {"b": batch, "q": queries, "k": keys, "d": problem.diagonal}
        indices["h"] = torch.arange(problem.heads, device=device)[heads, None, None]
        shown = shown & evaluate(problem.shown, {**given, **indices}, torch)
    seen: torch.Tensor = full | (partial & shown)
    return seen


def _of_batch(tensor: torch.Tensor, batch: int) -> torch.Tensor:
    return tensor[min(batch, tensor.shape[0] - 1)]


def _named(counts: torch.Tensor, indices: torch.Tensor, batch: int, heads: slice) -> torch.Tensor:
    """Bool `[heads or 1, blocks of rows, blocks of keys]`: which blocks the lists of a batch name."""
    counts, indices = (_of_batch(tensor, batch) for tensor in (counts, indices))
    if counts.shape[0] > 1:
        counts, indices = counts[heads], indices[heads]
    blocks = indices.shape[-1]
    listed = torch.arange(blocks, device=counts.device) < counts[..., None]
    named = torch.zeros((*counts.shape, blocks + 1), dtype=torch.bool, device=counts.device)
    return named.scatter_(-1, indices.masked_fill(~listed, blocks).long(), True)[..., :blocks]
