"""evoattn behind `torch.nn.functional.scaled_dot_product_attention`: for a block, or until further notice.

While any thread or asyncio task has it on, the name in `torch.nn.functional` is a function of ours, which passes calls
of others through. Code that bound torch's function to a name of its own before keeps torch's. Who chooses SDPA's
backends after that, by `torch.nn.attention.sdpa_kernel` or its flags, gets them. Compiled code takes what was on, and
whether backends were chosen, when it was compiled; it is compiled again where a thread's blocks have changed. What has
`torch.nn.MultiheadAttention` in it and was compiled before the first block keeps torch's until a reset."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.jit._builtins import _register_builtin

from evoattn.model import forks
from evoattn.model.blocks import Blocks
from evoattn.ops.arguments import MASKS, mask_of
from evoattn.ops.attention import attention
from evoattn.ops.attention_fp8 import in_eight_bits
from evoattn.ops.call import Call
from evoattn.ops.given import causal_kind
from evoattn.ops.runtime import current
from evoattn.ops.shapes import Shapes, miss, paused, recorded_call, recorders, recording
from evoattn.ops.torch_answer import PROMISE, SDPA, NoKernel

Backends = tuple[bool, ...]
"""Whether each of SDPA's may run."""
_flags: tuple[Callable[[], bool], ...] = (
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
)
_everywhere = False
_before: Backends = ()
"""Those that might run when `enable` was called."""
_lock = forks.Lock()
_users = 0
"""How many blocks, and whether `enable`, need the replacement in place."""
_original: Callable[..., Tensor] = SDPA
_blocks = Blocks[tuple[bool, Backends]]("evoattn.sdpa")
"""Whether it is on, and the backends that might run when the block began."""


class _Thread(threading.local):
    """For compiled code, whose guards look at it: what the blocks said when they were last looked at, None outside of
    all of them; and whether a call is in `_original`."""

    def __init__(self) -> None:
        self.on: bool | None = None
        self.inside = False


_thread = _Thread()


def _backends() -> Backends:
    return tuple([flag() for flag in _flags])


def backends_chosen() -> bool:
    """Whether SDPA's backends were chosen since evoattn was put in their place."""
    block = _blocks.innermost()
    return _backends() != (block.value[1] if block else _before)


backends_chosen._dynamo_marked_constant = True  # type: ignore[attr-defined] # as torch.compiler.assume_constant_result


def is_on() -> bool:
    """Whether calls of SDPA come to evoattn here, unless backends were chosen."""
    if torch.compiler.is_compiling():
        on = _thread.on
    else:
        block = _blocks.innermost()
        on = block.value[0] if block else None
        if on is not _thread.on:
            _thread.on = on
    return _everywhere if on is None else on


def _serves() -> bool:
    return is_on() and not backends_chosen()


def _by_torch(*arguments: Any, **keywords: Any) -> Tensor:
    """The function that ours replaces. Where that is another library's which calls ours, torch's own."""
    if _original is SDPA or _thread.inside:
        return SDPA(*arguments, **keywords)
    _thread.inside = True
    try:
        return _original(*arguments, **keywords)
    finally:
        _thread.inside = False


