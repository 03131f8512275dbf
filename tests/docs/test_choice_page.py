"""The page of choices names the kinds of problems that were timed as the list of kernels does."""

import re

from evoattn.model.gpu import GPUS
from evoattn.model.problem import OPERATIONS
from evoattn.portfolio.pick import list_for
from tests.docs.test_docs import ROOT

AHEAD = (*OPERATIONS, "deterministic")
"""Words of a kind that come before its head_dim."""


def test_the_kinds_are_those_of_the_list():
    listed = list_for(GPUS["h100"])
    assert listed
    rows = re.findall(r"^\| (8|16|32) \| (.+?) \| (.+?) \|$", (ROOT / "docs/choice.md").read_text(), re.MULTILINE)
    said = set()
    for bits, variants, each in ((bits, one, each) for bits, several, each in rows for one in several.split("; ")):
        words = variants.removeprefix("none").split()
        of = [bits, *(word for word in words if word in AHEAD)]
        behind = [word for word in words if word not in AHEAD]
        said |= {" ".join((*of, f"d{dims.strip().replace('/', ' dv')}", *behind)) for dims in each.split(",")}
    assert said == set(listed.kinds)


def test_the_cards_are_those_of_the_list():
    listed = list_for(GPUS["h100"])
    text = (ROOT / "docs/choice.md").read_text()
    assert listed and f"The {' and the '.join(card.upper() for card in listed.cards)} were timed." in text
