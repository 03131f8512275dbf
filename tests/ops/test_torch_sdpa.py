"""What torch's own attention is kept from: places and sizes that end the process, and queries that see no key."""

import pytest
import torch

from evoattn.ops.attention import attention
from evoattn.ops.torch_answer import aligned, is_aligned, readable, without_unseen


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
    lone = memory[:448].view(2, 4, 56, 1).mT  # one row, and the next one would be one number behind it
    for tensor in (odd, apart, odd.half()[..., 1:9], odd[:, :, :8].mT, lone):
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
    "lower right": lambda h, sq, sk: {"causal": "lower_right"},
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


def test_tensors_of_nothing_on_several_devices_are_refused():
    query, key = torch.empty(1, 2, 8, 0, device="meta"), torch.zeros(1, 2, 8, 0)
    with pytest.raises(RuntimeError, match="device"):
        attention(query, key, key)


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


@pytest.mark.parametrize("of", [torch.Tensor.detach, torch.nn.Parameter], ids=["tensors", "parameters"])
@pytest.mark.parametrize("columns, rows", [(32, 13), (64, 12)])
def test_tensors_that_do_not_fit_reach_no_kernel_of_torch(columns, rows, of):
    """On a GPU one ended the process at a key of fewer columns than query, and a CPU's reads past the end of value."""
    shapes = (2, 4, 9, 64), (2, 4, 13, columns), (2, 4, rows, 64)
    q, k, v = (of(torch.randn(shape)) for shape in shapes)
    for dropout_p in (0.0, 0.0, 0.5):
        with pytest.raises(RuntimeError):
            attention(q, k, v, dropout_p=dropout_p)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bool])
def test_masks_that_torch_would_misread_are_copied(dtype):
    """One of a column for all keys ended the use of a GPU by the process (torch 2.11)."""
    memory = (torch.arange(9 * 24 + 8) % 3).to(dtype)
    column, whole = memory[:9].view(9, 1), memory[: 9 * 24].view(9, 24)
    copy = readable(column, 16)
    assert copy.shape == (9, 16) and copy.is_contiguous() and torch.equal(copy, column.expand(9, 16))
    if dtype.is_floating_point:
        assert readable(torch.nn.Parameter(column), 16).shape == (9, 16), "a learned one"
    assert readable(column, 1) is column and readable(whole, 24) is whole
    late = memory[1 : 9 * 24 + 1].view(9, 24)
    assert torch.equal(readable(late, 24), late)
    assert (readable(late, 24) is late) == (dtype == torch.bool), "which torch makes numbers of"
    assert readable(torch.zeros((), dtype=dtype), 9).dim() == 0
