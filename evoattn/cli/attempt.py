"""`evoattn try`: one config, every step of its evaluation."""

from typing import Annotated

import typer

from evoattn.cli.common import (
    FAILED_RUN,
    chosen_problem,
    console,
    errors,
    family_names,
    gpu_names,
    print_plainly,
    problem_names,
)


def attempt(
    family: Annotated[
        str,
        typer.Argument(
            metavar="FAMILY", help="Name of the family (see `evoattn families`).", autocompletion=family_names
        ),
    ],
    values: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=V]...",
            help="Values of its parameters (see `evoattn families FAMILY`); the others come from a starting config.",
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="SHAPE", help="A shape, as for `evoattn search --shape`.", show_default="B=1,H=16,S=1024,D=64"
        ),
    ] = None,
    problem: Annotated[
        str | None, typer.Option(metavar="NAME", help="A name of `evoattn problems`.", autocompletion=problem_names)
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(
            metavar="NAME", autocompletion=gpu_names, help="GPU to compile for, or auto for the one that is here."
        ),
    ] = "auto",
    source: Annotated[bool, typer.Option("--source", help="Also print the CUDA source.")] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Do not run it on the device here: for another GPU than that one.")
    ] = False,
) -> None:
    """Try one config and say what happens to it.

    Why it cannot be; or what the compiler says, with registers and spills; whether it is right on the interpreter, and
    which element is wrong first; its relative cost; and where a CUDA device is, the same on it and the time. Exit code
    0 if it is right. Nothing is recorded."""
    with errors():
        from evoattn.families import registry
        from evoattn.model import gpu as gpus
        from evoattn.model.shape_text import parse_shape
        from evoattn.search.request import DEFAULT_SHAPE, choose_device

        chosen = registry.lookup(family)
        wanted = chosen_problem(shape, problem) or parse_shape(DEFAULT_SHAPE)
        spec, device = choose_device(gpu, gpus.detect_devices(), offline)
        print_plainly(f"{chosen.name} for {wanted.describe()} on the {spec.product}")

        from evoattn.report.text import print_lines, print_text
        from evoattn.search.attempt import attempt as steps_of
        from evoattn.search.attempt import fill_in, settings

        filled, screen = fill_in(chosen, values or [], wanted, spec), console()
        if filled.given:
            print_text(screen, f"given: {settings(filled.given)}", indent="  ")
        if filled.added:
            print_text(screen, f"filled in from {filled.source}: {settings(filled.added)}", indent="  ")
        right = True
        for step in steps_of(chosen, filled, wanted, spec, device is not None):
            right = right and step.agrees is not False
            mark = {True: "ok", False: "FAILED", None: "note"}[step.agrees]
            print_text(screen, f"{step.what:<12}{mark:<8}{step.sentence}", indent="  ")
            print_lines(screen, step.log.splitlines())
        if source:
            from evoattn.families.render import render

            screen.print()
            screen.print(render(chosen, wanted, filled.config, spec).source, markup=False, soft_wrap=True)
        if not right:
            raise typer.Exit(FAILED_RUN)
