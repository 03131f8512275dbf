"""vLLM's attention backend `CUSTOM`: `vllm serve … --attention-backend CUSTOM`.

vLLM finds `register` by the entry point `vllm.general_plugins` of this package. What it asks of a backend is in
https://github.com/vllm-project/vllm/blob/main/vllm/v1/attention/backend.py; methods, arguments and fields here have the
names of version 0.33.0. Nothing of vLLM is imported before it asks for `EngineBackend`."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from evoattn.integrations.flash_attn.cache import Cache, attend_engine, write_rows
from evoattn.integrations.flash_attn.options import MOST_COLUMNS, Options
from evoattn.integrations.flash_attn.sequences import Keys, Queries, over_rows
from evoattn.model.variant import PAGES
from evoattn.ops.torch_answer import PROMISE

ENCODERS = ("encoder", "encoder_only")


@dataclass
class Metadata:
    """Of one batch, for all layers; tensors are vLLM's own, whose contents change between replays of a graph."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    """`[num_reqs + 1]`"""
    max_seq_len: int
    seq_lens: Tensor
    """`[num_reqs]`"""
    block_table: Tensor
    """`[num_reqs, most pages]`"""
    slot_mapping: Tensor
    """`[num_actual_tokens]`: page · its size + place of each new key, below 0 for none."""
    causal: bool
    uniform: bool = False
    """Whether each has `max_query_len` queries, but for padding at the end, which has none."""


class Backend:
    """What vLLM asks before it takes a backend; each yes holds."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type:
        return of_engine()["impl"]

    @staticmethod
    def get_builder_cls() -> type:
        return of_engine()["builder"]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """Pages of kernels; vLLM cuts its own blocks into the largest of them."""
        return list(PAGES)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 0 < head_size <= MOST_COLUMNS

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in ("decoder", *ENCODERS)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Asked where `keeps_bits`."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Whether batches have as many queries in each sequence is decided by numbers of the CPU."""
        return False

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *_: Any, **__: Any
    ) -> str | None:
        if kv_cache_dtype in (None, "auto", str(dtype).removeprefix("torch.")):
            return None
        return "evoattn needs a KV cache of the model's own dtype"


class Builder:
    """Makes `Metadata`: names for what there is already; nothing is copied to the device or waited for."""

    supports_update_block_table = True
    reorder_batch_threshold = 1
    """vLLM puts requests with at most one query first."""

    def __init__(
        self, kv_cache_spec: Any = None, layer_names: Any = (), vllm_config: Any = None, device: Any = None
    ) -> None:
        self.kv_cache_spec, self.layer_names, self.vllm_config = kv_cache_spec, layer_names, vllm_config
        self.device = device

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        common = common_attn_metadata
        if isinstance(common.causal, Tensor):
            raise NotImplementedError("evoattn takes one causal mask for a batch, not one for each of its requests.")
        starts, longest = common.query_start_loc_cpu, max(1, common.max_query_len)
        rows, number = int(starts[-1]), torch.arange(len(starts), dtype=starts.dtype)
        return Metadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
            uniform=rows % longest == 0 and torch.equal(starts, (number * longest).clamp(max=rows)),
        )

    def update_block_table(self, metadata: Metadata, blk_table: Tensor, slot_mapping: Tensor) -> Metadata:
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


