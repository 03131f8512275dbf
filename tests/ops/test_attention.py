"""`evoattn.attention` with a fake device: what reaches the launch, what goes to SDPA instead, and what happens when
something fails.
"""

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from fake_device import WGMMA, Pick, fake_runtime, near, reference, tensors, wgmma_pick

from evoattn.backends.base import LaunchError
from evoattn.model.space import KernelConfig
from evoattn.ops import current
from evoattn.ops.attention import attention
from evoattn.ops.explain import explain, warmup
from evoattn.ops.runtime import NoKernel


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_a_kernel_gets_the_right_arguments(device, layout, is_causal, scale):
    q, k, v = tensors(layout=layout)
    answer = attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True, strict=True)
    assert near(answer, reference(q, k, v, is_causal=is_causal, scale=scale))
    assert answer.stride() == q.stride()
    assert answer.dtype == q.dtype
    assert device.launches[-1].addresses == tuple(t.data_ptr() for t in (q, k, v, answer))


def test_lower_right_and_log_sum_exp(device):
    q, k, v = tensors(seqlen_q=45, seqlen_k=37)
    answer, lse = attention(
        q, k, v, is_causal=True, causal="lower_right", enable_gqa=True, return_lse=True, strict=True
    )
    other, other_lse = attention(  # a scale under which torch computes both
        q, k, v, is_causal=True, causal="lower_right", enable_gqa=True, return_lse=True, scale=-(64**-0.5)
    )
    assert lse.shape == (2, 4, 45)
    assert lse.dtype == torch.float32
    assert (lse[:, :, :8] == -torch.inf).all()
    assert (answer[:, :, :8] == 0).all()
    assert (other_lse[:, :, :8] == -torch.inf).all()
    assert (other[:, :, :8] == 0).all()
    expected, expected_lse = attention(
        -q, k, v, is_causal=True, causal="lower_right", enable_gqa=True, return_lse=True, scale=-(64**-0.5)
    )
    assert near(answer, expected)
    assert torch.allclose(lse, expected_lse, atol=1e-3)


def test_a_last_query_alone_needs_no_mask(device):
    q, k, v = tensors(seqlen_q=1)
    words = dict(is_causal=True, causal="lower_right", enable_gqa=True)
    assert near(attention(q, k, v, **words, strict=True), reference(q, k, v))
    attention(q, k, v, enable_gqa=True)
    assert device.loads == 1, "one kernel serves both"


def test_views_into_a_packed_tensor_are_read_where_they_lie(device):
    packed = torch.randn(2, 33, 3, 4, 64, dtype=torch.float16)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    answer = attention(q, k, v, strict=True)
    assert near(answer, reference(q, k, v))
    assert answer.transpose(1, 2).is_contiguous()


def test_a_dimension_of_one_element_may_have_any_stride(device):
    q, k, v = (t.as_strided(t.shape, (3, *t.stride()[1:])) for t in tensors(batch=1))
    assert near(attention(q, k, v, enable_gqa=True, strict=True), reference(q, k, v))


def test_the_second_call_decides_and_encodes_nothing(device):
    q, k, v = tensors()
    attention(q, k, v, enable_gqa=True)
    encoded, loads = len(device.encoded), device.loads
    out = torch.empty_like(q)
    attention(q, k, v, enable_gqa=True, out=out)
    attention(q.clone(), k, v, enable_gqa=True, out=out)
    assert device.loads == loads
    assert device.launches[-1].addresses[1:3] == (k.data_ptr(), v.data_ptr())
    moved = len(device.moved)
    attention(q, k, v, enable_gqa=True, out=out)
    assert len(device.moved) == moved + 1, "only the query's address had changed"
    assert len(device.encoded) == encoded + 4, "out has a plan of its own"
    attention(q, k, v, enable_gqa=True, out=out)
    assert len(device.moved) == moved + 1


def test_out(device):
    q, k, v = tensors()
    out = torch.empty(2, 37, 4, 64, dtype=torch.float16).transpose(1, 2)
    assert attention(q, k, v, enable_gqa=True, out=out, strict=True) is out
    assert near(out, reference(q, k, v))
    expected = reference(q, q, q)
    assert attention(q, q, q, out=q, strict=True) is q
    assert near(q, expected), "the kernel must not write over what it still reads"
    with pytest.raises(ValueError, match="out must be"):
        attention(*tensors(), enable_gqa=True, out=torch.empty(2, 4, 37, 64))


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
        device.now = 9  # compiled code and captures take zeros of their own
        torch.ops.evoattn.attention(q, k, v, False, "upper_left", None, True)
        device.is_capturing = True
        attention(q, k, v, strict=True)
    assert [one.stream for one in device.launches[-2:]] == [9, 9]
    assert set(runtime._zeroed._kept) == {(-1, 7), (-1, 8)}


