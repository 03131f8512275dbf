"""The reference of the backward pass against torch's autograd of a plain formula, and its judge against faults."""

import math
from dataclasses import replace

import pytest
import torch

from evoattn.correctness import backward
from evoattn.correctness.gradients import attend, exact_gradients
from evoattn.correctness.judge import judge
from evoattn.correctness.reference import exact_attention, exact_lse
from evoattn.correctness.sequences import with_pairs
from evoattn.correctness.terms import qkv, terms_of, torch_dtype
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.score import SCORE, evaluate
from evoattn.model.shape_text import parse_shape

VARIANTS = (
    "H=4 Hkv=2 mask=full",
    "H=2 mask=causal_upper_left layout=bshd",
    "H=2 mask=causal_lower_right Sq=31 Sk=17",
    "H=2 mask=causal_lower_right Sq=17 Sk=31 window=5:0",
    "H=2 window=7:2",
    "H=2 softcap=2 scale=0.7",
    "H=4 Hkv=1 sink=1 grads=sinks lse=1",
    "H=2 sink=1 grads=sinks mask=causal_lower_right Sq=31 Sk=17",
    "H=4 alibi=1 mask=causal_lower_right",
    "H=4 Hkv=2 bias=bhs grads=bias",
    "H=4 Hkv=2 bias=hs grads=bias softcap=5",
    "H=4 bias=bs grads=bias",
    "H=2 bias=s grads=bias+sinks sink=1",
    "H=2 Dv=24",
    "H=4 Hkv=1 Dv=8 shared_kv=1",
    "H=2 seqused=0:20",
    "H=2 varlen=9+0+23+5/9+4+0+11 lse=1 sink=1 grads=sinks",
    "H=2 varlen=9+23/9+11 mask=causal_lower_right",
    "H=2 score=where(q>=k,s*gate[h]-0.1*s*s,-inf) tables=gate:fp32:2",
    "H=2 score=s-gate[h]*log(1+abs(q-k)) tables=gate:fp16:2",
    "H=2 bias=hs grads=bias score=3*tanh(s*gate[h]) tables=gate:fp32:2",
    "H=2 blocks=16x16:20+30",
)


def problem_of(text):
    sizes = "" if "Sq=" in text else "S=31 "
    batch = 4 if "9+0+23" in text else 2
    return parse_shape(f"B={batch} {sizes}D=16 dtype=fp32 op=backward {text}")


def scores_of(problem, leaves, b, rows=None, keys=None, number=None):
    """Dense scores `[heads, rows, keys]` of a batch as torch records them, what is hidden at -inf."""
    q, k = leaves["q"][b], leaves["k"][b]
    alone = problem
    if rows is not None:
        q, k, alone = (
            q[:, rows],
            k[:, keys],
            problem.with_(batch=1, seqlen_q=len(range(*rows.indices(10**6))), varlen=""),
        )
        alone = alone.with_(seqlen_k=keys.stop - keys.start)
    k = k.repeat_interleave(problem.group_size, 0)
    others = {name: leaves[name] for name in alone.term_shapes}
    if number is not None:
        others["b"] = torch.tensor(number)
    added = terms_of(alone, others, b, slice(0, problem.heads), slice(0, q.shape[1]), q.device)
    scores = q @ k.mT * problem.softmax_scale
    scores = evaluate(added.scoring.whole, {**added.values, SCORE: scores}, torch)
    if added.visible is not None:
        scores = scores.masked_fill(~added.visible, -math.inf)
    used = torch.arange(k.shape[1]) < alone.key_lengths[b]
    return scores.masked_fill(~used, -math.inf)


def plain(problem, leaves, scores, b, values):
    """o and lse of dense scores, without anything that could be NaN in the gradient."""
    heads = leaves["sinks"][:, None, None].expand(-1, scores.shape[1], 1) if problem.sink else scores[..., :0]
    whole = torch.cat((scores, heads), -1)
    empty = torch.isneginf(whole).all(-1, keepdim=True)
    whole = torch.where(empty, 0, whole)
    weights = torch.where(empty, 0, whole.softmax(-1))[..., : scores.shape[-1]]
    lse = torch.where(empty[..., 0], 0, whole.logsumexp(-1))
    return weights @ values.repeat_interleave(problem.group_size, 0), lse


