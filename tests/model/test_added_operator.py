"""An operator of scores takes one row of the table: in torch's answer, in gradients, in counts, and in a kernel."""

import torch

from evoattn.families.registry import FAMILIES, load_space
from evoattn.model import score
from evoattn.model.gpu import GPUS
from evoattn.model.score import Apply, Name, Number, Operator, derivative, evaluate, parse_score
from evoattn.model.shape_text import parse_shape
from tests.families.on_interpreter import built, judged


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
