"""FlexAttention, compiled, with a block mask: PyTorch's own way to a variant of attention
(https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html)."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from evoattn.correctness.sequences import NO_PAGE
from evoattn.correctness.terms import qkv
from evoattn.model.problem import AttentionProblem
from evoattn.model.score import SCORE, Name, evaluate
from evoattn.model.variant import SCORE_VARIANTS
from evoattn.peers.variants import PeerRefused, has_a_flag, refuse_all_but, whole_keys, without_nan

STRIPE = 1 << 26
"""Scores that are looked at together: each is a byte, and for a moment several integers."""


class Visible(Protocol):
    """`mask_mod` of FlexAttention: batch, head, query and key, tensors that broadcast → Bool."""

    def __call__(self, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor: ...


def visible_keys(problem: AttentionProblem, tensors: Mapping[str, torch.Tensor]) -> Visible | None:
    """None where each query sees all keys. Packed sequences count queries and keys from the first of all."""
    if problem.varlen:
        return _in_sequences(problem, tensors)
    used, at_end = tensors.get("seqused"), problem.masking.corner == "lower_right"
    band = problem.masking.band(problem.seqlen_q, problem.seqlen_k)
    if band.highest is None and used is None:
        return None

    def visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        keys = problem.seqlen_k if used is None else used[b]
        query = i + keys - problem.seqlen_k if at_end else i
        seen: torch.Tensor = (j < keys) & band.sees(query, j)
        return seen

    return visible


def _in_sequences(problem: AttentionProblem, tensors: Mapping[str, torch.Tensor]) -> Visible:
    """Of packed sequences: each sees its own keys, up to a diagonal of its own."""
    owner_q, first_q, length_q = _owners(tensors["cu_seqlens_q"])
    owner_k, first_k, length_k = _owners(tensors["cu_seqlens_k"])
    band = problem.masking.band(0, 0)  # of each sequence, whose own lengths say where its diagonal ends
    at_end = problem.masking.corner == "lower_right"

    def visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        mine = owner_q[i]
        query, key = i - first_q[mine], j - first_k[mine]
        query = query + length_k[mine] - length_q[mine] if at_end else query
        seen: torch.Tensor = (mine == owner_k[j]) & band.sees(query, key)
        return seen

    return visible


def _owners(starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(each row's sequence, each sequence's first row and length) out of `cu_seqlens_q` or `cu_seqlens_k`."""
    lengths = starts.diff()
    owners = torch.repeat_interleave(torch.arange(len(lengths), device=starts.device), lengths.long())
    return owners, starts[:-1], lengths


