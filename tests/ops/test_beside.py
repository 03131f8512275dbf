"""New keys and values in caches by a kernel of the family append_kv: what arrives on a device, and what is torch's.
`flash_attn_combine` by a kernel of the family merge_parts: pointers, counts and strides that arrive on a device."""

import ctypes
import math

import pytest
import torch

import evoattn
from evoattn import flash_attn
from evoattn.families.registry import load_space
from evoattn.integrations.flash_attn.cache import Cache, append_and_attend
from evoattn.integrations.flash_attn.options import Options
from evoattn.integrations.flash_attn.rotary import rotated
from evoattn.ops.beside import appended
from evoattn.ops.runtime import current
from tests.ops.fake_device import CONFIG, TORCH, CacheDevice, FakeDevice, Pick, fake_runtime, near
from tests.ops.fake_variants import tensor_at

TYPES = [ctypes.c_uint64] * 10 + [ctypes.c_int32] * 9 + [ctypes.c_int64] * 18


class AppendDevice(FakeDevice):
    """Writes what the arguments of a launch point to where they say."""

    interleaved = False

    def launch(self, config, function, arguments, _):
        places = (ctypes.c_void_p * len(TYPES)).from_address(arguments.value or 0)
        values = [kind.from_address(at).value for at, kind in zip(places, TYPES, strict=True)]
        (q, o, new_k, new_v, k, v, cos, sin, used, table), counts, strides = values[:10], values[10:19], values[19:]
        tokens, rows, heads, kv_heads, room, page, pages, width, half = counts
        kernel, name = self._functions[(function.value or 0) - 1]
        batch, dtype = tokens // rows, TORCH[kernel["dtype"]]
        dims = kernel["head_dim"], kernel["head_dim_v"]

        def at(address, outer, heads, inner, dim, which):
            return tensor_at(address, (outer, heads, inner, dim), (*strides[3 * which : 3 * which + 3], 1), dtype)

        lengths = tensor_at(used, (batch,), (1,), torch.int32)
        cached = (pages, page) if page else (batch, room)
        new = [at(one, batch, kv_heads, rows, dim, i) for one, dim, i in zip((new_k, new_v), dims, (2, 3), strict=True)]
        caches = [
            at(one, cached[0], kv_heads, cached[1], dim, i) for one, dim, i in zip((k, v), dims, (4, 5), strict=True)
        ]
        named = tensor_at(table, (batch, width), (width, 1), torch.int32) if page else None
        cache = Cache(*(one.transpose(1, 2) for one in caches), batch, lengths, named)
        rotary = None
        if cos:
            rotary = *(tensor_at(one, (room, half), (half, 1), dtype) for one in (cos, sin)), self.interleaved
        turned = by_torch(at(q, batch, heads, rows, dims[0], 0).transpose(1, 2) if q else None,
                          [one.transpose(1, 2) for one in new], cache, rotary, "causal" in kernel["mask"])  # fmt: skip
        if o:
            at(o, batch, heads, rows, dims[0], 1).transpose(1, 2).copy_(turned)
        self.launches.append(name)
        return 0


def by_torch(q, new, cache, rotary, moves):
    """`appended` by PyTorch's expressions."""
    k, v = new
    offset = torch.arange(k.shape[1]).expand(cache.batch, -1)
    position = cache.used[:, None] + offset
    if rotary:
        place = position if moves else cache.used[:, None].expand_as(position)
        q, k = rotated(q, *rotary[:2], place, rotary[2]), rotated(k, *rotary[:2], position, rotary[2])
    sequence = torch.arange(cache.batch)[:, None].expand_as(position)
    cache.append(k.flatten(0, 1), v.flatten(0, 1), sequence.flatten(), position.flatten())
    return q


