"""vLLM's backend, over metadata made by hand with the names of vLLM 0.33, and on its own classes where it is there."""

import sys
import tomllib
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace

import pytest
import torch

from evoattn.integrations import vllm as adapter
from evoattn.model.paths import ROOT
from evoattn.ops.runtime import current
from evoattn.ops.torch_answer import PROMISE, NoKernel
from tests.integrations.flash_attn_formula import Asked
from tests.integrations.serving_batch import DECODING, DIM, HEADS, KV_HEADS, MIXED, Batch, near
from tests.ops.fake_device import CacheDevice, fake_runtime, split_kv_pick


@dataclass
class CommonAttentionMetadata:
    """The fields of vLLM's that the builder reads."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True


def common_of(batch, **words):
    return CommonAttentionMetadata(
        query_start_loc=batch.bounds,
        query_start_loc_cpu=batch.bounds,
        seq_lens=batch.used,
        num_reqs=len(batch.queries),
        num_actual_tokens=len(batch.q),
        max_query_len=max(batch.queries),
        max_seq_len=max(batch.lengths),
        block_table_tensor=batch.table,
        slot_mapping=batch.slots(),
        **words,
    )


def cache_of(batch, heads_first):
    """[pages, kv_heads, page, 2 · head_dim], in either order in memory."""
    both = torch.cat((batch.k, batch.v), dim=-1)
    return both.transpose(1, 2).contiguous() if heads_first else both.transpose(1, 2)


def answer(batch, words, heads_first=False, behind=3, **of_batch):
    impl = adapter.Impl(HEADS, DIM, 0.2, KV_HEADS, **words)
    metadata = adapter.Builder().build(0, common_of(batch, **of_batch))
    output = torch.full((len(batch.q) + behind, HEADS, DIM), 7.0, dtype=batch.dtype)
    query = torch.cat((batch.q, batch.q.new_zeros(behind, HEADS, DIM)))
    found = impl.forward(None, query, None, None, cache_of(batch, heads_first), metadata, output)
    assert found is output and bool((output[len(batch.q) :] == 7).all())
    return output[: len(batch.q)]


ASKED = [
    ({}, {}),
    ({"sliding_window": 8}, {"window_size": (7, 0)}),
    ({"logits_soft_cap": 4.0}, {"softcap": 4.0}),
    ({"alibi_slopes": [0.1, 0.2, 0.3, 0.4]}, {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}),
    ({"sinks": torch.linspace(-1, 1, HEADS)}, {"s_aux": torch.linspace(-1, 1, HEADS)}),
]


@pytest.mark.parametrize("queries", [DECODING, [3, 3, 3, 3], MIXED])
@pytest.mark.parametrize("words, asked", ASKED)
def test_what_layers_ask_for(words, asked, queries):
    batch = Batch(queries)
    assert near(answer(batch, words), batch.expected(Asked(0.2, True, **asked))[0])


@pytest.mark.parametrize("queries, heads_first", [(DECODING, False), (DECODING, True), ([1, 1, 5, 12], False)])
def test_a_step_is_one_launch_on_the_cache_as_it_lies(tmp_path, queries, heads_first):
    batch, device = Batch(queries), CacheDevice()
    with current.use(fake_runtime(device, tmp_path, split_kv_pick)):
        answer(batch, {}, heads_first)  # compiles and checks
        device.launches.clear()
        found = answer(batch, {}, heads_first)
    assert len(device.launches) == 1
    assert near(found, batch.expected(Asked(0.2, True))[0])


@pytest.mark.parametrize("queries", [[2, 1, 2, 1], [2, 0, 2, 2], [2, 2, 2, 0], [1, 0, 0, 0], [2, 2, 1, 0]])
def test_rows_behind_the_last_request(queries):
    """As many as there would be if all requests had the most queries."""
    batch = Batch(queries)
    expected, rows = batch.expected(Asked(0.2, True))[0], len(batch.q)
    common = common_of(batch)
    common.num_actual_tokens = 4 * max(queries)
    batch.q = torch.cat((batch.q, batch.rows(common.num_actual_tokens - rows, HEADS, DIM, seed=7)))
    output = torch.empty_like(batch.q)
    metadata = adapter.Builder().build(0, common)
    assert metadata.uniform == (queries in ([2, 2, 2, 0], [1, 0, 0, 0]))
    adapter.Impl(HEADS, DIM, 0.2, KV_HEADS).forward(None, batch.q, None, None, cache_of(batch, True), metadata, output)
    assert near(output[:rows], expected)


def test_no_causal_mask():
    batch = Batch(MIXED)
    assert near(answer(batch, {}, causal=False), batch.expected(Asked(0.2, False))[0])
    with pytest.raises(NotImplementedError, match="one causal mask"):
        adapter.Builder().build(0, common_of(batch, causal=torch.ones(4, dtype=torch.bool)))


@pytest.mark.parametrize("page", [16, 64])
def test_new_keys_go_to_their_slots(page):
    """None to slots below 0; rows behind the slots are padding."""
    batch = Batch(MIXED, page)
    k, v = (batch.rows(len(batch.q) + 2, KV_HEADS, DIM, seed=seed) for seed in (8, 9))
    cache, slots = cache_of(batch, True), batch.slots()
    slots[3] = -1
    expected = cache.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // page, :, slot % page] = torch.cat((k[row], v[row]), dim=-1)
    adapter.Impl(HEADS, DIM, 0.2, KV_HEADS).do_kv_cache_update(None, k, v, cache, slots)
    assert torch.equal(cache, expected)


def test_padding_of_a_graph_writes_no_key(tmp_path):
    """It has no slot, and its row of the page table is another's: a kernel that wrote keys by the table would write
    there."""
    batch = Batch(DECODING, lengths=(40, 33, 1, 1))
    batch.table[2:] = batch.table[0]
    k, cache, slots = batch.rows(4, KV_HEADS, DIM, seed=8), cache_of(batch, True), batch.slots()
    slots[2:] = -1
    both, others = torch.cat((k, k), dim=-1), torch.ones(cache.shape[0], batch.page, dtype=torch.bool)
    others.view(-1)[slots[:2]] = False
    impl, metadata = adapter.Impl(HEADS, DIM, 0.2, KV_HEADS), adapter.Builder().build(0, common_of(batch))
    impl.do_kv_cache_update(None, k, k, cache, slots)
    with current.use(fake_runtime(CacheDevice(), tmp_path, split_kv_pick)):
        impl.forward(None, batch.q, None, None, cache, metadata, torch.empty_like(batch.q))
    kept = cache.transpose(1, 2)
    assert torch.equal(kept.flatten(0, 1)[slots[:2]], both[:2])
    assert torch.equal(kept[others], cache_of(batch, True).transpose(1, 2)[others])


def test_encoders_have_no_cache():
    """Packed sequences that see themselves whole."""
    batch = Batch(MIXED)
    impl = adapter.Impl(HEADS, DIM, 0.2, KV_HEADS, sliding_window=4, attn_type="encoder_only")
    k, v = (batch.rows(len(batch.q), KV_HEADS, DIM, seed=seed) for seed in (8, 9))
    output, empty = torch.empty_like(batch.q), torch.empty(0)
    metadata = adapter.Builder().build(0, common_of(batch, causal=False))
    impl.do_kv_cache_update(None, k, v, empty, batch.slots())
    impl.forward(None, batch.q, k, v, empty, metadata, output)
    for first, behind in zip(batch.bounds, batch.bounds[1:]):
        rows = slice(first, behind)
        assert near(output[rows], Asked(0.2, window_size=(3, 3)).of(batch.q[rows], k[rows], v[rows])[0])


def test_other_words_of_the_engine():
    impl, output = adapter.Impl(HEADS, DIM, 0.2), torch.ones(2, HEADS, DIM)
    assert not impl.forward(None, output, None, None, output, None, output).any()  # measures memory
    for scale in ("output_scale", "output_block_scale"):
        with pytest.raises(NotImplementedError, match="quantised"):
            impl.forward(None, output, None, None, output, None, output, **{scale: output})
    with pytest.raises(ValueError, match="is for vLLM"):
        adapter.halves(torch.zeros(2, 8, 16, KV_HEADS, DIM), DIM)
    metadata = adapter.Builder().build(0, common_of(Batch(DECODING)))
    moved = adapter.Builder().update_block_table(metadata, torch.ones(4, 2), torch.ones(4))
    assert moved.block_table.shape == (4, 2) and moved.seq_lens is metadata.seq_lens


def test_what_it_says_that_it_serves():
    backend, capability = adapter.Backend, SimpleNamespace(major=9)
    assert backend.supports_head_size(80) and not backend.supports_head_size(59) and not backend.supports_head_size(576)
    assert backend.supports_compute_capability(capability) and backend.supports_attn_type("decoder")
    assert not backend.supports_attn_type("encoder_decoder")
    assert backend.supports_combination(64, torch.bfloat16, "auto", 16) is None
    assert "dtype" in backend.supports_combination(64, torch.float16, "bfloat16", 16)
    assert not backend.supports_device_cpu_query_lens_mismatch()


def test_the_engine_s_switch_promises_the_same_bits(monkeypatch):
    engine = ModuleType("vllm")
    engine.envs = SimpleNamespace(VLLM_BATCH_INVARIANT=True)
    monkeypatch.setitem(sys.modules, "vllm", engine)
    monkeypatch.setattr(PROMISE, "everywhere", False)
    assert adapter.Backend.supports_batch_invariance()
    with pytest.raises(NoKernel, match="batch_invariant"):  # as PyTorch computes on a CPU
        answer(Batch(DECODING), {})


def test_classes_on_the_bases_of_the_engine():
    class Base:
        @classmethod
        def supports_sink(cls):
            return False

    engine = SimpleNamespace(
        AttentionBackend=Base,
        AttentionImpl=object,
        AttentionMetadataBuilder=object,
        AttentionCGSupport=Enum("AttentionCGSupport", ["ALWAYS", "UNIFORM_BATCH"]),
    )
    classes = adapter.joined(engine)
    assert classes["backend"].supports_sink() and issubclass(classes["backend"], Base)
    assert classes["builder"]._cudagraph_support is engine.AttentionCGSupport.UNIFORM_BATCH
    assert classes["impl"](HEADS, DIM, 0.2).num_kv_heads == HEADS


def test_it_has_no_other_names():
    with pytest.raises(AttributeError, match=r"module evoattn\.integrations\.vllm has no AnotherBackend"):
        adapter.AnotherBackend  # noqa: B018


@pytest.mark.parametrize("group", ["vllm.general_plugins", "sglang.srt.plugins"])
def test_entry_points_name_functions(group):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][group]
    assert callable(EntryPoint("evoattn", declared["evoattn"], group).load())


def test_the_engine_takes_it():
    engine = pytest.importorskip("vllm.v1.attention.backend")
    registry = pytest.importorskip("vllm.v1.attention.backends.registry")
    adapter.register()
    adapter.register()
    backend = registry.AttentionBackendEnum.CUSTOM.get_class()
    assert issubclass(backend, engine.AttentionBackend) and backend.get_name() == "CUSTOM"
    words = dict(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16, use_mla=False)
    words |= dict(has_sink=True, use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False)
    words |= dict(device_capability=SimpleNamespace(major=9, minor=0), attn_type="decoder", has_sliding_window=True)
    assert not backend.validate_configuration(**words)
    assert backend.validate_configuration(**words | dict(use_mla=True, head_size=576))
    batch = Batch(MIXED)
    common = engine.CommonAttentionMetadata(**vars(common_of(batch)))
    impl = backend.get_impl_cls()(HEADS, DIM, 0.2, KV_HEADS, None, None, "auto")
    metadata = backend.get_builder_cls()(None, [], None, torch.device("cpu")).build(0, common)
    output = torch.empty_like(batch.q)
    impl.forward(None, batch.q, None, None, cache_of(batch, True), metadata, output)
    assert near(output, batch.expected(Asked(0.2, True))[0])
