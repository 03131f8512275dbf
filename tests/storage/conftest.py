"""An open, empty database for each test: of a SQLite file, or of either kind that evoattn keeps its tables in."""

from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from evoattn.storage import Storage
from evoattn.storage.engine import parse_url
from tests.support.postgres import Server, programs


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "evoattn.sqlite"


@pytest.fixture
def storage(path):
    storage = Storage.open(str(path))
    yield storage
    storage.close()


@pytest.fixture(scope="session")
def server():
    """One PostgreSQL server for all tests of a process; it writes no file to the disk at once, which no crash of the
    server alone shows."""
    if programs() is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    pytest.importorskip("psycopg", reason="psycopg is not installed (evoattn[postgres])")
    server = Server("fsync=off")
    server.start()
    yield server
    server.remove()


@pytest.fixture
def postgres_url(server) -> str:
    server.databases = getattr(server, "databases", 0) + 1
    return server.create(f"test{server.databases}")


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request, path) -> str:
    """An empty database of each kind."""
    return f"sqlite:///{path}" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture
def either(url):
    """`url`, open."""
    storage = Storage.open(url)
    yield storage
    storage.close()


@pytest.fixture
def plain(url):
    """Runs one statement on `url`, as a program does that is not evoattn; gives its rows."""
    engine = create_engine(parse_url(url))

    def run(statement: str, **values):
        with engine.begin() as connection:
            result = connection.execute(text(statement), values)
            return [tuple(row) for row in result] if result.returns_rows else []

    yield run
    engine.dispose()