def drawn(paged, rows=3):
    """Queries, new keys and values, a cache and rotary tables of half of the columns."""
    torch.manual_seed(5)
    q = torch.randn(2, rows, 4, 96).bfloat16()[..., :64]  # rows with gaps
    new = torch.randn(2, rows, 2, 64).bfloat16(), torch.randn(2, rows, 2, 64).transpose(1, 2).bfloat16().transpose(1, 2)
    lying = (9, 16) if paged else (2, 64)
    k, v = torch.zeros(2, *lying, 2, 64).bfloat16()
    table = torch.tensor([[7, 2, 5, 1], [0, 3, 8, 4]]).int() if paged else None
    angles = 6 * torch.rand(64, 16)  # as many positions as there is room for
    tables = angles.cos().bfloat16(), angles.sin().bfloat16()
    return q, new, Cache(k, v, 2, torch.tensor([14, 31]).int(), table), tables


def runtime_of(device, folder):
    config = load_space("append_kv", device.gpu).starting_configs()[1]
    return fake_runtime(device, folder, lambda problem, gpu: Pick("append_kv", config, estimated=True))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("kind", ["", "halves", "pairs"])
def test_a_kernel_writes_them(tmp_path, paged, kind):
    device = AppendDevice()
    device.interleaved = kind == "pairs"
    q, new, cache, tables = drawn(paged)
    rotary = (*tables, device.interleaved) if kind else None
    other = Cache(cache.k.clone(), cache.v.clone(), 2, cache.used, cache.table)
    expected = by_torch(q, new, other, rotary, True)
    with current.use(runtime_of(device, tmp_path)):
        turned = appended(q, new, cache, rotary, True)
    assert device.launches and turned is not None and near(turned, expected)
    assert torch.equal(cache.k, other.k) and torch.equal(cache.v, other.v) and cache.k.any()
    if not kind:
        return
    with current.use(runtime_of(device, tmp_path)):  # the same tensors, and other plans
        still = appended(q, new, cache, rotary, False)
        assert near(still, by_torch(q, new, other, rotary, False)) and not near(still, expected)
        assert near(appended(q, new, cache, rotary, True), expected)
        device.interleaved, loads = not device.interleaved, device.loads
        swapped = appended(q, new, cache, (*tables, device.interleaved), True)
        assert near(swapped, by_torch(q, new, other, (*tables, device.interleaved), True)) and device.loads == loads + 1
        done = len(device.launches)
        fewer = Cache(cache.k, cache.v, 2, cache.used[:1], cache.table), (tables[0], tables[1][:40], device.interleaved)
        for given in ((cache, fewer[1]), (fewer[0], rotary)):  # a plan that is known does not hide it
            assert appended(q, new, *given, True) is None and len(device.launches) == done


def test_what_is_torch_s(tmp_path):
    device = AppendDevice()
    q, new, cache, (cos, sin) = drawn(True)
    with current.use(runtime_of(device, tmp_path)):
        assert appended(q, new, cache, (cos.float(), sin.float(), False), True) is None  # another dtype
        assert appended(q, new, cache, (cos[:40], sin[:40], False), True) is None  # fewer positions than room
        assert appended(q[:, :2], new, cache, None, True) is None  # fewer queries than new keys
        assert appended(q, new, Cache(cache.k, cache.v, 2, cache.used.long(), cache.table), None, True) is None
        words = dict(cache_seqlens=cache.used, cu_seqlens_k_new=torch.tensor([0, 3, 6]).int(), page_table=cache.table)
        flat = [one.flatten(0, 1) for one in new]
        flash_attn.flash_attn_with_kvcache(q.contiguous(), cache.k, cache.v, *flat, causal=True, **words)
        with pytest.raises(ValueError, match="need new values"):
            flash_attn.flash_attn_with_kvcache(q, cache.k, cache.v, new[0])
    assert not device.launches


ONE_LAUNCH = CONFIG | dict(LOAD="cp_async", BLOCK_M=8)


def pick_of_one_launch(problem, gpu):
    return Pick("split_kv", load_space("split_kv", gpu).make_config(ONE_LAUNCH))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("words", [{}, {"causal": True}, {"causal": True, "window_size": (5, 0), "softmax_scale": 0.1}])