class Impl:
    """Attention of one layer."""

    def __init__(  # noqa: PLR0913 - vLLM's arguments
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """A layer's sliding window counts the query's own key. Slopes are positive and taken away, as in
        FlashAttention."""
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name, self.sinks = kv_sharing_target_layer_name, sinks
        past, ahead = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.options = Options(
            scale=self.scale,
            window=(past, past if attn_type in ENCODERS else ahead),
            softcap=logits_soft_cap or 0.0,
            slopes=slopes,
            sinks=sinks,
        )
        if keeps_bits():
            PROMISE.everywhere = True  # of this process: all of its calls are the engine's

    def forward(  # noqa: PLR0913 - vLLM's arguments
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query `[tokens, heads, head_size]`, kv_cache `[pages, kv_heads, page, 2 · head_size]`; what is written to
        `output` are rows up to `num_actual_tokens`. Raises `NotImplementedError` for outputs to be quantised."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("evoattn writes outputs in the dtype of the queries, not quantised ones.")
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        rows, bounds = attn_metadata.num_actual_tokens, attn_metadata.query_start_loc
        query, queries = query[:rows], Queries(bounds, attn_metadata.max_query_len, uniform=attn_metadata.uniform)
        options = self._options_on(query.device)
        if self.attn_type in ENCODERS:
            keys = Keys(bounds[:-1], attn_metadata.max_query_len, bounds=bounds)
            answer = over_rows(query, key[:rows], value[:rows], queries, keys, options)
        else:
            k, v = halves(kv_cache, self.head_size)
            pages = Cache(k, v, len(bounds) - 1, attn_metadata.seq_lens, attn_metadata.block_table)
            answer = attend_engine(query, queries, pages, replace(options, causal=attn_metadata.causal))
        assert isinstance(answer, Tensor)
        output[:rows].view(answer.shape).copy_(answer)
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the new keys and values `[tokens, kv_heads, head_size]` to their slots."""
        if self.attn_type in ENCODERS or self.kv_sharing_target_layer_name is not None or not kv_cache.numel():
            return
        caches = halves(kv_cache, self.head_size)
        if (write := writer()) is not None and kv_cache.is_cuda:
            write(key, value, *caches, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale)
            return
        page, rows = caches[0].shape[1], len(slot_mapping)
        slots = slot_mapping.long()
        at, offset = torch.div(slots, page, rounding_mode="floor"), slots % page
        write_rows(caches, (key[:rows], value[:rows]), at, offset, slots >= 0)

    def _options_on(self, device: torch.device) -> Options:
        if self.options.slopes is not None and self.options.slopes.device != device:
            self.options = replace(self.options, slopes=self.options.slopes.to(device))
        return self.options


def halves(kv_cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """K and V `[pages, page, kv_heads, head_size]` of a layer's cache, as views. Raises `ValueError` for the shapes of
    older versions of vLLM."""
    if kv_cache.dim() != 4 or kv_cache.shape[-1] != 2 * head_size:
        raise ValueError(
            f"A KV cache of shape {tuple(kv_cache.shape)} is not [pages, kv_heads, page, 2 · {head_size}]: evoattn's "
            f"backend is for vLLM 0.33 and newer."
        )
    k, v = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    return k, v


def keeps_bits() -> bool:
    """Whether the engine asks for the same bits in every batch."""
    try:
        from vllm import envs
    except ImportError:
        return False
    return bool(envs.VLLM_BATCH_INVARIANT)


@cache
def writer() -> Any:
    """vLLM's own kernel that writes keys to slots; None where there is none."""
    try:
        from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash
    except ImportError:
        return None
    return triton_reshape_and_cache_flash


def joined(engine: Any) -> dict[str, type]:
    """The three classes on the bases of `engine`, which is the module `vllm.v1.attention.backend`.

    Graphs are promised for batches with as many queries in each sequence: these are one launch, whose lengths the
    device reads. Others may be several, whose number depends on the batch."""
    builder = {"_cudagraph_support": engine.AttentionCGSupport.UNIFORM_BATCH, "__module__": __name__}
    return {
        "backend": type("EngineBackend", (Backend, engine.AttentionBackend), {"__module__": __name__}),
        "builder": type("EngineBuilder", (Builder, engine.AttentionMetadataBuilder), builder),
        "impl": type("EngineImpl", (Impl, engine.AttentionImpl), {"__module__": __name__}),
    }


@cache
def of_engine() -> dict[str, type]:
    from vllm.v1.attention import backend

    return joined(backend)


def register() -> None:
    """Make evoattn vLLM's backend `CUSTOM`, unless another package has taken the name. May be called in each of vLLM's
    processes, any number of times."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.EngineBackend")


def __getattr__(name: str) -> type:
    """vLLM looks for its backend under the name that `register` gave."""
    if name == "EngineBackend":
        return of_engine()["backend"]
    raise AttributeError(f"module {__name__} has no {name}")
