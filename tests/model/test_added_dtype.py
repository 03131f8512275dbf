"""A dtype of K and V takes one row of the table in problems, inputs, references and torch's answers. Kernels follow
family by family, with conversions of their own."""

import subprocess
import sys

import pytest

ADDED = """
from evoattn.model import dtype

row = dtype.Dtype(
    "e4m3fnuz", bytes=1, torch="float8_e4m3fnuz", cuda="E4m3Fnuz", tensor_map="UINT8", tensor_map_code=0, mma_k=32,
    spellings=("e4m3fnuz",), largest=240.0, answers="bf16", may_query=False,
)
dtype.DTYPES[row.name] = row
dtype.KEY_DTYPES = (*dtype.KEY_DTYPES, row.name)

import torch

import evoattn
from evoattn.correctness.cases import make_case
from evoattn.model.shape_text import parse_shape

for words in ("scales=head mask=causal", "scales=token seqused=3:60 page=16"):
    problem = parse_shape(f"B=2 H=4 Hkv=2 S=60 D=64 dtype=fp16 kv=e4m3fnuz {words}")
    case = make_case("it", problem, 1, "cpu", "plain", double=True)
    assert case.tensors["v"].dtype == torch.float8_e4m3fnuz and problem.bytes < problem.with_(kv="", scales="").bytes

made = parse_shape("B=2 H=4 Hkv=2 S=60 D=64 dtype=fp16 op=quantize kv=e4m3fnuz scales=head")
x = make_case("it", made, 1, "cpu", "plain", double=True)
key, _, scale, _ = evoattn.quantize_kv(x.tensors["x"], x.tensors["x"], torch.float8_e4m3fnuz, "head")
wide = key.double() * scale[..., None, None]
assert (wide - x.tensors["x"]).abs().max() <= wide.abs().max() * torch.finfo(key.dtype).eps / 2
query = torch.randn(2, 4, 3, 64, dtype=torch.float16, generator=torch.Generator().manual_seed(1))
answer = evoattn.attention(query, key, key, k_scale=scale, v_scale=scale)
exact = torch.nn.functional.scaled_dot_product_attention(query.double(), wide, wide)
assert (answer - exact).abs().max() < 1e-3 * exact.abs().max()
"""


@pytest.mark.slow
def test_its_row_is_all_that_checks_and_torch_s_answers_need():
    subprocess.run([sys.executable, "-c", ADDED], check=True, timeout=120)