def test_new_keys_and_attention_in_one_launch(tmp_path, paged, words):
    q, (k, v), cache, _ = drawn(paged)
    words = words | dict(page_table=cache.table, return_softmax_lse=False)
    other = cache.k.clone(), cache.v.clone()
    expected = flash_attn.flash_attn_with_kvcache(q, *other, k, v, cache_seqlens=cache.used, **words)
    device = CacheDevice()
    with current.use(fake_runtime(device, tmp_path, pick_of_one_launch)):
        for _ in range(2):  # the first call checks the kernel
            device.launches.clear()
            kept = cache.k.clone(), cache.v.clone()
            out = flash_attn.flash_attn_with_kvcache(q, *kept, k, v, cache_seqlens=cache.used, **words)
    assert device.launches == ["split_kv"] and torch.allclose(out, expected, atol=0.01)  # two units of bf16
    assert torch.equal(kept[0], other[0]) and torch.equal(kept[1], other[1]) and kept[0].any()


@pytest.mark.parametrize("paged", [False, True])
def test_one_launch_reads_nothing_behind_terms_of_wrong_shapes(tmp_path, paged):
    q, (k, v), cache, _ = drawn(paged)
    device, words = CacheDevice(), dict(cache_seqlens=cache.used, causal=True, page_table=cache.table)
    wrong = [("sinks", dict(s_aux=torch.zeros(1).to(q.dtype))), ("alibi_slopes", dict(alibi_slopes=torch.zeros(1)))]
    wrong.append(("cache_seqlens", dict(cache_seqlens=cache.used[:1])))
    with current.use(fake_runtime(device, tmp_path, pick_of_one_launch)):
        for name, given in wrong:
            with pytest.raises(ValueError, match=name):
                flash_attn.flash_attn_with_kvcache(q, cache.k, cache.v, k, v, **(words | given))
    assert not device.launches


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_no_tensor_is_one_sentence(name, packed):
    q, _new, cache, _ = drawn(True)
    given = {"q": q[0], "k_cache": cache.k, "v_cache": cache.v} | {name: [[1.0]]}
    starts = torch.tensor([0, len(q[0])], dtype=torch.int32)
    words = dict(cu_seqlens_q=starts, max_seqlen_q=len(q[0])) if packed else {}
    with pytest.raises(TypeError, match=f"{name} must be a tensor, not list"):
        flash_attn.flash_attn_with_kvcache(**given, page_table=cache.table, cache_seqlens=cache.used, **words)


def slower(problem, gpu):
    """Of one launch a kernel that the cost model takes to be slow."""
    return Pick(
        "split_kv", load_space("split_kv", gpu).make_config(ONE_LAUNCH | dict(SPLITS=1 if problem.appended else 8))
    )


@pytest.mark.parametrize(
    "given",
    [
        dict(pick=slower, keys=8192),
        dict(pick=lambda problem, gpu: None if problem.appended else pick_of_one_launch(problem, gpu)),
        dict(used=torch.int64),
        dict(words={"chunk": 9}),
        dict(words={"softcap": 3.0, "slopes": torch.rand(2, 4)}),
        dict(rows=9),
        dict(invariant=True),
        dict(autocast=True),
        dict(one_cache=True),
    ],
)
def test_two_launches_where_one_does_not_serve_or_is_slower(tmp_path, given):
    torch.manual_seed(1)
    rows, keys = given.get("rows", 1), given.get("keys", 64)
    q, new = torch.randn(2, rows, 4, 64).half(), torch.randn(2, 2, rows, 2, 64).half()
    k, v = torch.randn(2, 2, keys, 2, 64).half()
    device = CacheDevice()
    cache = Cache(k, k if "one_cache" in given else v, 2, torch.tensor([9, 50], dtype=given.get("used", torch.int32)))
    with current.use(fake_runtime(device, tmp_path, given.get("pick", pick_of_one_launch))):
        try:
            if given.get("invariant"):
                evoattn.enable(batch_invariant=True)
            with torch.autocast("cpu", torch.float16, enabled="autocast" in given):
                assert append_and_attend(q, tuple(new), cache, Options(causal=True, **given.get("words", {}))) is None
        finally:
            evoattn.disable()
    assert not device.launches


POINTERS, COUNTS, STRIDES = 4, 4, 7


