"""The op in torch's registry, which compiled and exported code calls: `torch.ops.evoattn.attention` for plain calls,
`attention_variant` for those with a window, terms and so on, each with an `_lse` beside it that gives the log-sum-exp.
Those are differentiable: autograd calls `attention_backward`, which compiled code calls by itself.

Defined by `torch.library.Library`: a call of a `torch.library.custom_op` passes through three Python functions more,
which takes as long as the launch (2.9 µs against 8.7 for an empty op on one CPU).

`evoattn.flex_attention` in compiled code is torch's FlexAttention to its compilers, a higher-order operator that holds
both functions as graphs. Where kernels serve a call, autograd's part of it is the op of here. So nothing breaks the
graph, captured tensors are inputs of the op and have gradients, and what no kernel serves stays torch's. The lists say
what is seen; how many blocks they have is read once for each kind of mask, when the op runs.

Importing this module imports `torch._dynamo`, which takes a second: `attention` does so inside of a trace only."""

import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._higher_order_ops.flex_attention import flex_attention as operator
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import _disable_current_modes

from evoattn.families import mask_blocks
from evoattn.model.backward import BACKWARD, TERM_GRADS, parse_grads
from evoattn.model.mask import FULL
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.score import parse_score
from evoattn.model.score_lines import added_of, softcap_of
from evoattn.ops import block_masks, mods, torch_answer
from evoattn.ops.arguments import ARGUMENTS, DTYPES, TERMS, Score, has_autocast
from evoattn.ops.call import (
    GRADIENTS,
    Answer,
    Call,
    behind,
    out_like,
    strided,
    why_not_scale,
    why_not_shapes,
    with_tables,
)
from evoattn.ops.choice import Refusal
from evoattn.ops.given import scored, with_added
from evoattn.ops.gradients import (
    SECOND,
    Backward,
    are_deterministic,
    expected,
    grads_of,
    kept,
    names_of,
    places_of,
    why_not_differentiable,
    words_of,
)
from evoattn.ops.runtime import current
from evoattn.ops.torch_answer import is_promised, refuse

TAGS = (torch.Tag.pt2_compliant_tag,)
TENSORS = "Tensor query, Tensor key, Tensor value, str mask, bool enable_gqa"
"""What all schemas begin with; `mask` is that of `AttentionProblem`, the tensors are as `Call` has them."""
NAMED = tuple(argument for argument in ARGUMENTS if argument.in_schema)
"""The arguments that schemas take by name, in this order. Behind them come `finite`, of a cache that holds no NaN, the
text of a `Score` with the names of its tables, and tables and block lists."""
FIRST_NAMED = len(TENSORS.split(", "))
PLACE_OF_TABLES = FIRST_NAMED + len(NAMED) + 2
LAST = ("deterministic", "batch_invariant")
"""What all schemas end with; torch leaves out those that have their defaults."""
PLAIN = ("scale", "strict", *LAST)
"""Those of plain calls."""
VARIED = f"{TENSORS}, {', '.join(f'{a.in_schema} {a.name}' for a in NAMED)}, bool finite, str score, Tensor[] tables"
ENDING = ", ".join(f"bool {name}=False" for name in LAST)
VARIED = f"{VARIED}, {ENDING}, str blocks=''"
"""`blocks`: the predicate and the text of a block list. New arguments have defaults: torch keeps graphs on disk, and
knows by the forward pass alone which are still good."""
SCHEMAS = {"attention": f"({TENSORS}, float? scale, bool strict, {ENDING})", "attention_variant": f"({VARIED})"}
BACKWARD_SCHEMA = f"(Tensor grad, Tensor? grad_lse, Tensor out, Tensor lse, str grads, {VARIED})"
"""`grads` is that of `AttentionProblem`."""
LISTS = 4
"""Tensors of a block list."""
LIKELY_LENGTH = 1024
"""Queries and keys in place of those of compiled code, which serves many lengths."""
_library = torch.library.Library("evoattn", "FRAGMENT")


def _call(query: Tensor, key: Tensor, value: Tensor, mask: str, enable_gqa: bool, *others: Any) -> Call:
    """The call of an op's arguments."""
    if len(others) <= len(PLAIN):
        call, last = Call(query, key, value, mask, others[0], enable_gqa, strict=others[1], compiled=True), others[2:]
    else:
        given = dict(zip((a.name for a in NAMED), others, strict=False))
        finite, written, tables, *more = others[len(NAMED) :]
        last, of_blocks = tuple(more[: len(LAST)]), "".join(more[len(LAST) :])
        expression, *names = written.split(" ")
        own, lists = dict(zip(names, tables, strict=False)), tuple(tables[len(names) :])
        predicate, _, blocks = of_blocks.partition(" ")
        score = None
        if expression or predicate:
            score = Score.of_texts(expression, predicate, own) if blocks else Score(expression, **own)
        terms = tuple(given[name] for name in TERMS)
        terms = behind(with_tables(() if all(term is None for term in terms) else terms, score), lists)
        call = Call(
            query,
            key,
            value,
            mask,
            given["scale"],
            enable_gqa,
            None if given["window"] is None else tuple(given["window"]),
            given["softcap"],
            terms,
            strict=given["strict"],
            longest=(given["max_seqlen_q"], given["max_seqlen_k"]),
            finite=finite,
            compiled=True,
            score=score,
            blocks=blocks,
        )
    for name, asked in zip(LAST, last, strict=False):
        setattr(call, name, asked)
    return call


