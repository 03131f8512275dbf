"""All that is done to a score as one class in CUDA, with its derivatives: whatever the variants are."""

from __future__ import annotations

from evoattn.model.dtype import DTYPES
from evoattn.model.launch import Buffer, KernelArg, Scalar
from evoattn.model.problem import AttentionProblem
from evoattn.model.score import SCORE, WHOLE, Apply, Load, Name, Number, Table, Tree, derivative, of_score
from evoattn.model.score_cuda import in_cuda, member, size_member

CAP = Name("cap")
"""The softcap, which is an argument: it is no part of a kernel's code."""
BIAS = Name("biased")
"""The element of the bias, whose strides are arguments, as a caller's may be any."""
BIAS_FIELDS = (
    ("int64_t", "bias_batch_stride"),
    ("int64_t", "bias_head_stride"),
    ("int64_t", "bias_row_stride"),
)
ARGUMENTS = "float s, int b, int h, int q, int k, int d"


BIASED = (
    "    const float biased = to_float(bias[b * bias_batch_stride + h * bias_head_stride + q * bias_row_stride + k]);"
)


def score_class(problem: AttentionProblem) -> str:
    """The class `Score`: `of` a scaled score, its `slope`, and its `slope_behind_bias`, by the score that has the bias;
    and the macros of its arguments in a kernel, in the order of `score_args`."""
    tree, own = _whole(problem), problem.own_score
    behind: Tree = of_score(derivative(own.tree), _whole(problem.with_(score="", tables=""))) if own else Number(1)
    methods = (("of", tree), ("slope", derivative(tree)), ("slope_behind_bias", behind))
    fields = [("float", "cap")] if problem.softcap else []
    if problem.bias:
        fields += [("const Element* __restrict__", "bias"), *BIAS_FIELDS]
    for table in _tables(tree):
        element = DTYPES[table.dtype].cuda if table.dtype in DTYPES else WHOLE[table.dtype]
        fields.append((f"const {element}* __restrict__", member(table)))
        fields += [("int", size_member(table, i)) for i in range(len(table.shape))]
    return "\n".join(
        (
            "struct Score {",
            *(f"  {kind} {name};" for kind, name in fields),
            *(
                line
                for name, value in methods
                for line in (
                    f"  __device__ __forceinline__ float {name}({ARGUMENTS}) const {{",
                    *([BIASED] if problem.bias and _has(value, BIAS) else ()),
                    f"    return {in_cuda(value)};",
                    "  }",
                )
            ),
            "};",
            "#define SCORE_PARAMETERS" + "".join(f", {kind} score_{name}" for kind, name in fields),
            "#define SCORE_ARGUMENTS {" + ", ".join(f"score_{name}" for _, name in fields) + "}",
        )
    )


def score_args(problem: AttentionProblem) -> tuple[KernelArg, ...]:
    """The arguments that `score_class` names."""
    args: list[KernelArg] = [Scalar("float32", problem.softcap)] if problem.softcap else []
    if problem.bias:
        args += [Buffer("bias"), *(Scalar("int64", stride) for stride in problem.strides("bias")[:3])]
    for table in _tables(_whole(problem)):
        args += [Buffer(table.buffer), *(Scalar("int32", size) for size in table.shape)]
    return tuple(args)


def _whole(problem: AttentionProblem) -> Tree:
    """`AttentionProblem.scoring`, with the softcap and the bias by their names."""
    tree = _named(problem.with_(softcap=0.0).scoring)
    if not problem.softcap:
        return tree
    return of_score(tree, Apply("*", (CAP, Apply("tanh", (Apply("/", (Name(SCORE), CAP)),)))))


def _named(tree: Tree) -> Tree:
    """The expression with `BIAS` for the element of the bias."""
    match tree:
        case Load(table, _) if table.name == "bias" and table.buffer == "bias":
            return BIAS
        case Apply(name, of):
            return Apply(name, tuple(map(_named, of)))
    return tree


def _has(tree: Tree, name: Name) -> bool:
    return tree == name or (isinstance(tree, Apply) and any(_has(one, name) for one in tree.of))


def _tables(tree: Tree) -> list[Table]:
    """Those that an expression loads from, each once."""
    match tree:
        case Load(table, indices):
            found = [table, *(inner for index in indices for inner in _tables(index))]
        case Apply(_, of):
            found = [table for one in of for table in _tables(one)]
        case _:
            found = []
    return list({table.name: table for table in found}.values())
