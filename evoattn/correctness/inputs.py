"""Inputs of a problem, of the kinds that have caught wrong kernels."""

import math

import torch

from evoattn.correctness import eight_bits, sequences, terms
from evoattn.correctness.sequences import each
from evoattn.correctness.terms import torch_dtype
from evoattn.model.problem import AttentionProblem
from evoattn.model.scales import ROUNDED

KINDS = (
    "plain", "large_logits", "late_huge_key", "large_logits_late_key", "large_logits_two_keys", "huge_keys_within",
    "scores_past_fp16", "low_equal_scores", "rising_maximum", "equal_keys", "extreme_terms",
)  # fmt: skip
MOST_LONE = 1e4
"""Of an element of Q or K that alone decides a score: fp16 holds it."""
LONE_DIMENSIONS = 3
"""Of K in `huge_keys_within`: each is all that one of the rows sees that meet a huge key alone."""
LOW_SCORE = -4e4
"""Of each query and key in `low_equal_scores`: below any number that a kernel may take for minus infinity, but one."""
LARGE_OF_EIGHT_BITS = 8
"""Q of 8 bits in place of 300 times: scores of thousands would be off by nats, as tensor cores keep some 14 bits."""
SIDE_BY_SIDE, PAST_FP16 = 8, 8e4
"""Keys in `scores_past_fp16`, as many as one thread stores scores of, and these in octaves: fp16 ends at 65,504."""


def make_inputs(
    problem: AttentionProblem, seed: int, device: torch.device | str, kind: str = "plain", tile: int = 64
) -> dict[str, torch.Tensor]:
    """Random q, k and v of `problem` (no v where it lies within k) in its dtype and memory layout, each a view of
    logical shape `[batch, heads, seqlen, head_dim]`, and its other inputs (`AttentionProblem.term_shapes`). K and V
    hold NaN behind the last key in use, and in pages that no sequence has.

    Standard normal values; `kind` bends them to what has caught wrong kernels (reports/sources.md): `large_logits`
    scales q by 30, `late_huge_key` makes one key near the end of each row 12 times as long, `large_logits_late_key`
    does so and scales q by 300, so that weights relative to anything but a row's own maximum leave the range even of
    fp32, `large_logits_two_keys` has a second such key among the first, so that rows rise from either end on, eight by
    turns, `huge_keys_within` makes two keys far from either end 100 and 30 times as long, and rows of which one in 16
    alone meets such a key, or one in each `tile` keys, beside others that come close to what it has met before,
    `scores_past_fp16` gives a query one key that is more octaves above all others than fp16 has, or all keys as far
    below 0, `low_equal_scores` gives all pairs one score far below 0, so that the answer is the mean of the values that
    a row sees, and hidden keys count where a kernel gives them a finite score, `rising_maximum` lets the largest score
    grow with every key, `equal_keys` makes all keys the same, `extreme_terms` is plain but for the other inputs. Packed
    sequences are each bent so; the keys and values of one without queries are NaN, which no answer may show. Tensors of
    8 bits are these values quantised, beside their scales (`eight_bits.quantised`). Where a kernel rounds Q itself, a
    row of `large_logits_two_keys` has no answer (`_spoil_a_row`). Raises `ValueError` on another kind: it would be
    plain unseen."""
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is none of {', '.join(KINDS)}.")
    generator = torch.Generator(device=device).manual_seed(seed)
    tensors, scales = {}, {}
    for name in problem.tensors:
        shape = sequences.whole_shape(problem, name)
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        for one in each(problem):
            if name == "q" or not problem.seqused:
                _bend(values[:, :, one.queries if name == "q" else one.keys], name, kind, problem.softmax_scale, tile)
            if not one.lengths[0] and name != "q":
                values[:, :, one.keys] = math.nan
        if problem.seqused and name != "q":
            for row, keys in zip(values, problem.key_lengths, strict=True):
                _bend(row[None, :, :keys], name, kind, problem.softmax_scale, tile)
        if name == "q" and problem.element.bytes == 1 and kind.startswith("large_logits_"):
            values *= LARGE_OF_EIGHT_BITS / 300
        _spoil_a_row(values, problem, name, kind)
        if problem.element_of(name).bytes == 1:
            values, scales[name] = eight_bits.quantised(problem, name, values, kind == "extreme_terms")
        tensors[name] = values.to(torch_dtype(problem, name))
    others = terms.make_terms(problem, generator, device, kind == "extreme_terms")
    for name in problem.tensors:
        if name != "q" and problem.appended:
            others[f"new_{name}"] = sequences.taken_out(problem, tensors[name])
        if name != "q" and (problem.seqused or problem.page):
            tensors[name] = sequences.stored(problem, tensors[name], others)
        if problem.turned and name == "v":
            tensors[name] = eight_bits.turn(tensors[name])
        else:
            tensors[name] = _laid_out(problem, name, tensors[name])
    for name, scale in scales.items():
        others[f"{name}_scale"] = eight_bits.stored_scales(problem, name, scale, others)
    return tensors | others


