"""The op on a GPU: right answers for every kind of problem, whatever the layout, scale and dtype."""

import pytest
import torch
import torch.nn.functional as F

import evoattn
from evoattn.correctness.reference import make_inputs
from evoattn.model.shape_text import parse_shape
from evoattn.ops import torch_answer
from evoattn.ops.arguments import mask_of
from evoattn.ops.given import call_of
from tests.ops.gpu.gpu_problems import ON_A_GPU, PREFILL, SHAPES, flags, inputs, require_answer, require_right

pytestmark = ON_A_GPU


@pytest.mark.parametrize("shape", SHAPES)
def test_the_answer_is_right_and_stays_the_same(shape):
    problem = parse_shape(shape)
    q, k, v = inputs(problem)
    out = evoattn.attention(q, k, v, **flags(problem), strict=True)
    require_right(problem, q, k, v, out)
    assert out.stride() == torch.empty_like(q).stride()
    again = evoattn.attention(q, k, v, **flags(problem), strict=True)
    assert torch.equal(out, again)
    assert mask_of(flags(problem)["causal"]) == problem.mask


@pytest.mark.parametrize("scale", [0.25, 0.5])
def test_the_scale_is_the_callers(scale):
    problem = parse_shape("B=1,H=8,S=500,D=64,dtype=fp16,mask=full")
    q, k, v = inputs(problem)
    out = evoattn.attention(q, k, v, scale=scale, strict=True)
    require_right(problem, q, k, v, out, scale)  # powers of two: scaling q is exact


def test_views_into_packed_tensors_and_out():
    packed = torch.randn(2, 300, 3, 8, 64, device="cuda", dtype=torch.float16)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    out = torch.empty(2, 8, 300, 64, device="cuda", dtype=torch.float16)
    assert evoattn.attention(q, k, v, out=out, strict=True) is out
    require_right(parse_shape("B=2,H=8,S=300,D=64,dtype=fp16,mask=full"), q, k, v, out)


def test_log_sum_exp():
    q, k, v = inputs(PREFILL)
    out, lse = evoattn.attention(q, k, v, **flags(PREFILL), return_lse=True, strict=True)
    require_right(PREFILL, q, k, v, out)
    scores = (q.double() @ k.double().repeat_interleave(4, 1).transpose(-1, -2)) * 128**-0.5
    scores.masked_fill_(~torch.ones(2048, 2048, dtype=torch.bool, device="cuda").tril(), -torch.inf)
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=5e-4)


def test_autocast():
    q, k, v = (t.float() for t in inputs(PREFILL))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = evoattn.attention(q, k, v, **flags(PREFILL), strict=True)
    assert out.dtype == torch.bfloat16
    require_right(PREFILL, q.bfloat16(), k.bfloat16(), v.bfloat16(), out)


def test_a_block_serves_head_dims_that_flash_does_not():
    problem = parse_shape(SHAPES[-1])
    q, k, v = inputs(problem)
    expected = evoattn.attention(q, k, v, strict=True)
    with evoattn.sdpa():
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), expected)
    require_right(problem, q, k, v, expected)


def test_masks_are_torchs():
    q, k, v = inputs(parse_shape("B=1,H=4,S=64,D=64,dtype=fp16,mask=full"))
    mask = torch.zeros(64, 64, device="cuda", dtype=torch.float16)
    with evoattn.sdpa():
        assert torch.equal(
            F.scaled_dot_product_attention(q, k, v, mask), torch._C._nn.scaled_dot_product_attention(q, k, v, mask)
        )


@pytest.mark.parametrize(
    "shape",
    [
        "B=2 H=8 S=1000 D=64 fp16 causal score=s+table[h,k-q+99]*gate[h] tables=table:fp32:8x1999+gate:bf16:8",
        "B=1 H=16/4 S=2000 D=128 bf16 score=where((doc[q]==doc[k])|(k<7),s,-inf) tables=doc:int32:2000",
        "B=3 H=16/4 Sq=1 Sk=5000 D=128 bf16 score=s-slope[h]*abs(q+d-k)+gate[b] tables=slope:fp32:16+gate:fp16:3",
    ],
)
def test_an_expression_runs_in_a_kernel(shape):
    problem = parse_shape(shape)
    tensors = make_inputs(problem, 1, "cuda")
    own = problem.own_score
    score = evoattn.Score(own.text, **{table.name: tensors[table.buffer] for table in own.tables})
    q, k, v = (tensors[name] for name in "qkv")
    out = evoattn.attention(q, k, v, **flags(problem), score=score, strict=True)
    require_answer(problem, tensors, out)
    assert torch.equal(out, evoattn.attention(q, k, v, **flags(problem), score=score, strict=True))
    torch.testing.assert_close(out, torch_answer_of(q, k, v, problem, score), atol=2e-2, rtol=2e-2)


def torch_answer_of(q, k, v, problem, score):
    """By torch's formula."""
    return torch_answer.answer(call_of(q, k, v, {**flags(problem), "score": score}))
