"""What `scripts/portfolio_refined.py` says of each rule."""

from portfolio_refined import chosen, summary


def row(**kernels):
    named = {name.replace("_", " "): {"cost": cost, "us": us} for name, (cost, us) in kernels.items()}
    return {"problem": "B=1", "kernels": named}


ONE = row(pick=(10.0, 10.0), pick_1=(9.9, 9.0), pick_2=(9.0, 8.0), class_=(9.7, 12.0))
ONE["kernels"]["class"] = ONE["kernels"].pop("class ")


def test_a_climb_counts_where_it_saves_enough():
    """One step saves 1 %, which is too little; two save 10 %."""
    assert chosen(ONE["kernels"], "pick", 1)["us"] == 10.0
    assert chosen(ONE["kernels"], "pick", 2)["us"] == 8.0
    assert chosen(ONE["kernels"], "class", 3)["us"] == 12.0


def test_losses_are_over_the_fastest_of_all():
    other = row(pick=(5.0, 5.0))
    other["kernels"]["class"] = other["kernels"]["pick"]
    said = summary([ONE, other])
    assert "| the pick | 2 | 1.118 |" in said and "| 2 steps from the pick | 2 | 1.000 |" in said
