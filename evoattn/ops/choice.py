"""Which kernel a problem gets on a device, or the reason why none: everything short of loading it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from evoattn.families import registry
from evoattn.families.base import SOFTMAX_SCALE_LOG2, Family
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import KernelLaunch, Scalar
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.ops.call import StridedProblem


class Picked(Protocol):
    """What the op reads of `evoattn.portfolio.pick.Pick`."""

    @property
    def family(self) -> str: ...
    @property
    def config(self) -> KernelConfig: ...
    @property
    def why(self) -> str: ...
    @property
    def estimated(self) -> bool: ...


Picker = Callable[[AttentionProblem, GpuSpec], Picked | None]
Pickers = Callable[[AttentionProblem, GpuSpec], Iterable[Picked]]

KernelKey = tuple[str, str, int, int, str, str, bool, tuple[str, ...], str, str, str, bool]
"""Family, config, head_dim of Q and of V, dtype, mask, log-sum-exp, variants, architecture, operation, which gradients
of terms, and whether these are deterministic: what one compiled kernel serves (see `Family`)."""


class Refusal:
    """A call that SDPA serves: one sentence why."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


@dataclass(frozen=True)
class Choice:
    """A kernel for a problem. `words` is what `explain` says of it."""

    family: Family
    config: KernelConfig
    problem: StridedProblem
    gpu: GpuSpec
    words: str
    estimated: bool = False
    """Nobody timed it on such a card for such a problem."""

    @property
    def name(self) -> str:
        return f"{self.family.name} {self.config.describe()}"

    @property
    def instead(self) -> str:
        """What runs where this kernel cannot."""
        return "SDPA" if self.problem.op in ("forward", "backward") else "PyTorch's expression"

    @property
    def key(self) -> KernelKey:
        p = self.problem
        dims = p.head_dim, p.head_dim_v
        what = p.op, p.grads, p.deterministic
        return (
            self.family.name,
            self.config.id,
            *dims,
            p.dtype,
            p.mask,
            p.lse,
            p.compiled_variants,
            self.gpu.arch,
            *what,
        )

    def launches(self, scale: float | None) -> tuple[KernelLaunch, ...]:
        """The launches of the problem, with the caller's softmax scale in place of 1/sqrt(head_dim)."""
        launches = self.family.launches(self.problem, self.config, self.gpu)
        if scale is None:
            return launches
        value = Scalar("float32", scale * math.log2(math.e), SOFTMAX_SCALE_LOG2)
        return tuple(
            replace(
                launch,
                args=tuple(
                    value if isinstance(argument, Scalar) and argument.name == SOFTMAX_SCALE_LOG2 else argument
                    for argument in launch.args
                ),
            )
            for launch in launches
        )


def choose(
    problem: StridedProblem,
    gpu: GpuSpec,
    pick: Picker,
    estimated: bool,
    others: Pickers | None = None,
    lookup: Callable[[str], Family] = registry.lookup,
) -> Choice | Refusal:
    """The picked kernel if it may run; where it cannot serve these strides, the first of the `others` that can.
    `estimated` allows kernels that were measured on no GPU of this kind. `lookup` finds a family by its name.

    A picker that fails (a damaged file) is passed over with a warning.
    """
    searched = problem.as_searched
    try:
        picked = pick(searched, gpu)
        if picked is None:
            return Refusal(f"no portfolio has a kernel for {searched.describe()} on the {gpu.name}")
        if unmeasured := _why_unmeasured(picked, gpu, estimated):
            return Refusal(unmeasured)
        family, name = lookup(picked.family), _name(picked)
        if not (invalid := family.why_impossible(problem, picked.config, gpu)):
            return Choice(family, picked.config, problem, gpu, f"{name} runs: {picked.why}", picked.estimated)
        invalid = f"{name} cannot serve this call: {invalid.rstrip('.')}"
        for other in others(searched, gpu) if others else ():
            family = lookup(other.family)
            if not _why_unmeasured(other, gpu, estimated) and not family.why_impossible(problem, other.config, gpu):
                words = f"{_name(other)} runs: {other.why}; {invalid}"
                return Choice(family, other.config, problem, gpu, words, other.estimated)
    except Exception as error:  # whatever the user's own data does to it, a model must go on
        warnings.warn(f"evoattn: no kernel could be picked ({error}); SDPA runs.", RuntimeWarning, stacklevel=2)
        return Refusal(f"the choice of a kernel failed: {error}")
    return Refusal(invalid)


def _name(picked: Picked) -> str:
    return f"{picked.family} {picked.config.describe()}"


def _why_unmeasured(picked: Picked, gpu: GpuSpec, estimated: bool) -> str:
    """Why an estimated kernel does not run; empty if it may."""
    if estimated or not picked.estimated:
        return ""
    enable = "evoattn.enable(estimated=True) runs it all the same"
    return f"{_name(picked)} was measured on no {gpu.name}; {enable} ({picked.why})"
