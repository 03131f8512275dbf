"""What has to be alike on all machines of a search, so that a candidate is the same kernel on each."""

import hashlib
from functools import cache
from pathlib import Path

from evoattn import __version__
from evoattn.backends import compiler
from evoattn.model.errors import FailedRun
from evoattn.model.paths import ROOT, SEARCH_SPACES, TEMPLATES

Facts = dict[str, str]
"""By name, each short enough for a sentence."""


class NodeDiffers(FailedRun):
    """A machine that cannot take part: its message is one sentence."""


@cache
def facts_here() -> Facts:
    """evoattn's version, its compiler, and hashes of its templates and of its own code."""
    return {
        "evoattn": __version__,
        "compiler": compiler.version(),
        "templates": _hash(TEMPLATES, "*") + _hash(SEARCH_SPACES, "*.yaml"),
        "code": _hash(ROOT / "evoattn", "*.py"),
    }


def require_alike(node: str, here: Facts, wanted: Facts) -> None:
    """Raises `NodeDiffers` if a machine has other facts than are wanted."""
    other = [
        f"{name} {here.get(name, 'absent')}, not {value}" for name, value in wanted.items() if here.get(name) != value
    ]
    if other:
        raise NodeDiffers(
            f"The node {node} of the Ray cluster differs from the machine that searches: it has {'; '.join(other)}. "
            "Install the same evoattn and packages on both."
        )


def _hash(folder: Path, pattern: str) -> str:
    """The first digits of a sha256 over names and contents."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob(pattern)):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:8]
