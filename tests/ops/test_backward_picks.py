"""Backward passes as calls have them, by a family that there is: every buffer of its launches has its place."""

import pytest
import torch

from evoattn.backends.loaded import scratch_places, tensor_places
from evoattn.families.registry import FAMILIES
from evoattn.model.gpu import GPUS
from evoattn.model.launch import Buffer, TensorMap
from evoattn.ops.call import Call, StridedProblem
from evoattn.ops.choice import Choice
from evoattn.ops.gradients import expected
from tests.ops.fake_device import tensors
from tests.ops.stand_in import stand_in

H100 = GPUS["h100"]
CALLS = {
    "plain": {},
    "lse": {"return_lse": True},
    "causal": {"mask": "causal_lower_right", "window": (9, -1)},
    "scale": {"scale": 0.3},
    "sinks": {"terms": (torch.ones(4).half().requires_grad_(), *[None] * 6)},
    "bias": {"terms": (None, None, torch.ones(1, 4, 1, 45).half().requires_grad_(), *[None] * 4)},
}


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", list(CALLS))
def test_every_buffer_has_its_place(name, layout):
    call = Call(*tensors(layout=layout), enable_gqa=True, **CALLS[name])
    problem = expected(call).problem()
    assert isinstance(problem, StridedProblem)
    assert problem.strides("do") == problem.strides("o") and problem.strides("dk") == call.key.stride()
    assert problem.grads == (name if name in ("sinks", "bias") else "") and problem.lse == (name == "lse")
    picked = stand_in(problem.as_searched, H100)
    family, config = FAMILIES[picked.family], picked.config
    assert not family.why_impossible(problem, config, H100)
    places = tensor_places(problem) | scratch_places(family.workspace(problem, config, H100))[0]
    for launch in Choice(family, config, problem, H100, "").launches(None):
        for argument in launch.args:
            if isinstance(argument, Buffer | TensorMap):
                assert (argument.name if isinstance(argument, Buffer) else argument.buffer) in places
