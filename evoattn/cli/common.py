"""What the commands share: their common options, one sentence for every error, and where output goes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from evoattn.model.errors import FailedRun, WrongUse
from evoattn.model.paths import default_database
from evoattn.model.whole_file import write_file

if TYPE_CHECKING:
    from rich.console import Console

    from evoattn.model.gpu import GpuSpec
    from evoattn.model.problem import AttentionProblem
    from evoattn.model.records import Study, Trial
    from evoattn.report.screen import Kept
    from evoattn.storage import Storage

WRONG_USE, FAILED_RUN = 2, 1
"""Exit codes."""
PIPE_WIDTH = 160
"""Columns of tables that go to a pipe or a file."""


def _beginning(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """What a shell completes a word to: those of `names` that begin with it; none where they cannot be had."""

    def complete(incomplete: str) -> list[str]:
        try:
            return [name for name in names() if name.startswith(incomplete)]
        except (WrongUse, FailedRun, OSError):
            return []

    return complete


def _gpus() -> Iterable[str]:
    from evoattn.model.gpu import GPUS

    return GPUS


def _problems() -> Iterable[str]:
    from evoattn.model.shape_text import named_problems

    return named_problems()


def _families() -> Iterable[str]:
    from evoattn.families.registry import FAMILIES

    return FAMILIES


def _samplers() -> Iterable[str]:
    from evoattn.samplers.registry import SAMPLERS

    return SAMPLERS


def _studies() -> Iterable[str]:
    with opened(None) as storage:
        return [study.name for study in storage.studies()]


gpu_names, problem_names, family_names, sampler_names, study_names = map(
    _beginning, (_gpus, _problems, _families, _samplers, _studies)
)

Database = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="DB",
        help="SQLAlchemy URL or path of the database.",
        envvar="EVOATTN_DB",
        show_default="in the user's data folder",
    ),
]
StudyName = Annotated[
    str | None,
    typer.Option(
        "--study", metavar="NAME", help="Name of the study.", show_default="the latest", autocompletion=study_names
    ),
]
StudyWord = Annotated[
    str | None,
    typer.Argument(metavar="STUDY", help="The study, without --study.", hidden=True, autocompletion=study_names),
]
TrialWord = Annotated[str, typer.Argument(metavar="TRIAL", help="Number of the trial, or `best`.")]
ShapeOption = Annotated[
    str | None, typer.Option("--shape", help="`best` is then the best of all studies of this shape.", metavar="SHAPE")
]
ProblemOption = Annotated[
    str | None,
    typer.Option(
        "--problem", help="The same by a name of `evoattn problems`.", metavar="NAME", autocompletion=problem_names
    ),
]
GpuOfBest = Annotated[
    str | None,
    typer.Option("--gpu", help="With --shape or --problem: on this GPU.", metavar="NAME", autocompletion=gpu_names),
]
TrustSource = Annotated[
    bool,
    typer.Option(
        "--trust-source",
        help="Run the recorded source even if today's template renders another: it is code, of whoever wrote the "
        "database.",
    ),
]
Jobs = Annotated[
    int | None, typer.Option("--jobs", min=1, help="Compile processes.", show_default="all cores", metavar="N")
]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="File to write.", show_default="the terminal", metavar="FILE")
]


def stop(sentence: str, code: int) -> NoReturn:
    """End the command with one sentence on stderr."""
    shown = "".join(c if c.isprintable() else " " for c in sentence)  # it may quote a database
    typer.echo(f"evoattn: {shown}", err=True)
    raise typer.Exit(code)


@contextmanager
def errors() -> Iterator[None]:
    """Every error that a user can meet becomes one sentence: exit code 2 for wrong use, 1 for a failed run."""
    try:
        yield
    except WrongUse as error:
        stop(str(error), WRONG_USE)
    except FailedRun as error:
        stop(str(error), FAILED_RUN)
    except BrokenPipeError:  # `evoattn report | head`: who read the output has enough
        raise
    except OSError as error:
        stop(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}.", FAILED_RUN)
    except KeyboardInterrupt:
        stop("Interrupted.", FAILED_RUN)


def require_one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises `WrongUse` unless `value` is allowed."""
    if value not in allowed:
        raise WrongUse(f"A {what} is one of {', '.join(allowed)}, not {value!r}.")


def console() -> Console:
    """Terminals tell their width; pipes and files get room for a whole table row, unless COLUMNS is set."""
    from rich.console import Console

    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(width=None if known else PIPE_WIDTH, highlight=False)


def print_plainly(*lines: str) -> None:
    """Lines on standard output at once: before the slow imports, and where lines are to be pasted."""
    for line in lines:
        typer.echo(line)
    sys.stdout.flush()


def write(text: str, output: Path | None) -> None:
    """Text to a file, or to standard output."""
    if output is None:
        sys.stdout.write(text)
        return
    write_file(output, text)
    typer.echo(f"Wrote {output}.", err=True)


@contextmanager
def opened(db: str | None) -> Iterator[Storage]:
    """The database of an existing search."""
    from evoattn.storage import Storage

    storage = Storage.open(db or default_database(), create=False)
    try:
        yield storage
    finally:
        storage.close()


def named_study(option: str | None, word: str | None) -> str | None:
    """The study of `--study NAME`, or of the name alone, as it may be written too. Raises `WrongUse` for both."""
    if option is not None and word is not None:
        raise WrongUse(f"Give the study once: --study {option}, or {word!r}.")
    return word if option is None else option


def kept_in(storage: Storage, study: Study, db: str | None) -> Kept:
    """Where `study` is kept, as the next commands have to be told: `db` is the value of --db, if it was given."""
    from evoattn.report.screen import Kept

    latest = storage.latest_study()
    is_latest = latest is not None and latest.id == study.id
    return Kept(storage.place, unusual(db), None if is_latest else study.name)


def unusual(db: str | None) -> str | None:
    """The value of --db that further commands need, without a password; None where they find the database without
    it."""
    if db is None or db == default_database():
        return None
    from evoattn.storage.engine import without_password

    return without_password(db)


def chosen_problem(shape: str | None, problem: str | None) -> AttentionProblem | None:
    """The problem that --shape or --problem names, None without either. Raises `ProblemError`."""
    from evoattn.model import shape_text

    if shape is not None and problem is not None:
        raise WrongUse("Give --problem or --shape, not both.")
    if shape is not None:
        return shape_text.parse_shape(shape)
    return None if problem is None else shape_text.lookup(problem)


def chosen_gpu(name: str | None) -> GpuSpec | None:
    """The GPU called `name`, None without a name. Raises `GpuError`."""
    from evoattn.model import gpu

    return None if name is None else gpu.lookup(name)


@contextmanager
def chosen(
    db: str | None, trial: str, study: str | None, shape: str | None, problem: str | None, gpu: str | None
) -> Iterator[tuple[Storage, Trial]]:
    """The database and the trial that the words of `show`, `export` and `reproduce` name."""
    wanted, spec = chosen_problem(shape, problem), chosen_gpu(gpu)
    if study and wanted:
        raise WrongUse("Give --study, or --shape or --problem, not both.")
    with opened(db) as storage:
        from evoattn.storage.storage import chosen_trial

        yield storage, chosen_trial(storage, trial, study, wanted, spec)
