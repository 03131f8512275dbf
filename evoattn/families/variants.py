"""What a template gets to know of a problem's variants, and the arguments that its kernel then takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from evoattn.families.tensor_tiles import MAX_END, rows_apart
from evoattn.model.dtype import DTYPES
from evoattn.model.launch import Buffer, KernelArg, Scalar
from evoattn.model.problem import AttentionProblem
from evoattn.model.scales import PER_TOKEN
from evoattn.model.score import SCORE, WHOLE, Name, Score, Table, Tree, cost, depends_on, derivative, loads_pairs
from evoattn.model.score_cuda import changed_in_cuda, in_cuda, member, size_member
from evoattn.model.score_lines import loads_apart
from evoattn.model.variant import KEY_VARIANTS, SCORE_VARIANTS

COMPILED = (*SCORE_VARIANTS, *KEY_VARIANTS, "varlen")
"""Those of which a template gets a constant each."""
SEQUENCES = "sequences"
"""The argument that says how many packed sequences there are, in place of which a call may put fewer."""
NUMBERS: dict[str, Literal["int32", "int64", "float32"]] = {"int": "int32", "int64_t": "int64", "float": "float32"}
"""CUDA's types as `Scalar` names them."""
SHORT, LONG = 2, 12
"""Instructions of a predicate for a key."""


def variant_constants(problem: AttentionProblem, hides: bool = False, slope: bool = False) -> dict[str, Any]:
    """One constant for each variant of scores and keys; VARIANT, the header in `templates/device/variant` of the
    arguments; and OWN_SCORE, those and the code of the problem's own expression of scores, which, if it `hides`, makes
    -inf of the scores that the predicate of a block list does not show; `slope`: with its derivative."""
    flags = {name.upper(): name in problem.variants for name in COMPILED}
    own = _own_score(problem, hides, slope) if problem.own_score or problem.blocks else NO_OWN_SCORE
    if is_varied(problem):
        return flags | {"VARIANT": "varied", "OWN_SCORE": f"{own}\n{_parameters(problem)}"}
    return flags | {"VARIANT": "plain", "OWN_SCORE": own}


NO_OWN_SCORE = """struct OwnScore {
  static constexpr bool GIVEN = false;  // scores have no expression of their own
};
#define OWN_SCORE_PARAMETERS
#define OWN_SCORE_ARGUMENTS"""


def _own_score(problem: AttentionProblem, hides: bool, slope: bool) -> str:
    """The class `Own` of `templates/device/score.cuh`, and the arguments that its fields are made of, in the order of
    `own_score_args`."""
    score, shown = problem.own_score, problem.shown
    hides = hides and shown is not None
    hidden = "partial && !shows(b, h, q, k, d) ? NEGATIVE_INFINITY : " if hides else ""
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
            f"    return {hidden}{in_cuda(score.tree) if score else SCORE};",
            "  }",
            "  __device__ __forceinline__ float changed(float raw, float term_unit, int b, int h, int q, int first,",
            "                                           int step, int d) const {",
            "    const float s = raw * unit;",
            "    const int k = first + step;",
            f"    return {hidden}{_changed(score.tree if score else Name(SCORE))};",
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


def _changed(tree: Tree) -> str:
    """The value before the kernel scales it. Beside elements of each query and key the score is scaled: at head_dim 128
    a kernel with a bias `[heads, queries, keys]` took 1.26 times as long without (2026-11-27)."""
    return f"({in_cuda(tree)} * term_unit)" if loads_apart(tree) else changed_in_cuda(tree)


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
    all_eight = problem.element_bytes == 1
    scales = "KEY" if problem.scales == PER_TOKEN else "HEAD" if problem.kv or all_eight else "NONE"
    header = "all_scaled" if all_eight else "scaled" if problem.kv else "unscaled"
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


class Given(NamedTuple):
    """A field of `VariantArguments` in `templates/device/score.cuh`: its type and the name of the kernel's parameter,
    whether a problem's kernel takes it, and what a launch puts there."""

    cuda: str
    name: str
    needed: bool
    value: KernelArg


def given(problem: AttentionProblem) -> list[Given]:
    """All fields, in their order there. A field that no variant of the problem needs is 0, and no parameter.

    A kernel multiplies a score by its scale last, after the cap and what is added: with a cap the scale is the cap (see
    `softmax_scale_log2`), and what is added is divided by it beforehand.
    """
    last_scale = problem.softcap or problem.softmax_scale
    terms, own = problem.term_shapes, problem.own_score is not None or problem.shown is not None
    strides = problem.strides("bias")[:3] if problem.bias else (0, 0, 0)
    slides, paged, packed = bool(problem.seqused or problem.page), bool(problem.page), bool(problem.varlen)
    apart = rows_apart(problem, "k") if slides else 0

    def number(cuda: str, name: str, needed: bool, value: Any, told: str = "") -> Given:
        return Given(cuda, name, needed, Scalar(NUMBERS[cuda], value, told))

    def tensor(element: str, name: str, term: str) -> Given:
        return Given(f"const {element}* __restrict__", name, term in terms, Buffer(term))

    return [
        number("int", "window_past", bool(problem.window), problem.masking.past or 0),
        number("int", "window_ahead", bool(problem.window), problem.masking.ahead or 0),
        number("int", "diagonal", problem.alibi or own, problem.diagonal),
        number("float", "score_scale", problem.softcap > 0, problem.softmax_scale / last_scale),
        number("float", "term_unit", problem.alibi or bool(problem.bias) or own, 1 / last_scale),
        tensor("Element", "sinks_gmem", "sinks"),
        tensor("float", "slopes_gmem", "slopes"),
        tensor("Element", "bias_gmem", "bias"),
        *(
            number("int64_t", f"bias_{of}_stride", bool(problem.bias), stride)
            for of, stride in zip(("batch", "head", "row"), strides, strict=True)
        ),
        tensor("int", "seqused_gmem", "seqused"),
        tensor("int", "table_gmem", "table"),
        number("int", "page_bits", paged, problem.page.bit_length() - 1),
        number("int", "table_pages", paged, problem.table_pages if paged else 0),
        number("int", "kv_rows", slides, apart if apart <= MAX_END else 0),  # tensor maps that slide refuse more
        tensor("int", "cu_seqlens_q", "cu_seqlens_q"),
        tensor("int", "cu_seqlens_k", "cu_seqlens_k"),
        number("int", "total_queries", packed, problem.shape("q")[2] if packed else 0),
        number("int", "sequences", packed, problem.batch if packed else 0, SEQUENCES),
    ]


def _parameters(problem: AttentionProblem) -> str:
    """The parameters of a kernel for variants, and what it makes `VariantArguments` of."""
    fields = given(problem)
    taken = (f", {field.cuda} {field.name}" for field in fields if field.needed)
    made = (field.name if field.needed else "nullptr" if "*" in field.cuda else "0" for field in fields)
    return f"#define GIVEN_PARAMETERS {''.join(taken)}\n#define GIVEN_ARGUMENTS {', '.join(made)}"


def is_varied(problem: AttentionProblem) -> bool:
    """Whether a kernel needs parameters for the problem's variants."""
    return not {*COMPILED, "blocks"}.isdisjoint(problem.variants)


def variant_args(problem: AttentionProblem) -> tuple[KernelArg, ...]:
    """The arguments of `templates/device/variant/varied.cuh`; none for plain attention."""
    if not is_varied(problem):
        return ()
    last_scale = problem.softcap or problem.softmax_scale
    return *(field.value for field in given(problem) if field.needed), *own_score_args(problem, last_scale)
