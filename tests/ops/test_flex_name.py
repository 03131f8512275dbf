"""Where FlexAttention's name is ours, and what a call of it should take."""

import math
import threading
from types import SimpleNamespace

import pytest
from torch.nn.attention import flex_attention as torch_flex

import evoattn
from evoattn.cost.cost import scores
from evoattn.families.registry import load_space, lookup
from evoattn.model.gpu import GPUS
from evoattn.ops import flex
from evoattn.ops.choice import Choice, Refusal
from evoattn.ops.runtime import current
from evoattn.portfolio.pick import canonical
from tests.ops.fake_device import tensors


@pytest.mark.slow
def test_torch_s_name_is_ours_inside_of_a_block(device):
    q, k, v = tensors(1, 2, 2, 20, 30)
    own, seen = torch_flex.flex_attention, []

    def call():
        before = len(device.launches)
        torch_flex.flex_attention(q, k, v)
        seen.append(len(device.launches) > before)

    call()
    with evoattn.flex():
        call()
        with evoattn.flex(False):
            call()
        call()
        other = threading.Thread(target=call)
        other.start()
        other.join()
        assert torch_flex.flex_attention.__name__ == "flex_attention"
    call()
    assert seen == [False, True, False, True, False, False] and torch_flex.flex_attention is own


def test_who_replaces_our_replacement_keeps_the_name(monkeypatch):
    other = lambda *_: None
    with evoattn.flex():
        own = torch_flex.flex_attention
        monkeypatch.setattr(torch_flex, "flex_attention", other)
        with evoattn.flex():
            assert torch_flex.flex_attention is other
    assert torch_flex.flex_attention is other and own is not flex.TORCH
    monkeypatch.setattr(torch_flex, "flex_attention", flex.TORCH)
    with evoattn.flex(), evoattn.flex():
        assert torch_flex.flex_attention is own
    assert torch_flex.flex_attention is flex.TORCH


def test_what_a_call_should_take_is_what_its_pick_came_to_else_the_model_s(monkeypatch):
    gpu, space = GPUS["h100"], load_space("flash_mma", GPUS["h100"])
    config, other = space.starting_configs()[:2]
    call = flex.Call(*tensors(1, 2, 2, 100, 130))
    asked = call.problem(call.query.stride())
    problem = asked.as_searched
    choice = Choice(lookup("flash_mma"), config, asked, gpu, "", True)
    found = [choice, choice, choice, Refusal("no")]
    climbs = [{}, *({(canonical(problem), gpu): SimpleNamespace(config=one, score=7.0)} for one in (other, config))]
    monkeypatch.setattr(type(current), "climbs", lambda self: climbs.pop(0))
    with current.use(SimpleNamespace(choice=lambda one: found.pop(0))):
        model = float(scores(problem, [config], gpu)[0])
        assert [flex._us(call) for _ in range(4)] == [model, model, 7.0, math.inf] and model != 7.0
