"""Words that only those who wrote evoattn understand do not come back into files that others read."""

from __future__ import annotations

import re

import pytest
from test_docs import ROOT, tracked

TEXT = ("*.md", "*.py", "*.cuh", "*.j2", "*.yaml", "*.toml", "*.sh", "*.js", "*.css", "Makefile", ".ci/run")
OWN = "tests/docs/test_plain_words.py"
PRIVATE = {
    r"\bIssue \d+\b|\bissue #?\d+\b": "say what it is about",
    r"\b(?:first|second|third|fourth|fifth) session\b|\bbetween sessions\b": "give the date",
    r"\bcalled level\b|\blevel with (?:six|it|them|cuDNN|the)\b": "a tie",
    r"\bkernel-facts\b|\bhopper-findings\b": "name the heading of docs/sources.md, or the public source",
    r"\bthe notes\b|\bthe notes' ": "say whose, or cite the source",
    r"\b(?:the|our|my|a|other) colleagues?\b": "say who",
    r"\blying kernels?\b|\bplanted optimum\b": "say what the kernel does",
    r"\bdesign §|\bdesign\.md\b": "name docs/architecture.md",
    r"\b(?:registers|floats|bytes|loads) a (?:thread|lane)\b|\bkeys a tile\b|\brows a (?:block|warp)\b": "per",
    r"\b(?:µs|ms|KiB|MB|bytes|registers) an? (?:launch|warp|row|candidate|block|call|trial|replay)\b": "per",
    r"\bblocks an SM\b|\ba clock a SM\b|\bcalls a replay\b|\bµs a call\b|\b(?:candidates|trials) a second\b": "per",
}
"""What is private → what to write instead."""


@pytest.mark.parametrize("pattern", PRIVATE)
def test_no_private_words(pattern):
    found = []
    for path in tracked(*TEXT):
        name = path.relative_to(ROOT).as_posix()
        if name == OWN:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if match := re.search(pattern, line):
                found.append(f"{name}:{number}: {match[0]}")
    assert not found, f"{PRIVATE[pattern]}: " + "; ".join(found)
