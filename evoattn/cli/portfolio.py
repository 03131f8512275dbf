"""`evoattn portfolio`: what the kernels that come with evoattn are made from, chosen by and judged on."""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from evoattn.cli.common import FAILED_RUN, Jobs, console, errors, stop
from evoattn.model.errors import WrongUse
from evoattn.model.whole_file import write_file

app = typer.Typer(
    name="portfolio",
    help="For contributors: the kernels that come with evoattn.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Kinds = Annotated[str, typer.Option(metavar="KIND,…", help="Kinds of problems that are drawn, e.g. plain,packed.")]
Seeds = Annotated[str, typer.Option(metavar="FIRST:END", help="Seeds of the problems.")]
Peers = Annotated[str, typer.Option(metavar="NAME,…", help="Timed beside the best kernels.")]
Rounds = Annotated[int, typer.Option(min=1, metavar="N", help="Rounds of the finals.")]


def _sayer() -> Callable[[str], None]:
    started, screen = time.monotonic(), console()
    return lambda text: screen.print(f"{time.monotonic() - started:5.0f} s: {text}", markup=False)


def _seeds(text: str) -> range:
    first, _, end = text.partition(":")
    if not (first.isdigit() and end.isdigit()):
        raise WrongUse(f"Seeds are FIRST:END, such as 400:450, not {text!r}.")
    return range(int(first), int(end))


def _kinds(text: str) -> tuple[str, ...]:
    from evoattn.portfolio.workload import DRAWS

    kinds = tuple(text.split(","))
    if unknown := [kind for kind in kinds if kind not in DRAWS]:
        raise WrongUse(f"There is no kind {unknown[0]!r} of problems, only {', '.join(DRAWS)}.")
    return kinds


@app.command()
def measure(
    output: Annotated[Path, typer.Argument(metavar="OUT.jsonl.gz", help="Where the campaign's file goes.")],
    seconds: Annotated[float, typer.Option(min=0.0, metavar="S", help="Of search.")] = 360.0,
    count: Annotated[int, typer.Option(min=1, metavar="N", help="Problems in all.")] = 600,
    kinds: Kinds = "plain",
    seeds: Seeds = "0:50",
    jobs: Jobs = None,
) -> None:
    """Search problems as people have them, all at once, on the GPU that is here, and keep all times."""
    with errors():
        from evoattn.model.gpu import detect_devices
        from evoattn.portfolio import measure as room

        devices = [device for device in detect_devices() if device.spec]
        if not devices:
            stop("No GPU is here that evoattn knows.", FAILED_RUN)
        wanted = room.Wanted(output, seconds, count, _kinds(kinds), _seeds(seeds), jobs)
        room.measure(wanted, devices[0], _sayer())


@app.command()
def keep(
    campaigns: Annotated[list[Path], typer.Argument(metavar="FILE…", help="Files of `evoattn portfolio measure`.")],
    card: Annotated[Path, typer.Option(metavar="CARD.npz", help="The file of the card that they were measured on.")],
) -> None:
    """Add campaigns to a card's file of measured times, by which the cost model is fitted."""
    with errors():
        from evoattn.cost import measurements

        measurements.append(card, map(measurements.recorded, campaigns))
        typer.echo(f"{card} has {len(measurements.read(card))} campaigns.")


@app.command()
def select(
    campaigns: Annotated[list[Path], typer.Argument(metavar="FILE…", help="Files of `evoattn portfolio measure`.")],
    gpu: Annotated[str, typer.Option(metavar="NAME", help="The card that the choice is made for.")],
    output: Annotated[
        Path | None, typer.Option("-o", metavar="FILE", help="Where the list goes.", show_default="the shipped file")
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="Choose for it alone, e.g. '8 d128', and keep the rest; may be repeated."),
    ] = None,
    jobs: Jobs = None,
) -> None:
    """Choose the kernels that come with evoattn, of those that were fastest on measured problems; needs no GPU."""
    with errors():
        from evoattn.portfolio import select as room
        from evoattn.portfolio.kernels import DATA, load, save
        from evoattn.search.request import choose_device

        spec, _ = choose_device(gpu, [])
        today = load(spec.arch)
        made = room.select(campaigns, spec, today, jobs, kind or ())
        path = output or DATA / f"{spec.arch}.json"
        save(path, made)
        typer.echo(f"{len(made.kernels)} kernels for {len(made.kinds)} kinds of problems: {path}")


@app.command()
def check(
    seeds: Seeds = "71:73",
    count: Annotated[int, typer.Option(min=1, metavar="N", help="Problems in all.")] = 60,
    kinds: Kinds = "plain",
    problem: Annotated[
        list[str] | None, typer.Option(metavar="NAME|SHAPE", help="In place of drawn ones; may be repeated.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.0, metavar="S", help="Of search for each problem.")] = 10.0,
    peers: Peers = "flash,cudnn,efficient,fa3,fa4",
    rounds: Rounds = 7,
    configs: Annotated[Path | None, typer.Option(metavar="FILE", help="Kernels that take part in the finals.")] = None,
    times: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl.gz", help="Where all times go, as a campaign has them.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", metavar="FILE", help="Where all rows go, as JSON.")] = None,
    jobs: Jobs = None,
) -> None:
    """What do picks lose on problems that they were not built from, on the GPU that is here?

    For each problem the pick, the best kernels of a search, and every peer are timed in turns. All problems are
    searched together, and what is compiled for one is timed on others that it serves."""
    with errors():
        from evoattn.bench.contenders import read_configs
        from evoattn.model.gpu import detect_devices
        from evoattn.model.shape_text import by_name_or_shape
        from evoattn.portfolio import campaign
        from evoattn.portfolio import select as room
        from evoattn.portfolio.workload import draw_all

        devices = [device for device in detect_devices() if device.spec]
        if not devices:
            stop("No GPU is here that evoattn knows.", FAILED_RUN)
        gpu, say = devices[0].spec, _sayer()
        assert gpu is not None  # these devices have one
        drawn = [by_name_or_shape(text) for text in problem or ()]
        problems = drawn or draw_all(_kinds(kinds), _seeds(seeds), count)
        named = tuple(filter(None, peers.split(",")))
        known = partial(read_configs, configs, arch=gpu.arch) if configs else None
        wanted = room.Judging(seconds, named, rounds, jobs, known)
        judged = []
        for place, row in room.check_all(problems, gpu, wanted, say):
            judged.append((place, row))
            say(row.line())
            if output:
                kept = {"device": devices[0].product, "seeds": list(_seeds(seeds))}
                write_file(output, json.dumps(kept | {"rows": [one.to_dict() for _, one in judged]}))
            if times:  # after each problem, as the others
                about = {"device": devices[0].product, "driver": devices[0].driver, "kinds": kinds, "seeds": seeds}
                searched = list({place[0].name: place[0] for place, _ in judged}.values())
                campaign.save(times, searched, about, room.final_tables(judged))
        typer.echo(room.summary([row for _, row in judged]))
