#!/usr/bin/env python3
"""Formats the CUDA of templates/ with clang-format, by the rules of .clang-format.

    python scripts/format_cuda.py            # rewrites the files
    python scripts/format_cuda.py --check    # names those that it would rewrite; exit code 1 if there are any

Headers and what is exported with them are formatted whole, templates (.cu.j2) below the marker, where no Jinja is. A
header whose first line calls it a part of a kernel's body is formatted as one."""

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from evoattn.families.render import MARKER
from evoattn.model.paths import ROOT

VERSION = "19.1.7"
"""Of clang-format: others break lines elsewhere. As in pyproject.toml."""
KINDS = ("*.cuh", "*.h", "*.cu", "*.cpp", "*.cu.j2")
"""Names of the files in templates/ that are formatted."""
PART = "a part of the kernel's body"
BODY, END = "void body() {\n", "}\n"
"""Around such a part while it is formatted."""
TORN = re.compile(r"\w < [^;{}<>]* > \(")
"""A call with template arguments that clang-format took for comparisons: of arguments with operators it does so."""


class FormatterError(RuntimeError):
    """clang-format is not here, is of another version or failed: its message is one sentence."""


def formatter() -> str:
    """The path of clang-format, of its Python package or on PATH. Raises `FormatterError`."""
    package = importlib.util.find_spec("clang_format")
    if package and package.origin:  # its command on PATH starts a Python for every file
        path: str | None = str(Path(package.origin).with_name("data") / "bin" / "clang-format")
    else:
        path = shutil.which("clang-format")
    if path is None:
        raise FormatterError(f"clang-format is not installed: pip install clang-format=={VERSION}.")
    words = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout.split()
    if VERSION not in words:
        raise FormatterError(f"{' '.join(words)} is not {VERSION}: pip install clang-format=={VERSION}.")
    return path


def formatted(path: Path, text: str, program: str) -> str:
    """The text of a file as it should be. Raises `FormatterError`."""
    above, marker, cuda = text.partition(f"{MARKER}\n") if path.suffix == ".j2" else ("", "", text)
    is_part = PART in text.partition("\n")[0]
    command = [program, f"--style=file:{ROOT / '.clang-format'}", f"--assume-filename={path.stem}.cu"]
    done = subprocess.run(command, input=f"{BODY}{cuda}{END}" if is_part else cuda, capture_output=True, text=True)
    if done.returncode:
        raise FormatterError(f"clang-format failed on {path.name}: {done.stderr.strip()}")
    cuda = done.stdout
    if is_part:
        if not (cuda.startswith(BODY) and cuda.endswith(END)):
            raise FormatterError(f"{path.name} is not a part of a body: its braces do not match.")
        cuda = cuda.removeprefix(BODY).removesuffix(END)
    if torn := TORN.search(cuda):
        raise FormatterError(
            f"clang-format takes the template arguments in {path.name} for comparisons: give {torn[0]!r} "
            "a named constant."
        )
    return above + marker + cuda


def main(check: bool) -> int:
    program = formatter()
    paths = sorted(path for kind in KINDS for path in (ROOT / "templates").rglob(kind))
    texts = [path.read_text(encoding="utf-8") for path in paths]
    with ThreadPoolExecutor() as threads:
        results = list(threads.map(formatted, paths, texts, repeat(program)))
    wrong = {path: result for path, text, result in zip(paths, texts, results) if result != text}
    for path, result in wrong.items():
        if not check:
            path.write_text(result, encoding="utf-8")
        print(f"{'not formatted' if check else 'formatted'}: {path.relative_to(ROOT)}")
    return 1 if check and wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="rewrite nothing")
    try:
        sys.exit(main(parser.parse_args().check))
    except FormatterError as error:
        sys.exit(str(error))