def _made(*arguments: Any) -> Call:
    """As `_call`, with an `out` that is laid out in memory as `query` is. Raises `RuntimeError` where autograd would
    get an answer without a gradient."""
    call = _call(*arguments)
    if call.wants_gradients:
        raise RuntimeError(
            "torch.ops.evoattn computes no gradients without the log-sum-exp; call evoattn.attention, which does."
        )
    call.out = out_like(call.query, call.value)
    _tell_blocks(call)
    return call


def _tell_blocks(call: Call) -> None:
    """Have a call that runs know how many blocks its lists have."""
    if block_masks.UNREAD in call.blocks:
        call.blocks = block_masks.told(call.blocks, call.terms[-LISTS:])


def _answer(*arguments: Any) -> Tensor:
    """`evoattn.attention` by an op. Raises what `_made` raises, and `NoKernel` under `strict` where no kernel serves
    the call."""
    call = _made(*arguments)
    current.runtime().attend(call)
    assert call.out is not None
    return call.out


def _answer_and_lse(*arguments: Any) -> tuple[Tensor, Tensor]:
    """As `_answer`, and the log-sum-exp."""
    call = _made(*arguments)
    call.return_lse = True
    answer = current.runtime().attend(call)
    assert call.out is not None
    return call.out, answer[1].contiguous()  # a plan with room for more rows leaves gaps


