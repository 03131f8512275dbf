"""For all tests: one thread per process (pytest-xdist uses all cores), a cache of compiled kernels that is kept between
runs, and no access to the user's database."""

import gc
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # read by torch and NumPy when they are first imported, in our children too
os.environ.setdefault("EVOATTN_CACHE", str(Path(__file__).resolve().parents[1] / "build" / "cubins"))
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else its first compile starts processes that import torch
os.environ["XDG_DATA_HOME"] = str(Path(tempfile.gettempdir()) / "evoattn-tests" / "data")
os.environ["EVOATTN_DB"] = str(Path(tempfile.gettempdir()) / "evoattn-tests" / "a test forgot --db.sqlite")

settings.register_profile("any machine", deadline=None)  # a busy machine is no fault of what is tested
settings.load_profile("any machine")


def pytest_addoption(parser):
    parser.addoption("--all-cases", action="store_true", help="also the cases that a `sampled` test leaves out")


def pytest_collection_modifyitems(config, items):
    """Of a test that is `sampled(n)` every n-th case stays, in the order of its table, so that `make test` ends in
    time; `sampled(0)` is a test that stays out whole. With `edits=True` the others run until they compile, so that the
    texts that they replace in a source are found to be there."""
    if config.getoption("--all-cases"):
        return
    seen, kept, left = Counter(), [], []
    for item in items:
        mark = item.get_closest_marker("sampled")
        test = item.nodeid.partition("[")[0]
        out = mark and (mark.args[0] == 0 or seen[test] % mark.args[0])
        if out and mark.kwargs.get("edits"):
            item.fixturenames, out = [*item.fixturenames, "not_compiled"], False
        (left if out else kept).append(item)
        seen[test] += 1
    config.hook.pytest_deselected(items=left)
    items[:] = kept


@pytest.fixture
def not_compiled(monkeypatch):
    """A test ends, passed over, before it compiles a source that it has edited."""
    from tests.support import compiles

    # what `ptx_kept` asks first
    monkeypatch.setattr(compiles, "version", lambda: pytest.skip("edited; compiled with --all-cases"))


def pytest_configure(config):
    """To rewrite all asserts takes eight seconds of a core, in a fresh clone: one worker does so, the others wait until
    it has the last file, as another process, mypy, has the other core."""
    kept_elsewhere = sys.dont_write_bytecode or sys.pycache_prefix
    alone = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0" or bool(kept_elsewhere)
    last, until = max(Path(__file__).parent.rglob("test_*.py")), time.monotonic() + 60
    while not alone and [Path(arg).name for arg in config.args] == ["tests"] and time.monotonic() < until:
        alone = any((last.parent / "__pycache__").glob(f"{last.stem}.*-pytest-*"))
        time.sleep(0.1)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and tests live to the end: Python's collector of cycles need not look at them again and again. What tests
    leave is little: to look for it every 700 objects took one in forty seconds of theirs."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)
        gc.enable()


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory):
    """A database of today's tables: to migrate one to them takes longer than most tests."""
    from evoattn.storage import Storage  # which most tests do without

    path = tmp_path_factory.mktemp("empty") / "db.sqlite"
    Storage.open(str(path)).close()
    return path


@pytest.fixture
def storage(tmp_path, empty_database):
    """A database of its own for each test."""
    from evoattn.storage import Storage

    shutil.copy(empty_database, tmp_path / "db.sqlite")
    opened = Storage.open(str(tmp_path / "db.sqlite"))
    yield opened
    opened.close()