def autograd(problem, tensors):
    """The gradients by torch's autograd of the dense formula in float64."""
    wanted = [spec.name.removeprefix("d") for spec in problem.outputs]
    leaves = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    for name in wanted:
        leaves[name] = leaves[name].nan_to_num(0).requires_grad_()
    _, _, v = qkv(problem, {**leaves, "v": leaves.get("v")})
    total = 0
    if problem.varlen:
        for one in with_pairs(problem, tensors):
            scores = scores_of(problem, leaves, 0, one.queries, one.keys, one.number)
            o, lse = plain(problem, leaves, scores, 0, v[0][:, one.keys])
            total = total + (o * leaves["do"][0][:, one.queries]).sum()
            if problem.lse:
                total = total + (lse * leaves["dlse"][0][:, one.queries]).sum()
        if problem.sink and problem.lse:  # of sequences without keys the log-sum-exp is the sink
            paired = torch.zeros(leaves["q"].shape[2], dtype=torch.bool)
            for one in with_pairs(problem, tensors):
                paired[one.queries] = True
            total = total + (leaves["sinks"][:, None] * leaves["dlse"][0][:, ~paired]).sum()
    else:
        for b in range(problem.batch):
            o, lse = plain(problem, leaves, scores_of(problem, leaves, b), b, v[b])
            total = total + (o * leaves["do"][b]).sum()
            total = total + ((lse * leaves["dlse"][b]).sum() if problem.lse else 0)
    return dict(zip((f"d{n}" for n in wanted), torch.autograd.grad(total, [leaves[n] for n in wanted]), strict=True))


@pytest.mark.parametrize("text", VARIANTS)
def test_exact_gradients_are_those_of_autograd(text):
    problem = problem_of(text)
    tensors = backward.make_inputs(problem, 3, "cpu")
    tensors["o"], tensors["lse"] = attend(problem, tensors, torch.float64)
    expected = autograd(problem, tensors)
    found = exact_gradients(problem, tensors, torch.float64)
    assert list(found.values) == [spec.name for spec in problem.outputs] == list(found.bounds)
    for name, values in found.values.items():
        assert values.isfinite().all() and values.abs().max() > 0
        torch.testing.assert_close(values, expected[name], rtol=1e-10, atol=1e-10)
        assert (found.bounds[name] >= values.abs() * (1 - 1e-9)).all()


@pytest.mark.parametrize("text", VARIANTS)
def test_the_forward_pass_of_its_inputs_is_that_of_the_reference(text):
    problem = problem_of(text)
    tensors = backward.make_inputs(problem, 3, "cpu")
    assert list(tensors) == [spec.name for spec in problem.inputs]
    for spec in problem.inputs:
        if spec.name in ("q", "k", "v", "o", "do"):
            assert tensors[spec.name].shape == spec.shape and tensors[spec.name].stride() == spec.strides
    o = exact_attention(problem, *qkv(problem, tensors), torch.float64, others=tensors)
    torch.testing.assert_close(tensors["o"].double(), o, rtol=1e-6, atol=1e-6)
    lse = exact_lse(problem, tensors["q"], tensors["k"], tensors)
    torch.testing.assert_close(tensors["lse"].double(), lse, rtol=1e-6, atol=1e-6)


def test_chunks_change_nothing():
    problem = problem_of("H=4 Hkv=2 bias=hs grads=bias softcap=5")
    tensors = backward.make_inputs(problem, 0, "cpu")
    whole, parts = (exact_gradients(problem, tensors, torch.float64, most) for most in (1 << 20, 3 * 31))
    for name, values in whole.values.items():
        torch.testing.assert_close(parts.values[name], values)
        torch.testing.assert_close(parts.bounds[name], whole.bounds[name])


def test_gradients_of_parts_of_the_keys_sum_to_those_of_all():
    """What ring attention does: each part has the O and the log-sum-exp of all keys."""
    whole = parse_shape("B=1 H=4 Hkv=2 Sq=20 Sk=50 D=16 dtype=fp32 op=backward lse=1")
    tensors = backward.make_inputs(whole, 3, "cpu")
    expected = exact_gradients(whole, tensors, torch.float64).values
    dq, dk = torch.zeros_like(expected["dq"]), []
    for keys in (slice(0, 23), slice(23, 50)):
        part = whole.with_(seqlen_k=keys.stop - keys.start)
        of_part = {**tensors, "k": tensors["k"][:, :, keys], "v": tensors["v"][:, :, keys]}
        found = exact_gradients(part, of_part, torch.float64).values
        dq += found["dq"]
        dk.append(found["dk"])
    torch.testing.assert_close(dq, expected["dq"])
    torch.testing.assert_close(torch.cat(dk, 2), expected["dk"])


