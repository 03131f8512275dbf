"""NVRTC compiles starting configs of every family for every architecture in the table, for problems that they serve."""

import re
from functools import cache

import pytest

from evoattn.backends.compiler import compile_candidate
from evoattn.families.registry import FAMILIES, load_space
from evoattn.families.render import render
from evoattn.model.gpu import GPUS
from evoattn.model.paths import TEMPLATES
from tests.support.compiles import compile_ptx
from tests.support.own_problems import own_problems

A_CARD_EACH = {spec.arch: spec for spec in sorted(GPUS.values(), key=lambda spec: spec.dram_bytes)}
PAIRS = [
    (gpu, f) for gpu in A_CARD_EACH.values() for f in FAMILIES.values() if f.devices != "sm_90a" or gpu.arch == "sm_90a"
]
ASKED = re.compile(r"__CUDA_ARCH\w*__\s*(.*)")
HOPPER, CONVERTS_EIGHT_BITS = 900, 890
"""Of `__CUDA_ARCH__`. From the latter on one instruction converts floats of 8 bits; `test_eight_bit_cache.py` runs PTX
of both sides of it."""
SPILLS = 64
"""Bytes per thread that a known-good config may spill on an architecture that it was not tuned for."""


@pytest.mark.slow
@pytest.mark.parametrize("gpu, family", PAIRS, ids=lambda x: getattr(x, "arch", x.name))
@pytest.mark.sampled(5)
def test_starting_configs_compile(gpu, family):
    """One becomes machine code for each architecture, another for each; half of the others become PTX,
    which is all that NVRTC itself makes, for one architecture each."""
    configs, served = load_space(family.name, gpu).starting_configs(), served_by(family, gpu)
    assert len(served) > len(configs) / 3  # some are for shapes that have no name, or cards with more shared memory
    cards = [card for card, other in PAIRS if other is family]
    turn = cards.index(gpu)
    known = list(dict.fromkeys(config.id for card in cards for config, _ in served_by(family, card)))
    for config, problem in served:
        rendered = render(family, problem, config, gpu)
        if config is served[turn % len(served)][0]:
            kernel = compile_candidate(rendered)
            assert kernel.cubin and kernel.info.spill_bytes <= SPILLS, config.describe()
        elif known.index(config.id) % (2 * len(cards)) == 2 * turn:
            assert f".target {gpu.arch}" in compile_ptx(rendered.source, gpu.arch), config.describe()


def test_device_code_asks_for_two_architectures_only():
    """Else PTX for one architecture would say less of the others."""
    asked = [found for path in TEMPLATES.rglob("*") if path.is_file() for found in ASKED.findall(path.read_text())]
    assert set(asked) == {f">= {HOPPER}", f">= {CONVERTS_EIGHT_BITS}"}


@cache
def served_by(family, gpu):
    """The starting configs that serve a named problem, each with the first of those."""
    problems = own_problems(family, gpu)
    configs = load_space(family.name, gpu).starting_configs()
    return [(c, p) for c in configs if (p := first_valid(problems, family, c, gpu))]


def first_valid(problems, family, config, gpu):
    """The first problem that the config serves."""
    return next((p for p in problems if family.why_invalid(p, config, gpu) is None), None)
