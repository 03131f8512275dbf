"""`evoattn dashboard`: a study in a browser, while it runs."""

from typing import Annotated

import typer

from evoattn.cli.common import Database, StudyName, StudyWord, errors, named_study, opened, print_plainly


def dashboard(
    word: StudyWord = None,
    study: StudyName = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, metavar="N", help="Port to listen on; 0 takes a free one.")
    ] = 8080,
    host: Annotated[str, typer.Option("--host", metavar="NAME", help="Address to listen on.")] = "127.0.0.1",
    refresh: Annotated[
        float, typer.Option("--refresh", min=0.5, metavar="SECONDS", help="How often new trials are read.")
    ] = 5.0,
    db: Database = None,
) -> None:
    """Show a study in a browser with optuna-dashboard.

    History, importances, parallel coordinates, every trial with its source. It follows a search that is running. The
    database is only read: what is changed in the browser is not kept. Ctrl-C ends it."""
    with errors(), opened(db) as storage:
        from evoattn.dashboard.serve import Dashboard, listen, serve

        chosen = storage.chosen_study(named_study(study, word))
        shown = Dashboard(storage, chosen)
        server = listen(shown, host, port)
        print_plainly(
            f"Study {chosen.name}, {shown.trials} trials shown: http://{host}:{server.server_port}/dashboard/studies/0",
            "Ctrl-C ends it.",
        )
        serve(shown, server, refresh)
