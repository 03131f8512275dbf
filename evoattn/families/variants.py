"""What a template gets to know of a problem's variants, and the arguments that its kernel then takes (`given.py`)."""

from collections.abc import Sequence
from typing import Any

from evoattn.families.given import Given, number, tensor
from evoattn.families.tensor_tiles import MAX_END, rows_apart
from evoattn.model.dtype import DTYPES
from evoattn.model.problem import AttentionProblem
from evoattn.model.scales import PER_TOKEN
from evoattn.model.score import SCORE, WHOLE, Name, Score, Table, Tree, cost, depends_on, derivative, loads_pairs
from evoattn.model.score_cuda import changed_in_cuda, in_cuda, member, size_member
from evoattn.model.score_lines import is_finite, loads_apart
from evoattn.model.variant import KEY_VARIANTS, SCORE_VARIANTS

COMPILED = (*SCORE_VARIANTS, *KEY_VARIANTS, "varlen")
"""Those of which a template gets a constant each."""
SEQUENCES = "sequences"
"""The argument that says how many packed sequences there are, in place of which a call may put fewer."""
SHORT, LONG = 2, 12
"""Instructions of a predicate for a key."""


def variant_constants(problem: AttentionProblem, hides: bool = False, slope: bool = False) -> dict[str, Any]:
    """One constant for each variant of scores and keys, and OWN_SCORE, the code of the problem's own expression of
    scores, which, if it `hides`, makes -inf of the scores that the predicate of a block list does not show; `slope`:
    with its derivative."""
    flags = {name.upper(): name in problem.variants for name in COMPILED}
    own = _own_score(problem, hides, slope) if problem.own_score or problem.blocks else NO_OWN_SCORE
    return flags | {"OWN_SCORE": own}


NO_OWN_SCORE = """struct OwnScore {
  static constexpr bool GIVEN = false, MAY_HIDE = false;  // scores have no expression of their own
};"""


def _own_score(problem: AttentionProblem, hides: bool, slope: bool) -> str:
    """The class `Own` of `templates/device/score.cuh`, whose fields are those of `own_given`."""
    score, shown = problem.own_score, problem.shown
    hides = hides and shown is not None
    hidden = "partial && !shows(b, h, q, k, d) ? NEGATIVE_INFINITY : " if hides else ""
    given = "true" if score or hides else "false"
    may_hide = "true" if hides or (score and not is_finite(score.tree)) else "false"
    return "\n".join(
        (
            "struct OwnScore {",
            f"  static constexpr bool GIVEN = {given};  // s = {score.text if score else SCORE}",
            f"  static constexpr bool MAY_HIDE = {may_hide};  // s may become -inf",
            f"  static constexpr bool SHOWS = {'true' if shown else 'false'};  // PARTIAL blocks have a predicate",
            *members(own_given(problem)),
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
        )
    )


def _changed(tree: Tree) -> str:
    """The value before the kernel scales it. Beside elements of each query and key the score is scaled: at head_dim 128
    a kernel with a bias `[heads, queries, keys]` took 1.26 times as long without (2026-11-27)."""
    return f"({in_cuda(tree)} * term_unit)" if loads_apart(tree) else changed_in_cuda(tree)


OWN = "own_"
"""Before the names of members in those of parameters."""


def table_given(tables: Sequence[Table]) -> list[Given]:
    """The fields of a class whose methods read tables: of each its address and its dimensions."""
    fields = []
    for table in tables:
        element = DTYPES[table.dtype].cuda if table.dtype in DTYPES else WHOLE[table.dtype]
        fields.append(tensor(f"const {element}", OWN + member(table), table.buffer))
        fields += [number("int", OWN + size_member(table, i), size) for i, size in enumerate(table.shape)]
    return fields


def own_given(problem: AttentionProblem) -> list[Given]:
    """Those of the problem's own expression of scores, none without one: what the kernel scales a score by last, then
    those of tables."""
    if not (problem.own_score or problem.blocks):
        return []
    return [number("float", OWN + "unit", problem.softcap or problem.softmax_scale), *table_given(problem.own_tables)]


