"""SGLang's attention backend `evoattn`: `python -m sglang.launch_server … --attention-backend evoattn`.

SGLang finds `register` by the entry point `sglang.srt.plugins` of this package. What it asks of a backend is in
https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/layers/attention/base_attn_backend.py; methods,
arguments and fields here have the names of version 0.5.23."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evoattn.integrations.flash_attn.cache import Cache, attend_engine
from evoattn.integrations.flash_attn.options import OPEN, Options, refuse_fp8
from evoattn.integrations.flash_attn.sequences import Queries

NAME = "evoattn"


@dataclass
class Metadata:
    """Of one forward pass, for all layers."""

    queries: Queries
    seq_lens: Tensor
    """`[batch]`, int32: keys of each request, the new ones among them."""
    page_table: Tensor
    """`[batch, most pages]`, int32"""


class Backend:
    """Attention over SGLang's pool of keys and values, which it writes itself."""

    needs_cpu_seq_lens = False
    forward_metadata: Metadata | None = None

    def __init__(self, model_runner: Any) -> None:
        """Raises `ValueError` for models whose caches are not one pool of keys and values."""
        super().__init__()
        pool = model_runner.token_to_kv_pool
        for reason, refused in (
            ("latent caches (MLA)", model_runner.use_mla_backend),
            ("cross attention", model_runner.model_config.is_encoder_decoder),
            ("a pool of its own for windows (--disable-hybrid-swa-memory has none)", hasattr(pool, "swa_kv_pool")),
        ):
            if refused:
                raise ValueError(f"SGLang's backend `{NAME}` does not serve {reason}; take another one.")
        self.token_to_kv_pool, self.page_size = pool, model_runner.page_size
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.max_context_len, self.device = model_runner.model_config.context_len, model_runner.device
        self._graph: Metadata | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Eager passes. Nothing waits for the device: how far the table goes, the lengths on the CPU say."""
        batch, on_cpu = forward_batch, forward_batch.seq_lens_cpu
        longest = self.max_context_len if on_cpu is None or not len(on_cpu) else int(on_cpu.max())
        self.forward_metadata = Metadata(
            queries_of(batch), batch.seq_lens.to(torch.int32), self._table(batch.req_pool_indices, longest)
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Tensors for steps of decoding, one query for each request, that graphs read."""
        numbers = {"dtype": torch.int32, "device": self.device}
        self._graph = Metadata(
            Queries(torch.arange(max_bs + 1, **numbers), 1),
            torch.ones(max_bs, **numbers),
            torch.zeros(max_bs, -(-self.max_context_len // self.page_size), **numbers),
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Write the batch's lengths and pages into these tensors, before a capture and before each replay."""
        batch, kept = forward_batch, self._graph
        if not batch.forward_mode.is_decode_or_idle() or batch.spec_info is not None or kept is None:
            raise ValueError(f"SGLang's backend `{NAME}` has CUDA graphs for steps of decoding alone.")
        size = batch.batch_size
        kept.seq_lens[:size].copy_(batch.seq_lens[:size])
        kept.page_table[:size].copy_(self._table(batch.req_pool_indices[:size], self.max_context_len))
        queries = Queries(kept.queries.bounds[: size + 1], 1)
        self.forward_metadata = Metadata(queries, kept.seq_lens[:size], kept.page_table[:size])

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **unknown: Any,
    ) -> Tensor:
        """q of `tokens · heads · head_dim` numbers; the output `[tokens, heads · head_dim of V]`. Raises `ValueError`
        where one of the `unknown` words is given, which are those of other backends."""
        if given := [word for word, value in unknown.items() if value is not None]:
            raise ValueError(f"SGLang's backend `{NAME}` does not serve {', '.join(given)}; take another one.")
        assert self.forward_metadata is not None
        of_batch, pool = self.forward_metadata, self.token_to_kv_pool
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        caches = [
            pages.view(-1, self.page_size, *pages.shape[1:])
            for pages in (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id))
        ]
        refuse_fp8(caches[0])
        table = of_batch.page_table
        cache = Cache(caches[0], caches[1], len(table), of_batch.seq_lens, table)
        rows = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        answer = attend_engine(rows, of_batch.queries, cache, options_of(layer, sinks))
        assert isinstance(answer, Tensor)
        return answer.flatten(1)

    forward_extend = forward_decode
    """Chunks of prompts, with the keys that are there already: the same call, with more queries."""

    def support_triton(self) -> bool:
        return False

    def _table(self, requests: Tensor, longest: int) -> Tensor:
        """`[requests, pages of the longest]`: SGLang keeps the slot of each key."""
        slots = self.req_to_token[requests, : max(1, longest) : self.page_size]
        return torch.div(slots, self.page_size, rounding_mode="floor").to(torch.int32)


def queries_of(batch: Any) -> Queries:
    """Where the queries of a `ForwardBatch` lie. Raises `ValueError` for drafts, which have masks of their own."""
    if batch.spec_info is not None:
        raise ValueError(f"SGLang's backend `{NAME}` does not serve speculative decoding; take another one for it.")
    if batch.forward_mode.is_decode_or_idle():
        bounds = torch.arange(batch.batch_size + 1, dtype=torch.int32, device=batch.seq_lens.device)
        return Queries(bounds, 1, uniform=True)
    lengths = batch.extend_seq_lens_cpu
    longest = max(lengths, default=0)
    ends = batch.extend_seq_lens.cumsum(0, dtype=torch.int32)
    return Queries(torch.nn.functional.pad(ends, (1, 0)), longest, uniform=min(lengths, default=0) == longest)


def options_of(layer: Any, sinks: Tensor | None) -> Options:
    """Of a `RadixAttention`, whose window does not count the query's own key, and which has no slopes."""
    past = OPEN if layer.sliding_window_size is None else max(OPEN, layer.sliding_window_size)
    causal = getattr(layer.attn_type, "value", layer.attn_type) == "decoder"
    window = past, OPEN if causal else past
    return Options(layer.scaling, causal, window, layer.logit_cap or 0.0, sinks=sinks)


def register() -> None:
    """Make `evoattn` one of SGLang's attention backends. May be called any number of times."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(create)


def create(runner: Any) -> Any:
    """The backend of a `ModelRunner`, on SGLang's base class."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    return type("EvoattnBackend", (Backend, AttentionBackend), {})(runner)
