"""What calls get under autocast: its dtype, as SDPA's answers have, and scores that it does not round."""

import pytest
import torch
import torch.nn.functional as F

from evoattn.ops.attention import attention
from evoattn.ops.runtime import Runtime, current
from tests.ops.fake_device import tensors


def plain(q, k, v, **words):
    """Without the log-sum-exp."""
    out = attention(q, k, v, **words)
    return out[0] if isinstance(out, tuple) else out


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
