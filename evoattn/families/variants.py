"""What a template gets to know of a problem's variants, and the arguments that its kernel then takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evoattn.families.tensor_tiles import MAX_END, rows_apart
from evoattn.model.dtype import DTYPES
from evoattn.model.launch import Buffer, KernelArg, Scalar
from evoattn.model.problem import AttentionProblem
from evoattn.model.scales import PER_TOKEN
from evoattn.model.score import SCORE, WHOLE, Score, Table, Tree, cost, depends_on, derivative, loads_pairs
from evoattn.model.score_cuda import in_cuda, member, size_member
from evoattn.model.variant import KEY_VARIANTS, SCORE_VARIANTS

COMPILED = (*SCORE_VARIANTS, *KEY_VARIANTS, "varlen")
"""Those of which a template gets a constant each."""
SEQUENCES = "sequences"
"""The argument that says how many packed sequences there are, in place of which a call may put fewer."""
SHORT, LONG = 2, 12
"""Instructions of a predicate for a key."""


def variant_constants(problem: AttentionProblem, hides: bool = False, slope: bool = False) -> dict[str, Any]:
    """One constant for each variant of scores and keys; VARIANT, the header in `templates/device/variant` that names
    the arguments; and OWN_SCORE, the code of the problem's own expression of scores, which, if it `hides`, makes -inf
    of the scores that the predicate of a block list does not show; `slope`: with its derivative."""
    flags = {name.upper(): name in problem.variants for name in COMPILED}
    own = _own_score(problem, hides, slope) if problem.own_score or problem.blocks else NO_OWN_SCORE
    return flags | {"VARIANT": "varied" if any(flags.values()) or problem.blocks else "plain", "OWN_SCORE": own}


NO_OWN_SCORE = """struct OwnScore {
  static constexpr bool GIVEN = false;  // scores have no expression of their own
};
#define OWN_SCORE_PARAMETERS
#define OWN_SCORE_ARGUMENTS"""


def _own_score(problem: AttentionProblem, hides: bool, slope: bool) -> str:
    """The class `Own` of `templates/device/score.cuh`, and the arguments that its fields are made of, in the order of
    `own_score_args`."""
    score, shown = problem.own_score, problem.shown
    value, hides = in_cuda(score.tree) if score else SCORE, hides and shown is not None
    given = "true" if score or hides else "false"
    fields = [("float", "unit", "what the kernel scales a score by last")]
    fields += table_fields(problem.own_tables)
    return "\n".join(
        (
            "struct OwnScore {",
            f"  static constexpr bool GIVEN = {given};  // s = {score.text if score else SCORE}",
            f"  static constexpr bool SHOWS = {'true' if shown else 'false'};  // PARTIAL blocks have a predicate",
            *(f"  {kind} {name};  // {meaning}" for kind, name, meaning in fields),
            *(_of_lists(shown) if problem.blocks else ()),
            "  __device__ __forceinline__ float of(float s, int b, int h, int q, int k, int d) const {",
            f"    return {f'partial && !shows(b, h, q, k, d) ? NEGATIVE_INFINITY : {value}' if hides else value};",
            "  }",
            *(_slope(score) if slope and score else ()),
            "  __device__ __forceinline__ bool shows(int b, int h, int q, int k, int d) const {",
            f"    return {in_cuda(shown, False) if shown else 'true'};",
            "  }",
            "};",
            "#define OWN_SCORE_PARAMETERS " + "".join(f", {kind} own_{name}" for kind, name, _ in fields),
            "#define OWN_SCORE_ARGUMENTS " + "".join(f", own_{name}" for _, name, _ in fields),
        )
    )


def table_fields(tables: Sequence[Table]) -> list[tuple[str, str, str]]:
    """The fields of a class whose methods read tables, in the order of `table_args`: type, name, meaning."""
    fields = []
    for table in tables:
        element = DTYPES[table.dtype].cuda if table.dtype in DTYPES else WHOLE[table.dtype]
        fields.append(
            (f"const {element}* __restrict__", member(table), f"of {len(table.shape)} dimensions, contiguous")
        )
        fields += [("int", size_member(table, i), f"its dimension {i}") for i in range(len(table.shape))]
    return fields


