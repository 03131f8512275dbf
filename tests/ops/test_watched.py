"""What is beyond plain attention, where something watches: transforms, traces, compilers, fake and meta tensors,
inference mode and autocast. The answer is that of the eager call."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import evoattn
from evoattn.ops.runtime import current
from tests.ops.fake_device import CacheDevice, fake_runtime, split_kv_pick, tensors

MADE = torch.Generator().manual_seed(9)
VARIANTS = {
    "a window": {"window": (9, 0), "is_causal": True},
    "a soft cap": {"softcap": 20.0},
    "sinks": {"sinks": torch.randn(4, generator=MADE).half()},
    "slopes": {"alibi_slopes": torch.rand(4, generator=MADE)},
    "a bias": {"bias": torch.randn(37, 45, generator=MADE).half()},
    "a mask": {"attn_mask": torch.rand(37, 45, generator=MADE) > 0.3},
    "keys in use": {"seqused_k": torch.tensor([45, 9], dtype=torch.int32)},
    "a log-sum-exp": {"return_lse": True},
}
every = pytest.mark.parametrize("words", VARIANTS.values(), ids=list(VARIANTS))


@pytest.fixture(autouse=True)
def with_kernels(device):
    yield device
    torch.compiler.reset()


def answer(q, k, v, **words):
    """Without the log-sum-exp."""
    out = evoattn.attention(q, k, v, **words)
    return out[0] if isinstance(out, tuple) else out


def near(one, other):
    torch.testing.assert_close(one, other, atol=4e-3, rtol=4e-3)


def of(change, words):
    """The tensors of some arguments changed."""
    return {name: change(value) if isinstance(value, torch.Tensor) else value for name, value in words.items()}


def floats(words):
    return of(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, words)


@every
def test_vmap(words):
    q, k, v = tensors(kv_heads=4)
    several = torch.func.vmap(lambda one: answer(one, k, v, **words))(torch.stack((q, 2 * q)))
    near(several[1], answer(2 * q, k, v, **words))


@every
def test_gradients_of_a_transform(words):
    q, k, v = (tensor.float() for tensor in tensors(kv_heads=4))
    found = torch.func.grad(lambda q: answer(q, k, v, **floats(words)).sum())(q)
    answer(q.requires_grad_(), k, v, **floats(words)).sum().backward()
    near(found, q.grad)


@pytest.mark.parametrize("name", ["sinks", "slopes", "a bias"])
def test_gradients_of_what_is_added(name):
    words = of(lambda tensor: tensor.clone().requires_grad_(), floats(VARIANTS[name]))
    answer(*(tensor.float() for tensor in tensors(kv_heads=4)), **words).square().sum().backward()
    (added,) = words.values()
    assert added.grad.abs().sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("words", [{}, *VARIANTS.values()], ids=["plain", *VARIANTS])
def test_dual_numbers_reach_no_kernel(with_kernels, words):
    """It would drop the derivative; torch's own attention for 16 bits on a CPU has none, and says so."""
    q, k, v = tensors(kv_heads=4)
    for given in ({}, {"strict": True}):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(q, torch.ones_like(q))
            assert evoattn.explain(dual, k, v).startswith("SDPA runs: ")
            with contextlib.suppress(NotImplementedError, evoattn.NoKernel):
                assert forward_ad.unpack_dual(answer(dual, k, v, **words, **given)).tangent is not None
    assert not with_kernels.launches


@every
def test_inference_mode(words):
    q, k, v = tensors(kv_heads=4)
    with torch.inference_mode():
        inside = answer(q, k, v, **words)
    assert torch.equal(answer(q, k, v, **words), inside), "and what was kept then serves other calls"


@every
def test_a_trace_of_the_jit(words):
    q, k, v = tensors(kv_heads=4)
    traced = torch.jit.trace(lambda q: answer(q, k, v, **words), (q,), check_trace=False)
    near(traced(2 * q), answer(2 * q, k, v, **words))


@every
def test_tensors_without_data_have_answers_without(with_kernels, words):
    q, k, v = tensors(layout="bshd")
    meta = answer(*(t.to("meta") for t in (q, k, v)), enable_gqa=True, **of(lambda t: t.to("meta"), words))
    with FakeTensorMode() as mode:
        fake = answer(*map(mode.from_tensor, (q, k, v)), enable_gqa=True, **of(mode.from_tensor, words))
    assert meta.is_meta and meta.shape == fake.shape == q.shape and meta.dtype == fake.dtype == q.dtype
    assert not with_kernels.launches