def members(fields: Sequence[Given]) -> list[str]:
    """Their lines in a class."""
    return [f"  {field.cuda} {field.name.removeprefix(OWN)};" for field in fields]


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


def scale_constants(problem: AttentionProblem) -> dict[str, Any]:
    """The type of K and V, and SCALES: none, of a sequence's head, or of each key."""
    all_eight = problem.element_bytes == 1
    scales = "KEY" if problem.scales == PER_TOKEN else "HEAD" if problem.kv or all_eight else "NONE"
    return {"KV_ELEMENT": problem.element_of("k").cuda, "SCALES": scales}


def scale_given(problem: AttentionProblem, *tensors: str) -> list[Given]:
    """Of each scale of these of `qkv` that the problem has, its address, and its batch, head and row strides in
    elements, 0 where it is the same: `ScaleSource` in `templates/device/copy/kv_scales.cuh`. Shapes:
    `evoattn.model.scales`."""
    fields = []
    for name in (name for name in problem.scale_shapes if name[0] in tensors):
        strides = zip(("batch", "head", "row"), problem.scale_strides(name), strict=True)
        fields.append(tensor("const float", f"{name}_gmem", name))
        fields += [number("int64_t", f"{name}_{of}_stride", stride) for of, stride in strides]
    return fields


def lse_given(problem: AttentionProblem) -> list[Given]:
    """Where a kernel writes the log-sum-exp."""
    return [tensor("float", "lse_gmem", "lse", problem.lse)]


def is_varied(problem: AttentionProblem) -> bool:
    """Whether a kernel needs parameters for the problem's variants."""
    return not {*COMPILED, "blocks"}.isdisjoint(problem.variants)


def variant_given(problem: AttentionProblem) -> list[Given]:
    """The fields of `ScoreTerms`, none of plain attention: those of `VariantArguments` in
    `templates/device/score.cuh`, in their order there, then those of the problem's own expression.

    A kernel multiplies a score by its scale last, after the cap and what is added: with a cap the scale is the cap (see
    `softmax_scale_log2`), and what is added is divided by it beforehand."""
    if not is_varied(problem):
        return []
    last_scale = problem.softcap or problem.softmax_scale
    terms, own = problem.term_shapes, problem.own_score is not None or problem.shown is not None
    window, capped, biased = bool(problem.window), problem.softcap > 0, bool(problem.bias)
    strides = problem.strides("bias")[:3] if problem.bias else (0, 0, 0)
    slides, paged, packed = bool(problem.seqused or problem.page), bool(problem.page), bool(problem.varlen)
    apart = rows_apart(problem, "k") if slides else 0

    def term(element: str, name: str) -> Given:
        gmem = name if name.startswith("cu_") else f"{name}_gmem"
        return tensor(f"const {element}", gmem, name, name in terms)

    return [
        number("int", "window_past", problem.masking.past or 0, window),
        number("int", "window_ahead", problem.masking.ahead or 0, window),
        number("int", "diagonal", problem.diagonal, problem.alibi or own),
        number("float", "score_scale", problem.softmax_scale / last_scale, capped),
        number("float", "term_unit", 1 / last_scale, problem.alibi or biased or own),
        term("Element", "sinks"),
        term("float", "slopes"),
        term("Element", "bias"),
        *(
            number("int64_t", f"bias_{of}_stride", stride, biased)
            for of, stride in zip(("batch", "head", "row"), strides, strict=True)
        ),
        term("int", "seqused"),
        term("int", "table"),
        number("int", "page_bits", problem.page.bit_length() - 1, paged),
        number("int", "table_pages", problem.table_pages if paged else 0, paged),
        number("int", "kv_rows", apart if apart <= MAX_END else 0, slides),  # tensor maps that slide refuse more
        term("int", "cu_seqlens_q"),
        term("int", "cu_seqlens_k"),
        number("int", "total_queries", problem.shape("q")[2] if packed else 0, packed),
        number("int", "sequences", problem.batch if packed else 0, packed, SEQUENCES),
        *own_given(problem),
    ]
