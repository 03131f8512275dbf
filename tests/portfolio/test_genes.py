"""Values that right kernels of a campaign have are those of a portfolio's climbs too."""

from __future__ import annotations

from evoattn.portfolio.engine.kernel import Kernel
from scripts.portfolio_genes import LEAST, with_values

GENES = {"flash_wgmma": {"KEY_SPLIT": [1, 2]}}


def kernels(split: int, count: int, state: str = "right", family: str = "flash_wgmma") -> list[Kernel]:
    return [Kernel(family, {"KEY_SPLIT": split, "BLOCK_N": n}, "climbed", state) for n in range(count)]


def test_a_value_of_enough_right_kernels_comes_in():
    found = with_values(GENES, kernels(3, LEAST))
    assert found["flash_wgmma"]["KEY_SPLIT"] == [1, 2, 3]


def test_a_value_of_few_kernels_of_wrong_ones_or_of_another_family_does_not():
    others = kernels(3, LEAST - 1) + kernels(6, LEAST, "wrong: NaN") + kernels(8, LEAST, family="flash_mma")
    assert with_values(GENES, others) == GENES | {"flash_wgmma": GENES["flash_wgmma"]}
