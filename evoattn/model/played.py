"""For tests alone: the GPU at hand plays another card, as far as that takes less than it has.

`EVOATTN_PLAY_CARD=a100@sm_90a` has a GPU that compiles for sm_90a offer the families and the shared memory of a block
of an A100; `stranger@sm_90a` has it be a card that nobody has seen. Either way nothing that was measured on it counts:
the name of the played card is no row of the table. Clocks, SMs and memory stay those of the GPU, on which kernels run.
"""

import os
from dataclasses import replace

from evoattn.model.gpu_table import GPUS, GpuSpec

VARIABLE = "EVOATTN_PLAY_CARD"
STRANGER, PLAYS = "stranger", "-as-"


def _wanted() -> tuple[str, str]:
    """The card that is played, and what the GPU compiles for; empty words where none is."""
    card, _, target = os.environ.get(VARIABLE, "").partition("@")
    return (card, target) if target and (card == STRANGER or card in GPUS) else ("", "")


def played(spec: GpuSpec) -> GpuSpec:
    """What the GPU at hand is taken for."""
    card, _ = _wanted()
    if not card:
        return spec
    name = f"{spec.name}{PLAYS}{card}"
    if card == STRANGER:
        return replace(spec, name=name)
    other = GPUS[card]
    return replace(spec, name=name, arch=other.arch, smem_per_block=min(spec.smem_per_block, other.smem_per_block))


def is_played(spec: GpuSpec) -> bool:
    """Whether lists that ship are hidden from it."""
    return PLAYS in spec.name


def target(arch: str) -> str:
    """What the compiler is told in place of `arch`: what the GPU at hand can load."""
    return _wanted()[1] or arch