def _fake(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    """The answer's shape, strides, dtype and device."""
    return out_like(query, value)


def _fake_and_lse(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return out_like(query, value), query.new_empty(query.shape[:-1], dtype=torch.float32)


def _register(name: str, schema: str, compute: Any, fake: Any) -> OpOverload:
    """`torch.ops.evoattn.NAME`. `fake`: what `compute` returns, without its numbers."""
    _library.define(name + schema, tags=TAGS)
    _library.impl(name, compute, "CompositeExplicitAutograd")
    _library.impl(name, fake, "Meta")
    op: OpOverload = getattr(torch.ops.evoattn, name).default
    return op


attention_op, variant_op = (_register(name, f"{schema} -> Tensor", _answer, _fake) for name, schema in SCHEMAS.items())
attention_lse_op, variant_lse_op = (
    _register(f"{name}_lse", f"{schema} -> (Tensor, Tensor)", _answer_and_lse, _fake_and_lse)
    for name, schema in SCHEMAS.items()
)


def _unused(like: Tensor) -> Tensor:
    """In place of a gradient that is not wanted: ops return tensors alone."""
    return like.new_empty(0, dtype=torch.float32)


def _gradients(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, grads: str, *arguments: Any
) -> tuple[Any, ...]:
    """The backward pass of an op with these arguments and answers: gradients of query, key, value, the bias, the sinks
    and, in a list, tables."""
    call = _call(*arguments)
    call.out = out
    _tell_blocks(call)
    found = current.runtime().gradients(Backward(call, lse, grad, grad_lse, parse_grads(grads)))
    named = tuple(_unused(out) if made is None else made for made in found[:5])
    return *named, list(found[5:])


def _fake_gradients(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, grads: str, *arguments: Any
) -> tuple[Any, ...]:
    call, wanted = _call(*arguments), parse_grads(grads)
    places = places_of(call)
    terms = (call.term(places[name]) if name in wanted else None for name in names_of(wanted))
    of_terms = [_unused(out) if term is None else torch.empty(term.shape, **_like(term)) for term in terms]
    return *(torch.empty_like(tensor) for tensor in (call.query, call.key, call.value)), *of_terms[:2], of_terms[2:]


def _like(term: Tensor) -> dict[str, Any]:
    return {"dtype": term.dtype, "device": term.device}


backward_op = _register(
    "attention_backward",
    f"{BACKWARD_SCHEMA} -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor[])",
    _gradients,
    _fake_gradients,
)


def _varied(call: Call) -> tuple[Any, ...]:
    """The arguments of `attention_variant` for a call."""
    given: dict[str, Any] = dict(zip(TERMS, call.terms, strict=False))
    given |= {"scale": call.scale, "softcap": call.softcap, "strict": call.strict}
    given["window"] = None if call.window is None else list(call.window)
    given["max_seqlen_q"], given["max_seqlen_k"] = call.longest
    score = call.score
    of_score = "" if score is None else score.written, list(call.terms[len(TERMS) :])
    blocks = [f"{'' if score is None else score.predicate} {call.blocks}"] if call.blocks else []
    tensors = call.query, call.key, call.value, call.mask, call.enable_gqa
    named = [given.get(argument.name) for argument in NAMED]
    return (*tensors, *named, call.finite, *of_score, *_last(call), *blocks)


def _last(call: Call) -> tuple[bool, ...]:
    """The arguments of `LAST`."""
    return call.deterministic, call.batch_invariant


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what the backward pass reads. Raises `RuntimeError` where it would lack a gradient."""
    call = _call(*inputs)
    if reason := why_not_differentiable(call):
        raise RuntimeError(f"torch.ops.evoattn cannot do this: {reason}; call evoattn.attention, which does.")
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(call.query, call.key, call.value, *call.terms, *output)
    ctx.call, ctx.grads = words_of(call), grads_of(call)


def _differentiate(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    given = kept(ctx.call, ctx.grads, ctx.saved_tensors, grad, grad_lse)
    *found, tables = backward_op(
        given.grad, grad_lse, given.out, given.lse, "+".join(given.grads), *_varied(given.call)
    )
    count = len(ctx.needs_input_grad)  # without arguments that have their defaults
    made: list[Any] = [*found[:3], *[None] * (count - 3)]
    if count > PLACE_OF_TABLES:
        of_tables = dict(zip(names_of(given.grads)[len(TERM_GRADS) :], tables, strict=True))
        names = () if given.call.score is None else given.call.score.buffers
        lists = [None] * (LISTS if given.call.blocks else 0)
        made[PLACE_OF_TABLES] = [*(of_tables.get(name) for name in names), *lists]
    for name, gradient in zip(TERM_GRADS, found[3:], strict=True):
        if name in given.grads:
            made[FIRST_NAMED + [argument.name for argument in NAMED].index(name)] = gradient
    return tuple(made)


def _differentiate_twice(ctx: Any, *grads: Tensor | None) -> None:
    raise RuntimeError(SECOND)


for _op in (attention_lse_op, variant_lse_op):
    torch.library.register_autograd(_op, _differentiate, setup_context=_set_up, lib=_library)
torch.library.register_autograd(backward_op, _differentiate_twice, lib=_library)


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor has a shape and a device but no data."""
    return isinstance(tensor, FakeTensor)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def kernels_run_on() -> str:
    """The kind of device that kernels run on in this process, empty if there is none."""
    platform = current.runtime().platform
    return platform.device_type if platform else ""


def why_not_traced(call: Call) -> str | None:
    """One reason, without a full stop, why a trace takes torch's own code at once; what else may speak against a kernel
    shows when it runs."""
    kind = kernels_run_on()
    if not kind or not call.query.device.type == call.key.device.type == call.value.device.type == kind:
        return f"the tensors are on the {call.query.device.type.upper()}"
    if reason := why_not_shapes(call) or why_not_scale(call.scale):
        return reason
    if not call.wants_gradients:
        return None
    return why_not_differentiable(call) or _why_no_kernels(call)


def _why_no_kernels(call: Call) -> str | None:
    """As `why_not_traced`, of both passes of a call that wants gradients."""
    query, key, value = call.query, call.key, call.value
    given = [name for name, term in zip(TERMS, call.terms, strict=False) if term is not None]
    given += ["window"] if call.window is not None else []
    given += ["softcap"] if call.softcap != 0 else []
    # Symbols of a trace become numbers: head_dims and heads decide which kernels there are.
    sizes = index(query.shape[1]), index(key.shape[1]), index(query.shape[3]), index(value.shape[3])
    wanted = "+".join(grads_of(call)), are_deterministic(call), is_promised(call.batch_invariant)
    said = ("", "") if call.score is None else (call.score.text, call.score.likely_tables)
    reason = _why_no_kernels_of(DTYPES[query.dtype], sizes, call.mask, "+".join(given), *said, *wanted)
    return f"{GRADIENTS}, and {reason}" if reason else None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _why_no_kernels_of(dtype: str, sizes: tuple[int, int, int, int], mask: str, given: str, *wanted: Any) -> str:
    """Why kernels do not serve both passes of calls that are such but for their lengths; empty if they do. `sizes` are
    heads, K/V heads and head_dims, `given` names the arguments that SDPA lacks; `wanted` are an expression and its
    tables, the gradients of terms, and whether these are deterministic and rows batch-invariant."""
    score, tables, grads, deterministic, batch_invariant = wanted
    names, length, side = given.split("+"), LIKELY_LENGTH, LIKELY_LENGTH // 2
    fields: dict[str, Any] = {"seqlen_q": length, "seqlen_k": length, "dtype": dtype, "mask": mask, "layout": "bshd"}
    fields |= dict(zip(("heads", "kv_heads", "head_dim", "value_dim"), sizes, strict=True))
    fields |= {"sink": "sinks" in names, "alibi": "alibi_slopes" in names, "softcap": 30.0 * ("softcap" in names)}
    fields |= {"score": score, "tables": tables}
    fields["window"] = f"{side}:{side if mask == FULL else 0}" * ("window" in names)
    fields["bias"] = "hs" * ("bias" in names)
    fields["seqused"] = f"0:{length}" * ("seqused_k" in names)
    fields["varlen"] = f"sum:{length}/sum:{length}" * ("cu_seqlens_q" in names)
    runtime = current.runtime()
    platform = runtime.platform
    gpu = platform.spec(platform.current_device()) if platform else None
    if gpu is None:
        return "evoattn does not know this GPU"
    try:
        plain = AttentionProblem(batch=1, **fields)
        forward = plain.with_(lse=True, batch_invariant=batch_invariant)
        backward = plain.with_(op=BACKWARD.name, grads=grads, deterministic=deterministic)
    except ProblemError as error:
        return str(error).rstrip(".")
    choices = (runtime.choose(strided(one), gpu, promised=batch_invariant) for one in (forward, backward))
    return next((choice.reason for choice in choices if isinstance(choice, Refusal)), "")


def operands(call: Call) -> tuple[Any, ...]:
    """The arguments of the op for a call, but for `out`."""
    if call.has_variant:
        return _varied(call)
    return call.query, call.key, call.value, call.mask, call.enable_gqa, call.scale, call.strict, *_last(call)


def traced(call: Call) -> Answer:
    """The answer to a call within a trace: by an op where a kernel may run, by torch's own code elsewhere. `out` and
    terms have been checked. Raises `NoKernel` under `strict` where no kernel serves the call."""
    kind = call.query.device.type
    if has_autocast(kind):
        call = call.autocast(kind)
    reason = why_not_traced(call)
    if reason is not None:
        refuse(reason, call.strict, call.batch_invariant)
        return torch_answer.answer(call)
    has_lse = call.return_lse or call.wants_gradients
    if call.has_variant:
        op = variant_lse_op if has_lse else variant_op
    else:
        op = attention_lse_op if has_lse else attention_op
    answer = op(*operands(call))
    output, lse = answer if has_lse else (answer, None)
    if not call.return_lse:
        lse = None
    output = output if call.out is None else call.out.copy_(output)
    return output if lse is None else (output, lse)


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
        named = zip(mask_blocks.LISTS, (*block_mask[2:6], *[None] * 4), strict=True)  # gradients read the others
        mask = BlockMask((block_mask[0], block_mask[1]), **dict(named), BLOCK_SIZE=sizes, mask_mod=block_mask[-1])
        if reason := block_masks.why_not(mask, query.shape[0], query.shape[1], query.shape[2], key.shape[2]):
            return reason
        known = block_masks.Kept((), counts=block_masks.UNREAD, no_full=block_masks.none_full(mask))
        if not (blocks := block_masks.text_of(mask, known)):
            return "its blocks are none of kernels"
        lists = block_masks.lists_of(mask, known, key.shape[2])
    elif said.predicate:
        return "its mask has one block for all"

    def with_score(call: Call, score: str) -> Call:
        read = {name: table for name, table in tables.items() if re.search(rf"\b{name}\b", f"{score} {said.predicate}")}
        return scored(call, score, said.predicate, read, blocks, lists)

    made = [with_score(call, said.score)]
    if said.score:
        tree = parse_score(said.score, Score.of_texts("", "", tables).likely_tables, True).tree
        if cap := softcap_of(tree):
            made.insert(0, with_score(replace(call, softcap=cap), ""))
        elif (by_name := with_added(call, added_of(tree), tables, statically_known_true)) is not None:
            made.insert(0, with_score(by_name, ""))
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
        q, k, v = (_stand_of(one, "meta") for one in (call.query, call.key, call.value))
        terms = tuple(None if one is None else _stand_of(one, "meta") for one in call.terms)
        others = [one for one in terms[len(TERMS) :] if one is not None]
        score = None if call.score is None else call.score.of_tensors(others[: len(call.score.buffers)])
        blocks = block_masks.likely(call.blocks, others[-1].shape[-1]) if call.blocks else ""
        likely = replace(call, query=q, key=k, value=v, terms=terms, score=score, blocks=blocks)
        problems = [likely.problem(out_like(q, v).stride())]
        if call.wants_gradients:
            problems.append(expected(replace(likely, return_lse=False)).problem())
    for problem in problems:
        if isinstance(problem, str):
            return problem
        if isinstance(choice := runtime.choose(problem, gpu), Refusal):
            return choice.reason
    return ""
