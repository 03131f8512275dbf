"""Arguments that not every kernel of a family takes. One list says what a template prints and what a launch passes."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from evoattn.model.launch import Buffer, KernelArg, Scalar

NUMBERS: dict[str, Literal["int32", "int64", "float32"]] = {"int": "int32", "int64_t": "int64", "float": "float32"}
"""CUDA's types as `Scalar` names them."""


class Given(NamedTuple):
    """A field of an object that a kernel makes of its arguments: its type and the name of the kernel's parameter, what
    a launch puts there, and whether the kernel has this parameter; the field is 0 otherwise."""

    cuda: str
    name: str
    value: KernelArg
    needed: bool = True


def number(cuda: str, name: str, value: float, needed: bool = True, told: str = "") -> Given:
    """A number; `told`: the name by which a call may put another one in its place."""
    return Given(cuda, name, Scalar(NUMBERS[cuda], value, told), needed)


def tensor(cuda: str, name: str, buffer: str, needed: bool = True) -> Given:
    """The address of a buffer, whose elements are of type `cuda`."""
    return Given(f"{cuda}* __restrict__", name, Buffer(buffer), needed)


def printed(**groups: Iterable[Given]) -> dict[str, Any]:
    """The constant GIVEN of a template: of each group NAME the macros NAME_PARAMETERS, behind a kernel's own, and
    NAME_ARGUMENTS, of which it makes an object."""
    lines = []
    for name, fields in groups.items():
        fields = list(fields)
        taken = (f", {field.cuda} {field.name}" for field in fields if field.needed)
        made = (field.name if field.needed else "nullptr" if "*" in field.cuda else "0" for field in fields)
        lines += [f"#define {name}_PARAMETERS {''.join(taken)}", f"#define {name}_ARGUMENTS {', '.join(made)}"]
    return {"GIVEN": "\n".join(lines)}


def passed(*groups: Iterable[Given]) -> tuple[KernelArg, ...]:
    """What a launch passes of them."""
    return tuple(field.value for fields in groups for field in fields if field.needed)