def _spoil_a_row(values: torch.Tensor, problem: AttentionProblem, name: str, kind: str) -> None:
    """Where a kernel rounds Q, whose rows share scales, an infinity in a row of one head: its answer is NaN, and all
    others are as if it were not there."""
    if name == "q" and problem.op in ROUNDED and kind == "large_logits_two_keys":
        values[0, 0, values.shape[2] // 2, -1] = math.inf


def _bend(values: torch.Tensor, name: str, kind: str, scale: float, tile: int) -> None:
    """Make of a sequence, `[batch, heads, rows, head_dim]`, what `kind` says; `scale` is that of the softmax."""
    rows = values.shape[2]
    if not rows:
        return
    if kind.startswith("large_logits") and name == "q":
        values *= 30 if kind == "large_logits" else 300
        if kind == "large_logits_two_keys":
            _first_dimension(values, name)
    elif kind == "large_logits_two_keys" and name == "k" and rows > 5:
        _first_dimension(values, name)
    elif kind == "huge_keys_within" and name == "k":
        values[:, :, rows // 3] *= 100  # scores that leave even the range of bf16, whichever key comes first
        values[:, :, rows * 2 // 3] *= 30
        _lone_keys(values, tile)
    elif kind == "huge_keys_within" and name == "q":
        _lone_rows(values, scale)
    elif kind == "scores_past_fp16":
        _one_dimension_each(values, name, scale)
    elif kind == "low_equal_scores" and name != "v":  # by the last dimension, in which no V lies
        if name == "q":
            values[...] = 0
        values[..., -1] = (-1 if name == "q" else 1) * min(math.sqrt(-LOW_SCORE / scale), MOST_LONE)
    elif kind in ("late_huge_key", "large_logits_late_key") and name == "k":
        values[:, :, max(0, rows - 3)] *= 12
    elif kind == "rising_maximum" and name == "q":
        values.abs_()
    elif kind == "rising_maximum" and name == "k":
        values *= 0.1
        values += torch.linspace(0, 6, rows, device=values.device)[None, None, :, None]
    elif kind == "equal_keys" and name == "k":
        values[:] = values[:, :, :1].clone()


def _first_dimension(values: torch.Tensor, name: str) -> None:
    """Let the first dimension decide which of the two long keys is higher: the same way for all rows, queries or heads,
    or of 16 in 32 for eight the other way than for the next eight. Heads, or queries whose rows are heads, take turns;
    the keys of every other batch are the other way round."""
    batches, heads, rows, dim = values.shape
    places = (torch.arange(count, device=values.device) for count in (batches, heads, rows))
    batch, head, row = torch.meshgrid(*places, indexing="ij")
    if name == "k":
        for key, height in ((2, 36.0), (rows - 3, -36.0)):
            values[:, :, key] *= 12
            values[:, :, key, 0] = (height * (1 - 2 * (batch % 2))[:, :, key]).to(values)
        return
    heads_are_rows = heads > 2
    by_turns = (batch + (0 if heads_are_rows else head)) % 2 == 0
    index = head if heads_are_rows else row
    sign = 1 - 2 * torch.where(by_turns, index // 8 % 2, row % 2 if heads_are_rows else 1)
    decided = ~by_turns | (index // 16 % 2 == 0)
    values[..., 0] = torch.where(decided, (sign * 300 * math.sqrt(dim)).to(values), values[..., 0])


def _lone_rows(q: torch.Tensor, scale: float) -> None:
    """Of each 64 rows make the last 48 small but one in 16, which sees one dimension of K alone, the first, second or
    third: the logarithm of a weight to base 2. A warp, then, in which one row's scores alone rise, rows being queries
    (of one or two heads) or heads. With a `scale` too small for that it is `MOST_LONE`."""
    _, heads, queries, _ = q.shape
    steps = (1, 16) if heads <= 2 else (heads, 1)
    index = torch.arange(queries, device=q.device) * steps[0] + torch.arange(heads, device=q.device)[:, None] * steps[1]
    q[:, index // 16 % 4 > 0] *= 0.01
    q[..., :LONE_DIMENSIONS] *= 0.01
    for dimension, row in zip(range(LONE_DIMENSIONS), (5, 13, 13), strict=True):
        lone = (index // 16 % 4 == dimension + 1) & (index % 16 == row)
        q[:, lone] = 0
        q[:, lone, dimension] = min(math.log(2) / scale, MOST_LONE)


def _lone_keys(k: torch.Tensor, tile: int) -> None:
    """What such rows see: low weights, and in the first dimension one huge key, and some beside it, as far as a lane's
    keys are apart, that come close to five or eight octaves above the first maximum, of which kernels like to take
    their distance. In the second and third each `tile` keys have one that is higher than all before it, or behind it,
    by more than the range of bf16. It lies in the last eight keys of a tile, or in the first, second or third: a kernel
    that looks at some of a tile's scores alone misses one."""
    keys = k.shape[2]
    k[..., :LONE_DIMENSIONS] = -(torch.arange(keys, device=k.device) % 3)[:, None].float()
    for away, octaves in ((8, 4.3), (-8, 4.7), (16, 7.3), (-16, 7.7), (24, 4.7), (-24, 7.7), (0, 300.0)):
        if 0 <= keys // 3 + away < keys:
            k[:, :, keys // 3 + away, 0] = octaves
    tiles = -(-keys // tile)
    for dimension in (1, 2):
        for number in range(tiles):
            turn = number if dimension == 1 else tiles - 1 - number  # in the order in which scores rise
            within = (16, tile - 8, 0, 8)[turn % 4]
            at = number * tile + within % tile + 3 * number % 8
            higher = turn + (dimension == 2)
            if at < keys:
                k[:, :, at, dimension] = 150.0 * (higher + 1)


def _one_dimension_each(values: torch.Tensor, name: str, scale: float) -> None:
    """Let each query see one dimension of K alone, by turns. In eight of them one of the last keys but one, each of
    eight side by side, has a score past the range of fp16, and all others 0: its value is the answer. In the next all
    keys have one as far below 0: the mean of all values is."""
    if name == "v":
        return
    turns = min(SIDE_BY_SIDE + 1, values.shape[3])
    values[...] = 0
    for i in range(turns):
        if name == "q":
            values[:, :, i::turns, i] = min(2 * math.log(2) / scale, MOST_LONE)
        elif i == SIDE_BY_SIDE:
            values[..., i] = -PAST_FP16 / 2
        elif (at := values.shape[2] - 2 - i) >= 0:
            values[:, :, at, i] = PAST_FP16 / 2


def _laid_out(problem: AttentionProblem, name: str, values: torch.Tensor) -> torch.Tensor:
    """A copy of `values` (its logical shape) with the strides that the problem's layout gives."""
    out = torch.empty(values.numel(), dtype=values.dtype, device=values.device)
    view = out.as_strided(problem.shape(name), problem.strides(name))
    view.copy_(values)
    return view