@every
def test_autocast(words):
    q, k, v = tensors(kv_heads=4)
    with torch.autocast("cpu", dtype=torch.float16):
        found = answer(*(t.float() for t in (q, k, v)), **floats(words))
    assert found.dtype == torch.float16
    near(found, answer(q, k, v, **words))


@pytest.mark.slow
@every
def test_an_exported_program(words):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return answer(q, k, v, **words)

    q, k, v = tensors(kv_heads=4)
    with torch.no_grad():
        program = torch.export.export(Module(), (q, k, v))
        near(program.module()(q, k, v), answer(q, k, v, **words))


@pytest.mark.slow
@every
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.sampled(3)
def test_compiled_code(words, dynamic):
    compiled = torch.compile(
        lambda q, k, v, words: answer(q, k, v, **words), fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    with torch.no_grad():
        q, k, v = tensors(kv_heads=4)
        near(compiled(q, k, v, words), answer(q, k, v, **words))
        if not any(isinstance(value, torch.Tensor) and value.dim() == 2 for value in words.values()):
            q, k, v = tensors(kv_heads=4, seqlen_q=61, seqlen_k=50)
            near(compiled(q, k, v, words), answer(q, k, v, **words))


@pytest.mark.slow
@every
@pytest.mark.sampled(2)
def test_compiled_code_has_gradients(words):
    q, k, v = (tensor.float() for tensor in tensors(kv_heads=4))
    ours, theirs = q.clone().requires_grad_(), q.clone().requires_grad_()
    compiled = torch.compile(lambda q: answer(q, k, v, **floats(words)), fullgraph=True, backend="aot_eager")
    compiled(ours).sum().backward()
    answer(theirs, k, v, **floats(words)).sum().backward()
    near(ours.grad, theirs.grad)


@pytest.mark.slow
@every
def test_compiled_code_writes_to_out(words):
    q, k, v = tensors(kv_heads=4)
    out = torch.empty_like(q)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q, k, v, out):
        evoattn.attention(q, k, v, out=out, **words)
        return out + 1

    with torch.no_grad():
        near(call(q, k, v, out), answer(q, k, v, **words) + 1)
    near(out, answer(q, k, v, **words))


@pytest.mark.slow
def test_compiled_packed_sequences_take_a_kernel_with_an_out_too(with_kernels):
    q, k, v = (torch.randn(rows, heads, 64, generator=MADE).half() for rows, heads in ((40, 4), (60, 2), (60, 2)))
    starts = torch.tensor([0, 8, 40], dtype=torch.int32), torch.tensor([0, 20, 60], dtype=torch.int32)
    expected, out = evoattn.attention_varlen(q, k, v, *starts, 32, 40, causal=True), torch.empty_like(q)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q, k, v, out):
        return evoattn.attention_varlen(q, k, v, *starts, 32, 40, causal=True, out=out, strict=True)

    launched = len(with_kernels.launches)
    with torch.no_grad():
        assert torch.equal(call(q, k, v, out), expected) and torch.equal(out, expected)
        assert len(with_kernels.launches) == launched + 1


@pytest.mark.slow
def test_compiled_keys_in_use_take_a_kernel_with_an_out_too(tmp_path):
    q, k, v = tensors()
    used, out = torch.tensor([45, 9], dtype=torch.int32), torch.empty_like(q)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q, k, v, out):
        return evoattn.attention(q, k, v, seqused_k=used, enable_gqa=True, out=out, strict=True)

    device = CacheDevice()
    with current.use(fake_runtime(device, tmp_path, split_kv_pick)), torch.no_grad():
        expected = evoattn.attention(q, k, v, seqused_k=used, enable_gqa=True, strict=True)
        launched = len(device.launches)
        assert torch.equal(call(q, k, v, out), expected) and torch.equal(out, expected)
        assert len(device.launches) == launched + 1


@pytest.mark.slow
@pytest.mark.parametrize("words", [{}, VARIANTS["a soft cap"]], ids=["plain", "a soft cap"])
def test_a_scale_in_a_tensor_breaks_the_graph_as_with_sdpa(words):
    q, k, v = tensors(kv_heads=4)
    compiled = torch.compile(lambda q, k, v, scale: answer(q, k, v, scale=scale, **words), backend="aot_eager")
    with torch.no_grad():
        for scale in (0.1, 0.7):
            near(compiled(q, k, v, torch.tensor(scale)), answer(q, k, v, scale=scale, **words))
