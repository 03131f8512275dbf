"""`evoattn db`: whole databases."""

from typing import Annotated

import typer

from evoattn.cli.common import errors

DatabaseArgument = Annotated[str, typer.Argument(metavar="FROM", help="SQLAlchemy URL or path of the database.")]

app = typer.Typer(help="Move whole databases.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    pass


@app.command("copy")
def copy(
    source: DatabaseArgument,
    target: Annotated[str, typer.Argument(metavar="TO", help="URL or path of a new one, or of an empty one.")],
) -> None:
    """Copy a database to another one: a file to a PostgreSQL server, or back.

    Numbers of trials stay the same. The target has to be empty, and holds everything or nothing at the end."""
    with errors():
        from evoattn.storage import Storage
        from evoattn.storage.copying import copy_database

        reader = Storage.open(source, create=False)
        try:
            writer = Storage.open(target)
            try:
                copied = copy_database(reader, writer)
                said = ", ".join(f"{name} {count}" for name, count in copied.items() if count)
                typer.echo(f"Copied to {writer.place}: {said or 'no rows'}.")
            finally:
                writer.close()
        finally:
            reader.close()
