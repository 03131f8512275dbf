"""FlashMLA's decoding: a latent cache of 16 bits and of 8, beside the formula, and what the op asks a kernel for."""

import pytest
import torch

from evoattn.integrations.flash_mla import (
    ROW_BYTES,
    flash_mla_with_kvcache,
    get_mla_metadata,
    latent_views,
    quantize_latent,
)
from evoattn.ops.runtime import current
from evoattn.portfolio.pick import pick
from tests.ops.fake_device import FakeDevice, fake_runtime

PAGE, LENGTHS = 16, (37, 0, 16)


def inputs(seqlen_q=1, heads=4):
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(3, seqlen_q, heads, 576, generator=generator).bfloat16()
    latent = torch.randn(8, PAGE, 1, 576, generator=generator).bfloat16()
    table = torch.randperm(8, generator=generator)[:6].view(3, 2).int()
    table = torch.cat((table, table[:, :1].flip(0)), 1)
    return q, latent, table, torch.tensor(LENGTHS, dtype=torch.int32)


def exact(q, latent, table, causal=False):
    """By float64, one sequence at a time: the output and the log-sum-exp."""
    outs, sums = [], []
    for one, pages, keys in zip(q.double(), table.long(), LENGTHS, strict=True):
        rows = latent.double()[pages].flatten(0, 1)[:keys, 0]
        scores = torch.einsum("shd,kd->hsk", one, rows) * 576**-0.5
        if causal:
            places = torch.arange(len(one))[:, None] + keys - len(one)
            scores = scores.masked_fill(torch.arange(keys) > places, -torch.inf)
        sums.append(scores.logsumexp(-1))
        weights = (scores - sums[-1][..., None]).exp().nan_to_num(0)
        outs.append(torch.einsum("hsk,kd->shd", weights, rows[:, :512]))
    return torch.stack(outs), torch.stack(sums)


def rounded(latent):
    """What a cache of 8 bits stands for."""
    rotary, numbers, scales = latent_views(quantize_latent(latent))
    return torch.cat((numbers.float() * scales.repeat_interleave(128, -1), rotary.float()), -1)


def test_rows_have_656_bytes_and_views_share_them():
    latent = torch.randn(2, 3, 1, 576)
    latent[0, 0, 0, :128] = 0
    cache = quantize_latent(latent)
    rotary, numbers, scales = latent_views(cache)
    assert cache.shape == (2, 3, 1, ROW_BYTES) and ROW_BYTES == 656
    assert {one.untyped_storage().data_ptr() for one in (rotary, numbers, scales)} == {cache.data_ptr()}
    assert scales[0, 0, 0, 0] == 1 and numbers.float().abs().amax() == 448
    assert (rounded(latent) - latent).abs().max() < 2**-4 * latent.abs().max()


@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize(("seqlen_q", "causal"), [(1, False), (2, True), (2, False)])
def test_torch_answers_as_the_formula(eight, seqlen_q, causal):
    q, latent, table, lengths = inputs(seqlen_q)
    cache = quantize_latent(latent).view(torch.float8_e4m3fn) if eight else latent
    assert get_mla_metadata(lengths, 4, 1) == (None, None)
    bits = {"is_fp8_kvcache": True} if eight else {}
    found, sums = flash_mla_with_kvcache(q, cache, table, lengths, 512, *get_mla_metadata(), causal=causal, **bits)
    expected, expected_sums = exact(q, rounded(latent) if eight else latent, table, causal)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.02)
    torch.testing.assert_close(sums.double(), expected_sums, rtol=0, atol=0.01)


@pytest.mark.parametrize("device_is_there", [True, False])
def test_under_autocast_rotary_columns_have_the_dtype_of_queries(tmp_path, device_is_there):
    asked = []
    runtime = fake_runtime(FakeDevice(), tmp_path, lambda problem, gpu: asked.append(problem.dtype))
    q, latent, table, lengths = inputs()
    given = q, quantize_latent(latent), table, lengths, 512
    expected, _ = flash_mla_with_kvcache(*given, is_fp8_kvcache=True)
    with current.use(runtime if device_is_there else current.runtime()), torch.autocast("cpu", torch.float16):
        found, _ = flash_mla_with_kvcache(*given, is_fp8_kvcache=True)
    assert found.dtype == torch.float16 and asked == ["fp16"] * device_is_there
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0.02)


def test_a_kernel_reads_the_rows_where_they_lie(tmp_path):
    """The op asks for one, told the strides of the cache; the device of this test has none."""
    asked = []

    def recorded(problem, gpu):
        asked.append((problem, pick(problem, gpu)))

    q, latent, table, lengths = inputs(heads=16)
    with current.use(fake_runtime(FakeDevice(), tmp_path, recorded)):
        flash_mla_with_kvcache(q, quantize_latent(latent), table, lengths, 512, is_fp8_kvcache=True)
    (problem, found), *_ = asked
    assert found.family == "latent_columns"
    assert (problem.kv, problem.scales, problem.rotary_apart, problem.page) == ("e4m3", "columns", True, PAGE)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"indices": torch.zeros(1)}, "sparse attention"),
        ({"head_dim_v": 256}, "is 512, not 256"),
        ({"q": torch.zeros(3, 1, 4, 576)}, "is bfloat16, as its rotary columns are, not torch.float32"),
        ({"k_cache": torch.zeros(8, PAGE, 1, 600, dtype=torch.uint8)}, "656 bytes a row"),
    ],
)
def test_what_it_does_not_take(words, said):
    q, latent, table, lengths = inputs()
    given = dict(q=q, k_cache=quantize_latent(latent), block_table=table, cache_seqlens=lengths, head_dim_v=512)
    with pytest.raises(ValueError, match=said):
        flash_mla_with_kvcache(**given | words, is_fp8_kvcache=True)
    with pytest.raises(ValueError, match="576 columns"):
        quantize_latent(latent[..., 1:])
