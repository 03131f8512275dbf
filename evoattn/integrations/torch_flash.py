"""evoattn as one of torch's flash-attention implementations: also for training, and for code that calls torch from C++.

evoattn.integrations.torch_flash.register()
torch.nn.attention.activate_flash_attention_impl("evoattn")

Where `scaled_dot_product_attention` chooses its flash backend (16 bits, head_dim up to 256, no mask tensor), the
forward pass then runs evoattn's kernel with a log-sum-exp if there is one, else torch's own. Gradients are torch's, out
of that output and log-sum-exp. Next to `evoattn.enable` it costs a few microseconds more per call and leaves out what
torch gives to other backends."""

from typing import Any

import torch
from torch import Tensor

from evoattn.ops.arguments import mask_of
from evoattn.ops.call import Call
from evoattn.ops.runtime import current
from evoattn.ops.torch_answer import NoKernel, refuse

NAME = "evoattn"
OP = "_scaled_dot_product_flash_attention"
Answer = tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]
"""Output, log-sum-exp, offsets of ragged batches (none), lengths, two words of dropout's random state, debug mask."""


def register() -> None:
    """Make the name known to `torch.nn.attention.activate_flash_attention_impl`; nothing changes until it is called.

    Raises `RuntimeError` where torch has no such function or cannot hand out its own kernel (before 2.11)."""
    try:
        from torch.library import get_kernel
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:
        raise RuntimeError("torch's flash-attention implementations can be replaced from torch 2.11 on.") from None

    def replaced() -> Replaced:
        try:
            original = get_kernel(f"aten::{OP}", "CUDA")
        except RuntimeError:
            raise RuntimeError(
                "This build of torch has no flash attention for CUDA, which evoattn would take the place of."
            ) from None
        return Replaced(original, "CUDA")

    register_flash_attention_impl(NAME, register_fn=replaced)


class Replaced:
    """Torch's flash attention on a kind of device, replaced until `remove` is called."""

    def __init__(self, original: Any, key: str) -> None:
        """`original` serves what no kernel does, by its `call_boxed`; `key` is the dispatch key of the device."""
        self._original = original
        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl(OP, self._forward, key, with_keyset=True)

    def remove(self) -> None:
        """Give torch its own back."""
        self._library._destroy()

    def _forward(
        self,
        keys: torch._C.DispatchKeySet,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Answer:
        if not (dropout_p or return_debug_mask):
            grouped = key.shape[1] != query.shape[1]
            try:
                with torch.no_grad():  # autograd has been here already
                    mask = mask_of(None, is_causal)
                    call = Call(query, key, value, mask, scale, grouped, return_lse=True, strict=True)
                    answer = current.runtime().attend(call)
                state = torch.empty(2, dtype=torch.uint64, device=query.device)  # of dropout, which there is not
                debug_mask = torch.empty(0, dtype=query.dtype, device=query.device)
                return answer[0], answer[1], None, None, query.shape[2], key.shape[2], state, state[0], debug_mask
            except NoKernel:
                pass
        refuse("FlashAttention of torch was asked for what kernels do not serve")
        theirs: Answer = self._original.call_boxed(
            keys, query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale
        )
        return theirs