class MergeDevice(FakeDevice):
    """Adds up what the arguments of a launch point to."""

    def launch(self, config, function, arguments, _):
        types = [ctypes.c_uint64] * POINTERS + [ctypes.c_int32] * COUNTS + [ctypes.c_int64] * STRIDES
        places = (ctypes.c_void_p * len(types)).from_address(arguments.value or 0)
        values = [kind.from_address(at).value for at, kind in zip(places, types, strict=True)]
        (at_parts, at_sums, at_o, at_lse), (count, rows, heads, queries) = values[:4], values[4:8]
        shape = rows // (heads * queries), heads, queries
        kernel, name = self._functions[(function.value or 0) - 1]
        dim, dtype = kernel["head_dim"], TORCH[kernel["dtype"]]
        read = dtype if self.narrow else torch.float32
        parts = tensor_at(at_parts, (count, *shape, dim), (*values[8:12], 1), read).double()
        sums = tensor_at(at_sums, (count, *shape), (rows, heads * queries, queries, 1), torch.float32).double()
        weights = torch.softmax(sums, 0).nan_to_num(0)[..., None]
        merged = (parts * weights).masked_fill(weights == 0, 0).sum(0)
        tensor_at(at_o, (*shape, dim), (*values[12:15], 1), dtype).copy_(merged + self.error)
        tensor_at(at_lse, shape, (heads * queries, queries, 1), torch.float32).copy_(torch.logsumexp(sums, 0))
        self.launches.append(name)
        return 0

    narrow = False


def merging_runtime(device, folder):
    config = load_space("merge_parts", device.gpu).starting_configs()[0]
    return fake_runtime(device, folder, lambda problem, gpu: Pick("merge_parts", config, estimated=True))


def drawn_parts(dtype):
    generator = torch.Generator().manual_seed(4)
    parts = torch.randn(3, 5, 7, 2, 16, generator=generator).to(dtype)
    sums = torch.randn(3, 5, 7, 2, generator=generator)
    sums[1, 0], parts[1, 0] = -math.inf, math.nan
    return parts, sums


@pytest.mark.parametrize("narrow", [False, True])
def test_a_kernel_adds_them_up(tmp_path, narrow):
    device = MergeDevice()
    device.narrow = narrow
    parts, sums = drawn_parts(torch.bfloat16 if narrow else torch.float32)
    expected, expected_lse = flash_attn.flash_attn_combine(parts, sums, out_dtype=torch.bfloat16)
    with current.use(merging_runtime(device, tmp_path)):
        for mine in (None, torch.empty(5, 7, 2, 16, dtype=torch.bfloat16)):
            device.launches.clear()
            out, lse = flash_attn.flash_attn_combine(parts, sums, mine, torch.bfloat16)
            assert device.launches and near(out, expected) and near(lse, expected_lse)
            assert mine is None or out is mine
        assert len(device.launches) == 1 and device.loads == 1


def test_what_no_kernel_reads_is_torch_s(tmp_path):
    device = MergeDevice()
    parts, sums = drawn_parts(torch.float32)
    expected, _ = flash_attn.flash_attn_combine(parts, sums)
    apart = torch.empty(3, 5, 7, 2, 32)[..., ::2].copy_(parts)
    with current.use(merging_runtime(device, tmp_path)):
        assert near(flash_attn.flash_attn_combine(apart, sums)[0], expected)
        assert near(flash_attn.flash_attn_combine(parts, sums.double())[0], expected)
        wanted = parts.clone().requires_grad_()
        assert flash_attn.flash_attn_combine(wanted, sums)[0].requires_grad
        flash_attn.flash_attn_combine(parts[..., :3].contiguous(), sums)
        flash_attn.flash_attn_combine(parts[:, :0], sums[:, :0])
        with pytest.raises(RuntimeError):
            flash_attn.flash_attn_combine(parts, sums, torch.empty(5, 7, 2, 8))
    assert not device.launches


def test_a_kernel_that_is_wrong_is_not_used(tmp_path):
    device = MergeDevice(error=0.5)
    parts, sums = drawn_parts(torch.float32)
    expected, _ = flash_attn.flash_attn_combine(parts, sums)
    with current.use(merging_runtime(device, tmp_path)), pytest.warns(RuntimeWarning, match="failed its check"):
        assert near(flash_attn.flash_attn_combine(parts, sums)[0], expected)
