"""PyTorch's attention of packed sequences, `torch.nn.attention.varlen.varlen_attn` (torch 2.10 and later), whose
arguments differ between releases."""

import inspect
from collections.abc import Callable
from functools import partial

import torch

from evoattn.correctness.terms import qkv, torch_dtype
from evoattn.model.mask import MASKS
from evoattn.model.problem import AttentionProblem
from evoattn.model.variant import parse_window
from evoattn.peers.variants import PeerRefused, Tensors, refuse_all_but

Attend = Callable[..., torch.Tensor]


def find() -> Attend:
    """Torch's `varlen_attn`. Raises `ImportError` where it has none."""
    from torch.nn.attention.varlen import varlen_attn

    found: Attend = varlen_attn  # type: ignore[assignment]
    return found


def bound(
    varlen_attn: Attend, *, causal: bool, window: tuple[int, int] | None, scale: float | None, group_size: int
) -> Attend:
    """`varlen_attn` of (query, key, value, cu_seq_q, cu_seq_k, max_q, max_k) with these options; `causal` is the mask
    whose diagonal ends in the lower right corner of each sequence.

    Raises `PeerRefused` for an option that it lacks."""
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, object] = {}
    past, ahead = window or (-1, -1)
    if "window_size" in known:
        options["window_size"] = past, 0 if causal else ahead
    elif window is None and "is_causal" in known:
        options["is_causal"] = causal
    else:
        raise PeerRefused("The varlen_attn of this torch has no windows.")
    if scale is not None:
        if "scale" not in known:
            raise PeerRefused("The varlen_attn of this torch has no scale.")
        options["scale"] = scale
    if group_size > 1 and "enable_gqa" in known:
        options["enable_gqa"] = True
    return partial(varlen_attn, **options)


def make(problem: AttentionProblem, tensors: Tensors, load: Callable[[], Attend] = find) -> Callable[[], torch.Tensor]:
    """A call of it that gives O. Raises as `find` and `bound` do, and `PeerRefused` for what is not packed or has a
    variant that it lacks."""
    if not problem.varlen:
        raise PeerRefused("It is asked for packed sequences only.")
    refuse_all_but(("varlen", "window"), problem, "varlen_attn")
    if torch_dtype(problem) is torch.float32:
        raise PeerRefused("varlen_attn takes fp16 and bf16 only.")
    require_lower_right(problem, "varlen_attn")
    window = parse_window(problem.window) if problem.window else None
    causal = MASKS[problem.mask].causal
    function = bound(load(), causal=causal, window=window, scale=problem.scale, group_size=problem.group_size)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in qkv(problem, tensors))
    starts = tensors["cu_seqlens_q"], tensors["cu_seqlens_k"]

    def call() -> torch.Tensor:
        return function(q, k, v, *starts, problem.seqlen_q, problem.seqlen_k).transpose(0, 1)[None]

    return call


def require_lower_right(problem: AttentionProblem, who: str) -> None:
    """Raises `PeerRefused` for a causal mask that is not the one whose diagonal ends in the lower right corner."""
    ends_alike = all(queries == keys for queries, keys in problem.sequences)
    if not problem.masking.ends_lower_right and not ends_alike:
        raise PeerRefused(f"{who}'s causal mask is causal_lower_right, another one than this where Sq and Sk differ.")
