"""A dtype of K and V takes one row of the table in problems, inputs, references and torch's answers. Kernels follow
family by family, with conversions of their own."""

import subprocess
import sys

import pytest
import torch

from evoattn.families.registry import FAMILIES, load_space
from evoattn.model import score
from evoattn.model.gpu import GPUS
from evoattn.model.score import Apply, Name, Number, Operator, derivative, evaluate, parse_score
from evoattn.model.shape_text import parse_shape
from tests.families.on_interpreter import built, judged

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


def test_its_row_is_all_that_it_needs(monkeypatch):
    square = Operator(
        "float", ("float",), lambda torch, x: x * x, "({0} * {0})", lambda x: (Apply("*", (Number(2.0), x)),), (0, 1, 9)
    )
    monkeypatch.setitem(score.OPERATORS, "square", square)
    monkeypatch.setattr(score, "FUNCTIONS", (*score.FUNCTIONS, "square"))
    tree = parse_score("square(s+1)-s").tree
    values = {"s": torch.linspace(-3, 3, 9, dtype=torch.float64)}
    assert torch.equal(evaluate(tree, values, torch), (values["s"] + 1) ** 2 - values["s"])
    assert torch.equal(evaluate(derivative(tree), values, torch), 2 * (values["s"] + 1) - 1)
    assert score.cost(Apply("square", (Name("s"),))) == (0, 1, 9)
    problem, gpu = parse_shape("B=1 H=2 S=70 D=64 fp16 score=square(s)/8"), GPUS["h100"]
    family, space = FAMILIES["flash_mma"], load_space("flash_mma", gpu)
    config = next(c for c in space.starting_configs() if not family.why_impossible(problem, c, gpu))
    assert judged(built(family, problem, config, gpu), problem).passed
