"""evoattn behind `torch.nn.functional.scaled_dot_product_attention`: for a block, or until further notice.

While any thread has it on, the name in `torch.nn.functional` is a function of ours, which passes calls of other
threads through. Code that bound torch's function to a name of its own before keeps torch's. Compiled code takes what
was on when it was compiled, and is compiled again where that has changed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.jit._builtins import _register_builtin

from evoattn.model import forks
from evoattn.ops import current
from evoattn.ops.arguments import MASKS, mask_of
from evoattn.ops.attention import attention
from evoattn.ops.call import Call, causal_kind
from evoattn.ops.runtime import NoKernel
from evoattn.ops.shapes import Shapes, miss, paused, recorded_call, recorders, recording
from evoattn.ops.torch_answer import SDPA

_everywhere = False
_lock = forks.Lock()
_users = 0
"""How many blocks, and whether `enable`, need the replacement in place."""
_original: Callable[..., Tensor] = SDPA


class _Thread(threading.local):
    """What a thread's blocks say: None outside of all of them."""

    def __init__(self) -> None:
        self.on: bool | None = None


_thread = _Thread()


def is_on() -> bool:
    """Whether this thread's calls of SDPA come to evoattn."""
    return _everywhere if _thread.on is None else _thread.on


def _with_bias_object(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, dropout_p: float, scale: float | None, enable_gqa: bool
) -> Tensor:
    """For a mask of a tensor subclass; torch's causal biases compare the called function with the name that is
    replaced.
    """
    kind = causal_kind(bias)
    if kind is None:
        if recorders():
            miss("it has a mask tensor")
        return _original(query, key, value, bias, dropout_p, False, scale=scale, enable_gqa=enable_gqa)
    if is_on() and not dropout_p:
        with contextlib.suppress(NoKernel):
            return attention(query, key, value, causal=kind, scale=scale, enable_gqa=enable_gqa, strict=True)
    from torch.nn.attention.bias import CausalBias  # two seconds, which whoever made the bias has spent

    assert isinstance(bias, CausalBias)
    if dropout_p and recorders():
        miss("it has dropout")
    is_asked = bool(recorders()) and not is_on() and not dropout_p
    call = Call(query, key, value, MASKS[kind], scale, enable_gqa)
    with recorded_call(call) if is_asked else contextlib.nullcontext(), paused():
        return CausalBias._dispatch(query, key, value, bias, dropout_p, False, scale, enable_gqa)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`; without a mask tensor and dropout, `evoattn.attention` where
    it is on.
    """
    if attn_mask is not None and type(attn_mask) is not Tensor and not is_causal:
        return _with_bias_object(query, key, value, attn_mask, dropout_p, scale, enable_gqa)
    if attn_mask is None and not dropout_p:
        if is_on():
            return attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        if recorders():
            with recorded_call(Call(query, key, value, mask_of(None, bool(is_causal)), scale, enable_gqa)):
                return _original(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    elif recorders():
        miss("it has a mask tensor" if attn_mask is not None else "it has dropout")
    return _original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _hold(count: int) -> None:
    """Take or give up the name in `torch.nn.functional`. Where somebody else has replaced ours in the meantime, theirs
    stays.
    """
    global _users, _original
    with _lock:
        before, _users = _users, _users + count
        here = torch.nn.functional.scaled_dot_product_attention
        if before == 0 and _users and here is not scaled_dot_product_attention:
            _original = here
            # TorchScript knows torch's own by its identity, and would compile ours, which it cannot.
            _register_builtin(scaled_dot_product_attention, "aten::scaled_dot_product_attention")
            torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
        elif before and _users == 0 and here is scaled_dot_product_attention:
            torch.nn.functional.scaled_dot_product_attention = _original


@contextlib.contextmanager
def sdpa(on: bool = True) -> Iterator[None]:
    """This thread's `scaled_dot_product_attention` is evoattn's inside of the block; with `on=False`, torch's.

    Blocks nest, and an exception ends one like its last line. A compiled function takes evoattn if it is first called
    inside of a block.
    """
    before = _thread.on
    _hold(1)
    _thread.on = on
    try:
        yield
    finally:
        _thread.on = before
        _hold(-1)


@contextlib.contextmanager
def capture() -> Iterator[Shapes]:
    """Record what this thread's calls of SDPA and `evoattn.attention` ask for: problems, counts and, on a GPU, times.

    The calls run as they would without it. What is compiled or replayed from a CUDA graph is not seen: record the
    eager model.
    """
    _hold(1)
    try:
        with recording(Shapes()) as shapes:
            yield shapes
    finally:
        _hold(-1)


def enable(estimated: bool = False) -> None:
    """Put evoattn behind every `scaled_dot_product_attention` of the process.

    `estimated=True` also allows, here and in `evoattn.attention`, kernels that were measured on no GPU of this kind.
    """
    global _everywhere
    runtime = current.runtime()
    if runtime.estimated != estimated:
        runtime.estimated = estimated
        runtime.forget()
    if not _everywhere:
        _everywhere = True
        _hold(1)


def disable() -> None:
    """Undo `enable`. `evoattn.attention` goes on to work, without estimated kernels."""
    global _everywhere
    runtime = current.runtime()
    if runtime.estimated:
        runtime.estimated = False
        runtime.forget()
    if _everywhere:
        _everywhere = False
        _hold(-1)
