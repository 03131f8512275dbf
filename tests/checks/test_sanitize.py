"""`tests/checks/sanitize.py` without a device: which kernels it takes."""

import json

import pytest

from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.model import shape_text as problems
from evoattn.model.gpu import GPUS
from evoattn.model.space import ConfigError
from evoattn.search.starting import starting_configs
from tests.checks import sanitize

H100, PROBLEM = GPUS["h100"], problems.lookup("seed_l4_s512")


def test_starting_configs_of_every_family_that_takes_the_problem():
    configs = sanitize.chosen(PROBLEM, H100, None, 1, list(registry.FAMILIES))
    takers = [name for name, family in registry.FAMILIES.items() if family.why_unsupported(PROBLEM, H100) is None]
    assert [config.family for config in configs] == takers


def test_the_file_comes_first_and_no_config_twice(tmp_path):
    space = load_space("flash_mma", H100)
    valid = [config.params for config in starting_configs(space, PROBLEM, H100)]
    row = {"problem": PROBLEM.to_dict(), "arch": H100.arch, "median_us": 1.0, "family": "flash_mma"}
    file = tmp_path / "configs.jsonl"
    file.write_text("".join(json.dumps(row | {"config": params}) + "\n" for params in (valid[2], valid[2], valid[0])))
    chosen = [config.params for config in sanitize.chosen(PROBLEM, H100, file, 2, ["flash_mma"])]
    assert chosen == [valid[2], valid[0], valid[1]]  # two lines of the file are one config
    alone = sanitize.chosen(PROBLEM, H100, file, 2, list(registry.FAMILIES), alone=True)
    assert [config.params for config in alone] == [valid[2]]


def test_a_file_of_something_else_is_refused(tmp_path):
    file = tmp_path / "configs.jsonl"
    file.write_text("nothing")
    with pytest.raises(ConfigError, match="Line 1"):
        sanitize.chosen(PROBLEM, H100, file, 1, ["flash_mma"])
