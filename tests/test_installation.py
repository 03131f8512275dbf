"""A wheel and an sdist, installed into a fresh environment, do the main job from an empty folder; constraints.txt pins
every dependency of pyproject.toml within its range."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from evoattn import __version__
from evoattn.model.paths import ROOT

pytestmark = pytest.mark.slow
SEARCH = ("search", "--gpu", "l4", "--budget", "6trials", "--shape", "B=1,H=2,S=96,D=32", "--jobs", "2")


def run(*words: str | Path, cwd: Path, **environment: str) -> str:
    """What the command prints; its errors are shown if it fails."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "EVOATTN_DB"))}
    done = subprocess.run(words, cwd=cwd, env=keep | environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the sdist, and the wheel that is built from the unpacked sdist alone."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=folder / f"evoattn-{__version__}")
    return folder


@pytest.fixture(scope="module")
def bin_folder(built, tmp_path_factory) -> Path:
    """`bin` of a fresh environment with the wheel and, as links, the packages of this test's environment.

    Its `.pth` files, one of which leads to the checkout, are left out."""
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    python = environment / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=environment)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        linked = site_packages / package.name
        if package.suffix != ".pth" and "evoattn" not in package.name and not linked.exists():
            linked.symlink_to(package)
    return python.parent


def test_the_main_job_from_an_empty_folder(bin_folder, tmp_path):
    home = {"XDG_DATA_HOME": str(tmp_path / "data"), "HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}

    def evoattn(*words: str) -> str:
        return run(bin_folder / "evoattn", *words, cwd=empty, **home)

    (empty := tmp_path / "empty").mkdir()
    where = run(bin_folder / "python", "-c", "import evoattn; print(evoattn.__file__)", cwd=empty).strip()
    assert Path(where).is_relative_to(bin_folder.parent)
    assert run(bin_folder / "python", "-m", "evoattn", "--version", cwd=empty) == f"evoattn {__version__}\n"
    assert "flash_wgmma" in evoattn("families")
    assert "6 candidates" in evoattn(*SEARCH)
    assert (tmp_path / "data" / "evoattn" / "evoattn.sqlite").exists()
    evoattn("report", "--format", "html", "-o", "page.html")
    assert "<!doctype html>" in (empty / "page.html").read_text().lower()
    evoattn("export", "best", "-o", "kernel.cu")
    assert "__global__" in (empty / "kernel.cu").read_text()
    assert re.search(r"^reproduced$", evoattn("reproduce", "best"), re.MULTILINE)


MEASURED = ("reports", "measurements")
"""Times that only a fit reads: in the repository alone."""


def test_the_sdist_holds_every_file_of_the_repository(built):
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    unpacked = built / f"evoattn-{__version__}"
    tracked = [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]
    tracked = [name for name in tracked if Path(name).parts[:2] != MEASURED]
    assert len(tracked) > 500 and not [name for name in tracked if not (unpacked / name).exists()]


def read_by_the_program(folder: str) -> set[Path]:
    """The files of a top-level folder, but for databases and reports that somebody made there, texts and byte code."""
    found = {p.relative_to(ROOT) for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    made = {Path("db"): (".sqlite", ".sqlite-wal", ".sqlite-shm"), Path("reports"): (".html", ".json", ".md", ".svg")}
    found = {p for p in found if p.parts[:2] != MEASURED}
    return {p for p in found if p.suffix not in made.get(p.parent, ())}


def test_the_wheel_holds_what_the_program_reads_and_nothing_more(bin_folder):
    (package,) = bin_folder.parent.glob("lib/python*/site-packages/evoattn")
    for folder in ("templates", "search_spaces", "db", "reports"):
        there = {p.relative_to(package) for p in (package / folder).rglob("*") if p.is_file()}
        assert {p for p in there if "__pycache__" not in p.parts} == read_by_the_program(folder)
    assert (package / "py.typed").exists() and not (package / "tests").exists()


def test_every_dependency_has_a_pin_in_its_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(name for names in project["optional-dependencies"].values() for name in names)]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert len(pins) == len(lines) and all(pins.values())
    wanted = {canonicalize_name(r.name): r.specifier for r in map(Requirement, asked) if r.name != "evoattn"}
    assert len(wanted) > 20
    assert not {name: pins.get(name) for name, range_ in wanted.items() if pins.get(name, "0") not in range_}
