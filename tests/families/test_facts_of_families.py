"""What families make of configs beside the recorded ones stays, until a change wants it otherwise: constants, launches,
scratch and counted work of configs that differ from these in up to three genes, drawn for each."""

import random
from collections.abc import Iterator
from typing import Any

from evoattn.families.block_list import packed_mask
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig
from tests.families.decisions import rows
from tests.support.facts import changed, plain

LISTED = (
    *(f"blocks={by}64x64:300+70{op}" for by in ("", "b:", "h:") for op in ("", ",op=backward")),
    *("blocks=bh:64x64:9/1/99,predicate=(q%7==k%7)|(b==h)", "blocks=64x32:9/1/99,predicate=(q//5)%7<(k//3)%5"),
    *("blocks=64x64:0/9/9,predicate=(q//5)%7<(k//3)%5", "blocks=64x48:300+70", "blocks=48x64:300+70,op=backward"),
)
MANY = (1, 1, 700), (3, 32, 9000), (300, 300, 700), (1, 8, 100000)
"""Batches, heads and lengths beside each of the lists."""
TRIES, MOST, MOST_GENES = 10, 2, 3
"""Configs that are drawn for a recorded one, those of them that are kept, and genes in which they differ."""


def _others(row: dict[str, Any]) -> Iterator[Any]:
    """(what differs, what is decided) of configs that can be."""
    family, gpu, problem = FAMILIES[row["family"]], GPUS[row["gpu"]], AttentionProblem(**row["problem"])
    rng, genes, kept = random.Random(plain([row["params"], row["problem"]])), load_space(family.name, gpu).parameters, 0
    for _ in range(TRIES):
        some = rng.sample(genes, rng.randint(1, min(MOST_GENES, len(genes))))
        differ = {gene.name: rng.choice(gene.values) for gene in some}
        asked = problem, KernelConfig(family.name, row["params"] | differ), gpu
        if kept < MOST and not family.why_impossible(*asked):
            kept += 1
            made = family.all_constants(*asked), family.launches(*asked), family.workspace(*asked)
            yield differ, made, family.unordered(*asked[:2]), family.work(*asked[:2])


def facts() -> Iterator[tuple[str, Any]]:
    """See `tests.support.facts`."""
    listed = [
        parse_shape(f"B={batch},H={heads},S={length},D=64,{of}") for of in LISTED for batch, heads, length in MANY
    ]
    yield "bits of masks", [[problem.describe(), packed_mask(problem)] for problem in listed]
    known = rows()
    for family in FAMILIES:
        yield family, [[*_others(row)] for row in known if row["family"] == family]


def test_what_is_decided_of_other_configs_stays():
    assert not changed("families")
