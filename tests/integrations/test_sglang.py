"""SGLang's backend, over stubs with the names of SGLang 0.5.23, and on its own classes where it is there."""

from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace

import pytest
import torch

from evoattn.integrations import sglang as adapter
from evoattn.ops.runtime import current
from tests.integrations.flash_attn_formula import Asked
from tests.integrations.serving_batch import DECODING, DIM, HEADS, KV_HEADS, MIXED, Batch, near
from tests.ops.fake_device import CacheDevice, fake_runtime, split_kv_pick

CONTEXT = 64


class AttentionType(Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


@dataclass
class RadixAttention:
    """The fields of SGLang's layer that the backend reads."""

    scaling: float = 0.2
    layer_id: int = 0
    logit_cap: float = 0.0
    sliding_window_size: int = -1
    attn_type: AttentionType = AttentionType.DECODER
    tp_q_head_num: int = HEADS
    tp_k_head_num: int = KV_HEADS
    qk_head_dim: int = DIM
    v_head_dim: int = DIM


class ForwardMode(Enum):
    EXTEND = 1
    DECODE = 2

    def is_decode_or_idle(self):
        return self is ForwardMode.DECODE


@dataclass
class ForwardBatch:
    """The fields of SGLang's that the backend reads."""

    forward_mode: ForwardMode
    batch_size: int
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens_cpu: torch.Tensor | None = None
    extend_seq_lens: torch.Tensor | None = None
    extend_seq_lens_cpu: list[int] = field(default_factory=list)
    spec_info: object = None


class Pool:
    """Of one layer: slots of keys and values."""

    def __init__(self, batch):
        self.batch = batch
        self.keys, self.values = (cache.flatten(0, 1).clone() for cache in (batch.k, batch.v))

    def get_key_buffer(self, layer_id):
        return self.keys

    def get_value_buffer(self, layer_id):
        return self.values

    def set_kv_buffer(self, layer, loc, cache_k, cache_v):
        self.keys[loc], self.values[loc] = cache_k, cache_v


def runner_of(batch, **others):
    """A `ModelRunner`'s fields: a request has the row of its number plus 2 in the table of slots."""
    slots = torch.full((len(batch.queries) + 2, CONTEXT), 0, dtype=torch.int32)
    table = batch.table.cpu()
    for i, length in enumerate(batch.lengths):
        places = torch.arange(length)
        slots[i + 2, :length] = table[i, places // batch.page] * batch.page + (places % batch.page).int()
    fields = dict(
        token_to_kv_pool=Pool(batch),
        req_to_token_pool=SimpleNamespace(req_to_token=slots),
        model_config=SimpleNamespace(context_len=CONTEXT, is_encoder_decoder=False),
        page_size=batch.page,
        use_mla_backend=False,
        device="cpu",
    )
    return SimpleNamespace(**fields | others)


def served(batch, **of_runner):
    return adapter.Backend(runner_of(batch, **of_runner))


def forward_batch(batch):
    decodes, counts = set(batch.queries) == {1}, torch.tensor(batch.queries)
    return ForwardBatch(
        ForwardMode.DECODE if decodes else ForwardMode.EXTEND,
        len(batch.queries),
        torch.arange(len(batch.queries)) + 2,
        batch.used.long(),
        batch.slots(),
        batch.used.long(),
        None if decodes else counts,
        [] if decodes else batch.queries,
    )


def answer(backend, batch, layer, **words):
    call = backend.forward_decode if set(batch.queries) == {1} else backend.forward_extend
    return call(batch.q.flatten(1), None, None, layer, forward_batch(batch), **words).unflatten(1, (HEADS, DIM))


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("queries", [DECODING, MIXED])
@pytest.mark.parametrize(
    "layer, words, asked",
    [
        ({}, {}, {}),
        ({"sliding_window_size": 7}, {}, {"window_size": (7, 0)}),
        ({"logit_cap": 4.0}, {}, {"softcap": 4.0}),
        ({}, {"sinks": torch.linspace(-1, 1, HEADS)}, {"s_aux": torch.linspace(-1, 1, HEADS)}),
        ({"attn_type": AttentionType.ENCODER_ONLY}, {}, {"causal": False}),
    ],
)
def test_what_layers_ask_for(layer, words, asked, queries, page):
    batch = Batch(queries, page)
    backend = served(batch)
    backend.init_forward_metadata(forward_batch(batch))
    expected = batch.expected(Asked(**{"softmax_scale": 0.2, "causal": True} | asked))[0]
    assert near(answer(backend, batch, RadixAttention(**layer), **words), expected)


def test_new_keys_are_written_first():
    batch = Batch(MIXED)
    backend = served(batch)
    backend.init_forward_metadata(forward_batch(batch))
    k, v = (batch.rows(len(batch.q), KV_HEADS, DIM, seed=seed) for seed in (8, 9))
    found = backend.forward_extend(batch.q, k, v, RadixAttention(), forward_batch(batch))
    pool = backend.token_to_kv_pool
    assert torch.equal(pool.keys[batch.slots()], k)
    batch.k, batch.v = (slots.view(batch.k.shape) for slots in (pool.keys, pool.values))
    assert near(found.unflatten(1, (HEADS, DIM)), batch.expected(Asked(0.2, True))[0])
    kept = pool.keys.clone()
    backend.forward_extend(batch.q, v, k, RadixAttention(), forward_batch(batch), save_kv_cache=False)
    assert torch.equal(pool.keys, kept)


def test_graphs_read_tensors_that_stay(tmp_path):
    """A capture with lengths of 1, replays with others: the same addresses, one launch."""
    batch, device = Batch(DECODING), CacheDevice()
    backend, of_capture = served(batch), forward_batch(batch)
    of_capture.seq_lens = torch.full_like(of_capture.seq_lens, backend.get_cuda_graph_seq_len_fill_value())
    backend.init_cuda_graph_state(8, 8)
    with current.use(fake_runtime(device, tmp_path, split_kv_pick)):
        backend.init_forward_metadata_out_graph(of_capture, in_capture=True)
        captured = backend.forward_metadata
        answer(backend, batch, RadixAttention())
        device.launches.clear()
        backend.init_forward_metadata_out_graph(forward_batch(batch))
        backend.forward_metadata = captured
        found = answer(backend, batch, RadixAttention())
    assert len(device.launches) == 1
    assert near(found, batch.expected(Asked(0.2, True))[0])
    with pytest.raises(ValueError, match="decoding alone"):
        backend.init_forward_metadata_out_graph(forward_batch(Batch(MIXED)))


@pytest.mark.parametrize(
    "of_runner, said",
    [
        ({"use_mla_backend": True}, "MLA"),
        ({"model_config": SimpleNamespace(context_len=CONTEXT, is_encoder_decoder=True)}, "cross attention"),
        ({"token_to_kv_pool": SimpleNamespace(swa_kv_pool=None)}, "disable-hybrid-swa-memory"),
    ],
)
def test_models_that_are_refused(of_runner, said):
    with pytest.raises(ValueError, match=said):
        served(Batch(DECODING), **of_runner)


def test_calls_that_are_refused():
    batch = Batch(DECODING)
    backend, drafts = served(batch), forward_batch(batch)
    drafts.spec_info = object()
    with pytest.raises(ValueError, match="speculative"):
        backend.init_forward_metadata(drafts)
    backend.init_forward_metadata(forward_batch(batch))
    with pytest.raises(ValueError, match="score_mod"):
        answer(backend, batch, RadixAttention(), score_mod=print)
    pool = backend.token_to_kv_pool
    pool.keys = pool.keys.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="fp8"):
        answer(backend, batch, RadixAttention())


def test_the_engine_takes_it():
    registry = pytest.importorskip("sglang.srt.layers.attention.attention_registry")
    adapter.register()
    base = pytest.importorskip("sglang.srt.layers.attention.base_attn_backend")
    batch = Batch(DECODING)
    backend = registry.ATTENTION_BACKENDS["evoattn"](runner_of(batch))
    assert isinstance(backend, base.AttentionBackend)


@pytest.mark.parametrize("lengths, uniform", [([3, 3], True), ([3, 5], False), ([7], True)])
def test_where_the_queries_of_a_prefill_lie(lengths, uniform):
    batch = SimpleNamespace(spec_info=None, forward_mode=ForwardMode.EXTEND, extend_seq_lens_cpu=lengths)
    batch.extend_seq_lens = torch.tensor(lengths, dtype=torch.int32)
    found = adapter.queries_of(batch)
    assert found.bounds.tolist() == [0, *batch.extend_seq_lens.cumsum(0).tolist()]
    assert (found.longest, found.uniform) == (max(lengths), uniform)
    batch = SimpleNamespace(spec_info=None, forward_mode=ForwardMode.DECODE, batch_size=3, seq_lens=torch.ones(3))
    found = adapter.queries_of(batch)
    assert (found.bounds.tolist(), found.longest, found.uniform) == ([0, 1, 2, 3], 1, True)
