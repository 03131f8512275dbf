"""`evoattn.attention_fp8` without a kernel, and what a kernel would be given. Keys and values of 8 bits in calls:
torch's answer is that of the numbers that they stand for, kernels get the scales as callers have them, and what does
not fit is said."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import evoattn
from evoattn.backends.interpreter import InterpreterBackend
from evoattn.backends.loaded import tensor_places
from evoattn.families import registry
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.gpu import GPUS
from evoattn.model.launch import Buffer, TensorMap
from evoattn.model.scales import rounded_op
from evoattn.ops.attention_fp8 import choice_in_eight_bits, quantised
from evoattn.ops.beside import WIDE, Wanted, quantize
from evoattn.ops.call import E4M3, Call, behind, out_like, terms_of
from evoattn.ops.custom_op import operands, variant_lse_op
from evoattn.ops.given import call_of, with_scales
from evoattn.ops.runtime import current
from evoattn.ops.torch_answer import NoKernel
from tests.families.on_interpreter import built
from tests.ops.fake_device import FakeDevice, fake_runtime

B, H, HKV, SQ, SK, D = 2, 8, 2, 50, 70, 64


def tensors(seed=0, outlier=0.0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, h, s, D, generator=generator) for h, s in ((H, SQ), (HKV, SK), (HKV, SK)))
    k[..., 3] += outlier
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def exact(q, k, v, causal=False):
    return evoattn.attention(q.double(), k.double(), v.double(), enable_gqa=True, causal=causal, return_lse=True)


def rms(x):
    return x.double().square().mean().sqrt().item()


@pytest.mark.parametrize("causal", [False, True])
def test_it_quantises_on_the_way(causal):
    q, k, v = tensors()
    out, lse = evoattn.attention_fp8(q, k, v, causal=causal, return_lse=True)
    values, sums = exact(q, k, v, causal)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert rms(out - values) < 0.05 * rms(values) and rms(lse - sums) < 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sizes_of_values_do_not_matter(dtype):
    q, k, v = tensors()
    values, _ = exact(q, k, v)
    for size in (1e-4, 1.0, 1e3):  # of which 448 are more than fp16 holds, or so few that it keeps no digits of a scale
        given = [t.to(dtype) for t in (q, k / size, v * size)]
        out = evoattn.attention_fp8(given[0], given[1], given[2], scale=size / D**0.5)
        assert rms(out / size - values) < 0.06 * rms(values)
    assert torch.equal(evoattn.attention_fp8(q, k, torch.zeros_like(v)), torch.zeros(q.shape, dtype=torch.bfloat16))


def test_numbers_stand_for_themselves_times_their_scales():
    q, k, v = tensors()
    given, _ = quantised(q, k, v)
    assert given.query.dtype == E4M3 and given.q_scale.shape == (B, HKV)
    words = dict(q_descale=given.q_scale, k_descale=given.k_scale, v_descale=given.v_scale)
    out = evoattn.attention_fp8(given.query, given.key, given.value, **words)
    of_heads = lambda one, group: one.repeat_interleave(group, 1)[:, :, None, None].double()
    meant = (
        given.query.double() * of_heads(given.q_scale, H // HKV),
        given.key.double() * of_heads(given.k_scale, 1),
        given.value.double() * of_heads(given.v_scale, 1),
    )
    values, _ = exact(*meant)
    assert rms(out - values) < 0.01 * rms(values)
    assert torch.equal(out, evoattn.attention_fp8(q, k, v))


def test_keys_and_values_of_e5m2_and_scales_of_blocks():
    q, k, v = tensors(7)
    numbers = [q.to(E4M3), *(x.to(torch.float8_e5m2) for x in (k, v))]
    scales = [torch.rand(B, heads, 1) + 0.5 for heads in (H, HKV, HKV)]
    words = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    values, _ = exact(*[x.double() * s[..., None] for x, s in zip(numbers, scales, strict=True)])
    out = evoattn.attention_fp8(*numbers, **words)
    assert rms(out - values) < 0.01 * rms(values)
    words["q_descale"], words["k_descale"] = torch.full((B, HKV), 0.75), 2.0  # beside those of blocks
    mixed = evoattn.attention_fp8(*numbers, **words)
    values, _ = exact(numbers[0].double() * 0.75, numbers[1].double() * 2, numbers[2].double() * scales[2][..., None])
    assert rms(mixed - values) < 0.01 * rms(values)


def test_whole_numbers():
    q, k, v = tensors(3)
    made = [quantize(x, Wanted(torch.int8, "head", HKV)) for x in (q, k, v)]
    words = dict(zip(("q_descale", "k_descale", "v_descale"), [x.scale for x in made], strict=True))
    out, (values, _) = evoattn.attention_fp8(*[x.numbers for x in made], **words), exact(q, k, v)
    assert out.dtype == torch.bfloat16 and rms(out - values) < 0.02 * rms(values)


def test_one_scale_is_a_number_a_tensor_or_one_for_each_head():
    given, _ = quantised(*tensors())
    call = lambda scale: evoattn.attention_fp8(given.query, given.key, given.value, k_descale=scale, v_descale=0.5)
    for same in (torch.tensor([0.01]), torch.full((B, HKV), 0.01)):
        assert torch.equal(call(0.01), call(same))
    assert not torch.equal(call(0.01), call(None))


def test_keys_less_their_mean_cost_less_of_the_range():
    q, k, v = tensors(outlier=40.0)
    values, sums = exact(q, k, v)
    plain, smooth = (evoattn.attention_fp8(q, k, v, smooth_k=s, return_lse=True) for s in (False, True))
    assert rms(smooth[0] - values) < 0.5 * rms(plain[0] - values)
    assert rms(smooth[1] - sums) < 0.1 < rms(sums)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_answer_has_a_dtype(dtype):
    q, k, v = tensors()
    numbers = [x.to(E4M3) for x in (q, k, v)]
    out = evoattn.attention_fp8(*numbers, dtype=dtype)
    assert out.dtype == dtype and rms(out - evoattn.attention_fp8(*numbers)) < 0.01 * rms(out)
    assert evoattn.attention_fp8(q.to(dtype), k.to(dtype), v.to(dtype)).dtype == dtype
    with pytest.raises(ValueError, match="dtype must be float16 or bfloat16, not float32"):
        evoattn.attention_fp8(q, k, v, dtype=torch.float32)


@pytest.mark.parametrize("dtype, of", [(torch.float16, "head"), (torch.bfloat16, "block")])
def test_a_kernel_may_round_query_itself(dtype, of):
    q, k, v = (x.to(dtype) for x in tensors())
    given, _ = quantised(q, k, v, turned=True, granularity=of, rounds=True)
    assert given.query is q and given.q_scale is None
    terms = terms_of(k_scale=given.k_scale, v_scale=given.v_scale)
    call = Call(q, given.key, given.value, enable_gqa=True, terms=terms, turned=True, op=rounded_op(WIDE[dtype]))
    problem = call.problem(out_like(q, given.value).stride())
    assert (problem.dtype, problem.op, problem.answer.torch) == ("e4m3", call.op, str(dtype)[6:])
    assert (problem.scales, set(problem.scale_shapes)) == (of, {"k_scale", "v_scale"})


@pytest.mark.parametrize("of", ["", "head", "block"])
def test_a_kernel_gets_all_that_it_names(of):
    given, _ = quantised(*tensors())
    shapes = {"head": [(B, HKV)] * 3, "": [(1, 1)] * 3, "block": [(B, heads, 1) for heads in (H, HKV, HKV)]}
    scales = [torch.ones(shape) for shape in shapes[of]]
    call = Call(
        given.query, given.key, given.value, enable_gqa=True, return_lse=True, q_scaled=True,
        terms=behind(terms_of(k_scale=scales[1], v_scale=scales[2]), (scales[0],)),
    )  # fmt: skip
    out = out_like(call.query, call.value)
    assert out.dtype == torch.bfloat16 and out.shape == call.query.shape
    problem = call.problem(out.stride())
    assert (problem.dtype, problem.scales, problem.lse) == ("e4m3", of, True)
    family = FAMILIES["fp8_wgmma"]
    config = load_space("fp8_wgmma", GPUS["h100"]).starting_configs()[0]
    [launch] = family.launches(problem, config, GPUS["h100"])
    places = tensor_places(problem)
    names = [
        a.buffer if isinstance(a, TensorMap) else a.name for a in launch.args if isinstance(a, (Buffer, TensorMap))
    ]
    assert set(names) <= set(places) and {"q_scale", "k_scale", "v_scale"} <= set(names)
    before = 7  # five tensors, and two pieces of scratch memory
    assert all(call.terms[places[f"{t}_scale"][0] - before] is scale for t, scale in zip("qkv", scales, strict=True))
    strides = {"": [(0, 0, 0)] * 3, "head": [(HKV, 1, 0)] * 3, "block": [(H, 1, 1), *[(HKV, 1, 1)] * 2]}[of]
    assert [problem.scale_strides(f"{t}_scale") for t in "qkv"] == strides


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda q, k, v: ((q, k, v), {"q_descale": 2.0}), "descales belong"),
        (lambda q, k, v: ((q.to(E4M3), k, v), {}), "all be float8_e4m3fn"),
        (lambda q, k, v: ((q[0], k, v), {}), r"query must be \[batch"),
        (lambda q, k, v: ((q, k[:, :, :, :32], v), {}), "do not fit"),
        (lambda q, k, v: ((q.to(E4M3), k.to(E4M3), v.to(E4M3)), {"v_descale": torch.ones(3)}), "v_descale must be"),
        (lambda q, k, v: ((q.to(E4M3), k.to(E4M3), v.to(E4M3)), {"k_descale": -1.0}), "not be negative"),
        (lambda q, k, v: ((q.to(E4M3), k.to(E4M3), v.to(E4M3)), {"smooth_k": True}), "8 bits already"),
        (lambda q, k, v: ((q, k, v), {"smooth_k": True, "softcap": 5.0}), "no softcap"),
        (lambda q, k, v: ((q, k, v), {"smooth_k": True, "sinks": torch.zeros(H)}), "no sinks"),
        (lambda q, k, v: ((q.requires_grad_(), k, v), {}), "no gradients"),
    ],
)
def test_what_does_not_fit_is_one_sentence(change, words):
    args, options = change(*tensors())
    with pytest.raises(ValueError, match=words):
        evoattn.attention_fp8(*args, **options)


def test_packed_sequences_and_pages():
    generator = torch.Generator().manual_seed(5)
    drawn = lambda *shape: torch.randn(*shape, D, generator=generator).to(E4M3)
    scales = [torch.rand(3, HKV, generator=generator) + 0.5 for _ in range(3)]
    of_heads = lambda one, b, heads: one[b].double().repeat_interleave(heads // HKV)[:, None, None]
    words = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    starts_q, starts_k = (torch.tensor([0, *ends], dtype=torch.int32) for ends in ((5, 5, 30), (9, 20, 60)))
    packed = drawn(30, H), drawn(60, HKV), drawn(60, HKV)
    out = evoattn.attention_varlen(*packed, starts_q, starts_k, 25, 40, causal=True, **words)
    assert out.dtype == torch.bfloat16
    pages, table = (drawn(10, 16, HKV), drawn(10, 16, HKV)), torch.randperm(10, generator=generator)[:9].view(3, 3)
    query, used = drawn(3, 4, H), torch.tensor([40, 17, 33], dtype=torch.int32)
    paged = evoattn.attention_paged(query, *pages, table.int(), used, causal=True, **words)
    found, meant = [], []
    for b in range(3):
        rows, keys = (slice(*starts[b : b + 2]) for starts in (starts_q, starts_k))
        lie = [packed[0][rows], packed[1][keys], packed[2][keys]]
        both = [(out[rows], lie)] if b != 1 else []  # it has no queries
        both.append((paged[b], [query[b], *[one[table[b]].flatten(0, 1)[: used[b]] for one in pages]]))
        for answer, tensors in both:
            exact = [x.double().transpose(0, 1) * of_heads(s, b, x.shape[1]) for x, s in zip(tensors, scales)]
            values = evoattn.attention(*[x[None] for x in exact], enable_gqa=True, causal="lower_right")
            found.append(answer.transpose(0, 1).flatten()), meant.append(values.flatten())
    assert rms(torch.cat(found) - torch.cat(meant)) < 0.01 * rms(torch.cat(meant))
    given, asked = (
        torch.empty_like(out),
        functools.partial(evoattn.attention_varlen, *packed, starts_q, starts_k, 25, 40),
    )
    assert asked(causal=True, out=given, **words) is given and torch.equal(given, out)
    with pytest.raises(ValueError, match=r"out must be a torch\.bfloat16"):  # twice as large as query
        asked(causal=True, out=torch.empty_like(packed[0]), **words)
    call = call_of(*packed, dict(words, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=25, max_seqlen_k=40))
    problem = call.problem(out_like(call.query, call.value).stride())
    assert call.q_scaled and (problem.dtype, problem.scales, bool(problem.varlen)) == ("e4m3", "head", True)
    with torch.autocast("cpu", dtype=torch.float16):
        assert call.autocast("cpu").query is call.query
    with pytest.raises(ValueError, match="q_scale belongs"):
        evoattn.attention_paged(query.bfloat16(), *pages, table.int(), used, q_scale=1.0)
    with pytest.raises(ValueError, match="q_scale must not be negative"):
        evoattn.attention_paged(query, *pages, table.int(), used, q_scale=-1.0)
    with pytest.raises(ValueError, match="scales of each key"):
        evoattn.attention_varlen(*packed, starts_q, starts_k, 25, 40, k_scale=torch.ones(60, HKV))


def test_what_no_kernel_takes_is_tried_again_of_another_mask_and_dtype(tmp_path):
    runtime, asked = fake_runtime(FakeDevice(), tmp_path), []

    def refuse(call):
        asked.append((call.mask, call.op, call.turned))
        raise NoKernel("none")

    runtime.attend = refuse
    q, k, v = tensors()
    with current.use(runtime):
        given = (q, True, None), (q, True, None), (q, False, None), (q.half(), True, None), (q, True, torch.float16)
        for query, causal, out in given:
            with pytest.raises(NoKernel):
                evoattn.attention_fp8(
                    query, k.to(query.dtype), v.to(query.dtype), causal=causal, dtype=out, strict=True
                )
    causal, full = "causal_lower_right", "full"
    rounded, half = (rounded_op(dtype) for dtype in ("bf16", "fp16"))
    new = lambda mask, op: [(mask, op, True), (mask, "forward", True), (mask, "forward", False)]
    known = [(causal, "forward", False)]
    assert asked == [*new(causal, rounded), *known, *new(full, rounded), *new(causal, half), *new(causal, rounded)]


def test_a_kernel_is_chosen_for_the_device_of_the_tensors(monkeypatch):
    """Each device has picks of its own."""
    q, k, v = (torch.empty(1, 8, 32768, 128, dtype=torch.bfloat16, device="meta") for _ in range(3))
    asked = []
    runtime = SimpleNamespace(
        platform=SimpleNamespace(spec=lambda index: GPUS["h100"] if index == 3 else None),
        choose=lambda problem, gpu, index: asked.append((problem.dtype, problem.scales, gpu.name, index)),
    )
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 3)
    choice_in_eight_bits(runtime, Call(q, k, v))
    assert asked == [("e4m3", "head", "h100", 3)]


def test_strict_says_that_no_kernel_serves():
    with pytest.raises(evoattn.NoKernel):
        evoattn.attention_fp8(*tensors(), strict=True)


KEYS, PAGE = 37, 16
DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
CONFIG = dict(
    COMPUTE="mma", LOAD="registers", BLOCK_M=8, BLOCK_N=16, WARPS=1, STAGES=1, VECTOR_BYTES=16, DOT_LANES=4, SPLITS=1,
    MERGE="kernel", DEPENDENT_LAUNCH="none", BLOCKS_PER_SM=1,
)  # fmt: skip


def made(dtype, granularity):
    """Of two batches, two K/V heads: q, quantised k and v with scales, and float64 k and v that they stand for."""
    torch.manual_seed(3)
    q = torch.randn(2, 3, 4, 32, dtype=torch.bfloat16).transpose(1, 2)
    keys, values = (torch.randn(2, 2, KEYS, 32) * torch.tensor([1.0, 4.0]).view(1, 2, 1, 1) for _ in "kv")
    k, v, k_scale, v_scale = evoattn.quantize_kv(keys, values, dtype, granularity)
    shape = {"tensor": (1, 1, 1, 1), "head": (2, 2, 1, 1), "token": (2, 2, KEYS, 1)}[granularity]
    wide = [n.double() * scale.double().view(shape) for n, scale in ((k, k_scale), (v, v_scale))]
    return q, k, v, k_scale, v_scale, wide


def right(q, wide):
    keys, values = (one.repeat_interleave(2, 1) for one in wide)
    return torch.softmax(q.double() @ keys.transpose(-1, -2) / 32**0.5, -1) @ values


def packed(x):
    return x.transpose(1, 2).flatten(0, 1)


def paged(x, table):
    """`[2, heads, KEYS, …]` in pages `[pages, PAGE, heads, …]`; int8, as indices write no fp8."""
    pages = torch.full((6, PAGE, x.shape[1], *x.shape[3:]), 0, dtype=x.dtype)
    for batch in range(2):
        for key in range(KEYS):
            pages[int(table[batch, key // PAGE]), key % PAGE] = x[batch, :, key]
    return pages


def in_form(form, q, k, v, k_scale, v_scale):
    """The function, its arguments by name, and what makes its answer `[2, 4, 3, 32]`."""
    of_each = k_scale.dim() == 3
    if form == "attention":
        return evoattn.attention, dict(query=q, key=k, value=v, enable_gqa=True), k_scale, v_scale, lambda o: o
    if form == "varlen":
        starts = (torch.tensor([0, 3, 6], dtype=torch.int32), torch.tensor([0, KEYS, 2 * KEYS], dtype=torch.int32))
        words = dict(zip(("query", "key", "value"), map(packed, (q, k, v)), strict=True))
        words |= dict(cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seqlen_q=3, max_seqlen_k=KEYS)
        scales = [packed(one) if of_each else one for one in (k_scale, v_scale)]
        return evoattn.attention_varlen, words, *scales, lambda o: o.unflatten(0, (2, 3)).transpose(1, 2)
    table = torch.tensor([[3, 1, 0], [2, 4, 5]], dtype=torch.int32)
    caches = [paged(one.view(torch.int8), table).view(one.dtype) for one in (k, v)]
    words = dict(query=q.transpose(1, 2), k_cache=caches[0], v_cache=caches[1], block_table=table)
    words["seqused_k"] = torch.full((2,), KEYS, dtype=torch.int32)
    scales = [paged(one, table) if of_each else one for one in (k_scale, v_scale)]
    return evoattn.attention_paged, words, *scales, lambda o: o.transpose(1, 2)


@pytest.mark.parametrize("form", ["attention", "varlen", "paged"])
@pytest.mark.parametrize("granularity", ["tensor", "head", "token"])
def test_torch_computes_what_the_numbers_stand_for(form, granularity):
    for dtype in DTYPES:
        q, *eight, wide = made(dtype, granularity)
        function, words, k_scale, v_scale, back = in_form(form, q, *eight)
        answer, lse = function(**words, k_scale=k_scale, v_scale=v_scale, return_lse=True)
        assert answer.dtype == torch.bfloat16 and (back(answer) - right(q, wide)).abs().max() < 0.15
        assert lse.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "dtype", "granularity"),
    [
        ("attention", torch.float8_e4m3fn, "token"),
        ("attention", torch.int8, "mixed"),
        ("varlen", torch.float8_e5m2, "head"),
        ("paged", torch.float8_e4m3fn, "head"),
        ("paged", torch.int8, "token"),
    ],
)
def test_a_kernel_finds_the_scales_as_the_caller_has_them(form, dtype, granularity):
    q, k, v, k_scale, v_scale, wide = made(dtype, "token" if granularity == "mixed" else granularity)
    if granularity == "mixed":
        v_scale = torch.tensor([0.5, 2.0]) / 64
        wide[1] = v.double() * v_scale.double().view(1, 2, 1, 1)
    _, words, k_scale, v_scale, back = in_form(form, q, k, v, k_scale, v_scale)
    query, key, value = (words.pop(name) for name in list(words)[:3])
    call = call_of(query, key, value, words | dict(k_scale=k_scale, v_scale=v_scale))
    call.require()
    call.out = out_like(call.query, call.value)
    problem = call.problem(call.out.stride())
    assert not isinstance(problem, str), problem
    family, config = registry.lookup("split_kv"), load_space("split_kv", GPUS["l4"]).make_config(CONFIG)
    assert family.why_impossible(problem, config, GPUS["l4"]) is None
    kernel = built(family, problem.as_searched, config, GPUS["l4"], machine_code=False)
    names = ("sinks", "slopes", "bias", "seqused", "table", "cu_seqlens_q", "cu_seqlens_k", "k_scale", "v_scale")
    tensors = {"q": call.query, "k": call.key, "v": call.value, "o": call.out}
    tensors |= {name: term for name, term in zip(names, call.terms, strict=True) if term is not None}
    flat = {name: t.as_strided((_span(t),), (1,), t.storage_offset()) for name, t in tensors.items()}
    flat |= {name: torch.zeros(max(16, size), dtype=torch.uint8) for name, size in kernel.workspace(problem).items()}
    assert not InterpreterBackend().run(kernel.compiled, kernel.launches(problem), flat)
    assert (back(call.given_back(call.out)) - right(q, wide)).abs().max() < 0.05


def _span(tensor):
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


FORMULA = 0.1
"""How far PyTorch's formula may be off, which makes bf16 of keys and values: alone that moves answers by 0.03 to 0.09,
as the numbers are drawn, which differs between versions of torch."""


def test_the_registered_op_takes_scales():
    q, k, v, k_scale, v_scale, wide = made(torch.float8_e4m3fn, "head")
    words = dict(enable_gqa=True, k_scale=k_scale, v_scale=v_scale)
    answer, _ = variant_lse_op(*operands(call_of(q, k, v, words)))
    assert (answer - right(q, wide)).abs().max() < FORMULA


def test_a_cache_of_flash_attention_has_descale_factors():
    from evoattn.flash_attn import flash_attn_with_kvcache

    q, k, v, k_scale, v_scale, wide = made(torch.float8_e4m3fn, "head")
    caches = [one.transpose(1, 2).contiguous() for one in (k, v)]
    words = dict(cache_seqlens=KEYS, k_descale=k_scale, v_descale=v_scale)
    answer = flash_attn_with_kvcache(q.transpose(1, 2), *caches, **words)
    assert (answer.transpose(1, 2) - right(q, wide)).abs().max() < FORMULA
    with pytest.raises(ValueError, match="quantise these"):
        flash_attn_with_kvcache(q.transpose(1, 2), *caches, k=caches[0][:, :1], v=caches[1][:, :1], **words)


def test_what_does_not_fit_is_a_sentence():
    q, k, v, k_scale, _, _ = made(torch.int8, "token")
    with pytest.raises(ValueError, match="belong to keys and values of 8 bits"):
        evoattn.attention(q, q, q, k_scale=2.0)
    with pytest.raises(ValueError, match=r"k_scale must be a number, \[kv_heads\]"):
        evoattn.attention(q, k, v, enable_gqa=True, k_scale=k_scale[:, :, 1:])
    with pytest.raises(TypeError, match="v_scale must be a number"):
        evoattn.attention(q, k, v, enable_gqa=True, v_scale="2")
    with pytest.raises(ValueError, match="granularity"):
        evoattn.quantize_kv(k.float(), v.float(), granularity="row")


def test_a_first_call_has_the_bits_of_those_to_come(tmp_path):
    """What no kernel takes is quantised as where that is known."""
    q, k, v = tensors()
    with current.use(fake_runtime(FakeDevice(), tmp_path, lambda *asked: None)):
        first, again = (evoattn.attention_fp8(q, k, v) for _ in range(2))
    assert torch.equal(first, again)


def test_what_no_kernel_takes_in_a_capture_is_not_remembered(tmp_path):
    q, k, v = tensors()
    with current.use(fake_runtime(FakeDevice(), tmp_path, lambda *asked: None)) as runtime:
        runtime.platform.is_capturing = True
        evoattn.attention_fp8(q, k, v)
        assert not {"rounds", "turned"} & {key[0] for key in runtime.served}
        runtime.platform.is_capturing = False
        evoattn.attention_fp8(q, k, v)
        assert {"rounds", "turned"} & {key[0] for key in runtime.served}


def test_a_scale_that_is_a_number_is_one_tensor_of_all_calls_that_are_not_traced():
    """A fill is a launch, which takes as long as half of attention over a short cache."""
    q, k, v = tensors()
    call = Call(q, k.to(E4M3), v.to(E4M3), True)

    def scales(*given):
        return [one for one in with_scales(call, *given).terms if one is not None]

    with torch.inference_mode():
        first = scales(0.25, 0.5)
    assert [float(one) for one in first] == [0.25, 0.5] and not any(one.is_inference() for one in first)
    assert [id(one) for one in scales(0.25, 0.5)] == [id(one) for one in first]
    assert scales(0.5, None)[0] is first[1] and float(scales(0.5, None)[1]) == 1
    with FakeTensorMode():
        assert all(type(one) is FakeTensor for one in scales(0.125, 0.125))
    assert all(type(one) is torch.Tensor and float(one) == 0.125 for one in scales(0.125, 0.125))
