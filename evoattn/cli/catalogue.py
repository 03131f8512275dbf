"""`evoattn problems`, `evoattn gpus` and `evoattn families`: what evoattn knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from evoattn.cli.common import console, errors, family_names, gpu_names

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

    from evoattn.model.gpu import GpuSpec

DEFAULT_GPU = "h100"
GPUS_COLUMNS = 80
"""What the table of `evoattn gpus` needs."""


def _table(**columns: str) -> Table:
    """A table with these columns: name="left", "right" or "fold" (left, and long texts take several lines)."""
    from evoattn.report.text import make_table

    table = make_table()
    for name, kind in columns.items():
        table.add_column(name.replace("_", " "), justify="right" if kind == "right" else "left", no_wrap=kind != "fold")
    return table


def problems() -> None:
    """List the problems that have a name."""
    with errors():
        from evoattn.model.shape_text import named_problems
        from evoattn.report.text import print_text

        table = _table(name="left", shape="fold")
        for name, problem in named_problems().items():
            table.add_row(name, problem.with_().describe())
        screen = console()
        screen.print(table)
        print_text(screen, "Any other shape: `evoattn search --shape B=1,H=16,S=1024,D=64,dtype=fp16,mask=full`.")


def gpus() -> None:
    """List the GPUs that evoattn knows, and what is here."""
    with errors():
        from evoattn.model.gpu import GPUS, MADE_ROW, detect_devices

        table = _table(name="left", arch="left", SMs="right", smem_KiB="right", fp16="right", fp32="right",
                       DRAM="right", GiB="right", L2_MB="right", here="left")  # fmt: skip
        devices = detect_devices()
        for spec in GPUS.values():
            table.add_row(
                spec.name,
                spec.arch,
                str(spec.sm_count),
                f"{spec.smem_per_block / 1024:.0f}",
                f"{spec.peak_tflops('fp16'):.0f}",
                f"{spec.peak_tflops('fp32'):.0f}",
                f"{spec.dram_gb_per_s:.0f}",
                str(spec.dram_bytes >> 30),
                str(spec.l2_bytes >> 20),
                ", ".join(f"device {d.index}" for d in devices if d.spec and d.spec.name == spec.name),
            )
        screen = console()
        screen.width, width = max(screen.width, GPUS_COLUMNS), screen.width
        screen.print(table)  # a narrower terminal breaks its lines, and loses no digit
        screen.width = width
        screen.print("smem: shared memory that a block may use; fp16, fp32: peak TFLOP/s; DRAM: GB/s; GiB: memory.")
        for note, names in _notes(GPUS.values()).items():
            screen.print(f"{', '.join(names)}: {note}", markup=False)
        for device in devices:
            if device.spec is None:
                screen.print(f"Device {device.index}, {device.product}, is older than sm_80.", markup=False)
            elif device.spec.note == MADE_ROW:
                screen.print(f"Device {device.index}, {device.product}: {MADE_ROW}", markup=False)
        if not devices:
            screen.print("No CUDA device in this machine: a search runs offline, on the interpreter.")


def _notes(specs: Iterable[GpuSpec]) -> dict[str, list[str]]:
    """The GPUs of each note of the table."""
    notes: dict[str, list[str]] = {}
    for spec in specs:
        if spec.note:
            notes.setdefault(spec.note, []).append(spec.name)
    return notes


def families(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="FAMILY",
            help="Show the parameters of this family.",
            show_default="all",
            autocompletion=family_names,
        ),
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(
            metavar="NAME", autocompletion=gpu_names, help="The values that a search for this GPU chooses from."
        ),
    ] = DEFAULT_GPU,
) -> None:
    """List the families of kernels, or one family's parameters.

    Of each parameter: which values it may take, and what it means."""
    with errors():
        from evoattn.families import registry
        from evoattn.families.registry import load_space
        from evoattn.model.gpu import lookup
        from evoattn.model.space import spelling
        from evoattn.report.text import print_text

        spec, screen = lookup(gpu), console()
        if name is None:
            for family in registry.FAMILIES.values():
                points = load_space(family.name, spec).size
                print_text(screen, f"{family.name}: {family.summary}", "bold")
                print_text(
                    screen,
                    f"{family.devices}; {', '.join(family.dtypes)}; about {float(f'{points:.2g}'):,.0f} configs",
                    indent="  ",
                )
            screen.print()
            print_text(screen, "`evoattn families NAME` lists the parameters of one, with their values.")
            return
        family, space = registry.lookup(name), load_space(name, spec)
        print_text(screen, f"{family.name}: {family.summary}", "bold")
        print_text(screen, f"Runs on {family.devices}; {', '.join(family.dtypes)}. Values for the {spec.product}:")
        table = _table(parameter="left", values="fold", meaning="fold")
        for parameter in space.parameters:
            values = ", ".join(spelling(value) for value in parameter.values)
            table.add_row(parameter.name, values, parameter.meaning)
        screen.print(table)
        print_text(screen, f"Choose some by `evoattn search --family {name} --set NAME=V1,V2`.")
