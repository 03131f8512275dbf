"""`evoattn.flex_attention` in compiled code. Torch's compilers see its FlexAttention, a higher-order operator that
holds both functions as graphs. Where kernels serve a call, autograd's part of it is the op of `custom_op.py`.
Importing this module imports `torch._dynamo`: code that is not compiled does without.

So nothing breaks the graph, captured tensors are inputs of the op and have gradients, and what no kernel serves stays
torch's. The lists say what is seen; how many blocks they have is read once for each kind of mask, when the op runs.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._higher_order_ops.flex_attention import flex_attention as operator
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import _disable_current_modes

from evoattn.model.score import parse_score
from evoattn.model.score_lines import softcap_of
from evoattn.ops import block_masks, mods
from evoattn.ops.arguments import Score
from evoattn.ops.call import Call, behind, out_like, why_not_shapes, with_tables
from evoattn.ops.choice import Refusal
from evoattn.ops.gradients import expected, why_not_differentiable
from evoattn.ops.runtime import current

MARK = "EVOATTN"
"""The kernel option that has a call of torch's operator be ours. Its value is kept with compiled graphs, which are
therefore not those of another version."""
Answers = tuple[Tensor, Tensor, Tensor]
"""The output, the log-sum-exp over ln 2, the largest scores: torch's operator has the three."""


def marked(options: dict[str, Any] | None) -> dict[str, Any]:
    """Kernel options of a call that is to be ours, within a trace."""
    return {**(options or {}), MARK: _ready()}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _ready() -> str:
    """The mark's value; from now on torch's operator asks us."""
    from evoattn import __version__
    from evoattn.ops.custom_op import VARIED  # here: it imports `torch._dynamo`, which a trace has done

    if operator.py_kernels[DispatchKey.Autograd] is not _attend:
        _torch.append(operator.py_kernels[DispatchKey.Autograd])
        operator.py_kernels[DispatchKey.Autograd] = _attend
        operator._dispatch_cache.clear()
    return f"{__version__} {zlib.crc32(VARIED.encode()):x}"


_torch: list[Callable[..., Answers]] = []
"""Torch's own part, once ours is in its place."""


