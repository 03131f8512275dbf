"""What goes to SDPA instead of a kernel, and the sentence that says why."""

import random

import pytest
import torch
import torch.nn.functional as F
from fake_device import fake_runtime, tensors

from evoattn.ops import current
from evoattn.ops.attention import attention
from evoattn.ops.explain import explain, warmup
from evoattn.ops.runtime import NoKernel
from evoattn.ops.torch_sdpa import aligned, is_aligned, without_unseen


def fallbacks():
    q, k, v = tensors()
    yield "on the META", dict(query=q.to("meta"), key=k.to("meta"), value=v.to("meta"))
    yield "gradients", dict(query=q.clone().requires_grad_(), key=k, value=v)
    yield "float64", dict(query=q.double(), key=k.double(), value=v.double())
    yield "four dimensions", dict(query=q[0], key=k[0], value=v[0])
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
    assert "dropout" in explain(q, k, v, None, 0.5)
    assert explain(q.numpy(), k, v) == "SDPA runs: an argument is not a tensor."


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


@pytest.mark.parametrize("seed", range(40))
def test_on_a_cpu_the_op_is_sdpa(tmp_path, seed):
    """Any shape, layout, dtype and mask: the same bits, in both orders of dimensions."""
    pick = random.Random(seed)
    kv_heads, dtype = pick.choice((1, 2, 3)), pick.choice((torch.float16, torch.bfloat16, torch.float32, torch.float64))
    sizes = dict(
        batch=pick.choice((1, 2)), heads=kv_heads * pick.choice((1, 2)), kv_heads=kv_heads, dtype=dtype,
        seqlen_q=pick.randint(1, 70), seqlen_k=pick.randint(1, 70), head_dim=pick.choice((8, 40, 64, 80, 128)),
        layout=pick.choice(("bhsd", "bshd")),
    )  # fmt: skip
    q, k, v = tensors(**sizes)
    words = dict(is_causal=pick.random() < 0.5, scale=pick.choice((None, 0.3)), enable_gqa=True)
    with current.use(fake_runtime(None, tmp_path)):
        answer = attention(q, k, v, **words)
        expected = F.scaled_dot_product_attention(q, k, v, **words)
        assert torch.equal(answer, expected)
        assert answer.stride() == expected.stride()
        _, lse = attention(q, k, v, **words, return_lse=True)
    scores = (q.double() * (words["scale"] or q.shape[-1] ** -0.5)) @ k.double().repeat_interleave(
        q.shape[1] // kv_heads, dim=1
    ).transpose(-1, -2)
    if words["is_causal"]:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=1e-3)


@pytest.mark.parametrize("error", [OSError("libcuda.so.1: not found"), AttributeError("undefined symbol")])
def test_a_driver_that_is_not_there_costs_a_warning(error):
    def make():
        raise error

    with pytest.warns(RuntimeWarning, match="no kernel can run here, SDPA does"):
        assert current.find_platform(make) is None


def test_an_unknown_gpu(device):
    device.gpu = None
    assert "does not know this GPU (a fake GPU" in explain(*tensors(), enable_gqa=True)


def test_transforms_and_traces_are_torchs(device):
    q, k, v = tensors(kv_heads=4)
    batched = torch.func.vmap(lambda a, b, c: attention(a, b, c))(*(t[None].expand(3, *t.shape) for t in (q, k, v)))
    assert torch.allclose(batched[1].float(), F.scaled_dot_product_attention(q, k, v).float(), atol=1e-3)
    traced = torch.jit.trace(lambda a, b, c: attention(a, b, c), (q, k, v), check_trace=False)
    assert torch.equal(traced(q + 1, k, v), F.scaled_dot_product_attention(q + 1, k, v))
    assert not device.launches


def test_rows_that_flash_attention_cannot_read_are_known():
    memory = torch.zeros(4, 9, 24, dtype=torch.float16)
    assert is_aligned(memory) and is_aligned(memory[:, :, :16]) and is_aligned(memory[1:, :, 8:].transpose(0, 1))
    for other in (memory.transpose(1, 2), memory[:, :, 1:17], torch.zeros(4, 9, 20, dtype=torch.float16)):
        assert not is_aligned(other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_of_a_variant_are_not_rounded_to_16_bits(dtype):
    q, k, v = (
        200 * torch.randn(1, 2, 9, 64).to(dtype),
        200 * torch.randn(1, 2, 9, 64).to(dtype),
        torch.randn(1, 2, 9, 64).to(dtype),
    )
    sinks = torch.zeros(2, dtype=dtype)
    out, lse = attention(q, k, v, scale=1e-3, sinks=sinks, return_lse=True)
    scores = torch.cat(((q.double() @ k.double().mT) * 1e-3, torch.zeros(1, 2, 9, 1).double()), dim=-1)
    assert torch.isfinite(out).all()
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=1e-4)


