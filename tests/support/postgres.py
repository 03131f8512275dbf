"""A PostgreSQL server for a while: in a temporary folder, on a free local port, by a user that is not root.

    python -m tests.support.postgres        prints a URL for --db and serves until Ctrl-C

Needs PostgreSQL's programs (Debian: `apt-get install postgresql`). The tests and `tests/faults` use `Server`."""

import argparse
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

START_S = 30.0


def programs() -> Path | None:
    """The folder of `initdb` and `postgres`, the newest version first; None where they are not installed."""
    usual = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: int(p.parent.name), reverse=True)
    on_path = shutil.which("initdb")
    folders = [*usual, *([Path(on_path).parent] if on_path else [])]
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


class Server:
    """A server with a folder of its own. Whoever may connect from this machine is let in."""

    def __init__(self, *settings: str) -> None:
        """`settings`: `NAME=VALUE` of postgresql.conf. Raises `FileNotFoundError` where it is not installed."""
        found = programs()
        if found is None:
            raise FileNotFoundError("PostgreSQL is not installed (Debian: apt-get install postgresql).")
        self._programs, self._settings = found, settings
        self._user = self._other_user() if os.geteuid() == 0 else None  # the server refuses to run as root
        self.folder = Path(tempfile.mkdtemp(prefix="evoattn-postgres-"))
        if self._user:
            shutil.chown(self.folder, self._user)
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self._run("initdb", "-D", "data", "-U", "evoattn", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")

    @staticmethod
    def _other_user() -> str:
        names = {entry.pw_name for entry in pwd.getpwall()}
        return "postgres" if "postgres" in names else "nobody"

    def _run(self, program: str, *words: str) -> None:
        subprocess.run(
            [self._programs / program, *words], cwd=self.folder, user=self._user, check=True, capture_output=True
        )

    def url(self, database: str = "postgres") -> str:
        """What `--db` takes."""
        return f"postgresql+psycopg://evoattn@127.0.0.1:{self.port}/{database}"

    def create(self, database: str) -> str:
        """A new, empty database; its URL."""
        words = ("-h", "127.0.0.1", "-p", str(self.port), "-U", "evoattn", database)
        self._run("createdb", *words)
        return self.url(database)

    def start(self) -> None:
        """Start, or start again on the same port, and wait until it answers. Raises `TimeoutError`."""
        settings = (f"port={self.port}", "listen_addresses=127.0.0.1", "unix_socket_directories=", *self._settings)
        words = [word for setting in settings for word in ("-c", setting)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", "data", *words],
                cwd=self.folder,
                user=self._user,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal is for us
            )
        ready = [str(self._programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        end = time.monotonic() + START_S
        while subprocess.run(ready).returncode:
            if time.monotonic() > end or self._process.poll() is not None:
                raise TimeoutError(f"PostgreSQL does not start: {(self.folder / 'log').read_text()[-500:]}")
            time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End it: SIGINT ends its connections and writes all down; SIGQUIT is as a crash; SIGKILL is one."""
        if self._process:
            self._process.send_signal(how)
            self._process.wait()
            self._process = None

    def remove(self) -> None:
        """Stop, and delete all that it wrote."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    server = Server()
    try:
        server.start()
        print(server.create("evoattn"), flush=True)
        ended = threading.Event()
        for ending in (signal.SIGINT, signal.SIGTERM):  # a shell that put us in the background ignores SIGINT for us
            signal.signal(ending, lambda *_: ended.set())
        ended.wait()
    finally:
        server.remove()


if __name__ == "__main__":
    main()
