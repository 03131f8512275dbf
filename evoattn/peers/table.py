"""What users would run instead, on the same inputs as our kernels: torch's SDPA backends, FlexAttention and
`varlen_attn`, FlashAttention 3 and 4 and FlashInfer, each proved right first."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from evoattn.correctness.judge import judge_one
from evoattn.correctness.reference import Answer, first
from evoattn.correctness.terms import qkv
from evoattn.model.mask import MASKS, MaskKind
from evoattn.model.problem import AttentionProblem
from evoattn.peers import fa3, fa4, flashinfer, flex, torch_varlen
from evoattn.peers.backward import backward_of
from evoattn.peers.fa4 import ScoreMod, find_score_mod
from evoattn.peers.variants import PeerRefused as PeerRefused
from evoattn.peers.variants import added_to_scores, eight_bits, flash_options, whole_keys, without_nan

Tensors = dict[str, torch.Tensor]
Call = Callable[[], torch.Tensor | Tensors]
"""Gives the first output, or outputs by their names, in the problem's logical shapes."""

NOT_INSTALLED = "is not installed"
"""In the refusal of an absent peer; scripts/fetch_peers.py brings those that are no part of torch."""


@dataclass(frozen=True)
class Peer:
    """One row of the table. `make(problem, tensors)` may raise anything."""

    make: Callable[[AttentionProblem, Tensors], Call]
    package: str
    """The distribution to install for it."""
    found: Callable[[AttentionProblem], str] | None = None
    """What stands behind it, with its version, where that may be another distribution."""

    def version(self, problem: AttentionProblem) -> str:
        """`package` and its installed version, `unknown` where it was built in place, without metadata."""
        if self.found:
            return self.found(problem)
        try:
            return f"{self.package} {version(self.package)}"
        except PackageNotFoundError:
            return f"{self.package} unknown"


def _sdpa(backend: SDPBackend) -> Callable[[AttentionProblem, Tensors], Call]:
    def make(problem: AttentionProblem, tensors: Tensors) -> Call:
        # Imported here, as it brings torch._dynamo: a second of every worker's start.
        from torch.nn.attention.bias import causal_lower_right

        kind, lower_right = problem.masking.kind, problem.masking.corner == "lower_right"
        if kind is MaskKind.BAND and not problem.window:
            raise PeerRefused(f"SDPA has no {problem.mask} but as a matrix of all scores.")
        mask, q, keys = added_to_scores(problem, tensors), tensors["q"], whole_keys(problem, tensors)
        causal = kind is MaskKind.CAUSAL and mask is None
        if causal and lower_right:
            mask = causal_lower_right(problem.seqlen_q, problem.seqlen_k)

        def call() -> torch.Tensor:
            k, v = keys()
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    attn_mask=mask,
                    is_causal=causal and not lower_right,
                    scale=problem.scale,
                    enable_gqa=problem.group_size > 1,
                )

        return call

    return make


def _flash_attention(
    prepare: Callable[[AttentionProblem], fa3.Prepare], own: tuple[str, ...], who: str
) -> Callable[[AttentionProblem, Tensors], Call]:
    """FlashAttention's own interface: `[batch, seqlen, heads, head_dim]`, given as transposed views of the same memory.

    Their last stride is 1 and the others are multiples of 16 bytes, which is all that FlashAttention 3 and 4 ask, so
    nothing is copied. `causal` means `causal_lower_right` there. `own` as in `flash_options`."""

    def make(problem: AttentionProblem, tensors: Tensors) -> Call:
        if not problem.element.on_tensor_cores:
            raise PeerRefused("FlashAttention takes fp16 and bf16 only.")
        tensors = without_nan(problem, tensors)
        options = flash_options(problem, tensors, own, who)
        mask = problem.masking
        if mask.kind is MaskKind.BAND and not problem.window:
            raise PeerRefused(f"FlashAttention is not asked for {problem.mask}.")
        torch_varlen.require_lower_right(problem, "FlashAttention")
        q, k, v = (tensor.transpose(1, 2) for tensor in qkv(problem, tensors))
        if problem.varlen:
            q, k, v = q[0], *((k, v) if problem.page else (k[0], v[0]))
        function = prepare(problem)(q, k, v, MASKS[problem.mask].causal, options)

        def call() -> torch.Tensor:
            out = function()
            out = out[0] if isinstance(out, tuple) else out
            return (out[None] if problem.varlen else out).transpose(1, 2)

        return call

    return make


