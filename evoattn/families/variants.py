"""What a template gets to know of a problem's variants, and the arguments that its kernel then takes."""

from __future__ import annotations

from typing import Any

from evoattn.families.tensor_tiles import MAX_END, rows_apart
from evoattn.model.launch import Buffer, KernelArg, Scalar
from evoattn.model.problem import AttentionProblem
from evoattn.model.variant import KEY_VARIANTS, SCORE_VARIANTS

COMPILED = (*SCORE_VARIANTS, *KEY_VARIANTS, "varlen")
"""Those of which a template gets a constant each."""


def variant_constants(problem: AttentionProblem) -> dict[str, Any]:
    """One constant for each variant of scores and keys, and VARIANT, the header in `templates/device/variant` that
    names the arguments."""
    flags = {name.upper(): name in problem.variants for name in COMPILED}
    return flags | {"VARIANT": "varied" if any(flags.values()) else "plain"}


def variant_args(problem: AttentionProblem) -> tuple[KernelArg, ...]:
    """The arguments of `templates/device/variant/varied.cuh`; none for plain attention.

    A kernel multiplies a score by its scale last, after the cap and what is added: with a cap the scale is the cap (see
    `softmax_scale_log2`), and what is added is divided by it beforehand.
    """
    if not set(COMPILED) & set(problem.variants):
        return ()
    last_scale = problem.softcap or problem.softmax_scale
    null = Scalar("int64", 0)
    shapes = problem.term_shapes
    strides = problem.strides("bias")[:3] if problem.bias else (0, 0, 0)
    apart = rows_apart(problem, "k") if problem.seqused else 0
    return (
        Scalar("int32", problem.masking.past or 0),
        Scalar("int32", problem.masking.ahead or 0),
        Scalar("int32", problem.diagonal),
        Scalar("float32", problem.softmax_scale / last_scale),
        Scalar("float32", 1 / last_scale),
        *(Buffer(name) if name in shapes else null for name in ("sinks", "slopes", "bias")),
        *(Scalar("int64", stride) for stride in strides),
        *(Buffer(name) if name in shapes else null for name in ("seqused", "table")),
        Scalar("int32", problem.page.bit_length() - 1 if problem.page else 0),
        Scalar("int32", problem.table_pages if problem.page else 0),
        Scalar("int32", apart if apart <= MAX_END else 0),  # read by tensor maps that slide alone, which refuse more
        *(Buffer(name) if name in shapes else null for name in ("cu_seqlens_q", "cu_seqlens_k")),
        Scalar("int32", problem.shape("q")[2] if problem.varlen else 0),
        Scalar("int32", problem.batch if problem.varlen else 0),
    )
