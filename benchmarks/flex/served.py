"""What serves each function of `mods.MODS` on a card, by the choice that a call makes: nothing runs.

python -m benchmarks.flex.served [GPU]        a table for reports/flex_functions.md"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.flex.mods import MODS, Shape, Written
from evoattn.model.gpu import GPUS, GpuSpec
from evoattn.ops import flex
from evoattn.ops.arguments import BIAS, SLOPES
from evoattn.ops.call import Call, StridedProblem
from evoattn.ops.choice import Choice, Refusal, choose
from evoattn.ops.gradients import expected, why_not_differentiable
from evoattn.portfolio.pick import lasting_pick, next_picks

SHAPE, KV_HEADS, HEAD_DIM = Shape(2, 16, 2048, 2048), 4, 128
QUERIES = {"decoding": 1}
"""Where a function is for others."""


def of_choice(problem: StridedProblem | str, gpu: GpuSpec) -> str:
    """The family that runs, or why none does."""
    if isinstance(problem, str):
        return problem
    made: Choice | Refusal = choose(problem, gpu, lasting_pick, False, next_picks)
    return f"PyTorch: {made.reason}" if isinstance(made, Refusal) else f"`{made.family.name}`"


def said_of(call: Call) -> str:
    """How the call says the function."""
    written = call.score
    named = [call.mask.replace("_upper_left", "")] * (call.mask != "full") + ["window"] * (call.window is not None)
    named += ["soft cap"] * (call.softcap > 0) + ["slopes"] * (call.term(SLOPES) is not None)
    named += ["bias"] * (call.term(BIAS) is not None) + ["lists"] * bool(call.blocks)
    named += ["predicate"] * bool(written and written.predicate) + ["expression"] * bool(written and written.text)
    return ", ".join(named) or "nothing"


def served(make: Callable[[Shape], Written], shape: Shape, gpu: GpuSpec) -> tuple[str, str, str]:
    """(how it is said, what answers, what makes gradients: of query, key, value and captured floats)."""
    written = make(shape)
    sizes = (shape.batch, shape.heads, shape.queries), *[(shape.batch, KV_HEADS, shape.keys)] * 2
    q, k, v = (torch.empty(*size, HEAD_DIM, dtype=torch.bfloat16, requires_grad=True) for size in sizes)
    mask = written.block_mask(shape)

    def calls() -> list[Call] | str:
        made = flex.calls(Call(q, k, v, enable_gqa=True, strict=True), written.score_mod, mask)
        return made if isinstance(made, str) else [one() for one in made]

    with torch.no_grad():
        plain = calls()
    if isinstance(plain, str):
        return plain, "PyTorch", "PyTorch"
    answers = [(said_of(call), of_choice(call.problem(q.stride()), gpu)) for call in plain]
    for table in (table for call in plain for table in call.terms):
        if table is not None and table.is_floating_point():
            table.requires_grad_()
    gradients = []
    for call in calls():
        assert isinstance(call, Call)
        trained = of_choice(replace(call, return_lse=True).problem(q.stride()), gpu)
        reason = why_not_differentiable(call)
        of_gradients = f"PyTorch: {reason}" if reason else of_choice(expected(call).problem(), gpu)
        gradients.append(trained if "PyTorch" in trained else of_gradients)

    def is_torch(told: str) -> bool:
        return "PyTorch" in told

    return *min(answers, key=lambda row: is_torch(row[1])), min(gradients, key=is_torch)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpu", nargs="?", default="h200", choices=sorted(GPUS))
    gpu, rows = GPUS[parser.parse_args().gpu], dict[tuple[str, str, str], list[str]]()
    for name, make in MODS.items():
        row = served(make, SHAPE._replace(queries=QUERIES.get(name, SHAPE.queries)), gpu)
        rows.setdefault(row, []).append(name.replace("_", " "))
    print("| said by | answer | gradients | functions |\n|---|---|---|---|")
    for row, names in sorted(rows.items(), key=lambda item: -len(item[1])):
        print(f"| {' | '.join(row)} | {', '.join(names)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