def _with_bias_object(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, dropout_p: float, scale: float | None, enable_gqa: bool
) -> Tensor:
    """For a mask of a tensor subclass; torch's causal biases compare the called function with the name that is
    replaced."""
    kind = causal_kind(bias)
    if kind is None:
        if recorders():
            miss("it has a mask tensor")
        return _by_torch(query, key, value, bias, dropout_p, False, scale=scale, enable_gqa=enable_gqa)
    if _serves() and not dropout_p:
        with contextlib.suppress(NoKernel):
            return attention(query, key, value, causal=kind, scale=scale, enable_gqa=enable_gqa, strict=True)
    from torch.nn.attention.bias import CausalBias  # two seconds, which whoever made the bias has spent

    assert isinstance(bias, CausalBias)
    if dropout_p and recorders():
        miss("it has dropout")
    is_asked = bool(recorders()) and not _serves() and not dropout_p
    call = Call(query, key, value, MASKS[kind], scale, enable_gqa)

    def dispatch() -> Tensor:
        with paused():
            return CausalBias._dispatch(query, key, value, bias, dropout_p, False, scale, enable_gqa)

    return recorded_call(call, dispatch) if is_asked else dispatch()


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
    it is on."""
    if PROMISE.everywhere and (attn_mask is not None or dropout_p) and _serves():
        return attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and type(attn_mask) is not Tensor and not is_causal:
        return _with_bias_object(query, key, value, attn_mask, dropout_p, scale, enable_gqa)
    if attn_mask is None and not dropout_p:
        if _serves():
            return attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        if recorders():
            call = Call(query, key, value, mask_of(None, bool(is_causal)), scale, enable_gqa)
            words = dict(is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
            return recorded_call(call, lambda: _by_torch(query, key, value, **words))
    elif recorders():
        miss("it has a mask tensor" if attn_mask is not None else "it has dropout")
    return _by_torch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _compiled_with_its_caller(ours: Callable[..., object]) -> None:
    """Let a trace of the caller go through ours, and make no graph of ours alone: where torch does not trace the
    caller, as the layers of `torch.nn` under `layer.compile()`, the guards of a graph of one call take longer than the
    call. A torch without these names of its own makes that graph."""
    assert isinstance(ours, FunctionType)
    code = ours.__code__
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
    except (ImportError, AttributeError):
        return
    # Who hands ours itself to `torch.compile` wants that graph. Torch takes what a function names so in its place: the
    # same code, which is not passed over.
    same = FunctionType(code.replace(), globals(), SDPA.__name__, ours.__defaults__)
    vars(ours).update(_torchdynamo_orig_callable=same, _torchdynamo_wrapper_id=id(ours))


_compiled_with_its_caller(scaled_dot_product_attention)


def _promises() -> bool:
    """Whether calls with a mask are evoattn's to answer, or to refuse."""
    return PROMISE.everywhere and _serves()


PLACE_OF_PADDING = 14
"""Of `key_padding_mask` among the arguments of `multi_head_attention_forward`."""


