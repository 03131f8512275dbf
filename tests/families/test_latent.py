"""latent_wgmma and latent_columns: right on the interpreter's cases, wrong where a place that matters is changed."""

import pytest

from tests.families import test_latent_columns, test_latent_wgmma
from tests.families.latent import H100
from tests.families.on_interpreter import built, small_faults

OF = {"latent_wgmma": test_latent_wgmma, "latent_columns": test_latent_columns}


def kernel(family, name, *edits, **options):
    problem, genes = OF[family].CASES[name]
    return built(OF[family].FAMILY, problem, OF[family].config(**genes), H100, *edits, **options)


def faults(family, name, *edits, cases=slice(None)):
    """What the interpreter's cases find in the kernel with these edits; empty for a right one."""
    return small_faults(kernel(family, name, *edits), OF[family].CASES[name][0], cases)


RIGHT = [(family, name) for family, module in OF.items() for name in module.CASES]


@pytest.mark.slow
@pytest.mark.parametrize(("turn", "family", "name"), [(i, *row) for i, row in enumerate(RIGHT)])
@pytest.mark.sampled(4)
def test_it_is_right(turn, family, name):
    """On every third small case, in turns."""
    assert faults(family, name, cases=slice(turn % 3, None, 3)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["overlapped, DeepSeek's widths", "scores alone, DeepSeek's widths"])
def test_the_widest_compile_without_spills(name):
    info = kernel("latent_wgmma", name, machine_code=True).compiled.info
    assert not info.spill_bytes and not info.static_smem_bytes


IN_BOTH = {
    "all keys are in use": ("return used;", "return seqlen_k;"),
    "a merged sum without its shift": ("log_sum(share.shift, share.sum)", "log_sum(0.f, share.sum)"),
}
WRONG = [(family, fault, *row) for family, module in OF.items() for fault, row in module.WRONG.items()]
WRONG += [(family, fault, "keys in use", *edit) for family in OF for fault, edit in IN_BOTH.items()]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "fault", "name", "old", "new"), WRONG, ids=[f"{row[0]}: {row[1]}" for row in WRONG])
@pytest.mark.sampled(6)
def test_a_wrong_one_is_found(family, fault, name, old, new):
    assert faults(family, name, (old, new))
