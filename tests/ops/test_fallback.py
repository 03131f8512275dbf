"""What goes to SDPA instead of a kernel, and the sentence that says why."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import evoattn
import evoattn.flash_attn
from evoattn.backends.platform import find_platform
from evoattn.ops import torch_answer
from evoattn.ops.attention import attention
from evoattn.ops.call import Call, why_not_devices
from evoattn.ops.explain import explain, warmup
from evoattn.ops.runtime import current
from evoattn.ops.torch_answer import SDPA, NoKernel
from tests.ops.fake_device import Graphs, fake_runtime, near, tensors


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
    yield "positive scale", dict(query=q, key=k, value=v, scale=-1.0)
    yield "positive scale up to", dict(query=q, key=k, value=v, scale=1e20)
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


def test_tensors_of_several_devices_are_named():
    def on(*devices):
        return why_not_devices(Call(*(SimpleNamespace(device=torch.device(name)) for name in devices)), "cuda")

    assert on("cuda:0", "cuda:0", "cuda:0") is None and on("cuda:1", "cuda:1", "cuda:1") is None
    assert on("cuda:0", "cuda:1", "cuda:0") == on("cuda:0", "cuda:0", "cuda:1") == "the tensors are on several devices"
    assert on("cpu", "cuda:0", "cuda:0") == "the tensors are on the CPU, and kernels run on CUDA devices"


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
    with pytest.raises(ValueError, match="causal must be True, False, 'upper_left' or 'lower_right', not 'sideways'"):
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
        assert find_platform(make) is None


def test_explain_says_what_watches(device):
    q, k, v = tensors(kv_heads=4)
    said = []
    torch.func.vmap(lambda one: said.append(explain(one, k, v)) or one)(q[None])
    said.append(explain(torch._neg_view(q), k, v))
    assert said == ["SDPA runs: a tensor subclass, mode, transform, trace or negation is at work."] * 2


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


STARTS = torch.tensor([0, 2, 4], dtype=torch.int32)
TABLE, USED = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32)
BEYOND = {
    "softcap": dict(softcap=3.0),
    "sinks": dict(sinks=torch.zeros(2)),
    "slopes": dict(alibi_slopes=torch.ones(2)),
    "window": dict(window=(1, 0), return_lse=True),
}


def calls(q, k, v):
    """By name, of tensors `[2, 2, 4, 8]`: calls beyond SDPA."""
    made = {name: lambda words=words: evoattn.attention(q, k, v, **words) for name, words in BEYOND.items()}
    packed = [tensor.flatten(0, 1)[:, :2] for tensor in (q, k, v)]
    made["packed"] = lambda: evoattn.attention_varlen(*packed, STARTS, STARTS, 4, 4, softcap=3.0)
    queries, pages = q[:, :, :1].transpose(1, 2), [tensor.repeat(1, 1, 4, 1).transpose(1, 2) for tensor in (k, v)]
    made["paged"] = lambda: evoattn.attention_paged(queries, *pages, TABLE, USED, softcap=3.0)
    return made


@pytest.mark.parametrize("name", [*BEYOND, "packed", "paged"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.complex64, torch.uint8])
def test_what_is_no_real_floating_point_is_refused(name, dtype):
    tensor = torch.ones(2, 2, 4, 8).to(dtype)
    with pytest.raises(ValueError, match="one dtype of real floating-point numbers, not"):
        calls(tensor, tensor, tensor)[name]()


@pytest.mark.parametrize("name", [*BEYOND, "packed", "paged"])
def test_several_dtypes_are_refused(name):
    tensor = torch.ones(2, 2, 4, 8)
    with pytest.raises(ValueError, match="not float32, float16, float32"):
        calls(tensor, tensor.half(), tensor)[name]()


@pytest.mark.parametrize("words", [dict(softcap=3.0), dict(window=(1, 0)), dict(softcap=3.0, return_lse=True)])
@pytest.mark.parametrize("heads, kv_heads", [(1, 4), (2, 4), (6, 4), (2, 0)])
def test_heads_that_kv_heads_do_not_divide_are_refused(words, heads, kv_heads):
    query, key = torch.randn(2, heads, 3, 8), torch.randn(2, kv_heads, 3, 8)
    with pytest.raises(ValueError, match=f"{heads} query heads are no multiple of {kv_heads} K/V heads"):
        evoattn.attention(query, key, key, enable_gqa=True, **words)


def test_a_log_sum_exp_has_the_heads_of_the_answer():
    """SDPA broadcasts a single query head, and a single batch."""
    query, key = torch.randn(1, 1, 3, 8), torch.randn(2, 4, 5, 8)
    answer, lse = evoattn.attention(query, key, key, return_lse=True)
    assert answer.shape[:3] == lse.shape == (2, 4, 3)
    scores = query @ key.transpose(-1, -2) / math.sqrt(8)
    assert torch.allclose(lse, torch.logsumexp(scores, dim=-1), atol=1e-6)
    answer, lse = evoattn.attention(query[:, :, :0], key, key, return_lse=True)
    assert answer.shape[:3] == lse.shape == (2, 4, 0)


@pytest.mark.parametrize("word", ["bias", "attn_mask"])
def test_a_float32_mask_beside_float64_is_read_as_it_lies(word):
    """SDPA itself answers wrong by more than 0.5."""
    query, key, value = torch.randn(3, 1, 2, 5, 16, dtype=torch.float64).unbind()
    key, value, mask = key.repeat(1, 1, 4, 1), value.repeat(1, 1, 4, 1), torch.randn(5, 20)
    for given in (mask, mask[:1].expand(2, 5, 20)):
        answer, right = (evoattn.attention(query, key, value, **{word: one}) for one in (given, given.double()))
        assert torch.equal(answer, right)


def test_doubles_are_not_rounded_on_the_way():
    query, key, value = (torch.randn(1, 2, 5, 8, dtype=torch.float64) for _ in range(3))
    answer = evoattn.attention(query, key, value, softcap=3.0)
    scores = 3 * torch.tanh(query @ key.transpose(-1, -2) / math.sqrt(8) / 3)
    assert torch.allclose(answer, torch.softmax(scores, dim=-1) @ value, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.uint8])
@pytest.mark.parametrize("mask", [None, torch.ones(16, 16, dtype=torch.bool)])
def test_what_has_no_kernel_is_explained(dtype, mask):
    tensor = torch.ones(2, 4, 16, 8).to(dtype)
    assert evoattn.explain(tensor, tensor, tensor, mask).startswith("SDPA runs: ")


@pytest.mark.parametrize("sinks", [None, torch.full((2,), -math.inf)], ids=["", "infinite sinks"])
def test_a_row_that_its_mask_hides_wholly_has_gradients_of_0(sinks):
    """They were NaN by the formula, and with them those of all keys."""
    tensors = [torch.randn(1, 2, 5, 8, requires_grad=True) for _ in "qkv"]
    mask = torch.rand(5, 5) > 0.3
    mask[1] = False
    out, lse = attention(*tensors, attn_mask=mask, softcap=9.0, sinks=sinks, return_lse=True)
    (out.sum() + lse[:, :, mask.any(-1)].sum()).backward()
    assert torch.isneginf(lse[:, :, 1]).all() and not out[:, :, 1].any() and not tensors[0].grad[:, :, 1].any()
    assert all(torch.isfinite(one.grad).all() and one.grad.any() for one in tensors)


@pytest.mark.parametrize("words", [{"causal": True}, {"softcap": 2.0}, {"return_lse": True}], ids=str)
def test_nested_and_sparse_tensors_beside_what_sdpa_lacks_are_refused(words):
    plain = torch.randn(2, 4, 9, 64)
    nested = torch.nested.as_nested_tensor(list(plain), layout=torch.jagged)
    for kind, tensor in (("nested", nested), ("sparse", plain.to_sparse())):
        with pytest.raises(ValueError, match=f"^key is {kind}, "):
            attention(plain, tensor, plain, **words)


def test_a_mask_of_batches_under_vmap_is_the_formulas(monkeypatch):
    """Torch's CUDA kernels raise where the mask is the same in all calls of the transform, and has batches."""
    q, k, v = tensors()
    used = torch.tensor([3, 45], dtype=torch.int32)
    several = torch.stack((q, 2 * q))
    expected = attention(several[1], k, v, enable_gqa=True, seqused_k=used)
    monkeypatch.setattr(torch_answer, "SDPA", None)
    found = torch.vmap(lambda q: attention(q, k, v, enable_gqa=True, seqused_k=used))(several)
    assert near(found[1], expected)