def _seen_through(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of `torch.nn.functional`, which a trace goes through; another library's as it is.

    Torch's compilers take `multi_head_attention_forward` for one operator. So their guards do not see what is on, and
    their cache on the disk returns code of another process, with the attention that it had there. What checks a mask of
    padding they cannot trace: with one, which is torch's to compute, it stays an operator."""
    if not isinstance(original, FunctionType) or original.__globals__ is not vars(torch.nn.functional):
        return original
    parts = original.__code__, original.__globals__, original.__name__, original.__defaults__
    same, is_compiling, promises = FunctionType(*parts), torch.compiler.is_compiling, _promises
    place = PLACE_OF_PADDING
    same.__kwdefaults__ = original.__kwdefaults__

    def ours(*arguments: Any, **words: Any) -> Any:
        if not is_compiling():
            return original(*arguments, **words)
        padded = arguments[place] if place < len(arguments) else words.get("key_padding_mask")
        promises()  # which the trace sees, and not what is in the operator
        return (same if padded is None else original)(*arguments, **words)

    # For TorchScript, which compiles the text of `original` by what its names are here.
    named = FunctionType(ours.__code__, original.__globals__, original.__name__, None, ours.__closure__)
    return functools.update_wrapper(named, original)


_torchs_heads = torch.nn.functional.multi_head_attention_forward
_heads = _seen_through(_torchs_heads)


def _hold(count: int) -> None:
    """Take or give up the name in `torch.nn.functional`. Where somebody else has replaced ours in the meantime, theirs
    stays. `multi_head_attention_forward` stays seen through, for guards of what is compiled later on."""
    global _users, _original
    with _lock:
        before, _users = _users, _users + count
        here = torch.nn.functional.scaled_dot_product_attention
        if before == 0 and _users and here is not scaled_dot_product_attention:
            _original = here
            # TorchScript knows torch's own by its identity, and would compile ours, which it cannot.
            _register_builtin(scaled_dot_product_attention, "aten::scaled_dot_product_attention")
            torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
            if torch.nn.functional.multi_head_attention_forward is _torchs_heads:
                torch.nn.functional.multi_head_attention_forward = _heads
        elif before and _users == 0 and here is scaled_dot_product_attention:
            torch.nn.functional.scaled_dot_product_attention = _original


@contextlib.contextmanager
def sdpa(on: bool = True) -> Iterator[None]:
    """`scaled_dot_product_attention` is evoattn's inside of the block, for this thread or asyncio task; with
    `on=False`, torch's. An `sdpa_kernel` inside of it has PyTorch's backends run.

    Blocks nest, and an exception ends one like its last line. A compiled function takes evoattn if it is first called
    inside of a block."""
    _hold(1)
    try:
        with _blocks.entered((on, _backends())):
            is_on()  # tells compiled code
            yield
    finally:
        is_on()
        _hold(-1)


@contextlib.contextmanager
def capture() -> Iterator[Shapes]:
    """Record what this thread's or asyncio task's calls of SDPA and `evoattn.attention` ask for: problems, counts and,
    on a GPU, times.

    The calls run as they would without it. What is compiled or replayed from a CUDA graph is not seen: record the
    eager model."""
    _hold(1)
    try:
        with recording(shapes := Shapes()):
            yield shapes
    finally:
        _hold(-1)


def enable(
    estimated: bool = False, race: bool = True, batch_invariant: bool = False, precision: Literal["fp8"] | None = None
) -> None:
    """Put evoattn behind every `scaled_dot_product_attention` of the process. An `sdpa_kernel` later on has PyTorch's
    backends run.

    At the first eager call of a problem its kernel races others that may be faster, and one that was measured on no GPU
    of this kind PyTorch's attention; the fastest runs from then on. Here and in `evoattn.attention` `estimated=True`
    lets the latter run without a race; with `race=False` they never run, and no kernels race.

    With `batch_invariant=True` all calls of the process keep what the argument of that name promises ("The same bits"
    in docs/serves.md), those of `evoattn.attention` too, and raise `NoKernel` where no kernel can; those that
    `sdpa_kernel` gives to PyTorch excepted. Code that was compiled before may have torch's in it.

    With `precision="fp8"` eager calls of 16 bits whose answers need no gradients are computed by
    `evoattn.attention_fp8`, those of `evoattn.attention` too, where a kernel of 8 bits serves them and quantising pays
    ("enable" in docs/python.md). Raises `ValueError` for another precision, and for `batch_invariant` beside it: a
    scale depends on other rows."""
    global _before, _everywhere
    if precision not in (None, "fp8"):
        raise ValueError(f"precision must be 'fp8', or None for that of the tensors, not {precision!r}.")
    if precision and batch_invariant:
        raise ValueError("precision='fp8' and batch_invariant exclude each other: a scale depends on other rows.")
    _allow(estimated, race, batch_invariant, precision == "fp8")
    _before = _backends()
    if not _everywhere:
        _everywhere = True
        _hold(1)


def disable() -> None:
    """Undo `enable`. `evoattn.attention` goes on to work, and estimated kernels race again."""
    global _everywhere
    _allow(False, True, False, False)
    if _everywhere:
        _everywhere = False
        _hold(-1)


def _allow(estimated: bool, race: bool, batch_invariant: bool, fp8: bool) -> None:
    """Which kernels may run that were measured on no GPU of this kind, what all calls promise, and whether they may be
    of 8 bits."""
    runtime, PROMISE.everywhere, PROMISE.fp8 = current.runtime(), batch_invariant, in_eight_bits if fp8 else None
    if (runtime.estimated, runtime.races) != (estimated, race):
        runtime.estimated, runtime.races = estimated, race
        runtime.forget()
