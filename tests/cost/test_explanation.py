"""How far the model's first choices have been, in words."""

from dataclasses import replace

from evoattn.cost.explanation import how_far
from evoattn.cost.fitted import Fitted
from evoattn.model.gpu import GPUS

JUDGED = {"problems": 40, "first": 1.041, "worst_first": 1.62}
ANY = ", no wgmma, TMA or cluster"


def fitted(**left_out):
    names = {
        "lands": "landscape, h100",
        "camp": "campaign, h100",
        "any": f"landscape, h100{ANY}",
        "h200": "campaign, h200",
    }
    return Fitted(
        {}, {}, {"cards": ["h100", "h200"], "left_out": {names[n]: JUDGED | row for n, row in left_out.items()}}
    )


def test_a_measured_card_hears_of_all_families():
    text = how_far(GPUS["h100"], fitted(lands={}, camp={"first": 9.0}, h200={"first": 1.2}, any={"first": 5.0}))
    assert text.endswith(
        "first choices took 1.04 and 1.20 times the best on an H100 and an H200, 1.62 and 1.62 at worst."
    )


def test_another_card_hears_of_the_families_that_it_has_and_that_nothing_was_measured_on_it():
    text = how_far(GPUS["l4"], fitted(lands={}, any={"first": 1.1}))
    assert "first choices of this card's families took 1.10 times" in text and "1.04" not in text
    assert text.endswith("On this card, L4, nothing was measured.")
    assert "nothing was measured" in how_far(replace(GPUS["h100"], name="h100-pcie"), fitted(lands={}))


def test_without_a_judgement_it_only_says_that_nothing_was_measured():
    assert how_far(GPUS["l4"], fitted()) == "On this card, L4, nothing was measured."
