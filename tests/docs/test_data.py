"""The folders of measured data say what lies in them."""

import re

from evoattn.cost import measurements
from evoattn.model.paths import ROOT


def test_every_campaign_has_its_row():
    folder = ROOT / "reports/measurements"
    rows = re.findall(r"^\| ([a-z, ]+) \| H\d+", (folder / "README.md").read_text(), re.MULTILINE)
    names = [name for path in measurements.files() for name in measurements.names(path)]
    letters = {re.sub(r".*-|\d*$", "", name) for name in names}
    assert letters == {letter for row in rows for letter in row.split(", ")}