def block_mask(
    visible: Visible,
    batches: int | None,
    rows: int,
    keys: int,
    sizes: tuple[int, int],
    device: torch.device,
    stripe: int = STRIPE,
) -> Any:
    """The `BlockMask` of blocks of `sizes` (queries, keys), the same for all heads; `batches` None: for all batches.

    `create_block_mask` of torch asks for all scores at once, which packed sequences have too many of."""
    from torch.nn.attention.flex_attention import BlockMask

    height, width = sizes
    columns = torch.arange(-(-keys // width) * width, device=device)
    step = max(1, stripe // len(columns) // height) * height
    some, whole = [], []
    for batch in range(batches or 1):
        for first in range(0, -(-rows // height) * height, step):
            lines = torch.arange(first, min(first + step, -(-rows // height) * height), device=device)
            inside = (lines < rows)[:, None] & (columns < keys)
            seen = inside & visible(
                torch.tensor(batch, device=device),
                torch.tensor(0, device=device),
                lines.clamp(max=rows - 1)[:, None],
                columns.clamp(max=keys - 1)[None],
            )
            blocks = seen.view(-1, height, len(columns) // width, width).sum((1, 3))
            some.append((blocks > 0) & (blocks < height * width))
            whole.append(blocks == height * width)
    ordered = [_ordered(torch.cat(part).view(batches or 1, 1, -1, part[0].shape[-1])) for part in (some, whole)]
    return BlockMask.from_kv_blocks(*ordered[0], *ordered[1], sizes, visible, (rows, keys))


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(how many blocks of keys each row of blocks has, which: those first) of a Bool `[batch, head, rows, keys]`."""
    counts = blocks.sum(-1, dtype=torch.int32)
    return counts, blocks.int().argsort(dim=-1, descending=True, stable=True).int()


def whole_cache(cache: torch.Tensor) -> torch.Tensor:
    """`[1, kv_heads, pages · page, head_dim]` of a cache `[pages, kv_heads, page, head_dim]`: a view where the rows of
    all pages are equally far apart, as those of FlashAttention's caches are."""
    return cache.permute(1, 0, 2, 3).flatten(1, 2)[None]


def physical_blocks(problem: AttentionProblem, tensors: Mapping[str, torch.Tensor], blocks: Any) -> Any:
    """The `BlockMask` of the sequences as one of the cache, whose blocks are pages."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention

    table, device = tensors["table"].long(), str(tensors["q"].device)
    paged = PagedAttention(problem.shape("k")[0], problem.page, problem.batch, device)
    held = table != NO_PAGE
    paged.page_table[:, : problem.table_pages] = table.masked_fill(~held, 0)
    rows, places = held.nonzero(as_tuple=True)
    paged.physical_to_logical[rows, table[rows, places]] = places
    return paged.convert_logical_block_mask(blocks, kv_len=tensors["seqused"])


def listed_blocks(problem: AttentionProblem, tensors: Mapping[str, torch.Tensor], visible: Visible | None) -> Any:
    """The problem's own lists as a `BlockMask`; in PARTIAL blocks its predicate decides, and `visible`, its mask."""
    from torch.nn.attention.flex_attention import BlockMask

    shown, given = problem.shown, dict(tensors)

    def seen(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        both = i.new_ones((), dtype=torch.bool) if visible is None else visible(b, h, i, j)
        if shown is not None:
            both = both & evaluate(shown, {**given, "b": b, "h": h, "q": i, "k": j, "d": problem.diagonal}, torch)
        return both

    mask = problem.block_mask[0]
    last = tensors["kv_indices"].shape[-1] - 1  # behind the last block that is named lies anything
    return BlockMask.from_kv_blocks(
        tensors["kv_num_blocks"],
        tensors["kv_indices"].clamp(max=last),
        tensors["full_kv_num_blocks"],
        tensors["full_kv_indices"].clamp(max=last),
        (mask.rows, mask.keys),
        seen,
        (problem.seqlen_q, problem.seqlen_k),
        compute_q_blocks=False,
    )


Tensors = dict[str, torch.Tensor]
ScoreMod = Callable[..., torch.Tensor]
Compiler = Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]

BLOCK = 128
"""Rows and keys of a block of FlexAttention's masks, as it has them; of keys in pages a page."""
LARGE_HEADS: Any = {"BLOCK_M": 64, "BLOCK_N": 16, "num_stages": 1, "num_warps": 8, "FORCE_USE_FLEX_ATTENTION": True}
"""`kernel_options` for a head_dim over 256, whose tiles would not fit into shared memory by torch's own choice."""


def make(problem: AttentionProblem, tensors: Tensors, compiler: Compiler | None = None) -> Callable[[], torch.Tensor]:
    """A call that gives O. Sinks are folded in by the log-sum-exp, in the same compiled function.
    `compiler` is `torch.compile` unless given.

    Raises `PeerRefused` for plain attention that SDPA's fused kernels serve, and whatever torch's compiler raises."""
    if problem.op == "forward" and has_a_flag(problem):
        raise PeerRefused("FlexAttention is asked for what is no flag of SDPA: its compiler takes seconds.")
    # Imported here, as it brings torch._dynamo: a second of every worker's start.
    from torch.nn.attention.flex_attention import flex_attention

    served = (*SCORE_VARIANTS, "value_dim", "shared_kv", "seqused", "page", "varlen", "blocks")
    refuse_all_but(served, problem, "FlexAttention")
    if problem.varlen and problem.page:
        raise PeerRefused("FlexAttention is not asked for packed sequences in pages.")
    places_of_lengths = (problem.alibi or problem.score) and (problem.seqused or problem.varlen)
    if places_of_lengths or (problem.page and (problem.bias or problem.shared_kv)):
        raise PeerRefused(
            "FlexAttention is not asked for slopes or expressions of different lengths, nor for a bias of pages."
        )
    clean = without_nan(problem, tensors)
    if problem.page:
        q, k, v = tensors["q"], whole_cache(clean["k"]), whole_cache(clean["v"])
    elif problem.varlen:
        q, k, v = qkv(problem, clean)
    else:
        q, (k, v) = tensors["q"], whole_keys(problem, tensors)()
    visible, folded = visible_keys(problem, tensors), _heads_are_rows(problem)
    blocks = None
    if visible is not None:
        rows, keys = q.shape[2], problem.head_rows[1] if problem.varlen else problem.seqlen_k
        batches = problem.batch if problem.seqused else None
        blocks = block_mask(visible, batches, rows, keys, (BLOCK, problem.page or BLOCK), q.device)
    if problem.page:
        blocks = physical_blocks(problem, tensors, blocks)
    if problem.blocks:
        blocks = listed_blocks(problem, tensors, visible)
    options = LARGE_HEADS if problem.head_dim > 256 else None
    score_mod, sinks = _score_mod(problem, tensors), tensors.get("sinks")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result: Any = flex_attention(
            q.transpose(1, 2) if folded else q,
            k,
            v,
            score_mod=score_mod,
            block_mask=blocks,
            scale=problem.softmax_scale,
            enable_gqa=problem.group_size > 1 and not folded,
            return_lse=True,
            kernel_options=options,
        )
        out: torch.Tensor = result[0]
        if sinks is None:
            return out.transpose(1, 2) if folded else out
        return (out * torch.sigmoid(result[1] - sinks.float()[None, :, None])[..., None]).to(out.dtype)

    # A process that asks for one problem after another would reach the compiler's limit of variants of one function,
    # past which it runs uncompiled.
    torch.compiler.reset()
    compiled = compiler(attend) if compiler else torch.compile(attend, dynamic=False)
    return lambda: compiled(q, k, v)


def _heads_are_rows(problem: AttentionProblem) -> bool:
    """Whether the heads of one query, all of one K/V head, are given as queries: they fill a tile, which one query
    does not."""
    changed = {*SCORE_VARIANTS, "seqused"} & {*problem.variants}
    return problem.seqlen_q == problem.kv_heads == 1 and problem.heads > 1 and not changed and not problem.causal


def _score_mod(problem: AttentionProblem, tensors: Tensors) -> ScoreMod | None:
    """What is done to a scaled score of batch b, head h, query i and key j; None for nothing."""
    tree = problem.scoring.whole
    if tree == Name(SCORE):
        return None

    def change(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        values = {**tensors, SCORE: score, "b": b, "h": h, "q": i, "k": j, "d": problem.diagonal}
        changed: torch.Tensor = evaluate(tree, values, torch)
        return changed

    return change
