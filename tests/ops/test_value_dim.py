"""`evoattn.attention` with a value of another head_dim than key's, which may be key's first columns."""

import pytest
import torch

import evoattn
from evoattn.ops.attention import attention
from tests.ops.fake_device import near, reference, tensors


def inputs(value_dim, **shape):
    q, k, _ = tensors(**shape)
    return q, k, tensors(**{**shape, "head_dim": value_dim})[2]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("value_dim", [32, 128])
def test_a_kernel_answers_with_value_s_head_dim(device, layout, value_dim):
    q, k, v = inputs(value_dim, layout=layout)
    answer, lse = attention(q, k, v, is_causal=True, enable_gqa=True, return_lse=True, strict=True)
    assert answer.shape == (2, 4, 37, value_dim) and lse.shape == (2, 4, 37)
    assert near(answer, reference(q, k, v, is_causal=True))
    assert (answer.stride(1) < answer.stride(2)) == (layout == "bshd")
    out = torch.empty(2, 37, 4, value_dim, dtype=q.dtype).transpose(1, 2)
    assert attention(q, k, v, is_causal=True, enable_gqa=True, out=out, strict=True) is out
    torch.testing.assert_close(out, answer)


def test_a_variant_too(device):
    q, k, v = inputs(32)
    answer = attention(q, k, v, window=(44, 44), sinks=torch.full((4,), -torch.inf), enable_gqa=True, strict=True)
    assert near(answer, reference(q, k, v))


def test_torch_serves_what_no_kernel_does(device):
    q, k, v = (t.double() for t in inputs(32))
    torch.testing.assert_close(attention(q, k, v, enable_gqa=True), reference(q, k, v))


def test_a_value_within_key_is_read_out_of_key(device):
    q, k, _ = inputs(32)
    for _ in range(2):
        answer = attention(q, k, k[..., :32], enable_gqa=True, strict=True)
        assert near(answer, reference(q, k, k[..., :32]))
    assert device.loads == 1 and device.launches[-1].addresses[2] == k.data_ptr()
    elsewhere = torch.randn_like(k)[..., :32]  # of the same shape and strides
    assert near(attention(q, k, elsewhere, enable_gqa=True), reference(q, k, elsewhere))


def test_a_value_that_only_looks_so_is_no_part_of_key(device):
    q, k, _ = tensors()
    elsewhere = torch.randn_like(k)[..., :32]
    for _ in range(2):
        assert near(attention(q, k, elsewhere, enable_gqa=True, strict=True), reference(q, k, elsewhere))


def test_a_value_without_columns_is_no_plain_problem(device):
    """A head_dim of value of 0 says in a problem that it is that of key."""
    q, k, v = tensors()
    assert attention(q, k, v[..., :0], enable_gqa=True).shape == (2, 4, 37, 0) and not device.loads
    assert "a tensor is empty" in evoattn.explain(q, k, v[..., :0], enable_gqa=True)


@pytest.mark.slow
def test_compiled_code_knows_the_shape(device):
    torch.compiler.reset()
    q, k, v = inputs(32, layout="bshd")
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, enable_gqa=True) * 2, fullgraph=True, backend="aot_eager"
    )
    assert near(compiled(q, k, v), 2 * reference(q, k, v)) and device.launches


def test_a_recorded_call_says_it(device):
    q, k, v = inputs(32)
    with evoattn.capture() as shapes:
        attention(q, k, v, enable_gqa=True)
        attention(q, k, k[..., :32], enable_gqa=True)
    assert [entry.problem.describe() for entry in shapes.entries] == [
        "B=2 H=4/2 Sq=37 Sk=45 D=64 Dv=32 fp16 full",
        "B=2 H=4/2 Sq=37 Sk=45 D=64 Dv=32 fp16 full shared_kv",
    ]
    assert evoattn.explain(q, k, v, enable_gqa=True).startswith("flash_wgmma")