def fallbacks():
    q, k, v = tensors()
    yield "on the META", dict(query=q.to("meta"), key=k.to("meta"), value=v.to("meta"))
    yield "gradients", dict(query=q.clone().requires_grad_(), key=k, value=v)
    yield "float64", dict(query=q.double(), key=k.double(), value=v.double())
    yield "four dimensions", dict(query=q[0], key=k[0], value=v[0])
    yield "head_dim of value", dict(query=q, key=k, value=v[..., :32])
    yield "empty", dict(query=q[:, :, :0], key=k, value=v)
    wide = torch.randn(2, 4, 37, 128, dtype=torch.float16)
    yield "last dimension has stride 2", dict(query=wide[..., ::2], key=k, value=v)
    odd = torch.randn(2, 4, 37, 67, dtype=torch.float16)[..., :64]
    yield "stride of 19832 bytes", dict(query=odd, key=k, value=v)
    yield "head stride of 0", dict(query=q, key=k[:, :1].expand(2, 2, 45, 64), value=v)
    yield "positive, finite scale", dict(query=q, key=k, value=v, scale=-1.0)
    shifted = torch.randn(2 * 4 * 37 * 64 + 1, dtype=torch.float16)[1:].view(2, 4, 37, 64)
    yield "no multiple of 16 bytes", dict(query=shifted, key=k, value=v)
    yield "no portfolio", dict(query=q.float(), key=k.float(), value=v.float())


@pytest.mark.parametrize(("reason", "arguments"), list(fallbacks()), ids=[reason for reason, _ in fallbacks()])
def test_what_no_kernel_serves_is_torchs(device, reason, arguments):
    flags = dict(enable_gqa=True, scale=arguments.get("scale"))
    inputs = [arguments[name] for name in ("query", "key", "value")]
    answer = attention(*inputs, **flags)
    expected = F.scaled_dot_product_attention(*inputs, **flags)
    assert answer.shape == expected.shape
    assert answer.is_meta or torch.equal(answer, expected)
    assert answer.requires_grad == expected.requires_grad
    with pytest.raises(NoKernel, match=reason):
        attention(*inputs, **flags, strict=True)
    said = explain(*inputs, **flags)
    assert said.startswith("SDPA runs: ")
    assert reason in said
    assert said.count(".") - said.count("1.0") - said.count("=True).") <= 1


def test_explain_names_the_kernel_and_launches_nothing(device):
    q, k, v = tensors()
    said = explain(q, k, v, enable_gqa=True)
    assert said.startswith("flash_wgmma BLOCK_M=64")
    assert said.endswith("the test says so.")
    assert not device.launches
    assert "mask tensor" in explain(q, k, v, torch.zeros(37, 45))
    assert "dropout" in explain(q, k, v, None, 0.5)


@pytest.mark.parametrize(
    "inputs",
    [
        lambda q, k, v: (q, k, v),  # K/V heads that do not divide without enable_gqa
        lambda q, k, v: (q, k[:, :, :, :32], v),
        lambda q, k, v: (q, k, v[:, :, :20]),
        lambda q, k, v: (q, k.float(), v),
        lambda q, k, v: (None, k, v),
    ],
)
def test_wrong_input_raises_what_sdpa_raises(device, inputs):
    wrong = inputs(*tensors())
    with pytest.raises(Exception) as theirs:
        F.scaled_dot_product_attention(*wrong)
    with pytest.raises(type(theirs.value)) as ours:
        attention(*wrong)
    assert str(ours.value) == str(theirs.value)
    assert not device.launches


def test_a_wrong_word_is_one_sentence(device):
    with pytest.raises(ValueError, match="causal must be one of upper_left, lower_right, not 'sideways'"):
        attention(*tensors(), causal="sideways")


def test_no_device(tmp_path):
    q, k, v = tensors()
    with current.use(fake_runtime(None, tmp_path)):
        assert torch.equal(
            attention(q, k, v, is_causal=True, enable_gqa=True),
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        )
        assert "CPU" in explain(q, k, v)
        assert warmup(["seed_h100"]) == ["SDPA runs: there is no CUDA device."]


@pytest.mark.parametrize("error", [OSError("libcuda.so.1: not found"), AttributeError("undefined symbol")])
def test_a_driver_that_is_not_there_costs_a_warning(error):
    def make():
        raise error

    with pytest.warns(RuntimeWarning, match="no kernel can run here, SDPA does"):
        assert current.find_platform(make) is None


