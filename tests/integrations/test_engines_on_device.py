"""The engines' backends on a GPU: by kernels alone, without waiting, and in graphs that are replayed with other
lengths."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from evoattn.backends.platform import CudaPlatform
from evoattn.integrations import sglang, vllm
from evoattn.ops.runtime import Runtime, current
from evoattn.portfolio.pick import next_picks
from tests.integrations.flash_attn_formula import Asked
from tests.integrations.serving_batch import DECODING, DIM, HEADS, KV_HEADS, MIXED, Batch, near
from tests.integrations.test_sglang import RadixAttention, forward_batch, runner_of
from tests.integrations.test_vllm import cache_of, common_of
from tests.ops.gpu.gpu_problems import ON_A_GPU, without_waiting

pytestmark = ON_A_GPU
OTHERS = (9, 44, 17, 30)
"""Lengths of the replay."""
ASKED = Asked(0.2, True)


class KernelsAlone(Runtime):
    """Raises `NoKernel` where PyTorch would answer."""

    def attend(self, call):
        return super().attend(replace(call, strict=True))


@pytest.fixture(scope="module", autouse=True)
def runtime(tmp_path_factory):
    ours = KernelsAlone(CudaPlatform(), current.best_known, tmp_path_factory.mktemp("kernels"), others=next_picks)
    ours.estimated = True
    with current.use(ours), torch.no_grad():
        yield ours


def captured(call):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@pytest.mark.parametrize("queries", [DECODING, [3, 3, 3, 3], MIXED, [1, 1, 5, 12]])
@pytest.mark.parametrize("heads_first", [False, True])
def test_vllm(queries, heads_first):
    batch = Batch(queries)
    there, impl = batch.on("cuda"), vllm.Impl(HEADS, DIM, 0.2, KV_HEADS)
    metadata = vllm.Builder().build(0, replace(common_of(there), query_start_loc_cpu=batch.bounds))
    cache, output = cache_of(there, heads_first), torch.empty_like(there.q)
    call = lambda: impl.forward(None, there.q, None, None, cache, metadata, output)
    call()
    assert near(without_waiting(call).cpu(), batch.expected(ASKED)[0])


def test_vllm_writes_new_keys_without_waiting():
    batch = Batch(MIXED)
    there, impl = batch.on("cuda"), vllm.Impl(HEADS, DIM, 0.2, KV_HEADS)
    k, v = (batch.rows(len(batch.q), KV_HEADS, DIM, seed=seed) for seed in (8, 9))
    here, cache, slots = cache_of(batch, True), cache_of(there, True), batch.slots()
    slots[3] = -1
    impl.do_kv_cache_update(None, k, v, here, slots)
    given = [tensor.cuda() for tensor in (k, v, slots)]
    layer = SimpleNamespace(_k_scale=torch.ones(1).cuda(), _v_scale=torch.ones(1).cuda())
    impl.do_kv_cache_update(layer, *given[:2], cache.clone(), given[2])
    without_waiting(lambda: impl.do_kv_cache_update(layer, *given[:2], cache, given[2]))
    assert torch.equal(cache.cpu(), here)


def test_vllm_in_a_graph():
    batch, other = Batch(DECODING), Batch(DECODING, lengths=OTHERS)
    there, impl = batch.on("cuda"), vllm.Impl(HEADS, DIM, 0.2, KV_HEADS)
    metadata = vllm.Builder().build(0, replace(common_of(there), query_start_loc_cpu=batch.bounds))
    cache, output = cache_of(there, False), torch.empty_like(there.q)
    call = lambda: impl.forward(None, there.q, None, None, cache, metadata, output)
    call()
    graph, out = captured(call)
    there.used.copy_(other.used)
    graph.replay()
    assert near(out.cpu(), other.expected(ASKED)[0])


def test_sglang_in_a_graph():
    batch, other = Batch(DECODING), Batch(DECODING, lengths=OTHERS)
    there, later = batch.on("cuda"), other.on("cuda")
    runner, of_later = (runner_of(one, device="cuda") for one in (there, later))
    for one in (runner, of_later):
        one.req_to_token_pool.req_to_token = one.req_to_token_pool.req_to_token.cuda()
    backend = sglang.Backend(runner)
    backend.init_cuda_graph_state(8, 8)
    batches = [forward_batch(one) for one in (there, later)]
    for one in batches:
        one.req_pool_indices = one.req_pool_indices.cuda()
    backend.init_forward_metadata_out_graph(batches[0], in_capture=True)
    call = lambda: backend.forward_decode(there.q, None, None, RadixAttention(), batches[0])
    call()
    graph, out = captured(call)
    backend.req_to_token.copy_(of_later.req_to_token_pool.req_to_token)
    without_waiting(lambda: backend.init_forward_metadata_out_graph(batches[1]))
    graph.replay()
    assert near(out.unflatten(1, (HEADS, DIM)).cpu(), other.expected(ASKED)[0])
