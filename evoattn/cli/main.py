"""The command line: the table of commands, and one sentence for what was typed wrongly."""

import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from evoattn import __version__
from evoattn.cli import (
    bench,
    calibrate,
    catalogue,
    cost,
    kernels,
    pick,
    portfolio,
    search,
    studies,
)
from evoattn.cli.common import FAILED_RUN

_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""What a wrong option or argument raises; typer makes only this subclass of it public."""


_TYPERS_INTERRUPT = 130
"""The exit code that typer makes of Ctrl-C outside of a command's own `errors()`."""


class _Commands(TyperGroup):
    """Says in one sentence on stderr what was typed wrongly."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command. In standalone mode (the default) the process ends with the command's exit code."""
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except _UsageError as error:
            if not standalone_mode:
                raise
            sys.exit(_said(error))
        except BrokenPipeError:  # nobody reads on; Python would complain when it closes the output
            sys.stdout = sys.stderr
            sys.exit(FAILED_RUN)
        if code == _TYPERS_INTERRUPT:
            raise KeyboardInterrupt
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code


class _Command(TyperCommand):
    """Leaves a hidden argument out of the usage line too, and typer's parentheses out of defaults."""

    def get_help(self, ctx: Any) -> str:
        """The text of --help."""
        return re.sub(r"\bdefault:(\s+)\(([^\])]*)\)", r"default:\1\2", super().get_help(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words behind the command's name."""
        hidden = {f"[{p.metavar}]" for p in self.params if getattr(p, "hidden", False)}
        return [piece for piece in super().collect_usage_pieces(ctx) if piece not in hidden]


def _said(error: Exception) -> int:
    """Print the sentence of a usage error; returns its exit code."""
    ctx, exit_code = getattr(error, "ctx", None), getattr(error, "exit_code", 2)
    message = " ".join(str(getattr(error, "format_message", error.__str__)()).split()).rstrip(".")
    message = message.replace(": Value error, ", ": ")  # what an enum of typer says
    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
        typer.echo(getattr(error, "message", ""), err=True)
        return int(exit_code)
    if message.startswith("Got unexpected extra argument") and "=" in message:
        message += ": a shape with spaces in it stands in quotes"
    command = ctx.command_path if ctx else "evoattn"
    typer.echo(f"evoattn: {message}{'' if message.endswith('?') else '.'} See `{command} --help`.", err=True)
    return int(exit_code)


app = typer.Typer(
    name="evoattn",
    cls=_Commands,
    help="Evolutionary search for the fastest attention kernel on the GPU and the shapes that you have.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"evoattn {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


_COMMANDS: dict[str, Callable[..., None]] = {
    "search": search.search,
    "tune": pick.tune,
    "calibrate": calibrate.calibrate,
    "pick": pick.pick,
    "report": studies.report,
    "studies": studies.studies,
    "show": studies.show,
    "dashboard": studies.dashboard,
    "export": kernels.export,
    "reproduce": kernels.reproduce,
    "profile": kernels.profile,
    "try": kernels.attempt,
    "bench": bench.bench,
    "problems": catalogue.problems,
    "gpus": catalogue.gpus,
    "families": catalogue.families,
}
for _name, _command in _COMMANDS.items():
    app.command(_name, cls=_Command)(_command)
app.add_typer(calibrate.app, name="calibration")
app.add_typer(studies.databases, name="db")
app.add_typer(portfolio.app, name="portfolio")
app.add_typer(cost.app, name="cost")


def main() -> None:
    """Entry point of the `evoattn` command."""
    try:
        app()
    except KeyboardInterrupt:
        typer.echo("evoattn: Interrupted.", err=True)
        sys.exit(FAILED_RUN)


if __name__ == "__main__":
    main()
