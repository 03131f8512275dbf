"""The edge calls of `test_as_sdpa.py` on a GPU."""

import pytest
import torch.nn.functional as F
from edge_calls import Calls, difference, outcome
from gpu_problems import ON_A_GPU

import evoattn

pytestmark = ON_A_GPU


@pytest.fixture(scope="module")
def calls():
    return Calls("cuda").all()


@pytest.mark.parametrize("name", sorted(Calls("cpu").all()))
def test_the_op_does_what_sdpa_does(calls, name):
    torchs = outcome(F.scaled_dot_product_attention, calls[name])
    assert difference(outcome(evoattn.attention, calls[name]), torchs) == ""


@pytest.mark.parametrize("words", [{}, {"is_causal": True}])
def test_a_query_of_nan_spoils_its_own_row_alone(words):
    q, k, v = Calls("cuda").qkv()
    expected = evoattn.attention(q, k, v, **words, strict=True)
    q[1, 2, 3] = float("nan")
    answer = evoattn.attention(q, k, v, **words, strict=True)
    assert answer[1, 2, 3].isnan().all()
    answer[1, 2, 3] = expected[1, 2, 3]
    assert (answer == expected).all()