def in_steps(problem, tensors, fault=lambda name, x: x):
    """The gradients as a kernel makes them: fp32 scores, P and dS rounded for the tensor cores, fp32 sums."""
    dtype = torch_dtype(problem)
    q, k, v, do, o = (tensors[name].float() for name in ("q", "k", "v", "do", "o"))
    scores = fault("s", q @ k.mT * problem.softmax_scale)
    p = fault("p", (scores - tensors["lse"][..., None]).exp())
    ds = fault("ds", p * (do @ v.mT - fault("delta", (do * o).sum(-1))[..., None]))
    p, ds = (x.to(dtype).float() for x in (p, ds))
    dq, dk = ds @ k * problem.softmax_scale, ds.mT @ q * problem.softmax_scale
    return {"dq": dq.to(dtype), "dk": dk.to(dtype), "dv": (p.mT @ do).to(dtype)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", backward.KINDS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_honest_arithmetic_passes(dtype, kind):
    problem = AttentionProblem(1, 2, 2, 133, 300, 64, dtype, op="backward")
    for seed in range(3):
        tensors = backward.make_inputs(problem, seed, "cpu", kind)
        answer = backward.make_answer(problem, tensors, kind, double=True)
        assert all(math.isfinite(exact.allowed_error) for exact in answer.values())
        assert judge(in_steps(problem, tensors), answer)[0] == ""


def without_key(name, x):
    if name == "p":
        x = x.clone()
        x[..., -1] = 0
    return x


FAULTS = {
    "a key of 300 is left out": without_key,
    "delta is left out": lambda name, x: x * 0 if name == "delta" else x,
    "weights are of a wrong scale": lambda name, x: x * 1.01 if name == "s" else x,
    "dS is a percent off": lambda name, x: x * 1.02 if name == "ds" else x,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_faults_do_not_pass(dtype, fault):
    problem = AttentionProblem(1, 2, 2, 133, 300, 64, dtype, op="backward")
    tensors = backward.make_inputs(problem, 1, "cpu")
    answer = backward.make_answer(problem, tensors, double=True)
    assert "error is" in judge(in_steps(problem, tensors, FAULTS[fault]), answer)[0]


@pytest.mark.parametrize("kind", ["plain", "parts_of_keys", "extreme_terms", "huge_keys_within", "large_gradients"])
def test_gradients_in_16_bits_are_near_the_exact_ones(kind):
    for text in ("H=4 Hkv=2 mask=causal_upper_left sink=1", "H=2 Sq=31 Sk=60 softcap=3"):
        problem = problem_of(text).with_(dtype="fp16")
        tensors = backward.make_inputs(problem, 2, "cpu", kind, 8)
        exact = exact_gradients(problem, tensors, torch.float64).values
        low = backward.gradients_of_torch(problem, tensors, whole=kind != "parts_of_keys").values
        for name, values in exact.items():
            assert (low[name] - values).norm() <= 0.002 * values.norm(), name


def test_gradients_of_tables_that_16_bits_do_not_hold():
    text = "B=2 H=2 Hkv=1 Sq=40 Sk=131 D=24 dtype=fp16 mask=causal_lower_right op=backward lse=1"
    problem = parse_shape(f"{text} score=s*gate[h] tables=gate:fp32:2 grads=own_gate")
    kind = "large_logits_two_keys"
    answer = backward.make_answer(problem, backward.make_inputs(problem, 1, "cpu", kind), kind, double=True)
    gate = answer["down_gate"]
    assert gate.values.abs().max() > torch.finfo(torch.float16).max
    assert gate.allowed_error < gate.values.abs().max() / 3
    assert all(math.isfinite(bound) for one in answer.values() for bound in (one.allowed_error, one.allowed_rms))
    exact = {name: one.values.float() for name, one in answer.items()}
    assert judge(exact, answer)[0] == ""


def test_a_softcap_allows_three_times():
    problem = AttentionProblem(1, 1, 1, 40, 60, 32, "fp16", op="backward", softcap=5.0)
    tensors = backward.make_inputs(problem, 1, "cpu")
    answer = backward.make_answer(problem, tensors, double=True)
    assert answer["dv"].allowed_error > backward.SOFTCAP_ABSOLUTE


def test_pages_have_no_gradient():
    with pytest.raises(ProblemError, match="page: pages hold a cache"):
        parse_shape("B=1 H=1 S=64 D=16 seqused=3:60 page=16 op=backward")


def test_rows_and_sequences_without_keys_have_zeros():
    problem = problem_of("H=2 varlen=9+0+23+5/9+4+0+11 lse=1 sink=1 grads=sinks")
    answer = backward.make_answer(problem, backward.make_inputs(problem, 1, "cpu"), double=True)
    assert (answer["dq"].values[0, :, 9:32] == 0).all() and (answer["dk"].values[0, :, 9:13] == 0).all()
    assert answer["dk"].dims[2] == "key" and answer["dsinks"].dims == ("head",)


def test_scores_below_the_range_of_fp32_leave_hidden_keys_to_overflow():
    problem = AttentionProblem(1, 1, 1, 40, 60, 32, "fp16", op="backward")
    tensors = backward.make_inputs(problem, 1, "cpu", "low_scores")
    assert (tensors["lse"] < -380).all()
    wide = {
        **tensors,
        "k": torch.nn.functional.pad(tensors["k"], (0, 0, 0, 4)),
        "v": torch.nn.functional.pad(tensors["v"], (0, 0, 0, 4)),
    }
    outputs = in_steps(replace(problem, seqlen_k=64), wide)
    answer = backward.make_answer(problem, tensors, "low_scores", double=True)
    assert "NaN" in judge({name: out[:, :, : answer[name].values.shape[2]] for name, out in outputs.items()}, answer)[0]
