"""Gradients through FlexAttention's language: kernels on the interpreter, and torch's formula, beside torch's own."""

from dataclasses import replace

import pytest
import torch

from benchmarks.flex.mods import MODS, Shape, Written
from evoattn.backends.interpreter import InterpreterBackend
from evoattn.backends.loaded import own_tables
from evoattn.families.backward_mma.resources import sharing_of
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.backward import parse_grads
from evoattn.model.gpu import GPUS
from evoattn.model.score import elements, parse_score
from evoattn.ops import flex, torch_answer
from evoattn.ops.arguments import TERMS
from evoattn.ops.call import Call
from evoattn.ops.gradients import Backward, Training, attend_trained, by_rows, grads_of, words_of
from tests.families import test_backward_mma
from tests.families.on_interpreter import built
from tests.ops.fake_device import tensors
from tests.ops.test_flex_mods import by_torch

H100, SHAPE = GPUS["h100"], Shape(2, 2, 77, 131)
NAN = torch.where(torch.arange(131) < 100, 0.5, float("nan"))
DOCUMENTS = torch.arange(131) // 30
_drawn = torch.Generator().manual_seed(0)
OF_HEADS, OF_KEYS = torch.tensor([0.5, 1.5]), torch.where(torch.arange(131) < 100, 0.3, float("nan")).repeat(2, 1)
OF_PAIRS, OF_DOCUMENTS, SHIFTS, LINE, OF_ROWS, OF_KINDS = (
    torch.randn(shape, generator=_drawn) for shape in ((77, 131), (5,), (2, 127), (208,), (131,), (2, 9))
)
KINDS = torch.randint(9, (77, 131), dtype=torch.int32, generator=_drawn)
CAPTURED = [OF_HEADS, OF_KEYS, OF_PAIRS, OF_DOCUMENTS, SHIFTS, LINE, OF_ROWS, OF_KINDS]
for tensor in CAPTURED:
    tensor.requires_grad_()
"""Of each kind of places that scores share, and what they capture that they do not differ by."""


def of_tables(s, b, h, q, k):
    near = SHIFTS[h, (k - q).clamp(-63, 62) + 63 + (k > q)]
    near = near + LINE[q - k + 130]
    s = s + OF_KINDS[h, KINDS[q, k]]
    return s * OF_HEADS[h] + OF_KEYS[h, k] + OF_PAIRS[q, k] * near + OF_DOCUMENTS[DOCUMENTS[k]] * s + OF_ROWS[q + 5]


OF_TABLES = Written(of_tables, lambda b, h, q, k: (k < 100) & (q > 9) & (q < 64))
"""Keys behind which a captured tensor has NaN, and queries without a tile."""
NAN_BEHIND = Written(lambda s, b, h, q, k: s + NAN[k], lambda b, h, q, k: (k < 100) & (q > 9) & (q < 64))
PASS = {**test_backward_mma.PASS, "PASS_N": 32}


def made_of(written, block=64):
    """The backward pass of a call by lists or an expression, and torch's gradients in float64. The same numbers each
    time: rounding reached the tolerance with one draw in hundreds."""
    torch.manual_seed(0)
    q, k, v = tensors(SHAPE.batch, SHAPE.heads, 2, SHAPE.queries, SHAPE.keys, dtype=torch.float16)
    mask = written.block_mask(SHAPE, block)
    made = flex.calls(Call(q, k, v, enable_gqa=True, strict=True), written.score_mod, mask)
    assert not isinstance(made, str), made
    call = made[0]()
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    wanted = [one for one in call.terms[len(TERMS) :] if one.requires_grad]
    out, lse = by_torch(Call(*leaves, enable_gqa=True), written.score_mod, mask)
    grad, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    seen = ~lse.isneginf()
    total = (out * grad.half().double()).sum() + (lse * grad_lse)[seen].sum()
    expected = torch.autograd.grad(total, [*leaves, *wanted])
    answered = replace(call, out=out.detach().half())
    return Backward(answered, lse.detach().float(), grad.half(), grad_lse.float(), grads_of(call)), expected


def interpreted(backward, deterministic):
    """What backward_mma makes on the interpreter: dq, dk, dv, and those of tables; or what the interpreter says."""
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
    found |= {f"d{n}": torch.full(problem.term_shapes[n], float("nan")) for n in parse_grads(problem.grads)}
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


@pytest.mark.slow
def test_captured_tensors_have_torch_s_gradients():
    """Of all kinds of places, by kernels and by the formula."""
    backward, expected = made_of(OF_TABLES)
    assert len(backward.grads) == len(CAPTURED)
    found, formula = interpreted(backward, False), by_rows(backward, 20_000)
    assert not isinstance(found, str), found
    for one, by_torch_s, exact in zip(found, [one for one in formula if one is not None], expected, strict=True):
        torch.testing.assert_close(one.double(), exact.double(), atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(by_torch_s.double(), exact.double(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", ("global_window", "chosen_causal_blocks", "jagged", "t5_bias"))
def test_the_formula_gives_torch_s_gradients(name):
    backward, expected = made_of(MODS[name](SHAPE))
    for one, exact in zip(by_rows(backward, 20_000)[:3], expected, strict=True):
        torch.testing.assert_close(one.double(), exact, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("index", "sharing"),
    [
        *(("h", "HEAD"), ("k", "KEY"), ("b+q", "QUERY"), ("k-q+63", "DIAGONAL"), ("min(q,k)", "PAIR")),
        *(("where(q>k,abs(q-k),where(k<=q+5,2,3))", "DIAGONAL"), ("u[q,k]", "FEW"), ("u[q,3]", "QUERY")),
    ],
)
def test_which_scores_share_an_element(index, sharing):
    tree = parse_score(f"s+t[{index}]", "t:fp32:99" + "+u:int32:9x9" * ("u" in index)).tree
    assert sharing_of(elements(tree, "own_t")[0]) == sharing


class ByFormula:
    """In place of a runtime: its passes write as kernels do."""

    def trained(self, call, plan):
        return torch_answer.answer(replace(call, return_lse=True, strict=False))

    def gradients(self, given):
        q, k, v, *others = by_rows(given)
        assert [one.shape for one in given.made()[5:]] == [one.shape for one in others[2:]]
        return given.fitted((q, k, v, *(one if one is None else one.float() for one in others)))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_autograd_leads_to_captured_tensors(dtype):
    """To parts of parameters, turned round, of each call's own; by the words of the first call."""
    q, k, v = tensors(1, 2, 2, 9, 11, dtype=torch.float32)
    words = None
    for seed in range(2):
        torch.manual_seed(seed)
        table, gates = (torch.randn(size, dtype=dtype, requires_grad=True) for size in ((12, 2, 9), (2, 3)))
        score_mod = lambda s, b, h, q, k, t=table[1:, 1].T, g=gates[:, 2]: s * g[h] + t[q, k]
        made = flex.calls(Call(q, k, v, strict=True), score_mod, None)
        assert not isinstance(made, str), made
        call = made[0]()
        words = words or words_of(call)
        assert grads_of(call) == ("own_t0", "own_t1") and not words.score.tensors
        attend_trained(ByFormula(), call, Training(None, None, words, grads_of(call), False)).square().sum().backward()
        expected = torch.autograd.grad(by_torch(call, score_mod, None)[0].square().sum(), (table, gates))
        for one, exact in zip((table.grad, gates.grad), expected, strict=True):
            torch.testing.assert_close(one, exact, atol=1e-2 if dtype is torch.float16 else 1e-5, rtol=1e-2)
