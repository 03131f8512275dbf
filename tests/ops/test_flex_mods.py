"""What people write in FlexAttention's language: each is traced, and the op gives what torch gives in float64."""

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest

from benchmarks.flex.mods import MODS, Shape
from evoattn.ops import block_masks, flex
from evoattn.ops.call import Call
from evoattn.ops.torch_answer import by_formula
from tests.ops.fake_device import tensors

SHAPES = {"square": Shape(2, 4, 200, 200), "more keys": Shape(2, 4, 77, 301)}


def attended(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """What kernels compute for a call, in float64."""
    q, k, v = (t.double() for t in (call.query, call.key, call.value))
    return by_formula(Call(**{**{f: getattr(call, f) for f in call.__slots__}, "query": q, "key": k, "value": v}))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MODS)
def test_expressions_give_what_torch_gives(name, shape):
    shape = SHAPES[shape]
    q, k, v = tensors(shape.batch, shape.heads, 2, shape.queries, shape.keys, dtype=torch.float32)
    written = MODS[name](shape)
    mask = written.block_mask(shape, 64)
    call = Call(q, k, v, enable_gqa=True, return_lse=True, strict=True)
    made = flex.calls(call, written.score_mod, mask)
    assert not isinstance(made, str), made
    expected = flex.TORCH(
        q.double(),
        k.double(),
        v.double(),
        written.score_mod,
        None if mask is None else block_masks.authoritative(mask, shape.keys),
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    one = made[-1]()  # lists have no formula
    assert not one.blocks
    out, lse = attended(one)
    torch.testing.assert_close(out, expected[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse.double(), expected[1].lse, atol=1e-5, rtol=1e-5)
