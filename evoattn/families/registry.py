"""The one table of families."""

from collections.abc import Collection
from functools import cache

from evoattn.families.append_kv.family import AppendKv
from evoattn.families.backward_mma.family import BackwardMma
from evoattn.families.backward_scalar.family import BackwardScalar
from evoattn.families.backward_wgmma.family import BackwardWgmma
from evoattn.families.base import Family
from evoattn.families.flash_mma.family import FlashMma
from evoattn.families.flash_scalar.family import FlashScalar
from evoattn.families.flash_wgmma.family import FlashWgmma
from evoattn.families.flash_wmma.family import FlashWmma
from evoattn.families.fp8_wgmma.family import Fp8Wgmma
from evoattn.families.large_head.family import LargeHead
from evoattn.families.large_head_mma.family import LargeHeadMma
from evoattn.families.latent_columns.family import LatentColumns
from evoattn.families.latent_wgmma.family import LatentWgmma
from evoattn.families.merge_parts.family import MergeParts
from evoattn.families.quantize.family import Quantize
from evoattn.families.split_kv.family import SplitKv
from evoattn.families.three_kernel.family import ThreeKernel
from evoattn.model.errors import WrongUse, unknown
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import SearchSpace, Value


class FamilyError(WrongUse):
    """A family that is not in the table: its message is one sentence."""


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        FlashScalar(),
        FlashWmma(),
        FlashMma(),
        FlashWgmma(),
        Fp8Wgmma(),
        SplitKv(),
        ThreeKernel(),
        LargeHead(),
        LargeHeadMma(),
        LatentWgmma(),
        LatentColumns(),
        BackwardMma(),
        BackwardScalar(),
        BackwardWgmma(),
        MergeParts(),
        Quantize(),
        AppendKv(),
    )
}


@cache
def load_space(name: str, gpu: GpuSpec) -> SearchSpace:
    """The parameters of a family on one GPU, and its known-good configs. Raises `FamilyError` on an unknown family, and
    `ConfigError` if the file of these configs is missing or not as it should be."""
    return lookup(name).whole_space(gpu)


def completed(name: str, params: dict[str, Value]) -> dict[str, Value]:
    """The parameters of a recorded config, with the defaults of those that were added after it was recorded.

    As `SearchSpace.completed`, without the reading of a YAML file. Raises `FamilyError`, and `TypeError` on parameters
    that are not the family's."""
    return dict(vars(lookup(name).genes(**params)))


def weighed_as(name: str) -> str:
    """The family whose weights of the cost model the one called `name` has. Raises `FamilyError` on an unknown one."""
    return lookup(name).weighed_as or name


def contenders(problem: AttentionProblem, gpu: GpuSpec, among: Collection[str] | None = None) -> tuple[str, ...]:
    """The families, of those `among`, that serve the problem and may win it; where none may, all that serve it."""
    serving = [
        family
        for name, family in FAMILIES.items()
        if (among is None or name in among) and not family.why_unsupported(problem, gpu)
    ]
    return tuple(f.name for f in serving if f.may_win(problem)) or tuple(f.name for f in serving)


def lookup(name: str) -> Family:
    """The family called `name`. Raises `FamilyError` on an unknown one."""
    try:
        return FAMILIES[name]
    except KeyError:
        raise FamilyError(unknown("family", name, FAMILIES, "evoattn families")) from None
