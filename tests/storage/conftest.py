"""An open, empty database for each test."""

from pathlib import Path

import pytest

from evoattn.storage import Storage


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "evoattn.sqlite"


@pytest.fixture
def storage(path):
    storage = Storage.open(str(path))
    yield storage
    storage.close()
