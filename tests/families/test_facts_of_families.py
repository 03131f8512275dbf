"""What families make of configs beside the recorded ones stays, until a change wants it otherwise: constants, launches,
scratch and counted work of configs that differ from these in up to three genes, drawn for each."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from evoattn.families.block_list import packed_mask
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.gpu import GPUS, GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig
from tests.families.decisions import rows
from tests.support.facts import answer, changed, plain

LISTED = (
    *(f"blocks={by}64x64:300+70{op}" for by in ("", "b:", "h:") for op in ("", ",op=backward")),
    *("blocks=bh:64x64:9/1/99,predicate=(q%7==k%7)|(b==h)", "blocks=64x32:9/1/99,predicate=(q//5)%7<(k//3)%5"),
    *("blocks=64x64:0/9/9,predicate=(q//5)%7<(k//3)%5", "blocks=64x48:300+70", "blocks=48x64:300+70,op=backward"),
)
MANY = (1, 1, 700), (3, 32, 9000), (300, 300, 700), (1, 8, 100000)
"""Batches, heads and lengths beside each of the lists."""
CHEAP = "q>k", "q*2>k*3", "(q>k)|(k>9)", "(q>k)|(k*3>9)", "q%4<k%5"
"""Predicates whose answers are kept where more batches share them, the dearer from the fewer on."""
CHANGES = (
    *(("head_dim", dim) for dim in (40, 64, 96, 128, 192, 256)),
    *(("value_dim", dim) for dim in (48, 64, 128, 512)),
    *(("seqlen_q", 1), ("seqlen_q", 130), ("seqlen_k", 70), ("seqlen_k", 5000), ("batch", 70000), ("kv_heads", 1)),
    *(("softcap", 3.0), ("bias", "hs"), ("window", "30:0"), ("alibi", True), ("sink", True), ("lse", True)),
    *(("dtype", "fp32"), ("dtype", "e4m3"), ("kv", "int8"), ("layout", "bshd"), ("deterministic", True)),
    *(("mask", "causal_lower_right"), ("seqused", "0:64"), ("page", 16), ("score", "s*2"), ("batch_invariant", True)),
)
EVERY = 5
"""What another problem may have: two of these at once, and of a starting config every fifth."""
TRIES, MOST, MOST_GENES = 8, 2, 3
"""Configs that are drawn for a recorded one, those of them that are kept, and genes in which they differ."""


def _refused(words: dict[str, Any], config: KernelConfig, gpu: GpuSpec) -> str | None:
    return FAMILIES[config.family].why_invalid(AttentionProblem(**words), config, gpu)


def _others(row: dict[str, Any]) -> Iterator[Any]:
    """(what differs, what is decided) of configs that can be; (what differs, what is refused) of other problems."""
    family, gpu, problem = FAMILIES[row["family"]], GPUS[row["gpu"]], AttentionProblem(**row["problem"])
    rng, space, kept = random.Random(plain([row["params"], row["problem"]])), load_space(family.name, gpu), 0
    bases, genes = [row["params"], *(one.params for one in space.starting_configs())], space.parameters
    for turn in range(TRIES):
        some = rng.sample(genes, rng.randint(1, min(MOST_GENES, len(genes))))
        differ = rng.choice((bases[0], rng.choice(bases))) | {gene.name: rng.choice(gene.values) for gene in some}
        asked = problem, KernelConfig(family.name, differ), gpu
        if turn < MOST:
            other = dict(rng.sample(CHANGES, 2))
            yield other, answer(_refused, row["problem"] | other, *asked[1:])
        if kept < MOST and not family.why_impossible(*asked):
            kept += 1
            yield differ, _decided(*asked)


def _decided(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> list[Any]:
    family, asked = FAMILIES[config.family], (problem, config, gpu)
    made = [family.all_constants(*asked), family.launches(*asked), family.workspace(*asked)]
    return [*made, family.unordered(problem, config), family.work(problem, config)]


def _starting(family: str, known: list[dict[str, Any]]) -> Iterator[Any]:
    """What is decided of starting configs, for the recorded problems in turn, and what is refused of other problems."""
    for number, config in enumerate(load_space(family, GPUS["h100"]).starting_configs()):
        words = known[number % len(known)]["problem"]
        yield answer(_decided, AttentionProblem(**words), config, GPUS["h100"])
        some = CHANGES[number % EVERY :: EVERY]
        yield [answer(_refused, words | {name: value}, config, GPUS["h100"]) for name, value in some]


def facts() -> Iterator[tuple[str, Any]]:
    """See `tests.support.facts`."""
    listed = [
        parse_shape(f"B={batch},H={heads},S={length},D=64,{of}") for of in LISTED for batch, heads, length in MANY
    ]
    listed += [listed[0].with_(batch=n, blocks="64x64:9/1/99", predicate=of) for of in CHEAP for n in range(1, 9)]
    yield "bits of masks", [[problem.describe(), packed_mask(problem)] for problem in listed]
    known = rows()
    for family in FAMILIES:
        mine = [row for row in known if row["family"] == family]
        yield family, [[*_others(row)] for row in mine]
        yield f"starting configs of {family}", [*_starting(family, mine)]


@pytest.mark.slow
def test_what_is_decided_of_other_configs_stays():
    assert not changed("families")
