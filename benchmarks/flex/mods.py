"""What people write in FlexAttention's language: masks and scores of attention-gym, of papers and of serving engines.

Each row of `MODS` makes the functions for a shape, with tensors of its own: of documents, lengths, trees and so on."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, or_masks

Mod = Callable[..., Tensor]


class Shape(NamedTuple):
    """That of a call."""

    batch: int
    heads: int
    queries: int
    keys: int
    device: str = "cpu"

    @property
    def longest(self) -> int:
        return max(self.queries, self.keys)


class Written(NamedTuple):
    """What a user passes."""

    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    by_batch: bool = False
    """Whether the mask differs by batch."""
    by_head: bool = False
    lists: Callable[[int], tuple[Tensor, Tensor]] | None = None
    """Of a mask that is told by its lists: counts and blocks of PARTIAL ones for blocks of a size."""

    def block_mask(
        self, shape: Shape, block: int = 128, create: Callable[..., BlockMask] = create_block_mask
    ) -> BlockMask | None:
        """The mask of blocks of a size; None for none. `create` makes it of the function."""
        if self.lists is not None:
            counts, blocks = self.lists(block)
            words: dict[str, Any] = {"mask_mod": self.mask_mod} if self.mask_mod else {}
            return BlockMask.from_kv_blocks(
                counts, blocks, BLOCK_SIZE=block, seq_lengths=(shape.queries, shape.keys), **words
            )
        if self.mask_mod is None:
            return None
        batch, heads = shape.batch if self.by_batch else None, shape.heads if self.by_head else None
        return create(self.mask_mod, batch, heads, shape.queries, shape.keys, device=shape.device, BLOCK_SIZE=block)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def _random(shape: Shape) -> torch.Generator:
    return torch.Generator(shape.device).manual_seed(shape.queries * 7 + shape.keys)


def _documents(shape: Shape, count: int = 5) -> tuple[Tensor, Tensor]:
    """(the document of each place, where documents begin and the last one ends)."""
    cuts = torch.linspace(0, shape.longest, count + 1, device=shape.device).long()
    cuts[1:-1] += torch.arange(count - 1, device=shape.device) * 3 % 7
    return torch.repeat_interleave(torch.arange(count, device=shape.device), cuts.diff()), cuts


def _lengths(shape: Shape, most: int) -> Tensor:
    return torch.linspace(most / 3, most, shape.batch, device=shape.device).int()


def decoding(shape: Shape) -> Written:
    offset = torch.tensor(shape.keys - shape.queries, device=shape.device)
    return Written(None, lambda b, h, q, k: q + offset >= k)


def window(shape: Shape) -> Written:
    size = max(8, shape.keys // 8)
    return Written(None, lambda b, h, q, k: (q >= k) & (q - k <= size))


def two_sided_window(shape: Shape) -> Written:
    size = max(8, shape.keys // 16)
    return Written(None, lambda b, h, q, k: torch.abs(q - k) <= size)


def dilated_window(shape: Shape) -> Written:
    size = max(8, shape.keys // 8)
    return Written(None, lambda b, h, q, k: ((q - k).abs() <= size) & ((q - k).abs() % 4 == 0))


def global_window(shape: Shape) -> Written:
    is_global = torch.rand(shape.longest, generator=_random(shape), device=shape.device) < 0.01
    near = max(8, shape.keys // 16)
    return Written(
        None, or_masks(lambda b, h, q, k: (q - k).abs() <= near, lambda b, h, q, k: is_global[q] | is_global[k])
    )


def windows_of_heads(shape: Shape) -> Written:
    sizes = 8 << torch.arange(shape.heads, device=shape.device) % 6
    return Written(None, lambda b, h, q, k: (q >= k) & (q - k < sizes[h]), by_head=True)


def sink_tokens(shape: Shape) -> Written:
    size = max(8, shape.keys // 16)
    return Written(None, lambda b, h, q, k: (q >= k) & ((k < 4) | (q - k < size)))


def documents(shape: Shape) -> Written:
    ids, _ = _documents(shape)
    return Written(None, lambda b, h, q, k: ids[q] == ids[k])


def causal_documents(shape: Shape) -> Written:
    ids = _documents(shape)[0].int()
    return Written(None, and_masks(causal, lambda b, h, q, k: ids[q] == ids[k]))


def documents_by_offsets(shape: Shape) -> Written:
    ids, starts = _documents(shape)
    return Written(None, lambda b, h, q, k: (k >= starts[ids[q]]) & (k <= q))


def logical_documents(shape: Shape) -> Written:
    """A mask within documents, of places that count from their beginnings."""
    ids, starts = _documents(shape)

    def within(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        first, second = q - starts[ids[q]], k - starts[ids[k]]
        return (ids[q] == ids[k]) & (first >= second) & (first - second < 64)

    return Written(None, within)


def documents_of_batches(shape: Shape) -> Written:
    ids = torch.stack([(torch.arange(shape.longest, device=shape.device) + 17 * b) // 70 for b in range(shape.batch)])
    return Written(None, lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q >= k), by_batch=True)


def shared_prefixes(shape: Shape) -> Written:
    ids, starts = _documents(shape)
    parent = torch.tensor([0, 0, 0, 3, 3], device=shape.device)

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own, prefix = ids[q], parent[ids[q]]
        inside = (k >= starts[prefix]) & (k < starts[prefix + 1])
        return ((k >= starts[own]) & (q >= k)) | ((own != prefix) & inside)

    return Written(None, seen)


def prefix_lm(shape: Shape) -> Written:
    prefix = shape.keys // 4
    return Written(None, or_masks(lambda b, h, q, k: k < prefix, causal))


def prefixes_of_batches(shape: Shape) -> Written:
    lengths = _lengths(shape, shape.keys // 2)
    return Written(None, lambda b, h, q, k: (k < lengths[b]) | (q >= k), by_batch=True)


def padding(shape: Shape) -> Written:
    lengths = _lengths(shape, shape.keys).long()
    return Written(None, lambda b, h, q, k: k < lengths[b], by_batch=True)


def jagged(shape: Shape) -> Written:
    lengths = _lengths(shape, shape.longest)
    return Written(None, lambda b, h, q, k: (q < lengths[b]) & (k < lengths[b]) & (q >= k), by_batch=True)


def images_in_text(shape: Shape) -> Written:
    """PaliGemma's and Gemma 3's: causal, and both ways within an image."""
    place = torch.arange(shape.longest, device=shape.device)
    image = torch.where(place % 100 < 40, place // 100, -1).int()
    return Written(None, or_masks(causal, lambda b, h, q, k: (image[q] == image[k]) & (image[q] >= 0)))


def chunks(shape: Shape) -> Written:
    """Llama 4's."""
    size = max(16, shape.keys // 6)
    return Written(None, and_masks(causal, lambda b, h, q, k: q // size == k // size))


def block_causal(shape: Shape) -> Written:
    return Written(None, lambda b, h, q, k: q // 48 >= k // 48)


def block_diagonal(shape: Shape) -> Written:
    return Written(None, lambda b, h, q, k: q // 80 == k // 80)


def block_diffusion(shape: Shape) -> Written:
    half, block = -(-shape.longest // 2), 32

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        noisy_q, noisy_k = q < half, k < half
        of_q, of_k = q % half // block, k % half // block
        own = (of_q == of_k) & (noisy_q == noisy_k)
        return own | ((of_q > of_k) & noisy_q & ~noisy_k) | ((of_q >= of_k) & ~noisy_q & ~noisy_k)

    return Written(None, seen)


def blockwise_ids(shape: Shape) -> Written:
    ids = torch.randint(3, (-(-shape.longest // 32),), generator=_random(shape), device=shape.device)
    return Written(None, lambda b, h, q, k: ids[q // 32] == ids[k // 32])


def neighbours_1d(shape: Shape) -> Written:
    reach = max(4, shape.keys // 16)

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q.clamp(reach, shape.keys - 1 - reach) - k).abs() <= reach

    return Written(None, near)


def neighbours_2d(shape: Shape) -> Written:
    width = max(4, math.isqrt(shape.keys))
    height, reach = -(-shape.longest // width), 3

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        x = (q // width).clamp(reach, height - 1 - reach) - k // width
        y = (q % width).clamp(reach, width - 1 - reach) - k % width
        return (x.abs() <= reach) & (y.abs() <= reach)

    return Written(None, near)


def neighbours_3d(shape: Shape) -> Written:
    side = max(4, round(shape.keys ** (1 / 3)))

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = q >= 0
        for step in (1, side, side * side):
            seen = seen & ((q // step % side).clamp(1, side - 2) - k // step % side).abs().le(1)
        return seen

    return Written(None, near)


def sliding_tiles(shape: Shape) -> Written:
    """Of a picture in tiles of 4 x 4, and text behind it."""
    width = max(8, math.isqrt(shape.keys) // 4 * 4)
    picture, wide = width * (shape.keys // width // 4 * 4), width // 4

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        x = (q // 16 // wide).clamp(1, wide - 2) - k // 16 // wide
        y = (q // 16 % wide).clamp(1, wide - 2) - k // 16 % wide
        in_picture = (q < picture) & (k < picture)
        return (in_picture & (x.abs() <= 1) & (y.abs() <= 1)) | (k >= picture) | (q >= picture)

    return Written(None, seen)


def video_in_space(shape: Shape) -> Written:
    text, frame = shape.keys // 10, shape.keys // 6
    return Written(None, lambda b, h, q, k: (k < text + frame) | (q < text) | (torch.abs(q - k) < 2 * frame // 3))


def video_in_time(shape: Shape) -> Written:
    text, frame = shape.keys // 10, max(4, shape.keys // 6)
    return Written(
        None,
        lambda b, h, q, k: (
            (k < text) | (q < text) | (torch.abs((q - text) % frame - (k - text) % frame) < max(2, frame // 8))
        ),
    )


def pictures_for_text(shape: Shape) -> Written:
    """Flamingo's: text sees the picture before it."""
    pictures = 4
    tokens = -(-shape.keys // pictures)
    ends = torch.linspace(0, shape.queries, pictures + 1, device=shape.device).long()
    spans = torch.stack((ends[:-1], ends[1:]), 1)

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        span = spans[k // tokens]
        return (q >= span[0]) & (q < span[1])

    return Written(None, seen)


def _tree(nodes: int, device: str) -> Tensor:
    """Bool `[nodes, nodes]`: whether one is on the other's way to the root."""
    seen = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        seen[node] |= seen[(node - 1) // 2]
    return seen.to(device)


def tree(shape: Shape) -> Written:
    """Of drafts: the last keys are the nodes, and the queries."""
    nodes = min(shape.queries, shape.keys)
    before, ancestors = shape.keys - nodes, _tree(nodes, shape.device)

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        node = (k - before).clamp(0, nodes - 1)
        return (k < before) | ancestors[q.clamp(max=nodes - 1), node]

    return Written(None, seen)


def tree_of_bits(shape: Shape) -> Written:
    nodes = min(31, shape.queries, shape.keys)
    weights = 1 << torch.arange(nodes, device=shape.device)
    bits, before = (_tree(nodes, shape.device) * weights).sum(-1), shape.keys - nodes
    return Written(
        None, lambda b, h, q, k: (k < before) | (((bits[q.clamp(max=nodes - 1)] >> (k - before).clamp(min=0)) & 1) == 1)
    )


def several_items(shape: Shape) -> Written:
    """Items to be ranked, behind one prefix: each sees the prefix and itself."""
    prefix = shape.longest // 5
    item = ((torch.arange(shape.longest, device=shape.device) - prefix) // 37).clamp(min=-1)
    return Written(None, lambda b, h, q, k: (q >= k) & ((item[k] < 0) | (item[q] == item[k])))


def any_pairs(shape: Shape) -> Written:
    seen = torch.rand(shape.batch, shape.queries, shape.keys, generator=_random(shape), device=shape.device) < 0.3
    return Written(None, lambda b, h, q, k: seen[b, q, k], by_batch=True)


def _chosen(shape: Shape, block: int, most: int) -> tuple[Tensor, Tensor]:
    rows, blocks = -(-shape.queries // block), -(-shape.keys // block)
    order = torch.rand(shape.batch, shape.heads, rows, blocks, generator=_random(shape), device=shape.device)
    count = min(most, max(1, blocks // 2))
    return order.new_full(order.shape[:3], count, dtype=torch.int32), order.argsort(-1).int()


def chosen_blocks(shape: Shape) -> Written:
    """As NSA's selection: lists alone say what is seen."""
    return Written(lists=lambda block: _chosen(shape, block, 4))


def chosen_causal_blocks(shape: Shape) -> Written:
    """As MoBA's: blocks are chosen, and within them the mask is causal."""
    return Written(None, causal, lists=lambda block: _chosen(shape, block, 3))


def alibi(shape: Shape) -> Written:
    return Written(lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / shape.heads)))


def alibi_by_slopes(shape: Shape) -> Written:
    slopes = torch.exp2(-8.0 * torch.arange(1, shape.heads + 1, device=shape.device) / shape.heads)
    return Written(lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(), causal)


def softcap(shape: Shape) -> Written:
    return Written(lambda s, b, h, q, k: 20.0 * torch.tanh(s / 20.0))


def causal_softcap_in_window(shape: Shape) -> Written:
    return Written(softcap(shape).score_mod, window(shape).mask_mod)


def relative_bias(shape: Shape) -> Written:
    table = torch.randn(shape.heads, shape.queries + shape.keys, generator=_random(shape), device=shape.device)
    return Written(lambda s, b, h, q, k: s + table[h, k - q + shape.queries])


def clamped_relative_bias(shape: Shape) -> Written:
    table = torch.randn(65, generator=_random(shape), device=shape.device)
    return Written(lambda s, b, h, q, k: s + table[(q - k).clamp(-32, 32) + 32])


def bias_from_the_end(shape: Shape) -> Written:
    """Indices below 0 count from the end, as in Python."""
    table = torch.randn(2 * shape.longest, generator=_random(shape), device=shape.device)
    return Written(lambda s, b, h, q, k: s + table[q - k])


def t5_bias(shape: Shape) -> Written:
    table = torch.randn(32, shape.heads, generator=_random(shape), device=shape.device)

    def biased(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        far = (k - q).abs()
        logarithm = 8 + (torch.log(far.clamp(min=1) / 8.0) / math.log(128 / 8) * 8).to(torch.int32)
        bucket = torch.where(far < 8, far, logarithm.clamp(max=15)) + 16 * (k > q)
        return s + table[bucket, h]

    return Written(biased)


def dense_bias(shape: Shape) -> Written:
    sizes = shape.heads, shape.queries, shape.keys
    bias = torch.randn(sizes, generator=_random(shape), device=shape.device).bfloat16()
    return Written(lambda s, b, h, q, k: s + bias[h, q, k], causal)


def bias_of_graphs(shape: Shape) -> Written:
    """Graphormer's."""
    generator = _random(shape)
    bias = torch.randn(shape.heads, 9, generator=generator, device=shape.device)
    sizes = shape.batch, shape.queries, shape.keys
    steps = torch.randint(9, sizes, generator=generator, device=shape.device, dtype=torch.int32)
    return Written(lambda s, b, h, q, k: s + bias[h, steps[b, q, k]])


def sandwich(shape: Shape) -> Written:
    places = torch.arange(2 * shape.longest, device=shape.device) - shape.longest
    table = torch.cos(places[:, None] / 100.0 ** torch.linspace(0, 1, 16, device=shape.device)).sum(-1)
    ratio = shape.heads / (8.0 * torch.arange(1, shape.heads + 1, device=shape.device))
    return Written(lambda s, b, h, q, k: s + table[q - k + shape.longest] * ratio[h])


def activation(shape: Shape) -> Written:
    """Another function in the place of the exponential."""
    return Written(lambda s, b, h, q, k: torch.log(torch.nn.functional.gelu(s) + 1.0))


def sigmoid_gate(shape: Shape) -> Written:
    gate = torch.randn(shape.heads, generator=_random(shape), device=shape.device)
    return Written(lambda s, b, h, q, k: s * torch.sigmoid(gate[h]) + torch.nn.functional.relu(s))


def decay(shape: Shape) -> Written:
    """A soft mask: far keys weigh less."""
    rate = torch.linspace(0.1, 1, shape.heads, device=shape.device)
    return Written(lambda s, b, h, q, k: s - torch.log1p((q - k).abs().float()) * rate[h], causal)


def scale_by_length(shape: Shape) -> Written:
    return Written(lambda s, b, h, q, k: s * torch.log(q + 2.0) / math.log(shape.keys), causal)


def hidden_by_score(shape: Shape) -> Written:
    ids, _ = _documents(shape)
    return Written(lambda s, b, h, q, k: torch.where((ids[q] == ids[k]) & (q >= k), s, -float("inf")))


MODS: dict[str, Callable[[Shape], Written]] = {
    "nothing": lambda shape: Written(),
    "causal": lambda shape: Written(None, causal),
    **{
        one.__name__: one
        for one in (
            *(decoding, window, two_sided_window, dilated_window, global_window, windows_of_heads, sink_tokens),
            *(documents, causal_documents, documents_by_offsets, logical_documents, documents_of_batches),
            *(shared_prefixes, prefix_lm, prefixes_of_batches, padding, jagged, images_in_text, chunks),
            *(block_causal, block_diagonal, block_diffusion, blockwise_ids),
            *(neighbours_1d, neighbours_2d, neighbours_3d, sliding_tiles, video_in_space, video_in_time),
            *(pictures_for_text, tree, tree_of_bits, several_items, any_pairs, chosen_blocks, chosen_causal_blocks),
            *(alibi, alibi_by_slopes, softcap, causal_softcap_in_window, relative_bias, clamped_relative_bias),
            *(bias_from_the_end, t5_bias, dense_bias, bias_of_graphs, sandwich, activation, sigmoid_gate, decay),
            *(scale_by_length, hidden_by_score),
        )
    },
}
"""By name."""
