"""Gradients through FlexAttention's language: kernels on the interpreter, and torch's formula, beside torch's own."""

from dataclasses import replace

import pytest
import torch

from benchmarks.flex.mods import MODS, Shape, Written
from evoattn.backends.interpreter import InterpreterBackend
from evoattn.families.registry import FAMILIES
from evoattn.model.gpu import GPUS
from evoattn.model.space import load_space
from evoattn.ops import flex, torch_gradients
from evoattn.ops.call import Call
from evoattn.ops.gradients import Backward
from evoattn.ops.kernel import own_tables
from tests.families import test_backward_mma
from tests.families.on_interpreter import built
from tests.ops.fake_device import tensors
from tests.ops.test_flex_mods import by_torch

H100, SHAPE = GPUS["h100"], Shape(2, 2, 77, 131)
NAN = torch.where(torch.arange(131) < 100, 0.5, float("nan"))
NAN_BEHIND = Written(lambda s, b, h, q, k: s + NAN[k], lambda b, h, q, k: (k < 100) & (q > 9) & (q < 64))
PASS = {**test_backward_mma.PASS, "PASS_N": 32}


def made_of(written, block=64):
    """The backward pass of a call by lists or an expression, and torch's gradients in float64."""
    q, k, v = tensors(SHAPE.batch, SHAPE.heads, 2, SHAPE.queries, SHAPE.keys, dtype=torch.float16)
    mask = written.block_mask(SHAPE, block)
    made = flex.calls(Call(q, k, v, enable_gqa=True, strict=True), written.score_mod, mask)
    assert not isinstance(made, str), made
    call = made[0]()
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    out, lse = by_torch(Call(*leaves, enable_gqa=True), written.score_mod, mask)
    grad, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    seen = ~lse.isneginf()
    total = (out * grad.half().double()).sum() + (lse * grad_lse)[seen].sum()
    expected = torch.autograd.grad(total, leaves)
    answered = replace(call, out=out.detach().half())
    return Backward(answered, lse.detach().float(), grad.half(), grad_lse.float(), ()), expected


def interpreted(backward, deterministic):
    """What backward_mma makes on the interpreter: dq, dk, dv; or what the interpreter says."""
    problem = backward.problem()
    assert not isinstance(problem, str), problem
    problem, family = problem.as_searched, FAMILIES["backward_mma"]
    config = load_space("backward_mma", H100).make_config(test_backward_mma.BASE | (PASS if deterministic else {}))
    assert family.why_impossible(problem.with_(deterministic=deterministic), config, H100) is None
    kernel, call = built(family, problem, config, H100, machine_code=False), backward.call
    buffers = {"q": call.query, "k": call.key, "v": call.value, "o": backward.out, "lse": backward.lse}
    buffers |= {"do": backward.grad, "dlse": backward.grad_lse}
    buffers |= {n: t.contiguous() for n, t in zip(own_tables(problem), call.terms[-len(own_tables(problem)) :])}
    found = {n: torch.full_like(buffers[n[1:]], float("nan")) for n in ("dq", "dk", "dv")}
    for name, size in family.workspace(problem, config, H100).items():
        buffers[name] = torch.zeros(size, dtype=torch.uint8)
    faults = InterpreterBackend().run(kernel.compiled, family.launches(problem, config, H100), buffers | found)
    return faults[0] if faults else tuple(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize(
    "written",
    [MODS[name](SHAPE) for name in ("global_window", "chosen_causal_blocks", "sigmoid_gate")] + [NAN_BEHIND],
    ids=("global_window", "chosen_causal_blocks", "sigmoid_gate", "nan_behind"),
)
def test_kernels_give_torch_s_gradients(written, deterministic):
    backward, expected = made_of(written)
    found = interpreted(backward, deterministic)
    assert not isinstance(found, str), found
    for one, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), exact, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", ("global_window", "chosen_causal_blocks", "jagged", "t5_bias"))
def test_the_formula_gives_torch_s_gradients(name):
    backward, expected = made_of(MODS[name](SHAPE))
    for one, exact in zip(torch_gradients.by_rows(backward, 20_000)[:3], expected, strict=True):
        torch.testing.assert_close(one.double(), exact, atol=2e-2, rtol=2e-2)
