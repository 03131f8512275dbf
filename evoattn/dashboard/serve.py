"""optuna-dashboard on a local port."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from evoattn.dashboard.mirror import Mirror, Sources
from evoattn.model.errors import FailedRun, WrongUse
from evoattn.model.records import Study
from evoattn.storage import Storage

StartResponse = Callable[..., Any]
App = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]


Load = Callable[[str], Any]


class DashboardError(FailedRun):
    """The dashboard cannot be served: its message is one sentence."""


class Dashboard:
    """A WSGI application that shows one study as it is."""

    def __init__(self, storage: Storage, study: Study, load: Load = import_module) -> None:
        """`load` imports optuna-dashboard by its module's name. Raises `DashboardError` where it is not installed,
        `StorageError` where the database fails."""
        self._storage, self._study = storage, study
        try:
            self._wsgi = load("optuna_dashboard").wsgi
        except ImportError:
            raise DashboardError("optuna-dashboard is not installed; `pip install 'evoattn[dashboard]'`.") from None
        self._renew()

    def _renew(self) -> None:
        self._mirror = Mirror(self._storage, self._study)
        self._app: App = self._wsgi(self._mirror.optuna_storage, Sources(self._storage))

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        return self._app(environ, start_response)

    @property
    def trials(self) -> int:
        """Trials that it shows."""
        return self._mirror.trials

    def update(self) -> None:
        """Show what was recorded since. Raises `StorageError` where the database fails."""
        if self._mirror.update():
            self._renew()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Requests are not worth a line."""


def listen(dashboard: Dashboard, host: str, port: int) -> WSGIServer:
    """A server that is ready to serve; port 0 takes a free one. Raises `DashboardError` if the port is taken, and
    `WrongUse` without a host, which would be all addresses of this machine."""
    if not host:
        raise WrongUse("The host is empty; leave --host out for 127.0.0.1, or name an address of this machine.")
    try:
        return make_server(host, port, dashboard, _Server, _Quiet)
    except OSError as error:
        raise DashboardError(
            f"Port {port} of {host} cannot be had ({error.strerror}); choose another --port or --host."
        ) from None


def serve(dashboard: Dashboard, server: WSGIServer, refresh_s: float) -> None:
    """Serve until Ctrl-C, with what the study has got every `refresh_s` seconds. Raises `StorageError` where the
    database fails."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    stop = threading.Event()
    try:
        with suppress(KeyboardInterrupt):
            while not stop.wait(refresh_s):
                dashboard.update()
    finally:
        server.shutdown()
        server.server_close()
