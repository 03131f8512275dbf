"""A kernel's launches in C++: those of its family, worked out with sizes, strides and the number of SMs left open.

All else depends on config, head_dims, dtype, mask and `lse` alone, and is a number in the text."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass, replace
from itertools import groupby
from typing import Any

from evoattn.families.base import Family, starts_zeroed
from evoattn.model.dtype import DTYPES
from evoattn.model.forward import LSE, MAIN
from evoattn.model.gpu import GPUS, GpuSpec
from evoattn.model.launch import Buffer, KernelArg, KernelLaunch, Scalar
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.model.symbol import Either, Number, merged, outcomes

SIZES = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k")
PLAIN = (*MAIN, LSE)
"""Tensors of a call, in the order of `BufferId` in `templates/export/host.h`."""


class OpenProblem(AttentionProblem):
    """A problem of which no size, stride or scale is known. It is no key of a cache: what a function does with it is
    taken down each time."""

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def like(cls, problem: AttentionProblem) -> OpenProblem:
        """With the head_dims, dtype, mask and `lse` of `problem`."""
        made = cls.__new__(cls)
        fields = {name: getattr(problem, name) for name in problem.__dataclass_fields__}
        sizes = {name: Number(name) for name in SIZES}
        made.__dict__.update(fields | sizes | {"scale": Number("p.softmax_scale")})
        return made

    def strides(self, tensor: str) -> Any:
        return *(Number(f"p.{tensor}.{what}") for what in ("batch", "head", "row")), 1


def host_code(family: Family, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str:
    """What `templates/export/api.h` asks of this kernel: constants, `refusal` and `plan`.

    It is for all GPUs of the architecture: of L2, which is asked for in `gangs.py`, they have the least."""
    one = OpenProblem.like(problem)
    l2 = min(row.l2_bytes for row in (gpu, *GPUS.values()) if row.arch == gpu.arch)
    sm_count: Any = Number("sm_count")
    any_gpu = replace(gpu, sm_count=sm_count, l2_bytes=l2)
    refusals = merged(outcomes(lambda: family.refuse(one, any_gpu) or family.why_too_long(one, config, any_gpu)))
    plans = merged(outcomes(lambda: (family.launches(one, config, any_gpu), family.workspace(one, config, any_gpu))))
    return "\n".join(
        (
            f'constexpr char DTYPE[] = "{problem.dtype}", MASK[] = "{problem.mask}";',
            f"constexpr int HEAD_DIM = {problem.head_dim}, ELEMENT_BYTES = {problem.element_bytes};",
            f"constexpr bool WRITES_LSE = {str(problem.lse).lower()};",
            "",
            *_function("const char* refusal", refusals, _refusal),
            *_function("Plan plan", plans, _plan),
        )
    )


def _function(declared: str, tree: Any, leaf: Callable[[Any], Iterator[str]]) -> Iterator[str]:
    body = list(_branches(tree, leaf, "  "))
    used = [name for name in SIZES if re.search(rf"(?<![.\"\w]){name}\b", "\n".join(body))]
    yield f"inline {declared}([[maybe_unused]] const Problem& p, [[maybe_unused]] int64_t sm_count) {{"
    if used:
        yield f"  [[maybe_unused]] const int64_t {', '.join(f'{name} = p.{name}' for name in used)};"
    yield from body
    yield from ("}", "")


def _branches(tree: Any, leaf: Callable[[Any], Iterator[str]], indent: str) -> Iterator[str]:
    while isinstance(tree, Either):
        yield f"{indent}if ({tree.condition.text({})}) {{"
        yield from _branches(tree.then, leaf, indent + "  ")
        yield f"{indent}}}"
        tree = tree.otherwise
    yield from (indent + line for line in leaf(tree))


def _refusal(sentence: str | None) -> Iterator[str]:
    yield f"return {json.dumps(sentence) if sentence else 'nullptr'};"


def _plan(result: tuple[tuple[KernelLaunch, ...], dict[str, int]]) -> Iterator[str]:
    launches, workspace = result
    uses = Counter(_numbers_in(result))
    names: dict[Number, str] = {}
    for number, count in uses.items():
        if count > 1 and number.parts and not number.is_condition and not number.is_bound:
            worked_out = number.text(names)
            names[number] = f"n{len(names)}"
            yield f"const auto {names[number]} = {worked_out};"

    def text(value: Any) -> str:
        return value.text(names, False) if isinstance(value, Number) else str(value).lower()

    def listed(values: Iterable[Any]) -> str:
        return f"{{{', '.join(map(text, values))}}}"

    yield "Plan plan{};"
    for name, size in workspace.items():
        yield f'plan.add_scratch("{name}", {text(size)}, {text(starts_zeroed(name))});'
    buffers = {name: name.upper() for name in PLAIN} | {name: f"SCRATCH + {i}" for i, name in enumerate(workspace)}
    for launch in launches:
        sizes = (listed(size) for size in (launch.grid, launch.block, launch.cluster))
        yield f'plan.add("{launch.kernel}", {", ".join(sizes)}, {text(launch.smem_bytes)}, {text(launch.overlaps)});'
        for kind, group in groupby(launch.args, _kind):
            arguments: list[Any] = list(group)
            if kind == "map":
                for one in arguments:
                    code = DTYPES[one.dtype].tensor_map_code
                    lists = ", ".join(listed(list_) for list_ in (one.shape, one.strides_bytes, one.box))
                    yield f"plan.last().map({{{buffers[one.buffer]}, {code}, {len(one.shape)}, {lists}}});"
            else:
                values = (buffers[one.name] if kind == "buffer" else text(one.value) for one in arguments)
                joined = ", ".join(values)
                yield f"plan.last().{kind}({joined if kind == 'float32' else f'{{{joined}}}'});"
    yield "return plan;"


def _kind(argument: KernelArg) -> str:
    """The method of `Launch` that adds it."""
    return argument.ctype if isinstance(argument, Scalar) else "buffer" if isinstance(argument, Buffer) else "map"


def _numbers_in(value: Any) -> Iterator[Number]:
    """All numbers of a result, each after its parts; parts of one that comes again are not counted again."""
    seen: set[Number] = set()

    def walk(value: Any) -> Iterator[Number]:
        if isinstance(value, Number):
            if value not in seen:
                seen.add(value)
                yield from walk(value.parts)
            yield value
        elif isinstance(value, dict):
            yield from walk(tuple(value.values()))
        elif isinstance(value, tuple):
            for part in value:
                yield from walk(part)
        elif is_dataclass(value):
            yield from walk(tuple(vars(value).values()))

    return walk(value)
