"""`evoattn.attention` with a fake device: what reaches the launch, and that the answer is right; under autocast, and
with a value of another head_dim than key's, which may be key's first columns."""

import ctypes
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import evoattn
from evoattn.ops.attention import attention, attention_paged, attention_varlen
from evoattn.ops.explain import explain
from evoattn.ops.runtime import Runtime, current
from tests.ops.fake_device import FakeDevice, fake_runtime, near, reference, tensors


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
    answer, lse = attention(q, k, v, causal=True, enable_gqa=True, return_lse=True, strict=True)
    other, other_lse = attention(  # a scale under which torch computes both
        q, k, v, causal=True, enable_gqa=True, return_lse=True, scale=-(64**-0.5)
    )
    assert lse.shape == (2, 4, 45)
    assert lse.dtype == torch.float32
    assert (lse[:, :, :8] == -torch.inf).all()
    assert (answer[:, :, :8] == 0).all()
    assert (other_lse[:, :, :8] == -torch.inf).all()
    assert (other[:, :, :8] == 0).all()
    expected, expected_lse = attention(-q, k, v, causal=True, enable_gqa=True, return_lse=True, scale=-(64**-0.5))
    assert near(answer, expected)
    assert torch.allclose(lse, expected_lse, atol=1e-3)


def test_a_last_query_alone_needs_no_mask(device):
    q, k, v = tensors(seqlen_q=1)
    words = dict(causal=True, enable_gqa=True)
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
    assert device.launches[-1].addresses[0] == q.data_ptr()
    assert len(device.moved) == moved, "the driver has shown where a map has its address"
    assert len(device.encoded) == encoded + 4, "out has a plan of its own"


class Elsewhere(FakeDevice):
    """Whose tensor maps say twice where they lie."""

    def move_map(self, destination, address):
        super().move_map(destination, address)
        ctypes.c_uint64.from_address(destination + 24).value = address


def test_the_driver_moves_a_map_whose_address_is_not_its_first_word_alone(tmp_path):
    (q, k, v), device = tensors(), Elsewhere()
    with current.use(fake_runtime(device, tmp_path)):
        for _ in range(2):
            attention(q, k, v, enable_gqa=True, out=(out := torch.empty_like(q)))
            assert near(out, reference(q, k, v))
        moved = len(device.moved)
        attention(q.clone(), k, v, enable_gqa=True, out=out)
        attention(q, k, v, enable_gqa=True, out=out)
        assert len(device.moved) == moved + 2, "only the query's address had changed"
        attention(q, k, v, enable_gqa=True, out=out)
        assert len(device.moved) == moved + 2 and near(out, reference(q, k, v))


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


def test_autocast(device):
    q, k, v = (t.float() for t in tensors())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answer = attention(q, k, v, enable_gqa=True, strict=True)
    assert answer.dtype == torch.bfloat16
    assert torch.allclose(answer.double(), reference(q, k, v), atol=3e-2)


@pytest.mark.parametrize("words", [{}, {"softcap": 5.0}, {"return_lse": True}], ids=str)
def test_a_scale_that_changes_in_its_tensor_counts(device, words):
    """As the logit scale of some models; torch takes tensors of one number for numbers."""
    (q, k, v), scale = tensors(kv_heads=4), torch.tensor(0.1, requires_grad=True)
    for number in (0.1, 0.7):
        with torch.no_grad():
            scale.fill_(number)
            answers = (attention(q, k, v, scale=given, **words, strict=True) for given in (scale, float(scale)))
        one, other = (answer if isinstance(answer, torch.Tensor) else answer[0] for answer in answers)
        assert torch.equal(one, other) and device.launches


def test_a_soft_cap_that_changes_in_its_tensor_counts(device):
    (q, k, v), cap = tensors(kv_heads=4), torch.tensor(1.0)
    first = attention(q, k, v, softcap=cap, strict=True)
    cap.fill_(9.0)
    assert torch.equal(attention(q, k, v, softcap=cap, strict=True), attention(q, k, v, softcap=9.0, strict=True))
    assert not torch.equal(attention(q, k, v, softcap=cap), first)


@pytest.mark.parametrize("scale", [np.float32(0.1), np.float64(0.1), 1, True], ids=repr)
def test_numbers_of_other_kinds_are_scales(device, scale):
    q, k, v = tensors(kv_heads=4)
    assert near(attention(q, k, v, scale=scale, strict=True), reference(q, k, v, scale=float(scale)))


@pytest.mark.parametrize("scale", ["x", [0.1], 0.1j, Fraction(1, 10), torch.tensor([0.1])], ids=repr)
@pytest.mark.parametrize("words", [{}, {"softcap": 5.0}], ids=str)
def test_no_number_is_no_scale(device, scale, words):
    q, k, v = tensors(kv_heads=4)
    with pytest.raises(TypeError):
        torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
    with pytest.raises(TypeError, match="scale must be a number"):
        attention(q, k, v, scale=scale, **words)


