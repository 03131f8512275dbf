"""What else answers the batches of `serving.py`, over the same pages. Each is asked once per step what an engine plans
outside of its graphs; that is not timed. Each raises what its library raises where it does not take a batch.

- `gather`: PyTorch gathers the pages, then `varlen_attn` (the places of keys are not timed);
- `fa4`: FlashAttention 4, whose compiler takes seconds a kernel;
- `fa3`: FlashAttention 3 as vLLM builds it, with pages, sinks and latent queries;
- `fi2`, `fi3`: FlashInfer's kernels for tensor cores of Ampere, which split keys, and for those of Hopper."""

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import torch

from evoattn.peers import torch_varlen

Call = Callable[[], torch.Tensor]
WORKSPACE = 256 << 20
"""Bytes, as FlashInfer's documentation has it for many splits."""


class Batch(Protocol):
    """What is asked of `serving.Batch`: q `[rows, heads, columns]`, k and v `[pages, page, kv_heads, columns]`, a page
    table, keys in use and starts of queries, int32; words of the call; and lengths on the host."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    used: torch.Tensor
    starts: torch.Tensor
    words: dict[str, Any]
    is_latent: bool
    page: int
    longest: int
    """Queries of a sequence."""
    key_counts: tuple[int, ...]
    most_keys: int


def gather(batch: Batch) -> Call:
    """PyTorch's: keys out of their pages, end to end. It has no sinks and no latent cache."""
    if "sinks" in batch.words or batch.is_latent:
        raise RuntimeError("varlen_attn has no sinks and no latent cache")
    function = torch_varlen.bound(
        torch_varlen.find(), causal=True, window=batch.words["window"], scale=None,
        group_size=batch.q.shape[1] // batch.k.shape[2],
    )  # fmt: skip
    places = []
    for row, keys in zip(batch.table, batch.key_counts, strict=True):
        key = torch.arange(keys, device=row.device)
        places.append(row.long()[key // batch.page] * batch.page + key % batch.page)
    where, k, v = torch.cat(places), batch.k.flatten(0, 1), batch.v.flatten(0, 1)
    ends = torch.nn.functional.pad(batch.used.cumsum(0, dtype=torch.int32), (1, 0))
    return lambda: function(batch.q, k[where], v[where], batch.starts, ends, batch.longest, batch.most_keys)


def fa4(batch: Batch) -> Call:
    """FlashAttention 4, which has no latent cache on Hopper."""
    from flash_attn.cute import flash_attn_varlen_func

    if batch.is_latent:
        raise RuntimeError("a latent cache")
    window = batch.words["window"]
    words: dict[str, Any] = {"window_size": window} if window else {}
    if "sinks" in batch.words:
        words["learnable_sink"] = batch.words["sinks"]

    def call() -> torch.Tensor:
        out = flash_attn_varlen_func(
            batch.q, batch.k, batch.v, cu_seqlens_q=batch.starts, seqused_k=batch.used, page_table=batch.table,
            max_seqlen_q=batch.longest, causal=True, **words,
        )  # fmt: skip
        found: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return found

    return call


def fa3(batch: Batch) -> Call:
    """FlashAttention 3, whose scheduler's plan is made once, as vLLM does. Of a latent cache K is the rotary part."""
    library = import_module("vllm.vllm_flash_attn.flash_attn_interface")
    q, k, v, more = batch.q, batch.k, batch.v, dict[str, Any]()
    if batch.is_latent:
        split, scale = v.shape[-1], q.shape[-1] ** -0.5
        q, k, more = q[..., split:].contiguous(), k[..., split:], {"q_v": q[..., :split].contiguous()}
        more["softmax_scale"] = scale
    window = batch.words["window"] or (-1, -1)
    plan = library.get_scheduler_metadata(
        len(batch.key_counts), batch.longest, batch.most_keys, q.shape[1], k.shape[2], q.shape[2], batch.used, q.dtype,
        headdim_v=v.shape[-1], cu_seqlens_q=batch.starts, page_size=batch.page, causal=True, window_size=window,
    )  # fmt: skip
    if "sinks" in batch.words:
        more["s_aux"] = batch.words["sinks"]

    def call() -> torch.Tensor:
        out: torch.Tensor = library.flash_attn_varlen_func(
            q, k, v, batch.longest, batch.starts, batch.most_keys, seqused_k=batch.used, block_table=batch.table,
            causal=True, window_size=list(window), scheduler_metadata=plan, fa_version=3, **more,
        )  # fmt: skip
        return out

    return call


def flashinfer(batch: Batch, backend: str) -> Call:
    """FlashInfer's wrappers for packed queries over pages; sinks are a variant that it compiles as its own wrapper
    does."""
    counts = [-(-keys // batch.page) for keys in batch.key_counts]
    kept = torch.cat([row[:count] for row, count in zip(batch.table, counts, strict=True)])
    ends = torch.nn.functional.pad(torch.tensor(counts).cumsum(0), (1, 0)).int()
    starts, ends = batch.starts, ends.to(batch.table.device)
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=batch.q.device)
    q, (heads, dim, value_dim) = batch.q, (*batch.q.shape[1:], batch.v.shape[-1])
    scale = 1 / math.sqrt(dim)
    if batch.is_latent:
        library = import_module("flashinfer.mla")
        wrapper = library.BatchMLAPagedAttentionWrapper(workspace, backend=backend)
        wrapper.plan(
            metadata=library.MLAPlanMetadata.csr(starts, ends, kept, batch.used), num_heads=heads,
            head_dim_ckv=value_dim, head_dim_kpe=dim - value_dim, page_size=batch.page, causal=True, sm_scale=scale,
            q_data_type=q.dtype, kv_data_type=q.dtype,
        )  # fmt: skip
        cache = batch.k[:, :, 0]
        return lambda: wrapper.run(query=q, kv_cache=cache)
    window, words, more = batch.words["window"], dict[str, Any](), tuple[Any, ...]()
    if "sinks" in batch.words:
        decl = import_module("flashinfer.jit.attention.variants").attention_sink_decl[backend]
        words["jit_args"] = [
            f"batch_prefill_attention_sink_bf16_swa_{window is not None}_{backend}", q.dtype, q.dtype, q.dtype,
            torch.int32, dim, value_dim, ["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", decl,
        ]  # fmt: skip
        strides = "independent" if backend == "fa2" else "runtime"
        words["jit_kwargs"] = {
            "use_sliding_window": window is not None, "paged_kv_stride_mode": strides, "module_surface": "full"
        }  # fmt: skip
        more = batch.words["sinks"].float(), scale
    prefill = import_module("flashinfer.prefill")
    wrapper = prefill.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend, **words)
    last = torch.tensor([(keys - 1) % batch.page + 1 for keys in batch.key_counts], dtype=torch.int32)
    wrapper.plan(
        starts, ends, kept, last.to(ends.device), heads, batch.k.shape[2], dim, batch.page, head_dim_vo=value_dim,
        causal=True, sm_scale=scale, window_left=window[0] if window else -1, q_data_type=q.dtype,
        kv_data_type=q.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(q, (batch.k, batch.v), *more)


PEERS: dict[str, Callable[[Any], Call]] = {
    "gather": gather,
    "fa4": fa4,
    "fa3": fa3,
    "fi2": lambda batch: flashinfer(batch, "fa2"),
    "fi3": lambda batch: flashinfer(batch, "fa3"),
}