@pytest.mark.parametrize("columns", [0, 8])
def test_a_bool_mask_hides_keys_of_tensors_without_columns(columns):
    """Torch's formula alone adds it as 0 and 1."""
    q, k, v = torch.randn(1, 1, 2, columns), torch.randn(1, 1, 3, columns), torch.randn(1, 1, 3, 4)
    mask = torch.tensor([[True, False, False], [False, True, True]])
    expected = torch.softmax((q @ k.mT * max(1, columns) ** -0.5).masked_fill(~mask, -math.inf), -1) @ v
    assert torch.allclose(torch_answer.sdpa(q, k, v, mask), expected)


def test_one_query_under_a_causal_mask_reads_one_key_of_heads_that_share_them(monkeypatch):
    """Torch's efficient kernel on CUDA shows all of them."""
    q, k = torch.randn(2, 3, 1, 8), torch.randn(2, 1, 5, 8).expand(2, 3, 5, 8)
    v, seen = k + 1, []
    monkeypatch.setattr(torch_answer, "SDPA", lambda *given, **words: seen.append(given[1].shape[2]) or SDPA(*given))
    assert torch.allclose(torch_answer.sdpa(q, k, v, is_causal=True), v[:, :, :1]) and seen == [1]


def test_what_is_no_tensor_or_has_other_dimensions_is_named():
    q, k, v = tensors()
    packed, caches, table = q[0].transpose(0, 1), torch.randn(4, 8, 2, 64).half(), torch.zeros(1, 2, dtype=torch.int32)
    used, starts = torch.tensor([9], dtype=torch.int32), torch.tensor([0, 37], dtype=torch.int32)
    given = packed, caches, caches, table, used, starts
    for place, name in enumerate(("query", "k_cache", "v_cache", "block_table", "seqused_k", "cu_seqlens_q")):
        for wrong, error in ((None, TypeError), (torch.tensor(1.5), ValueError)):
            with pytest.raises(error, match=f"^{name} must "):
                evoattn.attention_mixed(*given[:place], wrong, *given[place + 1 :], 37)
    with pytest.raises(TypeError, match=r"^value must be a tensor, not list\.$"):
        attention(q, k, [1, 2], enable_gqa=True, softcap=2.0)
    rows = [one[0].transpose(0, 1) for one in (q, k, v)]
    for words in ({"cu_seqlens_q": "x"}, {"cu_seqlens_k": starts[None]}, {"alibi_slopes": 3}, {"v": torch.tensor(1.5)}):
        common = dict(zip("qkv", rows, strict=True), cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=37)
        with pytest.raises((TypeError, ValueError), match=f"^{next(iter(words))} must "):
            evoattn.flash_attn.flash_attn_varlen_func(**{**common, "max_seqlen_k": 45, **words})


