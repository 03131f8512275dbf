"""`evoattn search`: its options, and a run of them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from evoattn.cli.common import (
    FAILED_RUN,
    Database,
    Jobs,
    console,
    errors,
    family_names,
    gpu_names,
    print_plainly,
    problem_names,
    sampler_names,
    study_names,
)
from evoattn.model.timeline import mark

if TYPE_CHECKING:
    from evoattn.search.machines import Machines
    from evoattn.search.request import SearchRequest

SHAPE_HELP = (
    "Or a shape, such as B=1,H=16,S=1024,D=64,mask=causal, or as problems are printed: 'B=1 H=32/8 S=4096 D=128 "
    "bf16 causal'. Keys: B batch, H heads, Hkv K/V heads, S length (or Sq and Sk), D head dimension, "
    "dtype=fp16|bf16|fp32|e4m3, mask=full|causal|causal_lower_right, layout=bhsd|bshd, lse=0|1, batch_invariant=0|1; "
    "of gradients op=backward, grads=bias+sinks, deterministic=0|1. Variants: scale=0.1, window=128:0, softcap=50, "
    "sink=1, alibi=1, bias=hs, seqused=512:4096, page=16, appended=1, Dv=128, shared_kv=1, rotary_apart=1, "
    "varlen=16:4096, blocks=128x128:300+700, score=s+t[h] tables=t:fp32:2, blocks=128x128:1/7/16 predicate=q>=k, "
    "kv=e4m3 scales=head, dtype=e4m3 turned=1."
)


def search(
    gpu: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            autocompletion=gpu_names,
            help="GPU to search for (see `evoattn gpus`), or auto for the one that is here.",
        ),
    ] = "auto",
    budget: Annotated[
        str, typer.Option(metavar="BUDGET", help="A time (90s, 30m, 2h) or a count (500trials).")
    ] = "10m",
    problem: Annotated[
        str | None, typer.Option(metavar="NAME", help="A name of `evoattn problems`.", autocompletion=problem_names)
    ] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="SHAPE", help=SHAPE_HELP, show_default="B=1,H=16,S=1024,D=64")
    ] = None,
    family: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            autocompletion=family_names,
            help="Search only this family (see `evoattn families`); may be given several times.",
        ),
    ] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=V1,V2", help="Search only these values of a parameter; may be given several times."
        ),
    ] = None,
    starting_configs: Annotated[
        bool,
        typer.Option(
            "--starting-configs/--no-starting-configs", help="Begin with the known-good configs, or with random ones."
        ),
    ] = True,
    sampler: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", autocompletion=sampler_names, help="guided, genetic, tpe or random.", show_default="guided"
        ),
    ] = None,
    study: Annotated[
        str | None,
        typer.Option(
            "--study",
            metavar="NAME",
            help="Name of the study.",
            show_default="made of the shape",
            autocompletion=study_names,
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, metavar="N", help="Seed of the sampler.", show_default="0")] = None,
    db: Database = None,
    jobs: Jobs = None,
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="MODE",
            help="warm keeps the inputs in L2 between calls, cold flushes it before each.",
            show_default="warm",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a study: the one of --study, else the latest.")
    ] = False,
    sanitize: Annotated[
        bool,
        typer.Option(
            "--sanitize", help="Run compute-sanitizer on the finalists; one that fails memcheck leaves the leaderboard."
        ),
    ] = False,
    devices: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="GPUs of this machine to time on: 0,1 or all.", show_default="the first"),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run on a Ray cluster: its address, auto, or local for one of this machine (needs evoattn[ray]).",
        ),
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Time nothing, even if a device is here: for another GPU than that one.")
    ] = False,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep/--no-keep",
            help="Have evoattn.attention run the winner, where it is clearly ahead of what runs today and of SDPA.",
        ),
    ] = True,
) -> None:
    """Search for the fastest kernel of a problem.

    Ctrl-C or SIGTERM ends the search without its final comparison. All that was found is kept, and --resume goes on.

    Without a GPU, name one by --gpu: kernels are then compiled for it, checked on an interpreter and ranked by a cost
    model, but never timed."""
    with errors():
        from evoattn.search import request

        words = request.SearchWords(
            gpu=gpu,
            budget=budget,
            problem=problem,
            shape=shape,
            families=tuple(family or ()),
            choices=tuple(choice or ()),
            starting_configs=starting_configs,
            sampler=sampler,
            study=study,
            seed=seed,
            cache=cache,
            resume=resume,
            sanitize=sanitize,
            offline=offline,
            keep=keep,
            devices=devices,
            ray=ray,
            db=db,
            jobs=jobs,
        )
        mark("words are imported")
        checked = request.read_words(words)
        what = f"Problem {checked.problem.describe()}" if checked.problem else "Going on with a study"
        print_plainly(f"{what}; budget {budget}.")
        from evoattn.search.machines import machines_of

        with machines_of(words) as machines:
            _run(checked, machines)


def _run(checked: SearchRequest, machines: Machines) -> None:
    """Say what is searched and where, then search."""
    mark("devices are detected")
    from evoattn.search import request
    from evoattn.search.early_start import begun

    wanted = checked.problem and request.plan(checked.words, checked.problem, machines.devices)
    if wanted and wanted.device is None:
        why = "As asked" if machines.devices else "No CUDA device"
        print_plainly(
            f"{why}: searching offline for the {wanted.gpu.product} ({wanted.gpu.arch}).",
            "Kernels are compiled for it, checked on an interpreter and ranked by a cost",
            "model, never timed.",
        )
    elif wanted and wanted.device:
        count = len(machines.fleet(checked.words, wanted).boards)
        print_plainly(f"Searching on {'the' if count == 1 else f'{count} x'} {wanted.device.product}.")
    if wanted and wanted.gpu.note:
        print_plainly(wanted.gpu.note)

    with begun(checked.words, wanted, machines) if wanted else nullcontext() as early:
        from evoattn.cli.run import run_search
        from evoattn.search.setup import begin_study, resume_study

        mark("the search is imported")
        prepared = begin_study(checked, wanted) if wanted else resume_study(checked, machines.devices)
        mark("the study is made")
        found = run_search(prepared, machines, console(), early=early)
    if not found:
        raise typer.Exit(FAILED_RUN)
