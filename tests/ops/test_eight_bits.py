"""Keys and values of 8 bits in calls: torch's answer is that of the numbers that they stand for, kernels get the
scales as callers have them, and what does not fit is said."""

import pytest
import torch

import evoattn
from evoattn.backends.interpreter import InterpreterBackend
from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.ops.call import out_like
from evoattn.ops.custom_op import operands, variant_lse_op
from evoattn.ops.given import call_of
from tests.families.on_interpreter import built

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
