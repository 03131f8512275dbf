"""A database to export from."""

import shutil

import pytest

from evoattn.storage import Storage

NVCC = shutil.which("nvcc")


@pytest.fixture
def database(tmp_path):
    opened = Storage.open(str(tmp_path / "kernels.sqlite"))
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def nvcc():
    """Its path; the tests that need it are skipped without it."""
    if NVCC is None:
        pytest.skip("there is no nvcc")
    return NVCC
