"""The problems that have a name, as a family of any operation is asked for them."""

from evoattn.families.base import Family
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.shape_text import named_problems


def own_problems(family: Family, gpu: GpuSpec) -> list[AttentionProblem]:
    """Those that the family serves on the GPU, with its operation, and in its first dtype where it serves none."""

    def served(**changed: str) -> list[AttentionProblem]:
        found = []
        for problem in named_problems().values():
            try:
                problem = problem.with_(op=family.operations[0], **changed)
            except ProblemError:  # a cache has no gradients
                continue
            if family.why_unsupported(problem, gpu) is None:
                found.append(problem)
        return found

    return served() or served(dtype=family.dtypes[0])
