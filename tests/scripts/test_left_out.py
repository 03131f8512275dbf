"""`scripts/left_out.py` without a device: every edit finds its one place in today's template, and what is left
compiles."""

from dataclasses import replace

import left_out
import pytest

from evoattn.backends.compiler import compile_candidate
from evoattn.families import registry
from evoattn.families.render import render
from evoattn.model import named_problems as problems
from evoattn.model.gpu import GPUS

H100 = GPUS["h100"]


@pytest.mark.slow
@pytest.mark.parametrize("name", left_out.VARIANTS)
def test_a_variant_compiles_to_another_kernel(name):
    problem = problems.lookup("seed_h100")
    whole = render(registry.lookup("flash_wgmma"), problem, left_out.config_for(problem, H100, None), H100)
    variant = left_out.edited(whole, left_out.VARIANTS[name])
    assert (variant.source == whole.source) == (name == "whole")
    assert compile_candidate(variant).info.spill_bytes == 0


def test_a_template_that_has_changed_is_said():
    problem = problems.lookup("seed_h100")
    whole = render(registry.lookup("flash_wgmma"), problem, left_out.config_for(problem, H100, None), H100)
    with pytest.raises(ValueError, match="0 places"):
        left_out.edited(replace(whole, source="int a;"), left_out.VARIANTS["no exp"])
