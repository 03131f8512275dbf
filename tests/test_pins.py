"""constraints.txt pins every dependency of pyproject.toml, within the range that is given there."""

import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from evoattn.model.paths import ROOT


def test_every_dependency_has_a_pin_in_its_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(name for names in project["optional-dependencies"].values() for name in names)]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert len(pins) == len(lines) and all(pins.values())
    wanted = {canonicalize_name(r.name): r.specifier for r in map(Requirement, asked) if r.name != "evoattn"}
    assert len(wanted) > 20
    assert not {name: pins.get(name) for name, range_ in wanted.items() if pins.get(name, "0") not in range_}
