"""What the template of backward_mma gets to know of the tables of an expression whose gradients are wanted."""

from __future__ import annotations

from collections.abc import Iterator

from evoattn.model.backward import parse_grads
from evoattn.model.launch import Buffer, KernelArg
from evoattn.model.problem import AttentionProblem
from evoattn.model.score import SCORE, Load, Name, Table, depends_on, derivative, elements
from evoattn.model.score_cuda import in_cuda, place_in_cuda, size_member
from evoattn.model.score_lines import is_shift


def tables_of(problem: AttentionProblem) -> tuple[Table, ...]:
    """The tables whose gradients are wanted."""
    wanted = parse_grads(problem.grads)
    return tuple(table for table in problem.own_tables if table.buffer in wanted)


def elements_of(problem: AttentionProblem) -> tuple[Load, ...]:
    """Their elements that scores differ by."""
    if problem.own_score is None:
        return ()
    return tuple(one for table in tables_of(problem) for one in elements(problem.own_score.tree, table.buffer))


def sharing_of(element: Load) -> str:
    """Which scores of a head are of the same element: see `templates/backward_mma/table_gradients.cuh`."""
    of_query, of_key = depends_on(element, "q"), depends_on(element, "k")
    if not of_query or not of_key:
        return "QUERY" if of_query else "KEY" if of_key else "HEAD"
    return "DIAGONAL" if is_shift(element) else "PAIR"


def needs_score(problem: AttentionProblem) -> bool:
    """Whether such a gradient differs by the score."""
    score = problem.own_score
    return score is not None and any(depends_on(derivative(score.tree, one), SCORE) for one in elements_of(problem))


def registers_of(problem: AttentionProblem, key_tiles: int, part: int) -> int:
    """Of the sums of a thread, and of the scores that they are made of."""
    halves, parts = 2 * key_tiles, part // 8
    counts = {"HEAD": 1, "KEY": halves, "QUERY": 2 * parts, "DIAGONAL": 2 * (parts + halves - 1), "PAIR": 0}
    scores = key_tiles * part // 2 * needs_score(problem)
    return scores + sum(counts[sharing_of(one)] for one in elements_of(problem))


def unordered_tables(problem: AttentionProblem) -> tuple[str, ...]:
    """The gradients that are added up in any order: of tables an element of which several scores may be of."""
    return tuple(f"d{table.buffer}" for table in tables_of(problem) if not _is_each_alone(problem, table))


def _is_each_alone(problem: AttentionProblem, table: Table) -> bool:
    """Whether each score is of an element of its own."""
    found = [one for one in elements_of(problem) if one.table == table]
    if not found:
        return True
    sizes = {"b": problem.batch, "h": problem.heads, "q": problem.seqlen_q, "k": problem.seqlen_k}
    names = {index.name: size for index, size in zip(found[0].indices, table.shape) if isinstance(index, Name)}
    inside = all(names.get(name, 1) >= size for name, size in sizes.items())
    return len(found) == 1 and inside and not problem.varlen


def table_gradients(problem: AttentionProblem) -> str:
    """The class `Own` of `templates/backward_mma/table_gradients.cuh`, and the arguments that its fields are made of,
    in the order of `table_gradient_args`."""
    tables, found, score = tables_of(problem), elements_of(problem), problem.own_score
    arguments = "int b, int h, int q, int k, int d"
    slopes = [in_cuda(derivative(score.tree, one)) for one in found] if score else []
    places = [f"d_{one.table.name} + {place_in_cuda(one)}" for one in found]
    return "\n".join(
        (
            "struct OwnGradients : OwnScore {",
            f"  static constexpr bool WANTED = {'true' if tables else 'false'};  // gradients of tables",
            f"  static constexpr int COUNT = {len(found)};  // elements that scores differ by",
            "  template <int I> static constexpr Sharing SHARED = "
            + "".join(f"I == {i} ? Sharing::{sharing_of(one)} : " for i, one in enumerate(found))
            + "Sharing::PAIR;",
            *(f"  float* d_{table.name};  // the gradient of {table.name}" for table in tables),
            f"  template <int I> __device__ __forceinline__ float slope_by(float s, {arguments}) const {{",
            *_cases(slopes, "0.f"),
            "  }",
            f"  template <int I> __device__ __forceinline__ float* place({arguments}) const {{",
            *_cases(places, "nullptr"),
            "  }",
            "  __device__ __forceinline__ void clear(int64_t first, int64_t step) const {",
            *(line for table in tables for line in _clear(table)),
            "  }",
            "};",
            "#define TABLE_GRADIENT_PARAMETERS " + "".join(f", float* d_{table.name}" for table in tables),
            "#define TABLE_GRADIENT_ARGUMENTS " + "".join(f", d_{table.name}" for table in tables),
        )
    )


def _cases(values: list[str], otherwise: str) -> Iterator[str]:
    yield from (f"    if constexpr (I == {i}) return {value};" for i, value in enumerate(values))
    yield f"    return {otherwise};"


def _clear(table: Table) -> Iterator[str]:
    count = " * ".join(f"int64_t({size_member(table, i)})" for i in range(len(table.shape)))
    yield f"    for (int64_t i = first; i < {count}; i += step) d_{table.name}[i] = 0.f;"


def table_gradient_args(problem: AttentionProblem) -> tuple[KernelArg, ...]:
    """The arguments of gradients of tables; none where none is wanted."""
    return tuple(Buffer(f"d{table.buffer}") for table in tables_of(problem))