@pytest.mark.parametrize("cap", ["x", [5.0], torch.tensor([5.0, 6.0]), np.ones(2)], ids=repr)
@pytest.mark.parametrize("words", [{}, {"window": (9, 0)}], ids=str)
def test_no_number_is_no_soft_cap(device, cap, words):
    q, k, v = tensors(kv_heads=4)
    for called in (attention, explain):
        with pytest.raises(TypeError, match="softcap must be a number, not "):
            called(q, k, v, softcap=cap, **words)


@pytest.mark.slow
@pytest.mark.parametrize("words", [{}, {"window": (9, 0)}], ids=str)
def test_none_is_no_soft_cap(device, words):
    """As models say that they have none."""
    q, k, v = tensors(kv_heads=4)
    expected = attention(q, k, v, **words, strict=True)
    assert torch.equal(attention(q, k, v, softcap=None, **words, strict=True), expected)
    assert explain(q, k, v, softcap=None, **words) == explain(q, k, v, **words)
    compiled = torch.compile(lambda cap: attention(q, k, v, softcap=cap, **words), backend="eager", fullgraph=True)
    assert near(compiled(None), expected)
    (packed, keys, values), starts = (
        (t[0].transpose(0, 1) for t in (q, k, v)),
        [torch.tensor([0, t.shape[2]]) for t in (q, k)],
    )
    packed = attention_varlen(packed, keys, values, *starts, 37, 45, softcap=None)
    assert near(packed, attention(q[:1], k[:1], v[:1])[0].transpose(0, 1))
    table, used = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([45], dtype=torch.int32)
    paged = attention_paged(*(t[:1].transpose(1, 2) for t in (q, k, v)), table, used, softcap=None)
    assert near(paged, attention(q[:1], k[:1], v[:1]).transpose(1, 2))


@pytest.mark.parametrize("words", [{"is_causal": 1}, {"enable_gqa": None}, {"is_causal": "x", "softcap": 5.0}], ids=str)
def test_what_is_no_bool_is_no_flag(device, words):
    with pytest.raises(TypeError, match="must be bool, not"):
        attention(*tensors(kv_heads=4), **words)


def plain(q, k, v, **words):
    """Without the log-sum-exp."""
    out = attention(q, k, v, **words)
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.slow
@pytest.mark.parametrize("device_is_there", [True, False])
@pytest.mark.parametrize(
    "words",
    [{}, {"softcap": 5.0}, {"attn_mask": torch.zeros(37, 45)}, {"dropout_p": 0.5}, {"return_lse": True}],
    ids=lambda words: next(iter(words), "plain"),
)
def test_autocasts_dtype_is_that_of_a_given_out(device, tmp_path, device_is_there, words):
    """As of the answer that SDPA makes anew."""
    q, k, v = (tensor.float() for tensor in tensors(kv_heads=4))
    out = torch.zeros(q.shape, dtype=torch.bfloat16)
    runtime = current.runtime() if device_is_there else Runtime(None, current.best_known, tmp_path)
    with current.use(runtime), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(1)
        expected = plain(q, k, v, **words)
        torch.manual_seed(1)
        assert plain(q, k, v, out=out, **words) is out
        with pytest.raises(ValueError, match=r"out must be a torch\.bfloat16 tensor"):
            plain(q, k, v, out=torch.zeros_like(q), **words)
    assert out.any() and torch.equal(out, expected)


@pytest.mark.parametrize(
    "words",
    [{}, {"softcap": 50.0}, {"alibi_slopes": torch.tensor([0.3, 0.7, 1.3, 0.1])}],
    ids=["plain", "a soft cap", "slopes"],
)
def test_autocast_does_not_round_scores(device, words):
    q, k, v = (4 * tensor for tensor in tensors(kv_heads=4))
    expected = attention(q, k, v, return_lse=True, **words)
    with torch.autocast("cpu", dtype=torch.float16):
        answer, lse = attention(q, k, v, return_lse=True, **words)
    assert lse.dtype == torch.float32 and torch.equal(lse, expected[1])
    assert torch.equal(answer, expected[0])


@pytest.mark.parametrize("words", [{}, {"attn_mask": torch.zeros(37, 45)}], ids=["plain", "a mask"])
@pytest.mark.parametrize("empty", ["queries", "columns of value"])
def test_an_empty_answer_has_autocasts_dtype(tmp_path, empty, words):
    """Its formula, which torch's autocast does not know, gives it."""
    q, k, v = (tensor.float() for tensor in tensors(kv_heads=4))
    q, v = (q[:, :, :0], v) if empty == "queries" else (q, v[..., :0])
    words = {name: mask[: q.shape[2]] for name, mask in words.items()}
    with current.use(Runtime(None, current.best_known, tmp_path)), torch.autocast("cpu", dtype=torch.bfloat16):
        answer, expected = attention(q, k, v, **words), F.scaled_dot_product_attention(q, k, v, **words)
    assert answer.dtype == expected.dtype == torch.bfloat16 and answer.shape == expected.shape


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


@pytest.mark.parametrize("place", range(3))
def test_a_tensor_without_dimensions_has_torchs_sentence(place):
    given = [torch.zeros(1, 2, 8, 16) for _ in range(3)]
    given[place] = torch.tensor(1.0)
    for attend in (F.scaled_dot_product_attention, attention):
        with pytest.raises(RuntimeError, match="at least 2 dimensional"):
            attend(*given)
    assert explain(*given)
