"""YAML from outside is plain values or a refusal: it runs nothing, and does not grow. Words on the command line and
configs of any form are values or refusals in one sentence."""

import json
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from evoattn.engine.budget import BudgetError, parse_budget
from evoattn.model import gpu, safe_yaml
from evoattn.model.problem import ProblemError
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import ConfigError, Parameter, read_space
from evoattn.storage import StorageError
from evoattn.storage.storage import trial_number
from tests.untrusted.untrusted import JSON, SPACE


@pytest.mark.slow
@given(st.text(max_size=80) | st.text(alphabet="abc:[]{}&*!-|>#? \n\t0123'\"<", max_size=80))
def test_yaml_is_plain_values_or_a_refusal(text):
    try:
        value = safe_yaml.load(text)
    except yaml.YAMLError:
        return
    plain = lambda v: type(v).__module__ == "datetime" or isinstance(v, (bytes, set))
    json.dumps(value, default=lambda v: None if plain(v) else pytest.fail(repr(v)), skipkeys=True)


BOMB = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9)
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system [id]",
        "!!python/name:os.system",
        BOMB,
        "a: 1\na: 2",
        "a: {b: 1, b: 2}",
        "[" * 5000,
        "&a [*a]",
        "x: &a [1]\ny: [" + "*a, " * 1001 + "]",
        "a: " + "x" * (1 << 20),
        "2026-13-45",
        "? [a]\n: b",
    ],
    ids=[
        "apply",
        "name",
        "bomb",
        "twice",
        "twice inside",
        "deep",
        "itself",
        "many aliases",
        "long",
        "date",
        "list as key",
    ],
)
def test_hostile_yaml_is_refused(tmp_path, text):
    with pytest.raises(yaml.YAMLError):
        safe_yaml.load(text)
    (tmp_path / "evil.yaml").write_text(text)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_space("evil", (), (), tmp_path)


YAML_SPACE = Parameter("A", (1, 2), "x"), Parameter("B", (False, True), "y", False)


@pytest.mark.parametrize(
    "text",
    [
        "starting_configs: [7]",
        "starting_configs: [{A: [1]}]",
        "starting_configs: 7",
        "starting_configs:",
        "a: 1",
        "7",
        "",
        *(f"starting_configs: [{{{row}}}]" for row in ("B: yes", "A: 3", "A: 1, C: 1")),
    ],
)
def test_starting_configs_of_another_form_are_refused(tmp_path, text):
    (tmp_path / "odd.yaml").write_text(text)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_space("odd", YAML_SPACE, YAML_SPACE, tmp_path)


def test_a_parameter_with_a_default_may_be_left_out(tmp_path):
    (tmp_path / "young.yaml").write_text("starting_configs: [{A: 1}, {A: 2, B: yes}]")
    space = read_space("young", YAML_SPACE, YAML_SPACE, tmp_path)
    assert [c.params for c in space.starting_configs()] == [{"A": 1, "B": False}, {"A": 2, "B": True}]
    assert space.make_config({"A": 2}) == space.make_config({"B": False, "A": 2})
    with pytest.raises(ConfigError, match=r"missing \['A'\]"):
        space.make_config({"B": True})
    (one, *_) = YAML_SPACE
    assert len(read_space("young", (replace(one, values=(1,)), YAML_SPACE[1]), YAML_SPACE, tmp_path).starting) == 1


SHAPE_WORDS = st.text(alphabet="BHSDqkv=,0123456789dtypefloat16mask _-.e\n\"'\x1b", max_size=60)


@pytest.mark.slow
@given(st.text(max_size=40) | SHAPE_WORDS)
def test_shapes_budgets_gpus_and_trial_numbers(text):
    for parse, error in (
        (parse_shape, ProblemError),
        (parse_budget, BudgetError),
        (gpu.lookup, gpu.GpuError),
        (trial_number, StorageError),
    ):
        try:
            parse(text)
        except error as refusal:
            assert str(refusal)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(SPACE.names()) | st.text(max_size=5), JSON, max_size=14))
def test_configs_are_of_the_space_or_refused(params):
    with pytest.raises(ConfigError):
        SPACE.make_config(params)
