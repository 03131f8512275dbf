"""FlashInfer (flashinfer-python 0.7): its kernels for Hopper on packed sequences and single ones, those of its `fa2`
backend, which split the keys, on caches and pages, and those of latent attention.

`plan`, which reads lengths on the CPU, is part of what is made, not of what is timed: an engine plans once per step for
all layers. What it has not compiled yet, it compiles with nvcc at the first call, which takes minutes on few cores."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from evoattn.correctness.sequences import NO_PAGE
from evoattn.correctness.terms import qkv, torch_dtype
from evoattn.model.mask import MaskKind
from evoattn.model.problem import AttentionProblem
from evoattn.model.variant import KEY_VARIANTS
from evoattn.peers.torch_varlen import require_lower_right
from evoattn.peers.variants import PeerRefused, has_a_flag, refuse_all_but, whole_keys, without_nan


@dataclass(frozen=True)
class Pages:
    """int32 tensors on the device of the inputs."""

    size: int
    """Keys of a page."""
    starts: torch.Tensor
    """`[batch + 1]`: where each sequence's part of `table` begins."""
    table: torch.Tensor
    """Pages of all sequences, one after another."""
    lengths: torch.Tensor
    """`[batch]`: keys in use."""

    @property
    def indexes(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(starts, table, keys in each last page)."""
        return self.starts, self.table, torch.where(self.lengths > 0, (self.lengths - 1) % self.size + 1, 0).int()


def pages_of(problem: AttentionProblem, tensors: Mapping[str, torch.Tensor], size: int) -> Pages:
    """Those of the problem's table, or, of a cache without one, pages of `size` keys in the order in which they lie;
    `size` divides seqlen_k then."""
    device = tensors["q"].device
    lengths = torch.tensor(problem.key_lengths, dtype=torch.int32, device=device)
    counts = (lengths + size - 1) // size
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    if problem.page:
        table = tensors["table"]
    else:
        each = problem.seqlen_k // size
        table = torch.arange(problem.batch * each, dtype=torch.int32, device=device).view(problem.batch, each)
    used = torch.arange(table.shape[1], device=device) < counts[:, None]
    assert not (table[used] == NO_PAGE).any()
    return Pages(size, starts, table[used].int(), lengths)


Call = Callable[[], torch.Tensor]
Tensors = Mapping[str, torch.Tensor]
WORKSPACE = 256 << 20
"""Bytes for partial results: its documentation asks for 128 MB and more for many splits."""
HOPPER_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
"""(of K, of V) that its kernels for Hopper have."""
LATENT_PAGE = 64
"""Keys of a page of a latent cache, as in FlashMLA."""


def make(problem: AttentionProblem, tensors: Tensors, load: Callable[[str], ModuleType] = import_module) -> Call:
    """A call that gives O. Raises `PeerRefused` for what it has no kernel for, `ImportError` where it is absent, and
    whatever its compiler raises."""
    if has_a_flag(problem):
        raise PeerRefused("FlashInfer is asked for what is no flag of SDPA: its compiler takes minutes.")
    if not problem.element.on_tensor_cores:
        raise PeerRefused("FlashInfer takes fp16 and bf16 only.")
    served = ("window", "softcap", "sink", "value_dim", "shared_kv", *KEY_VARIANTS, "varlen")
    refuse_all_but(served, problem, "FlashInfer")
    if problem.softcap and problem.sink:
        raise PeerRefused("FlashInfer has no softcap beside sinks.")
    mask = problem.masking
    if mask.kind is MaskKind.BAND and mask.ahead != 0:
        raise PeerRefused("FlashInfer has windows behind the diagonal only.")
    require_lower_right(problem, "FlashInfer")
    if problem.varlen and problem.page:
        raise PeerRefused("FlashInfer is not asked for packed sequences in pages.")
    library, clean = load("flashinfer"), without_nan(problem, tensors)
    if problem.shared_kv:
        return _latent(library, problem, clean)
    if problem.varlen or (problem.batch == 1 and problem.seqlen_q > 1 and not problem.seqused):
        return _packed(library, problem, clean)
    return _cached(library, problem, clean)


def _plan(problem: AttentionProblem) -> dict[str, Any]:
    """What both kinds of wrapper are told of the problem."""
    mask = problem.masking
    return {
        "num_qo_heads": problem.heads,
        "num_kv_heads": problem.kv_heads,
        "head_dim_qk": problem.head_dim,
        "head_dim_vo": problem.head_dim_v,
        "causal": mask.kind is not MaskKind.FULL,
        "sm_scale": problem.softmax_scale,
        "window_left": -1 if mask.past is None else mask.past,
        "logits_soft_cap": float(problem.softcap) or None,
        "q_data_type": torch_dtype(problem),
        "kv_data_type": torch_dtype(problem),
    }


def _with_sinks(library: ModuleType, problem: AttentionProblem, tensors: Tensors, backend: str) -> tuple[Any, Any]:
    """(words for a wrapper, arguments of each run): sinks are a variant that it compiles as its own wrapper does
    (`BatchAttentionWithAttentionSinkWrapper`), under a name that has the head_dim."""
    if not problem.sink:
        return {"backend": backend}, ()
    variants, dtype, windowed = library.jit.attention.variants, torch_dtype(problem), problem.masking.past is not None
    dims = f"{problem.head_dim}_{problem.head_dim_v}"
    described = [
        f"evoattn_sink_{problem.dtype}_{dims}_swa_{windowed}_{backend}",
        *(dtype, dtype, dtype, torch.int32, problem.head_dim, problem.head_dim_v),
        *(["sink"], ["float"], ["sm_scale"], ["double"]),
        *("AttentionSink", variants.attention_sink_decl[backend]),
    ]
    strides = "independent" if backend == "fa2" else "runtime"
    options = {"use_sliding_window": windowed, "paged_kv_stride_mode": strides, "module_surface": "full"}
    words = {"backend": backend, "jit_args": described, "jit_kwargs": options}
    return words, (tensors["sinks"].float(), problem.softmax_scale)


def _packed(library: ModuleType, problem: AttentionProblem, tensors: Tensors) -> Call:
    """Sequences that lie end to end, or the only one."""
    q, k, v = (tensor[0].transpose(0, 1) for tensor in qkv(problem, tensors))
    starts = [tensors[name] for name in ("cu_seqlens_q", "cu_seqlens_k") if problem.varlen] or [
        torch.tensor([0, end], dtype=torch.int32, device=q.device) for end in (problem.seqlen_q, problem.seqlen_k)
    ]
    backend = "fa3" if (problem.head_dim, problem.head_dim_v) in HOPPER_DIMS else "fa2"
    words, more = _with_sinks(library, problem, tensors, backend)
    wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(_workspace(q), "NHD", **words)
    wrapper.plan(*starts, **_plan(problem))
    return lambda: wrapper.run(q, k, v, *more).transpose(0, 1)[None]


def _cached(library: ModuleType, problem: AttentionProblem, tensors: Tensors) -> Call:
    """A cache of pages; one of equally long sequences has one page for each."""
    q = _rows(tensors["q"])
    k, v = (tensors["k"], tensors["v"]) if problem.page else whole_keys(problem, tensors)()
    pages = pages_of(problem, tensors, problem.page or problem.seqlen_k)
    words, more = _with_sinks(library, problem, tensors, "fa2")
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(_workspace(q), "HND", **words)
    starts = _even_starts(problem, q.device)
    wrapper.plan(starts, *pages.indexes, page_size=pages.size, **_plan(problem))
    return lambda: _batches(problem, wrapper.run(q, (k, v), *more))


def _latent(library: ModuleType, problem: AttentionProblem, tensors: Tensors) -> Call:
    """V within K: its first columns are the compressed part, the others the rotated one."""
    if problem.kv_heads > 1 or problem.seqused or set(problem.variants) & {"window", "softcap", "sink"}:
        raise PeerRefused("FlashInfer's latent attention is asked for one K/V head and all keys.")
    q, cache = _rows(tensors["q"]), tensors["k"][:, 0]
    size = LATENT_PAGE if problem.seqlen_k % LATENT_PAGE == 0 else problem.seqlen_k
    pages: Pages = pages_of(problem, tensors, size)
    wrapper = library.mla.BatchMLAPagedAttentionWrapper(_workspace(q), backend="fa3")
    metadata = library.mla.MLAPlanMetadata.csr(
        _even_starts(problem, q.device), pages.starts, pages.table, pages.lengths
    )
    wrapper.plan(
        metadata=metadata,
        num_heads=problem.heads,
        head_dim_ckv=problem.head_dim_v,
        head_dim_kpe=problem.head_dim - problem.head_dim_v,
        page_size=size,
        causal=problem.causal,
        sm_scale=problem.softmax_scale,
        q_data_type=q.dtype,
        kv_data_type=q.dtype,
    )
    in_pages = cache.reshape(-1, size, problem.head_dim)
    return lambda: _batches(problem, wrapper.run(query=q, kv_cache=in_pages))


def _workspace(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=like.device)


def _rows(q: torch.Tensor) -> torch.Tensor:
    """`[batch · seqlen_q, heads, head_dim]`: a copy where they do not lie so."""
    return q.transpose(1, 2).flatten(0, 1)


def _batches(problem: AttentionProblem, out: torch.Tensor) -> torch.Tensor:
    """O, as all know it, out of rows."""
    return out.view(problem.batch, problem.seqlen_q, problem.heads, problem.head_dim_v).transpose(1, 2)


def _even_starts(problem: AttentionProblem, device: torch.device) -> torch.Tensor:
    """Where each batch's queries begin."""
    return torch.arange(problem.batch + 1, dtype=torch.int32, device=device) * problem.seqlen_q
