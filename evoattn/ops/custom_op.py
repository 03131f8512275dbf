"""The op in torch's registry, which compiled and exported code calls: `torch.ops.evoattn.attention` for plain calls,
`attention_variant` for those with a window, terms and so on, each with an `_lse` beside it that gives the log-sum-exp.

Defined by `torch.library.Library`: a call of a `torch.library.custom_op` passes through three Python functions more,
which takes as long as the launch (2.9 µs against 8.7 for an empty op on one CPU).

Importing this module imports `torch._dynamo`, which takes a second: `attention` does so inside of a trace only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from evoattn.ops import current, torch_answer
from evoattn.ops.arguments import ARGUMENTS, TERMS, Score
from evoattn.ops.call import GRADIENTS, Answer, Call, out_like, why_not_scale, why_not_shapes, with_tables
from evoattn.ops.runtime import NoKernel
from evoattn.ops.torch_modes import has_autocast

TAGS = (torch.Tag.pt2_compliant_tag,)
TENSORS = "Tensor query, Tensor key, Tensor value, str mask, bool enable_gqa"
"""What all schemas begin with; `mask` is that of `AttentionProblem`, the tensors are as `Call` has them."""
NAMED = tuple(argument for argument in ARGUMENTS if argument.in_schema)
"""The arguments that schemas take by name, in this order. Behind them come `finite`, of a cache that holds no NaN, and
`Score.key` with its tables."""
PLAIN = ("scale", "strict")
"""Those of plain calls."""
SCHEMAS = {
    "attention": f"({TENSORS}, float? scale, bool strict)",
    "attention_variant": f"({TENSORS}, {', '.join(f'{a.in_schema} {a.name}' for a in NAMED)}, bool finite, str score, "
    "Tensor[] tables)",
}
_library = torch.library.Library("evoattn", "FRAGMENT")


def _made(query: Tensor, key: Tensor, value: Tensor, mask: str, enable_gqa: bool, *others: Any) -> Call:
    """The call of an op's arguments, with an `out` that is laid out in memory as `query` is. Raises `RuntimeError`
    where autograd would get an answer without a gradient."""
    out = out_like(query, value)
    if len(others) == len(PLAIN):
        call = Call(query, key, value, mask, others[0], enable_gqa, out=out, strict=others[1], compiled=True)
    else:
        given = dict(zip((a.name for a in NAMED), others, strict=False))
        finite, written, tables = others[len(NAMED) :]
        expression, *names = written.split(" ")
        score = Score(expression, **dict(zip(names, tables, strict=True))) if written else None
        terms = tuple(given[name] for name in TERMS)
        terms = with_tables(() if all(term is None for term in terms) else terms, score)
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
            out=out,
            strict=given["strict"],
            longest=(given["max_seqlen_q"], given["max_seqlen_k"]),
            finite=finite,
            compiled=True,
            score=score,
        )
    if call.wants_gradients:
        raise RuntimeError("torch.ops.evoattn computes no gradients; call evoattn.attention, which does.")
    return call


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
    return call.out, answer[1]


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
    shows when it runs.
    """
    kind = kernels_run_on()
    if not kind or not call.query.device.type == call.key.device.type == call.value.device.type == kind:
        return f"the tensors are on the {call.query.device.type.upper()}"
    if call.wants_gradients:
        return GRADIENTS
    return why_not_shapes(call) or why_not_scale(call.scale)


def operands(call: Call) -> tuple[Any, ...]:
    """The arguments of the op for a call, but for `out`."""
    tensors = call.query, call.key, call.value, call.mask, call.enable_gqa
    if not call.has_variant:
        return (*tensors, call.scale, call.strict)
    given: dict[str, Any] = dict(zip(TERMS, call.terms, strict=False))
    given |= {"scale": call.scale, "softcap": call.softcap, "strict": call.strict}
    given["window"] = None if call.window is None else list(call.window)
    given["max_seqlen_q"], given["max_seqlen_k"] = call.longest
    score = ("", ()) if call.score is None else (call.score.key, call.score.tensors)
    return (*tensors, *[given.get(argument.name) for argument in NAMED], call.finite, *score)


def traced(call: Call) -> Answer:
    """The answer to a call within a trace: by an op where a kernel may run, by torch's own code elsewhere. `out` and
    terms have been checked. Raises `NoKernel` under `strict` where no kernel serves the call."""
    kind = call.query.device.type
    if has_autocast(kind):
        call = call.autocast(kind)
    reason = why_not_traced(call)
    if reason is not None:
        if call.strict:
            raise NoKernel(f"No kernel serves this call: {reason}.")
        return torch_answer.answer(call)
    if call.has_variant:
        op = variant_lse_op if call.return_lse else variant_op
    else:
        op = attention_lse_op if call.return_lse else attention_op
    answer = op(*operands(call))
    output, lse = answer if call.return_lse else (answer, None)
    output = output if call.out is None else call.out.copy_(output)
    return output if lse is None else (output, lse)