def test_a_launch_that_fails_falls_back_and_is_not_tried_again(device):
    q, k, v = tensors()
    attention(q, k, v, enable_gqa=True, strict=True)
    device.status = 719
    with pytest.warns(RuntimeWarning, match="fake error 719; the kernel is not used again"):
        answer = attention(q, k, v, enable_gqa=True)
    assert near(answer, reference(q, k, v))
    device.status, before = 0, len(device.launches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(q, k, v, enable_gqa=True)
        attention(q, k, v, enable_gqa=True, is_causal=False, scale=0.2)
    assert len(device.launches) == before
    assert "fake error 719" in explain(q, k, v, enable_gqa=True)


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


def test_a_kernel_that_answers_wrong_is_never_used_on_this_machine(device, tmp_path):
    device.error = 0.05
    q, k, v = tensors()
    with pytest.warns(RuntimeWarning, match="failed its check on this machine: .*largest error"):
        answer = attention(q, k, v, enable_gqa=True)
    assert torch.equal(answer, F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    device.error = 0.0  # the record counts, in the next process too
    with current.use(fake_runtime(device, tmp_path)):
        with pytest.warns(RuntimeWarning, match="never used here"):
            attention(q, k, v, enable_gqa=True)
        with pytest.raises(NoKernel, match="failed its check"):
            attention(q, k, v, enable_gqa=True, strict=True)


def test_a_check_that_passed_is_not_repeated(device, tmp_path):
    attention(*tensors(), enable_gqa=True)
    assert len(device.launches) > 1
    device.launches.clear()
    with current.use(fake_runtime(device, tmp_path)):
        attention(*tensors(), enable_gqa=True)
    assert len(device.launches) == 1


def test_a_module_that_does_not_load_costs_a_warning(device):
    def refuse(cubin):
        raise LaunchError("The driver could not load the module.")

    device.load = refuse
    with pytest.warns(RuntimeWarning, match="could not load the module; SDPA runs"):
        attention(*tensors(), enable_gqa=True)


def test_a_picker_that_fails_costs_a_warning(device, tmp_path):
    def pick(problem, gpu):
        raise ValueError("a damaged file")

    with current.use(fake_runtime(device, tmp_path, pick)), pytest.warns(RuntimeWarning, match="a damaged file"):
        attention(*tensors(), enable_gqa=True)


def test_an_invalid_pick_is_refused(device, tmp_path):
    def pick(problem, gpu):
        return Pick("flash_wgmma", KernelConfig("flash_wgmma", WGMMA | {"STAGES": 50}))

    with current.use(fake_runtime(device, tmp_path, pick)):
        assert "cannot serve this call" in explain(*tensors(), enable_gqa=True)
        with pytest.raises(NoKernel, match="cannot serve"):
            attention(*tensors(), enable_gqa=True, strict=True)


def test_estimated_kernels_wait_to_be_asked_for(device, tmp_path):
    def pick(problem, gpu):
        return Pick("flash_wgmma", wgmma_pick(problem, gpu).config, "of another card", estimated=True)

    runtime = fake_runtime(device, tmp_path, pick)
    with current.use(runtime):
        with pytest.raises(NoKernel, match=r"measured on no h100; evoattn.enable\(estimated=True\)"):
            attention(*tensors(), enable_gqa=True, strict=True)
        runtime.estimated = True
        runtime.forget()
        attention(*tensors(), enable_gqa=True, strict=True)


def test_an_unknown_gpu(device):
    device.gpu = None
    assert "does not know this GPU (a fake GPU" in explain(*tensors(), enable_gqa=True)


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


def test_autocast(device):
    q, k, v = (t.float() for t in tensors())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answer = attention(q, k, v, enable_gqa=True, strict=True)
    assert answer.dtype == torch.bfloat16
    assert torch.allclose(answer.double(), reference(q, k, v), atol=3e-2)


def test_transforms_and_traces_are_torchs(device):
    q, k, v = tensors(kv_heads=4)
    batched = torch.func.vmap(lambda a, b, c: attention(a, b, c))(*(t[None].expand(3, *t.shape) for t in (q, k, v)))
    assert torch.allclose(batched[1].float(), F.scaled_dot_product_attention(q, k, v).float(), atol=1e-3)
    traced = torch.jit.trace(lambda a, b, c: attention(a, b, c), (q, k, v), check_trace=False)
    assert torch.equal(traced(q + 1, k, v), F.scaled_dot_product_attention(q + 1, k, v))
    assert not device.launches
