"""Words on the command line and configs of any form are values or refusals in one sentence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoattn.engine.budget import BudgetError, parse_budget
from evoattn.model import gpu
from evoattn.model.problem import ProblemError
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import ConfigError
from evoattn.storage import StorageError
from evoattn.storage.storage import trial_number
from tests.untrusted.untrusted import JSON, SPACE

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
