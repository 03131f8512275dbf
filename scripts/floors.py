"""Runs the fast tests with the lowest version of each dependency that pyproject.toml allows.

    python scripts/floors.py FOLDER [--torch 2.13.0] [words for pytest]

makes an environment in FOLDER, which takes some minutes and gigabytes. `--torch` names another torch than the lowest,
where that one cannot be had."""

import argparse
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAST = "not slow and not device and not postgres and not browser"


def lowest(requirements: list[str], torch: str | None) -> list[str]:
    """`name>=A,<B` as `name==A`; another torch if one is named."""
    floors = dict(requirement.split(",")[0].split(">=") for requirement in requirements)
    if torch:
        floors["torch"] = torch
    return [f"{name}=={version}" for name, version in floors.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch")
    known, words = parser.parse_known_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = known.folder / "bin" / "python"
    if not python.exists():
        venv.create(known.folder, with_pip=True)
    tools = project["optional-dependencies"]["test"]
    install = [python, "-m", "pip", "install", "--quiet", *lowest(project["dependencies"], known.torch), *tools]
    subprocess.run(install, check=True)
    tests = [python, "-m", "pytest", "--numprocesses", "auto", "--dist", "worksteal", *(words or ["-m", FAST])]
    return subprocess.run(tests, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
