"""`evoattn bench`: our best kernels timed beside every peer."""

import os
from io import StringIO
from pathlib import Path
from typing import Annotated

import typer

from evoattn.cli.common import Jobs, Output, console, errors, gpu_names, require_one_of, write
from evoattn.model.paths import default_database
from evoattn.model.whole_file import write_file
from evoattn.peers.labels import PEER_NAMES


def bench(
    problems: Annotated[
        list[str],
        typer.Argument(metavar="PROBLEM", help="Names of `evoattn problems`, or shapes as for `search --shape`."),
    ],
    gpu: Annotated[
        str, typer.Option(metavar="NAME", autocompletion=gpu_names, help="The GPU that must be here, or auto.")
    ] = "auto",
    db: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DB",
            help="Databases; may be given several times. The first takes new trials.",
            show_default="in the user's data folder",
        ),
    ] = None,
    configs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Further configs, as scripts/best_configs.py writes them.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Kernels of ours in each final.")] = 4,
    peers: Annotated[
        str, typer.Option(metavar="LIST", help="Peers that are asked, with commas between them.")
    ] = ",".join(PEER_NAMES),
    jobs: Jobs = None,
    format: Annotated[str, typer.Option("--format", metavar="FORMAT", help="table or json.")] = "table",
    output: Output = None,
) -> None:
    """Time the best kernels beside those of other libraries.

    The best recorded kernels of each problem (else its starting configs) take turns with every peer that is installed:
    kernels of PyTorch, FlashAttention and others. Each is checked before and after it is timed. Needs a CUDA device."""
    with errors():
        require_one_of("format", format, ("table", "json"))
        asked = peers.split(",")
        for name in asked:
            require_one_of("peer", name, PEER_NAMES)
        from evoattn.model.shape_text import by_name_or_shape

        for text in problems:
            by_name_or_shape(text)

        from rich.console import Console

        from evoattn.bench.row import Row
        from evoattn.bench.run import BenchWords, run_bench
        from evoattn.bench.table import render_rows, rows_json

        urls = db or [default_database()]
        progress, count = Console(stderr=True, highlight=False), jobs or os.cpu_count() or 1

        def keep(rows: list[Row]) -> None:
            """So that a bench that is ended early leaves what it has."""
            if format == "json" and output:
                write_file(output, rows_json(rows))

        words = BenchWords(tuple(problems), gpu, tuple(urls), configs, top, count, asked)
        rows = run_bench(words, progress, keep=keep)
        if format == "json":
            write(rows_json(rows), output)
        elif output:
            page = StringIO()
            render_rows(rows, Console(file=page, width=200))
            write(page.getvalue(), output)
        else:
            render_rows(rows, console())
