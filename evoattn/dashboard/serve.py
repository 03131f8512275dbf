"""optuna-dashboard on a local port, for whoever asks this machine by its own name, and only to look."""

import ipaddress
import platform
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


class OnlyLooks:
    """An application that passes on what only looks, asked by a name of this machine.

    A page of another site may have a browser ask here under the site's own name, which it lets lead to this machine
    (DNS rebinding): what comes under that name is refused. A page cannot do so under an address."""

    def __init__(self, app: App, host: str) -> None:
        """`host`: where the server listens."""
        self._app = app
        self._names = {"localhost", "127.0.0.1", "::1", host.lower(), platform.node().lower()}
        self._any_address = _is_wildcard(host)

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _refused(
                start_response, "405 Method Not Allowed", "The dashboard only shows.", ("Allow", "GET, HEAD")
            )
        if not self._is_own(_name_of(environ.get("HTTP_HOST", ""))):
            return _refused(start_response, "403 Forbidden", "The dashboard answers to this machine's own names only.")
        environ.setdefault("HTTP_ACCEPT_ENCODING", "")  # which optuna-dashboard takes for granted
        return self._app(environ, start_response)

    def _is_own(self, name: str) -> bool:
        return name in self._names or (self._any_address and _is_address(name))


def _name_of(host: str) -> str:
    """Of a request's `Host`: without the port, and without the brackets of an address of IPv6."""
    name = host.strip().lower()
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_wildcard(host: str) -> bool:
    return _is_address(host) and ipaddress.ip_address(host).is_unspecified


def _refused(start_response: StartResponse, status: str, sentence: str, *headers: tuple[str, str]) -> list[bytes]:
    body = f"{sentence}\n".encode()
    start_response(status, [("Content-Type", "text/plain"), ("Content-Length", str(len(body))), *headers])
    return [body]


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
        return make_server(host, port, OnlyLooks(dashboard, host), _Server, _Quiet)
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
