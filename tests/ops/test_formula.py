"""What torch's SDPA refuses is refused beside arguments that it lacks, too; doubles stay doubles."""

import math

import pytest
import torch

import evoattn

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
