"""The op under `torch.compile`, fake tensors and `opcheck`."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from evoattn.ops.attention import attention
from evoattn.ops.custom_op import attention_lse_op, attention_op
from evoattn.ops.runtime import current
from evoattn.ops.torch_answer import NoKernel
from tests.ops.fake_device import Graphs, near, reference, tensors

OPS = {"attention": attention_op, "attention_lse": attention_lse_op}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()


def cases():
    yield "contiguous", tensors(), ("full", True, None, False)
    yield "views", tensors(layout="bshd"), ("causal_upper_left", True, 0.2, False)
    yield "lower right, served by torch", tensors(dtype=torch.float32), ("causal_lower_right", True, None, False)
    packed = torch.randn(2, 33, 3, 4, 64, dtype=torch.float16)
    q, k, v = tensors(layout="bshd")
    yield "a head_dim of value", (q, k, v[..., :32]), ("causal_upper_left", True, None, False)
    yield "packed", tuple(packed[:, :, i].transpose(1, 2) for i in range(3)), ("full", False, None, False)


@pytest.mark.slow
@pytest.mark.parametrize("op", list(OPS))
@pytest.mark.parametrize(("inputs", "flags"), [case[1:] for case in cases()], ids=[case[0] for case in cases()])
def test_opcheck(device, op, inputs, flags):
    results = torch.library.opcheck(OPS[op], (*inputs, *flags))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.slow
def test_opcheck_without_a_device():
    results = torch.library.opcheck(attention_op, (*tensors(), "causal_upper_left", True, None, False))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.slow
def test_a_compiled_function_calls_the_kernel(device):
    compiled = torch.compile(
        lambda q, k, v: attention(q * 1, k, v, is_causal=True, enable_gqa=True), fullgraph=True, backend="aot_eager"
    )
    q, k, v = tensors(seqlen_q=45)
    attention(q, k, v, is_causal=True, enable_gqa=True)  # loads and checks the kernel
    before = len(device.launches)
    assert near(compiled(q, k, v), reference(q, k, v, is_causal=True))
    assert len(device.launches) == before + 1


@pytest.mark.slow
def test_an_out_that_does_not_fit_raises_in_compiled_code_too(device):
    """It would be filled with copies of the answer, or with rounded ones."""
    q, k, v = tensors()
    for out in (torch.empty(2, *q.shape), torch.empty(q.shape, dtype=torch.float32)):
        with pytest.raises(ValueError, match="out must be"):
            torch.compile(lambda out: attention(q, k, v, enable_gqa=True, out=out), backend="eager")(out)


def test_an_out_that_does_not_fit_raises_under_a_transform(device):
    q, k, v = tensors()
    out = torch.empty(2, 2, *q.shape[1:], dtype=q.dtype)
    with pytest.raises(ValueError, match="out must be"):
        torch.vmap(lambda one: attention(one[None], k[:1], v[:1], enable_gqa=True, out=out))(q)


def test_a_trace_of_the_jit_warns_of_nothing(device):
    q, k, v = tensors()
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(lambda q: attention(q, k, v, enable_gqa=True), (q,), check_trace=False)
    assert near(traced(q), reference(q, k, v))


@pytest.mark.slow
def test_other_lengths_need_no_other_graph(device):
    graphs = Graphs()
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, enable_gqa=True, strict=True), fullgraph=True, dynamic=True, backend=graphs
    )
    for length in (45, 50, 61):
        q, k, v = tensors(seqlen_q=length, seqlen_k=length)
        assert near(compiled(q, k, v), reference(q, k, v))
    assert len(graphs) == 1
    assert "evoattn.attention" in graphs[0].code


@pytest.mark.parametrize("wanted", [False, True])
def test_what_no_kernel_serves_is_compiled_as_sdpa(device, wanted):
    graphs = Graphs()
    q, k, v = (t.double().requires_grad_(wanted) for t in tensors(kv_heads=4))
    compiled = torch.compile(lambda q, k, v: attention(q, k, v), fullgraph=True, backend=graphs)
    assert torch.equal(compiled(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert "evoattn" not in graphs[0].code
    assert "scaled_dot_product_attention" in graphs[0].code
    if wanted:
        compiled(q, k, v).sum().backward()
        assert q.grad is not None


@pytest.mark.slow
def test_out_lse_and_autocast_compile(device):
    q, k, v = (t.float() for t in tensors())
    out = torch.empty_like(q, dtype=torch.bfloat16)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def both(q, k, v, out):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention(q, k, v, enable_gqa=True, return_lse=True, out=out, strict=True)

    answer, lse = both(q, k, v, out)
    assert torch.allclose(answer.double(), reference(q, k, v), atol=3e-2)
    assert torch.equal(answer, out)
    assert lse.shape == q.shape[:3]


@pytest.mark.slow
def test_strict_under_compile(device):
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, strict=True), backend="eager")
    with pytest.raises(NoKernel, match="float64"):
        compiled(*(t.double() for t in tensors(kv_heads=4)))


def test_the_op_itself_refuses_gradients(device):
    q, k, v = tensors(kv_heads=4)
    with pytest.raises(RuntimeError, match="computes no gradients"):
        attention_op(q.requires_grad_(), k, v, "full", False, None, False)
    with torch.no_grad():
        assert near(attention_op(q, k, v, "full", False, None, False), reference(q, k, v))


def test_fake_tensors(device):
    q, k, v = tensors(layout="bshd")
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (q, k, v)]
        answer = attention(*fakes, enable_gqa=True)
    assert answer.shape == q.shape
    assert answer.stride() == q.stride()
    assert not device.launches


@pytest.mark.parametrize(
    ("heads", "words", "error"), [(3, {}, RuntimeError), (2, {"is_causal": 1}, TypeError)], ids=["heads", "flags"]
)
def test_fake_tensors_raise_what_real_ones_do(device, heads, words, error):
    q, k, v = tensors(kv_heads=heads)
    with pytest.raises(error):
        attention(q, k, v, enable_gqa=True, **words)
    with FakeTensorMode() as mode, pytest.raises(error):
        attention(*(mode.from_tensor(t) for t in (q, k, v)), enable_gqa=True, **words)


def test_export(device):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, enable_gqa=True)

    q, k, v = tensors()
    with torch.no_grad():
        program = torch.export.export(Module(), (q, k, v))
        assert near(program.module()(q, k, v), reference(q, k, v))
    assert any("evoattn.attention" in str(node.target) for node in program.graph.nodes)


def test_the_runtime_can_be_replaced(device):
    assert current.runtime().platform is device
