"""What `scripts/portfolio_refined.py` says of each way to choose."""

from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from evoattn.portfolio.pick import class_kernels, pick
from scripts.portfolio_refined import CLASS, RULE, SHAPE, chosen, contestants, summary

H100 = GPUS["h100"]


def row(**kernels):
    named = {
        name.replace("_", " "): {"cost": cost, "us": us, "genes": genes} for name, (cost, us, genes) in kernels.items()
    }
    return {"problem": "B=1", "kernels": named}


ONE = row(rule_0=(10.0, 10.0, 0), rule_1=(9.9, 9.0, 1), rule_2=(9.0, 8.0, 2), class0_0=(9.7, 12.0, 0))
ONE["kernels"] |= row(shape1_0=(8.9, 11.0, 4))["kernels"]


def test_a_climb_counts_where_it_saves_enough():
    """One step saves 1 %, which is too little; two save 10 %."""
    assert chosen(ONE["kernels"], (RULE,), 1, 0.0)["us"] == 10.0
    assert chosen(ONE["kernels"], (RULE,), 2, 0.0)["us"] == 8.0
    assert chosen(ONE["kernels"], (RULE, CLASS), 0, 0.0)["us"] == 12.0


def test_changed_genes_cost():
    assert chosen(ONE["kernels"], (RULE, CLASS, SHAPE), 2, 0.0)["us"] == 11.0
    assert chosen(ONE["kernels"], (RULE, CLASS, SHAPE), 2, 0.01)["us"] == 8.0


def test_losses_are_over_the_fastest_of_all():
    said = summary([ONE, row(rule_0=(5.0, 5.0, 0))])
    assert (
        "| the class's kernel by its rule | 2 | 1.118 |" in said and "| a climb from the rule's | 2 | 1.000 |" in said
    )


def test_climbs_begin_at_the_class_and_at_other_shapes_and_the_pick_is_one_of_their_steps():
    problem = parse_shape("B=1,H=20,Sq=256,Sk=11546,D=160,dtype=bf16,mask=causal_lower_right")
    found = contestants(problem, {}, H100)
    first = class_kernels(problem, H100)[0]
    assert found["rule 0"]["config"] == [first.family, first.params]
    assert any(name.startswith(SHAPE) for name in found)
    picked = pick(problem, H100)
    assert picked and found["pick"]["config"] == [picked.family, picked.config.params]
