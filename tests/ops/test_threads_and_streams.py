"""The op on other threads, streams and devices than the one that it first ran on, and in a capture."""

import threading
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.ops.attention import attention
from evoattn.ops.call import Call, terms_of
from evoattn.ops.custom_op import operands, variant_op
from evoattn.ops.explain import warmup
from evoattn.ops.given import of_sequences
from evoattn.ops.plan import MOST_KEPT, CallPlan, Scratch
from evoattn.ops.runtime import current
from evoattn.ops.torch_answer import NoKernel
from tests.ops.fake_device import WGMMA, CacheDevice, Pick, fake_runtime, near, reference, split_kv_pick, tensors


@pytest.mark.slow
def test_streams_have_zeroed_scratch_of_their_own(device, tmp_path):
    def pick(problem, gpu):
        return Pick("flash_wgmma", KernelConfig("flash_wgmma", WGMMA | {"SCHEDULE": "claimed"}))

    q, k, v = tensors(batch=4, heads=64, kv_heads=64)
    runtime = fake_runtime(device, tmp_path, pick)
    with current.use(runtime):
        for stream in (7, 8, 7):
            device.now = stream
            assert near(attention(q, k, v, strict=True), reference(q, k, v))
        assert [one.stream for one in device.launches[-3:]] == [7, 8, 7]
        device.now = 9  # compiled code may be about to be captured: zeros that stay come from no graph's pool
        torch.ops.evoattn.attention(q, k, v, "full", False, None, True)
        device.is_capturing = True
        attention(q, k, v, strict=True)
    assert [one.stream for one in device.launches[-2:]] == [9, 9]
    assert set(runtime._kernels._scratch._kept) == {(-1, 7, True), (-1, 8, True), (-1, 9, True)}
    assert device.outside == 1


def test_memory_of_variants_in_compiled_code_comes_from_no_pool(tmp_path):
    """The first runs of compiled code may allocate from the pool of a graph that is to come, whose replays would write
    into what is kept."""

    def pick(problem, gpu):
        parts = split_kv_pick(problem, gpu).config.params | {"SPLITS": 2, "MERGE": "last_block"}
        return Pick("split_kv", KernelConfig("split_kv", parts))

    device, (q, k, v) = CacheDevice(), tensors()
    used = torch.full((2,), 45, dtype=torch.int32)
    with current.use(fake_runtime(device, tmp_path, pick)) as runtime:
        variant_op(*operands(Call(q, k, v, enable_gqa=True, terms=terms_of(seqused_k=used), strict=True)))
        assert device.outside == len(runtime._kernels._scratch._kept) > 0


@pytest.mark.slow
def test_memory_of_packed_sequences_in_compiled_code_comes_from_no_pool(device, tmp_path):
    def pick(problem, gpu):
        return Pick("flash_wgmma", KernelConfig("flash_wgmma", WGMMA | {"SCHEDULE": "claimed"}))

    q, k, v = (torch.randn(1024, 16, 64).half() for _ in range(3))
    starts = torch.tensor([0, 300, 1024], dtype=torch.int32)
    terms = terms_of(cu_seqlens_q=starts, cu_seqlens_k=starts)
    with current.use(fake_runtime(device, tmp_path, pick)) as runtime:
        variant_op(*operands(Call(**of_sequences(q, k, v, (1024, 1024), None), terms=terms, strict=True)))
        assert device.outside == len(runtime._kernels._scratch._kept) > 0


def test_scratch_is_kept_per_stream_unless_it_is_large(device):
    scratch, here = Scratch(device), torch.device("cpu")
    kept = scratch.get(64, False, here, -1, 7, False)
    assert scratch.get(16, False, here, -1, 7, False) is kept
    assert scratch.get(16, True, here, -1, 7, False) is not kept
    assert scratch.get(16, False, here, -1, 8, False) is not kept
    assert scratch.get(16, False, here, -1, 7, True) is kept
    device.is_capturing = True
    assert scratch.get(16, False, here, -1, 7, True) is not kept, "a graph has memory of its own"
    device.is_capturing = False
    large = scratch.get(MOST_KEPT + 1, False, here, -1, 9, False)
    assert scratch.get(MOST_KEPT + 1, False, here, -1, 9, False) is not large
    assert scratch.get(65, False, here, -1, 7, False).numel() == 65
    scratch.forget()
    assert scratch.get(64, True, here, -1, 7, False).count_nonzero() == 0