def _attend(  # noqa: PLR0913 - torch's own arguments
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> Answers:
    """In the place of torch's autograd of its operator, of all calls: those without the mark are torch's."""
    buffers = score_mod_other_buffers, mask_mod_other_buffers
    options = {name: value for name, value in kernel_options.items() if name != MARK}
    if len(options) < len(kernel_options) and not options.get("OUTPUT_MAX"):
        made = calls_of((query, key, value), score_mod, block_mask, scale, *buffers)
        for call in () if isinstance(made, str) else made:
            if not why_no_kernel(call):
                return _by_op(call)
    return _torch[0](query, key, value, score_mod, block_mask, scale, options, *buffers)


def _by_op(call: Call) -> Answers:
    from evoattn.ops.custom_op import operands, variant_lse_op

    out, lse = variant_lse_op(*operands(call))
    return out, lse / math.log(2), lse.detach()


def calls_of(
    tensors: tuple[Tensor, Tensor, Tensor],
    score_mod: Callable[..., Any],
    block_mask: tuple[Any, ...],
    scale: float,
    of_score: Sequence[Any],
    of_mask: Sequence[Any],
) -> list[Call] | str:
    """The calls of the op that answer to arguments of torch's operator, the most promising first, or one reason,
    without a full stop, why there are none."""
    query, key, _ = tensors
    call = Call(*tensors, scale=scale, enable_gqa=True, return_lse=True, compiled=True)
    if reason := why_not_shapes(call):
        return reason
    if any(isinstance(one, Tensor) and one.requires_grad for one in of_mask):
        return "its mask_mod captures a tensor that wants gradients"
    given = [_tensor_of(one, query) for one in (*of_score, *of_mask)]
    traced = _traced(score_mod, block_mask[-1], given, len(of_score))
    if isinstance(traced, str):
        return traced
    said, stands = traced
    tables = {}
    for name, place in zip((f"t{i}" for i in range(len(said.places))), said.places, strict=True):
        tensor, stand = given[place.base], stands[place.base]
        is_whole = place == mods.Place(place.base, tuple(stand.shape), stand.stride(), 0)
        if not is_whole and any(type(size) is not int for size in (*tensor.shape, *tensor.stride())):
            return "it captures a part of a tensor whose sizes change"
        tables[name] = tensor if is_whole else place.of(tensor)
    blocks, lists, sizes = "", tuple[Tensor, ...](), (int(block_mask[-3]), int(block_mask[-2]))
    if max(sizes) < block_masks.WHOLE:
        named = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
        mask = BlockMask(
            (block_mask[0], block_mask[1]),
            **dict(zip(named, block_mask[2:6], strict=True)),
            q_num_blocks=None,
            q_indices=None,
            full_q_num_blocks=None,
            full_q_indices=None,
            BLOCK_SIZE=sizes,
            mask_mod=block_mask[-1],
        )
        if reason := block_masks.why_not(mask, query.shape[0], query.shape[1], query.shape[2], key.shape[2]):
            return reason
        known = block_masks.Kept((), block_masks.UNREAD, block_masks.none_full(mask), {})
        if not (blocks := block_masks.text_of(mask, known)):
            return "its blocks are none of kernels"
        lists = block_masks.lists_of(mask, known, key.shape[2])
    elif said.predicate:
        return "its mask has one block for all"

    def scored(call: Call, score: str) -> Call:
        own = Score.of_texts(score, said.predicate, tables) if score or said.predicate else None
        return replace(call, score=own, blocks=blocks, terms=behind(with_tables(call.terms, own), lists))

    made = [scored(call, said.score)]
    if said.score and "[" not in said.score and (cap := softcap_of(parse_score(said.score).tree)):
        made.insert(0, scored(replace(call, softcap=cap), ""))
    return made


def _tensor_of(one: Any, query: Tensor) -> Tensor:
    """What a function captures: a number of a trace that may change as a tensor of it."""
    return one if isinstance(one, Tensor) else query.new_full((), one, dtype=torch.int64)


def _sizes(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Numbers of a trace as those that it is made with. They do not become constants by it."""
    return tuple(size if type(size) is int else int(size.node.hint) for size in sizes)


def _stand_of(tensor: Tensor, device: str = "cpu") -> Tensor:
    """An empty tensor of the same sizes, strides and dtype."""
    made = torch.empty_strided(_sizes(tensor.shape), _sizes(tensor.stride()), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)


def _traced(
    score_mod: Callable[..., Any], mask_mod: Callable[..., Any], given: list[Tensor], count: int
) -> tuple[mods.Traced, list[Tensor]] | str:
    """What both functions say, which have the first `count` tensors and the others behind their arguments, and the
    tensors' stand-ins; or why they are no expressions."""
    with _disable_current_modes(), torch.no_grad():
        stands = [_stand_of(one).detach() for one in given]
        captured = list(stands)
        try:
            said = mods.trace(
                lambda *given: score_mod(*given, *stands[:count]),
                lambda *given: mask_mod(*given, *stands[count:]),
                captured,
            )
        except mods.Untraceable as error:
            return str(error)
    return (said, stands) if len(captured) == len(stands) else "its graph holds a tensor of its own"


def why_no_kernel(call: Call) -> str:
    """Why torch computes such a call, and its gradients where they are wanted: chosen of the lengths of the trace."""
    runtime = current.runtime()
    platform = runtime.platform
    if platform is None or call.query.device.type != runtime.device_type:
        return "no kernel runs there"
    if call.wants_gradients and (reason := why_not_differentiable(call)):
        return reason
    gpu = platform.spec(platform.current_device())
    if gpu is None:
        return "evoattn does not know this GPU"
    with _disable_current_modes():
        q, k, v, *others = (_stand_of(one, "meta") for one in (call.query, call.key, call.value, *call.given_terms))
        tables = 0 if call.score is None else len(call.score.buffers)
        score = None if call.score is None else call.score.of_tensors(others[:tables])
        blocks = block_masks.likely(call.blocks, others[-1].shape[-1]) if call.blocks else ""
        likely = replace(call, query=q, key=k, value=v, terms=behind((), tuple(others)), score=score, blocks=blocks)
        problems = [likely.problem(out_like(q, v).stride())]
        if call.wants_gradients:
            problems.append(expected(replace(likely, return_lse=False)).problem())
    for problem in problems:
        if isinstance(problem, str):
            return problem
        if isinstance(choice := runtime.choose(problem, gpu), Refusal):
            return choice.reason
    return ""
