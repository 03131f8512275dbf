"""What users would run instead: the backends of torch's `scaled_dot_product_attention`, on the same inputs as our kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from evoattn.problem import AttentionProblem

SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class BaselineRefused(RuntimeError):
    """A backend does not take the problem: the message is its own, in one sentence."""


def sdpa_call(backend: str, problem: AttentionProblem, tensors: dict[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
    """A call of one SDPA backend on `tensors` (q, k, v of the problem's logical shapes); returns O.

    Raises `BaselineRefused` if a first call is refused or fails.
    """
    mask = causal_lower_right(problem.seqlen_q, problem.seqlen_k) if problem.mask == "causal_lower_right" else None

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPA_BACKENDS[backend]):
            return scaled_dot_product_attention(
                tensors["q"], tensors["k"], tensors["v"], attn_mask=mask, is_causal=problem.mask == "causal_upper_left",
                enable_gqa=problem.group_size > 1,
            )

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
            torch.cuda.synchronize()
        except (RuntimeError, ValueError) as error:
            reasons = [str(w.message).split(" (Triggered")[0] for w in caught if "warn" not in str(w.message).lower()[:4]]
            raise BaselineRefused(_sentence((reasons or [str(error)])[-1])) from None
    return call


def _sentence(text: str) -> str:
    return " ".join(text.split())[:300]
