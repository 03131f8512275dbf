"""The folders of measured data say what lies in them."""

import re

from evoattn.model.paths import ROOT


def test_every_campaign_has_its_row():
    folder = ROOT / "docs/campaigns"
    rows = re.findall(r"^\| ([a-z, ]+) \| H\d+", (folder / "README.md").read_text(), re.MULTILINE)
    letters = {re.sub(r".*-|\d*\.jsonl\.gz", "", path.name) for path in folder.glob("*.jsonl.gz")}
    assert letters == {letter for row in rows for letter in row.split(", ")}
