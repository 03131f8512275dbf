"""Tables of the families' own tests: configs that are refused, and starting configs that compile without spills.

What is refused is kept in digests (`decisions.py`); rows are here where those of its kernels do not meet a refusal.

`REFUSED` has rows of genes, and words of the refusal; `REFUSED_OF` of a problem, genes, words (one, several, or None
where the config is valid), and a GPU if not the family's usual; `STARTING` of a problem, a GPU, and the number or genes
of a starting config."""

import pytest

from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.search.starting import starting_configs
from tests.families import (
    test_backward_mma,
    test_flash_mma,
    test_flash_scalar,
    test_flash_wgmma,
    test_flash_wgmma_balanced,
    test_flash_wmma,
    test_large_head,
    test_large_head_mma,
    test_latent_columns,
    test_latent_wgmma,
    test_split_kv,
    test_split_kv_hopper,
    test_three_kernel,
)
from tests.families.on_interpreter import built

L4, H100 = GPUS["l4"], GPUS["h100"]
OF_HOPPER = (test_flash_wgmma, test_flash_wgmma_balanced, test_latent_columns, test_latent_wgmma, test_split_kv_hopper)
MODULES = (
    test_backward_mma, test_flash_mma, test_flash_scalar, test_flash_wmma, test_large_head, test_large_head_mma,
    test_split_kv, test_three_kernel, *OF_HOPPER,
)  # fmt: skip


def rows(name):
    """Each module's rows of a table, with the module in front."""
    return [(module, *row) for module in MODULES for row in getattr(module, name, ())]


def named(row):
    module, p, genes, *rest = row
    return pytest.param(*row, id=f"{module.__name__[20:]}: {p.describe()} {genes} {rest[0]}")


@pytest.mark.slow
@pytest.mark.parametrize(("module", "p", "gpu", "which"), [named(row) for row in rows("STARTING")])
@pytest.mark.sampled(4)
def test_a_starting_config_compiles_without_spills(module, p, gpu, which):
    able = starting_configs(load_space(module.FAMILY.name, gpu), p, gpu)
    if isinstance(which, dict):
        config = next(config for config in able if which.items() <= config.params.items())
    else:
        config = able[which]
    info = built(module.FAMILY, p, config, gpu, machine_code=True).compiled.info
    assert info.spill_bytes == info.stack_bytes == info.static_smem_bytes == 0


REFUSED = [(module, module.problem(), *row) for module, *row in rows("REFUSED")] + rows("REFUSED_OF")


@pytest.mark.parametrize(("module", "p", "genes", "words", "gpu"), [named((*row, None)[:5]) for row in REFUSED])
def test_a_refusal_is_a_sentence_with_numbers(module, p, genes, words, gpu):
    reason = module.FAMILY.why_invalid(p, module.config(**genes), gpu or (H100 if module in OF_HOPPER else L4))
    if words is None:
        assert reason is None
    else:
        assert reason.endswith(".") and all(word in reason for word in (words if type(words) is tuple else [words]))


@pytest.mark.parametrize("module", [module for module in MODULES if hasattr(module, "REFUSED")])
def test_what_is_changed_until_it_is_refused_is_valid(module):
    gpu = H100 if module in OF_HOPPER else L4
    assert module.FAMILY.why_invalid(module.problem(), module.config(), gpu) is None
