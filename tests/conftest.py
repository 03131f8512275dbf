"""For all tests: one thread per process (pytest-xdist uses all cores), a cache of compiled kernels that is kept between
runs, and no access to the user's database."""

import gc
import os
import tempfile
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


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and tests live to the end: Python's collector of cycles need not look at them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