def test_a_longest_length_of_none_breaks_no_device():
    """To read rows out of none would leave a process without its device."""
    rows, starts = torch.randn(5, 2, 8), torch.tensor([0, 5], dtype=torch.int32)
    used, table = torch.tensor([9], dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    assert evoattn.attention_mixed(rows, *torch.randn(2, 4, 8, 2, 8), table, used, starts, 0).shape == rows.shape


def test_compilers_are_no_transforms(monkeypatch):
    mask, found = torch.ones(2, 1, 1, 3), []
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: len(found) == 1)
    for _ in range(2):
        torch.vmap(lambda x: found.append(torch_answer._is_lost_by_vmap(mask)) or x)(mask)
    assert found == [True, False]


@pytest.mark.slow
def test_a_mask_of_batches_in_compiled_code_is_sdpas():
    """There a look for transforms found one, and all scores were made."""
    q, k, v = tensors(seqlen_q=5, seqlen_k=5, dtype=torch.float32)
    graphs, mask = Graphs(), torch.ones(2, 1, 5, 5, dtype=torch.bool)
    torch.compile(lambda q: attention(q, k, v, attn_mask=mask, enable_gqa=True), backend=graphs, fullgraph=True)(q)
    names = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert any("scaled_dot_product_attention" in name for name in names) and not any("math" in name for name in names)