def test_a_thread_without_a_context_gets_one(device):
    q, k, v = tensors()
    attention(q, k, v, enable_gqa=True)
    device.status, before = 201, device.contexts
    original = device.make_context_current

    def heal(index):
        device.status = 0
        original(index)

    device.make_context_current = heal
    assert near(attention(q, k, v, enable_gqa=True, strict=True), reference(q, k, v))
    assert device.contexts == before + 1


def test_a_capture_loads_nothing(device):
    q, k, v = tensors()
    device.is_capturing = True
    with pytest.warns(RuntimeWarning, match=r"SDPA was captured for B=2.*call evoattn.warmup"):
        answer = attention(q, k, v, enable_gqa=True)
    assert torch.equal(answer, F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(q, k, v, enable_gqa=True)  # said once
        device.is_capturing = False
        assert warmup(["B=2,H=4,Hkv=2,Sq=37,Sk=45,D=64,dtype=fp16"])[0].startswith("flash_wgmma")
        device.is_capturing, before = True, device.loads
        assert near(attention(q, k, v, enable_gqa=True, strict=True), reference(q, k, v))
        attention(q[:, :, :9].clone(), k, v, enable_gqa=True, strict=True)  # another shape, the same kernel
    assert device.loads == before


def test_another_current_device_is_guarded(device):
    device.here = 3
    guards = len(device.guards)
    attention(*tensors(), enable_gqa=True, strict=True)
    assert device.guards[-1] == -1
    assert len(device.guards) > guards


def test_threads_share_a_plan(device):
    rounds, wrong = 20, []
    inputs = [tensors() for _ in range(4)]
    inputs = [tuple(t + i for t in three) for i, three in enumerate(inputs)]
    expected = [reference(*three) for three in inputs]

    def work(i):
        for _ in range(rounds):
            if not near(attention(*inputs[i], enable_gqa=True, strict=True), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert device.loads == 1


class SlowLaunch:
    """Of a call called `name`: what a launch is to a plan."""

    config = arguments = None
    kernel, addresses = "slow", 6

    def __init__(self, name):
        self.function = name

    def bind(self, addresses, sizes=None):
        pass

    def set_stream(self, stream):
        pass


@pytest.mark.parametrize("names", ["aa bb cc", "aa bb c"])
def test_calls_of_several_launches_of_one_stream_do_not_mix(device, names):
    """Threads share torch's default stream, and so its scratch memory: the second launch reads what the first wrote,
    and a call of one launch may write there too."""
    launched = []

    def launch(config, function, arguments, extra):
        launched.append(function)
        time.sleep(0.002)  # other threads run meanwhile, as in a call of the driver
        return 0

    device.launch = launch
    scratch, problem = Scratch(device), AttentionProblem(2, 4, 2, 37, 45, 64)
    kernel = SimpleNamespace(index=-1, failure="")
    calls = names.split()
    choice = SimpleNamespace(problem=problem, words="")
    plans = [CallPlan(choice, kernel, tuple(map(SlowLaunch, call)), (64, 0, scratch), (), device) for call in calls]
    q, k, v = tensors()

    def work(plan):
        for _ in range(5):
            assert plan.run(Call(q, k, v), (q, k, v, q), None) == ""

    threads = [threading.Thread(target=work, args=(plan,)) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted("".join(launched)) == sorted(5 * "".join(calls))
    assert not "".join(launched).replace("aa", "").replace("bb", "").replace("cc", "").replace("c", "")


def test_without_memory_for_scratch_torch_answers(device, tmp_path):
    def pick(problem, gpu):
        return Pick("flash_wgmma", KernelConfig("flash_wgmma", WGMMA | {"SCHEDULE": "claimed"}))

    def run_out(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    q, k, v = tensors(batch=4, heads=64, kv_heads=64)
    runtime = fake_runtime(device, tmp_path, pick)
    with current.use(runtime), warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(q, k, v, strict=True)
        enough, runtime._kernels._scratch.get = runtime._kernels._scratch.get, run_out
        assert torch.equal(attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
        with pytest.raises(NoKernel, match="no memory left"):
            attention(q, k, v, strict=True)
        runtime._kernels._scratch.get = enough
        assert near(attention(q, k, v, strict=True), reference(q, k, v)), "the kernel stays in use"