def fa3_peer(load: fa3.Load = import_module) -> Peer:
    """FlashAttention 3, out of the modules that `load` imports. Numbers of 8 bits go to it with their scales.

    Its call raises `PeerRefused` for a dtype that the installed build lacks."""

    def make(problem: AttentionProblem, tensors: Tensors) -> Call:
        plain, tensors, descales = eight_bits(problem, tensors)

        def prepare(problem: AttentionProblem) -> fa3.Prepare:
            try:
                found = fa3.find(problem.dtype, load).prepare
            except fa3.LacksDtype as error:
                raise PeerRefused(str(error)) from None
            return lambda q, k, v, causal, options: found(q, k, v, causal, {**options, **descales})

        return _flash_attention(prepare, (), "FlashAttention 3")(plain, tensors)

    return Peer(make, "flash-attn-3", lambda p: fa3.find(p.dtype, load).version)


def fa4_peer(load: fa3.Load = import_module, score_mod: Callable[[str], ScoreMod] = find_score_mod) -> Peer:
    """FlashAttention 4, out of the modules that `load` imports, with the functions of scores that `score_mod` finds."""
    prepare = partial(fa4.prepare, load=load, score_mod=score_mod)
    return Peer(_flash_attention(prepare, fa4.OWN, "FlashAttention 4"), "flash-attn-4")


PEERS: dict[str, Peer] = {
    "flash": Peer(_sdpa(SDPBackend.FLASH_ATTENTION), "torch"),
    "cudnn": Peer(_sdpa(SDPBackend.CUDNN_ATTENTION), "torch"),
    "efficient": Peer(_sdpa(SDPBackend.EFFICIENT_ATTENTION), "torch"),
    "math": Peer(_sdpa(SDPBackend.MATH), "torch"),
    "fa3": fa3_peer(),
    "fa4": fa4_peer(),
    "flex": Peer(flex.make, "torch"),
    "varlen": Peer(torch_varlen.make, "torch"),
    "flashinfer": Peer(flashinfer.make, "flashinfer-python"),
}
"""The one table of peers: those of torch by the name of their backend."""
BACKWARD_PEERS = {name: replace(peer, make=backward_of(peer.make)) for name, peer in PEERS.items()}
"""The same of the backward pass, which some refuse."""


def peers_of(problem: AttentionProblem) -> dict[str, Peer]:
    """The table of the problem's operation; empty where nobody else computes it."""
    return {"forward": PEERS, "backward": BACKWARD_PEERS}.get(problem.op, {})


def peer_call(peer: Peer, problem: AttentionProblem, tensors: Tensors, answer: Answer) -> Call:
    """A call of the peer on `tensors` (q, k, v of the problem's logical shapes), which was right by `answer` at
    first: in the first output, or in all that it gives.

    Raises `PeerRefused` if it is absent, refuses, fails, or is wrong: a peer that computes something else must not
    stand beside ours."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call = peer.make(problem, tensors)
            wrong = _wrong(call(), answer)
        except ImportError as error:
            raise PeerRefused(f"{peer.package} {NOT_INSTALLED} ({_sentence(str(error))}).") from None
        except torch.cuda.OutOfMemoryError:
            raise PeerRefused("It needs more device memory than is free.") from None
        except PeerRefused:
            raise
        except Exception as error:  # other people's code: it may raise anything
            raise PeerRefused(refusal([str(w.message) for w in caught], f"{error}" or type(error).__name__)) from None
    if wrong:
        raise PeerRefused(f"Its answer is wrong: {wrong}")
    return call


def _wrong(given: torch.Tensor | Tensors, answer: Answer) -> str:
    """What is wrong with a peer's outputs; reads the device, so that a failed launch shows here."""
    if isinstance(given, torch.Tensor):
        return judge_one(given, first(answer))[0]
    reasons = {name: judge_one(out, answer[name])[0] for name, out in given.items()}
    return next((f"{name}: {reason}" for name, reason in reasons.items() if reason), "")


def refusal(said: list[str], error: str) -> str:
    """Why a peer failed: SDPA's reason is in the warnings that it printed before its error.

    torch goes through all fused backends: those that `sdpa_kernel` switched off say only that they are off, under
    headings of their own. Of any other error the warnings are no part."""
    if "No available kernel" not in error:
        return _sentence(error)
    noise = ("runtime disabled", "not used because", "User provided")
    reasons = [text.split(" (Triggered")[0] for text in said if not any(word in text for word in noise)]
    return _sentence((reasons or [error])[-1])


def _sentence(text: str) -> str:
    return " ".join(text.split())[:300]