def test_what_lies_at_odd_places_is_copied_for_torch():
    """Its kernels would load 16 bytes at once from there."""
    memory = torch.randn(2 * 4 * 9 * 64 + 64)
    assert aligned(memory[8 : 8 + 4608].view(2, 4, 9, 64)).data_ptr() == memory[8:].data_ptr()
    odd = memory[3 : 3 + 4608].view(2, 4, 9, 64)
    apart = memory[: 4 * 9 * 65].view(4, 9, 65)[..., :64]
    for tensor in (odd, apart, odd.half()[..., 1:9], odd[:, :, :8].mT):
        copy = aligned(tensor)
        assert is_aligned(copy) and torch.equal(copy, tensor) and copy.data_ptr() % 16 == 0
    narrow = memory[:180].half().view(1, 1, 9, 20)  # no copy has rows at multiples of 16 bytes
    assert aligned(narrow) is narrow
    assert aligned(memory[3:183].half().view(1, 1, 9, 20)).shape == narrow.shape


VARIANTS = {
    "plain": lambda h, sq, sk: {},
    "window": lambda h, sq, sk: {"window": (3, 0)},
    "softcap": lambda h, sq, sk: {"softcap": 5.0},
    "sinks": lambda h, sq, sk: {"sinks": torch.zeros(h)},
    "slopes": lambda h, sq, sk: {"alibi_slopes": torch.ones(h)},
    "bias": lambda h, sq, sk: {"bias": torch.zeros(1, 1, sq, sk)},
    "lower right": lambda h, sq, sk: {"is_causal": True, "causal": "lower_right"},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("nothing", ["batch", "heads", "queries", "keys", "columns"])
def test_tensors_of_nothing_have_answers(device, name, nothing):
    sizes = dict(batch=2, heads=4, queries=9, keys=13, columns=64) | {nothing: 0}
    b, h, sq, sk, d = sizes.values()
    q, k, v = torch.randn(b, h, sq, d), torch.randn(b, h // 2, sk, d), torch.randn(b, h // 2, sk, d)
    words = VARIANTS[name](h, sq, sk) | {"enable_gqa": True}
    out, lse = attention(q, k, v, return_lse=True, **words)
    assert out.shape == (b, h, sq, d) and lse.shape == (b, h, sq)
    assert not out.isnan().any() and not lse.isnan().any()
    if nothing == "keys":
        assert not out.any() and torch.equal(lse, torch.full_like(lse, 0.0 if name == "sinks" else -torch.inf))
    assert attention(q, k, v, **words).shape == out.shape


def test_the_log_sum_exp_of_other_numbers_of_dimensions():
    q, k = torch.randn(2, 3, 4, 9, 8), torch.randn(2, 3, 4, 7, 8)
    expected = (q @ k.mT / 8**0.5).logsumexp(-1)
    for at in ((), (1,), (1, 2), (1, 2, 3)):
        _, lse = attention(q[at], k[at], k[at], return_lse=True)
        torch.testing.assert_close(lse, expected[at])


@pytest.mark.parametrize("heads", [(0, 0), (4, 0), (0, 2)])
def test_no_heads_end_no_process(heads):
    """PyTorch's formula divides by the K/V heads where they are grouped, and the process ends."""
    q, k = torch.randn(2, heads[0], 5, 8), torch.randn(2, heads[1], 5, 8)
    if heads[0] == heads[1]:
        assert attention(q, k, k, enable_gqa=True).shape == q.shape
    else:
        with pytest.raises(RuntimeError):
            attention(q, k, k, enable_gqa=True)


@pytest.mark.parametrize(
    "mask",
    [torch.ones(9, 13).tril(-3).bool(), torch.zeros(9, 13).masked_fill(torch.ones(9, 13).triu(-2).bool(), -torch.inf)],
    ids=["bool", "numbers"],
)
def test_what_torch_gives_to_queries_that_see_nothing_is_taken_away(mask):
    """The mean of all values, or NaN, by some of its kernels on a GPU."""
    answer = without_unseen(torch.full((2, 4, 9, 8), float("nan")), mask)
    assert not answer[:, :, :3].any() and answer[:, :, 3:].isnan().all()


@pytest.mark.parametrize("columns, rows", [(32, 13), (64, 12)])
def test_tensors_that_do_not_fit_reach_no_kernel_of_torch(columns, rows):
    """On a GPU one ended the process at a key of fewer columns than query, and a CPU's reads past the end of value."""
    q, k, v = torch.randn(2, 4, 9, 64), torch.randn(2, 4, 13, columns), torch.randn(2, 4, rows, 64)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            attention(q, k, v)
