"""The kernels of the nearest class of a portfolio that can serve a problem, the most promising first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from evoattn.families import registry
from evoattn.model.gpu import GPUS, GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.portfolio import shipped
from evoattn.portfolio.features import class_of
from evoattn.portfolio.known import visible
from evoattn.portfolio.refine import Genes
from evoattn.portfolio.shipped import KernelClass, Portfolio

REFINED_VARIANTS = ("value_dim",)
"""Those with which the kernels of another class are refined, too: DeepSeek's latent prefill is in the cost model's fit,
a token of it, with as many heads of 192 and 128 columns, is of no class."""


@cache
def portfolios(gpu: GpuSpec) -> list[Portfolio]:
    """The portfolios that may serve: of this architecture and of older ones, the newest first."""
    older = {g.arch: g.capability for g in GPUS.values() if g.capability <= gpu.capability} | {gpu.arch: gpu.capability}
    found = (shipped.load(arch) for arch in sorted(older, key=lambda arch: older[arch], reverse=True))
    return [portfolio for portfolio in found if portfolio]


@cache
def classes_for(name: str, names: tuple[str, ...]) -> list[str]:
    """The class `name` and those of the same mask and size that have no variants but its own, the nearest first: of a
    head_dim that is not less, with most of its variants, and of the nearest head_dim."""
    bits, dim, mask, size = name.split()
    base, *variants = mask.split("+")
    found: list[tuple[bool, bool, int, int, str]] = []
    for other in names:
        other_bits, other_dim, other_mask, other_size = other.split()
        other_base, *others = other_mask.split("+")
        if (other_bits, other_base, other_size) == (bits, base, size) and set(others) <= set(variants):
            above = int(other_dim[1:]) - int(dim[1:])
            found.append((other != name, above < 0, -len(others), abs(above), other))
    return [entry[-1] for entry in sorted(found)]


def _predicted(problem: AttentionProblem, gpu: GpuSpec, kernels: KernelClass) -> list[float]:
    """The times of all that the class's kernels can run as."""
    alike = kernels.alike(problem, gpu)
    return [us for kernel in kernels.kernels for us in kernel.predicted_us(problem, gpu, alike)]


def ranked(problem: AttentionProblem, gpu: GpuSpec, kernels: KernelClass) -> Iterator[KernelConfig]:
    """The class's configs that can serve the problem, those first that should take least time: by the class's own
    constants, and of packed sequences and keys in use by the cost model as much. Both err in ways of their own: on 112
    problems that neither had seen the constants alone lose 1.063, the model alone 1.046, and both 1.044. No latent
    cache was among these, so that they keep to the constants."""
    configs = [config for kernel in kernels.kernels for config in kernel.variants()]
    seen = visible(problem)
    predicted = [_predicted(one, gpu, kernels) for one in seen]
    products = map(math.prod, zip(*predicted, strict=True))
    able = [
        (us, config)
        for us, config in zip(products, configs, strict=True)
        if not registry.lookup(config.family).why_impossible(problem, config, gpu)
    ]
    if (problem.varlen or problem.seqused) and not problem.shared_kv and len(able) > 1:
        from evoattn.cost.cost import scores  # here: it imports NumPy and reads a file

        costs = [scores(one, [config for _, config in able], gpu) for one in seen]
        factors = map(math.prod, zip(*costs, strict=True))
        able = [(us * factor, config) for (us, config), factor in zip(able, factors, strict=True)]
    yield from (config for _, config in sorted(able, key=lambda pair: pair[0]))


@dataclass(frozen=True)
class Nearest:
    """The nearest class with kernels that can serve a problem, and these, the most promising first."""

    configs: list[KernelConfig]
    why: str
    as_is: bool
    """They are not refined: nothing was tried on the card, or their times were measured with the problem's variants."""
    estimated: bool
    regret: float | None
    genes: Mapping[str, Genes]
    narrower: bool
    """The class is of a smaller head_dim."""


def nearest(problem: AttentionProblem, gpu: GpuSpec) -> Nearest | None:
    own = class_of(problem)
    for portfolio in portfolios(gpu):
        for name in classes_for(own, portfolio.classes):
            kernels = portfolio.kernel_class(name)
            if not (found := list(ranked(problem, gpu, kernels))):
                continue
            tried = gpu.name in portfolio.cards
            estimated = not tried or name != own
            why = (
                f"of the kernels of class '{name}' it should take least time here, by times that were measured on "
                f"{portfolio.measured_on}"
            )
            if not tried:
                why += f"; nothing was tried on {gpu.name}"
            elif estimated:
                same_mask = own.split()[2] == name.split()[2]
                why += f"; {f'head_dim {problem.head_dim}' if same_mask else own} was not measured"
            regret, narrower = None if estimated else kernels.regret, int(name.split()[1][1:]) < problem.head_dim
            as_is = not tried or (bool(problem.variants) and not (estimated and problem.variants == REFINED_VARIANTS))
            return Nearest(found, why, as_is, estimated, regret, portfolio.genes, narrower)
    return None
