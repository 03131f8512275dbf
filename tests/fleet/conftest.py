"""A database of its own for each test."""

import pytest

from evoattn.storage import Storage


@pytest.fixture
def storage(tmp_path):
    opened = Storage.open(str(tmp_path / "db.sqlite"))
    yield opened
    opened.close()