def table_args(tables: Sequence[Table]) -> tuple[KernelArg, ...]:
    """The arguments that `table_fields` are made of."""
    args: list[KernelArg] = []
    for table in tables:
        args += [Buffer(table.buffer), *(Scalar("int32", size) for size in table.shape)]
    return tuple(args)


def _of_lists(shown: Tree | None) -> tuple[str, ...]:
    """What block lists ask of the predicate. It is written out for each key where it is short and bits are not likely
    to be asked in its place: compilers would take seconds."""
    asked = 0.0 if shown is None else cost(shown)[2]
    in_loop = shown is not None and asked > SHORT and (asked > LONG or not depends_on(shown, "h"))
    return (
        f"  static constexpr bool IN_LOOP = {'true' if in_loop else 'false'};  // not written out for each key",
        f"  static constexpr bool PAIRED = {'true' if shown and loads_pairs(shown) else 'false'};  // a table of pairs",
        "  bool partial = false;  // the tile at hand is of a PARTIAL block",
    )


def _slope(score: Score) -> tuple[str, ...]:
    """The method that gives the derivative by the score."""
    return (
        "  __device__ __forceinline__ float slope(float s, int b, int h, int q, int k, int d) const {",
        f"    return {in_cuda(derivative(score.tree))};",
        "  }",
    )


def own_score_args(problem: AttentionProblem, last_scale: float) -> tuple[KernelArg, ...]:
    """The arguments of the problem's own expression of scores; none without one."""
    if not (problem.own_score or problem.blocks):
        return ()
    return Scalar("float32", last_scale), *table_args(problem.own_tables)


def scale_constants(problem: AttentionProblem) -> dict[str, Any]:
    """The type of K and V; SCALED, the header in `templates/device/variant` that names their scales; and SCALES: none,
    of a sequence's head, or of each key."""
    scales = "KEY" if problem.scales == PER_TOKEN else "HEAD" if problem.kv else "NONE"
    header = "scaled" if problem.kv else "unscaled"
    return {"KV_ELEMENT": problem.element_of("k").cuda, "SCALED": header, "SCALES": scales}


def scale_args(problem: AttentionProblem) -> tuple[KernelArg, ...]:
    """Of each scale that the problem has, those of Q, K and V in turn: its address, and its batch, head and row strides
    in elements, 0 where it is the same. Shapes: `evoattn.model.scales`."""
    args: list[KernelArg] = []
    for name in problem.scale_shapes:
        args += [Buffer(name), *(Scalar("int64", stride) for stride in problem.scale_strides(name))]
    return tuple(args)


def lse_constants(problem: AttentionProblem) -> dict[str, Any]:
    """Whether a kernel writes the log-sum-exp, and its parameter for that, which no other kernel has."""
    parameter, argument = (", float* __restrict__ lse_gmem", "lse_gmem") if problem.lse else ("", "nullptr")
    return {"WRITE_LSE": problem.lse, "LSE_PARAMETER": parameter, "LSE_ARGUMENT": argument}


def lse_args(problem: AttentionProblem) -> tuple[KernelArg, ...]:
    """Where such a kernel writes it."""
    return (Buffer("lse"),) * problem.lse


def variant_args(problem: AttentionProblem) -> tuple[KernelArg, ...]:
    """The arguments of `templates/device/variant/varied.cuh`; none for plain attention.

    A kernel multiplies a score by its scale last, after the cap and what is added: with a cap the scale is the cap (see
    `softmax_scale_log2`), and what is added is divided by it beforehand.
    """
    if not {*COMPILED, "blocks"} & set(problem.variants):
        return ()
    last_scale = problem.softcap or problem.softmax_scale
    null = Scalar("int64", 0)
    shapes = problem.term_shapes
    strides = problem.strides("bias")[:3] if problem.bias else (0, 0, 0)
    apart = rows_apart(problem, "k") if problem.seqused or problem.page else 0
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
        Scalar("int32", problem.batch if problem.varlen else 0, SEQUENCES),
        *own_score_args(problem, last_scale),
    )
