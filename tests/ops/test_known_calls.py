"""A call gets the plan of one that differs in nothing that the plan depends on; no word of a mask is passed over."""

import inspect

import pytest
import torch

import evoattn
from evoattn.backends.loaded import SCRATCH_ALIGNMENT, LoadedKernel, scratch_places
from evoattn.model.launch import KernelLaunch
from evoattn.ops.arguments import ALL, ARGUMENTS, REQUIRED
from evoattn.ops.attention import attention, attention_mixed, attention_paged, attention_varlen
from evoattn.ops.call import Call
from evoattn.ops.explain import RecordedKernel
from evoattn.ops.given import call_of
from evoattn.ops.runtime import current
from evoattn.ops.torch_answer import NoKernel
from tests.ops.fake_device import CacheDevice, FakeDevice, fake_runtime, near, reference, split_kv_pick, tensors


def in_other_order(tensor):
    """The same numbers, `[batch, seqlen, heads, head_dim]` in memory."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("name", ["query", "key", "value", "out"])
def test_strides_of_each_tensor_count(device, name):
    q, k, v = tensors()
    given = dict(query=q, key=k, value=v, out=torch.empty_like(q))
    for changed in (given, given | {name: in_other_order(given[name])}, given):
        assert near(attention(**changed, enable_gqa=True, strict=True), reference(q, k, v))


class On:
    """A tensor that says it is on another device."""

    def __init__(self, tensor, index):
        self._tensor, self._index = tensor, index

    def __getattr__(self, name):
        return getattr(self._tensor, name)

    def get_device(self):
        return self._index


def test_devices_count(device):
    (q, k, v), runtime = tensors(), current.runtime()
    out = torch.empty_like(q)
    guarded = []
    for index in (-1, 1, 2, 1):
        on = [On(tensor, index) for tensor in (q, k, v)]
        runtime.attend(Call(*on, enable_gqa=True, out=out, strict=True))
        assert near(out, reference(q, k, v))
        guarded.append(device.guards[-1])
    assert guarded[1:] == [1, 2, 1], "launches are of the device of their tensors"


@pytest.mark.parametrize("here", [-2, 0])
def test_a_device_on_either_side_of_the_current_one_is_guarded(device, here):
    q, k, v = tensors()
    attention(q, k, v, enable_gqa=True, strict=True)
    before, device.here = len(device.guards), here
    attention(q, k, v, enable_gqa=True, strict=True)
    assert device.guards[before:] == [-1]


@pytest.mark.parametrize("name", ["query", "key", "value", "sinks"])
def test_gradients_of_each_tensor_count(device, name):
    q, k, v = tensors()
    given = dict(query=q, key=k, value=v, sinks=torch.zeros(4).half())
    attention(**given, enable_gqa=True, strict=True)
    given[name] = given[name].clone().requires_grad_()
    with pytest.raises(NoKernel, match="gradients"):
        attention(**given, enable_gqa=True, strict=True)
    attention(**given, enable_gqa=True).sum().backward()
    assert given[name].grad is not None


def test_an_out_at_an_odd_address_is_no_kernel_s(device):
    q, k, v = tensors()
    attention(q, k, v, enable_gqa=True, strict=True, out=torch.empty_like(q))
    launches, out = len(device.launches), torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    with pytest.raises(NoKernel, match="multiple of 16"):
        attention(q, k, v, enable_gqa=True, strict=True, out=out)
    assert attention(q, k, v, enable_gqa=True, out=out) is out
    assert near(out, reference(q, k, v)) and len(device.launches) == launches


def test_the_log_sum_exp_takes_a_kernel_of_its_own(device):
    q, k, v = tensors()
    attention(q, k, v, enable_gqa=True, strict=True)
    answer, lse = attention(q, k, v, enable_gqa=True, strict=True, return_lse=True)
    expected = torch.logsumexp(q.double() @ k.double().repeat_interleave(2, 1).mT / 8, -1)
    assert near(answer, reference(q, k, v)) and near(lse, expected) and device.loads == 2


def test_the_dtype_of_a_bias_counts(device):
    (q, k, v), bias = tensors(), torch.randn(37, 45)
    attention(q, k, v, enable_gqa=True, bias=bias.half(), strict=True)
    with pytest.raises(NoKernel, match="would round"):
        attention(q, k, v, enable_gqa=True, bias=bias, strict=True)


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes", "bias"])
def test_strides_and_dtypes_of_terms_count(device, name):
    q, k, v = tensors()
    shape = (37, 45) if name == "bias" else (4,)
    numbers = torch.randn(shape).half()
    apart = torch.zeros(*shape, 3).half()
    apart[..., 1] = numbers
    given = [numbers, apart[..., 1], numbers.clone()]
    given += [] if name == "bias" else [numbers.float(), numbers.double()]
    expected = attention(q.double(), k.double(), v.double(), enable_gqa=True, **{name: numbers.double()})
    for term in given * 2:
        assert near(attention(q, k, v, enable_gqa=True, strict=True, **{name: term}), expected)


def test_zeros_are_new_after_a_launch_that_failed(device):
    q, k, v = tensors()
    attention(q, k, v, enable_gqa=True, strict=True)
    scratch = current.runtime()._kernels._scratch
    scratch.get(8, True, q.device, -1, 0, False)
    device.status = 719
    with pytest.warns(RuntimeWarning, match="not used again"):
        attention(q, k, v, enable_gqa=True)
    assert not scratch._kept


def test_functions_are_not_loaded_in_a_capture(device):
    q, k, v = tensors()
    attention(q, k, v, enable_gqa=True, strict=True)
    (kernel,) = current.runtime()._kernels._loaded.values()
    kernel.holds = lambda launches: False
    device.is_capturing = True
    with pytest.warns(RuntimeWarning, match="captured"), pytest.raises(NoKernel, match="graph is being captured"):
        attention(q, k, v, enable_gqa=True, scale=0.3, strict=True)


def test_scratch_buffers_begin_at_whole_steps():
    places, size, _ = scratch_places({"partials": 100, "sums": 8, "others": 300})
    assert [offset % SCRATCH_ALIGNMENT for _, offset in places.values()] == [0, 0, 0] and size % SCRATCH_ALIGNMENT == 0
    assert len(set(places.values())) == 3


def test_a_later_launch_of_more_shared_memory_is_allowed_it():
    device, allowed = FakeDevice(), []
    device.allow_shared_memory = lambda function, smem_bytes: allowed.append(smem_bytes)
    kernel = LoadedKernel(b"{}", device, -1)
    for smem_bytes in (60_000, 100_000, 80_000):
        kernel.bound((KernelLaunch("one", (1, 1, 1), (32, 1, 1), smem_bytes=smem_bytes, args=()),), {})
    assert allowed == [60_000, 100_000]


def test_a_mask_is_never_passed_over():
    q, k, v = tensors(dtype=torch.float32)
    lower = attention(q, k, v, causal="lower_right", enable_gqa=True)
    upper = attention(q, k, v, is_causal=True, enable_gqa=True)
    full = attention(q, k, v, enable_gqa=True)
    assert not torch.equal(lower, full) and not torch.equal(lower, upper)
    assert torch.equal(attention(q, k, v, causal=True, enable_gqa=True), lower)
    for words in (dict(causal="upper_left"), dict(causal="upper_left", is_causal=True)):
        assert torch.equal(attention(q, k, v, **words, enable_gqa=True), upper)
    assert torch.equal(attention(q, k, v, causal=False, enable_gqa=True), full)
    for said in (True, False, "lower_right"):
        with pytest.raises(ValueError, match="says another one"):
            attention(q, k, v, is_causal=True, causal=said, enable_gqa=True)
    for wrong in ("upper", 1, 0, "full", ["upper_left"]):
        with pytest.raises(ValueError, match="causal must be"):
            attention(q, k, v, causal=wrong, enable_gqa=True)


@pytest.mark.parametrize("words", [{"is_causal": True}, {"causal": "upper_left"}], ids=str)
def test_sequences_and_pages_have_no_upper_left_mask(words):
    q, starts = torch.zeros(5, 2, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=3, max_seqlen_k=3)
    with pytest.raises(ValueError, match="lower right one"):
        evoattn.explain(q, q, q, **packed, **words)
    with pytest.raises(ValueError, match="lower right one"):
        call_of(q, q, q, packed | words)


def test_pages_have_a_log_sum_exp(tmp_path):
    q, pages = torch.randn(2, 1, 4, 64).half(), torch.randn(6, 16, 2, 64).half()
    table, used = torch.tensor([[4, 0, 2], [5, 1, 3]], dtype=torch.int32), torch.tensor([40, 9], dtype=torch.int32)
    out, lse = attention_paged(q, pages, pages, table, used, causal=True, return_lse=True)
    for b, count in enumerate(used.tolist()):
        keys = pages[table[b].long()].flatten(0, 1)[:count].repeat_interleave(2, 1).double()
        scores = torch.einsum("hd,khd->hk", q[b, 0].double(), keys) / 8
        assert near(lse[b, :, 0], torch.logsumexp(scores, -1))
        assert near(out[b, 0], torch.einsum("hk,khd->hd", torch.softmax(scores, -1), keys))
    with current.use(fake_runtime(CacheDevice(), tmp_path, split_kv_pick)):
        assert near(attention_paged(q, pages, pages, table, used, causal=True, strict=True), out)


def test_the_functions_have_the_arguments_of_the_table():
    functions = attention, attention_varlen, attention_paged, attention_mixed
    for function in functions:
        has = {name: p.default for name, p in inspect.signature(function).parameters.items()}
        rows = {one.name: one.default for one in ARGUMENTS if function.__name__ in one.of}
        assert set(has) - set(rows) == set(list(has)[:3]), "query, key and value, or caches"
        for name, default in rows.items():
            required = default is REQUIRED or (name == "seqused_k" and function in functions[2:])
            assert has[name] == (inspect.Parameter.empty if required else default), name
    shared = [one.name for one in ARGUMENTS if one.of == ALL]
    of_each = [inspect.signature(function).parameters for function in functions]
    assert all([name for name in has if name in shared] == shared for has in of_each), "in one order"
    for function, without in (
        (evoattn.explain, {"out", "strict"}),
        (RecordedKernel.__call__, {"strict", "deterministic", "batch_invariant"}),
    ):
        has = set(inspect.signature(function).parameters)
        others = {"attn_mask", "dropout_p", "score_mod", "block_mask"}  # SDPA's and FlexAttention's
        assert {one.name for one in ARGUMENTS} - without - others == has - others - {"self", "query", "key", "value"}
