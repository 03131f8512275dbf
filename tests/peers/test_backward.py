"""Peers of the backward pass: their gradients are those of torch's engine, and are judged."""

import pytest
import torch

from evoattn.correctness.cases import make_case
from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import parse_shape
from evoattn.peers.backward import Walk, backward_of
from evoattn.peers.table import BACKWARD_PEERS, PEERS, Peer, PeerRefused, peer_call, peers_of

PROBLEM = AttentionProblem(2, 4, 2, 37, 53, 32, "fp32", "causal_upper_left", "bshd", op="backward")


def case_of(problem):
    return make_case("own", problem, 1, "cpu", double=True)


def test_each_operation_has_its_table():
    assert peers_of(PROBLEM) is BACKWARD_PEERS and peers_of(PROBLEM.with_(op="forward")) is PEERS
    assert list(BACKWARD_PEERS) == list(PEERS)


@pytest.mark.parametrize(
    "text",
    ["mask=causal", "seqused=3:53", "bias=hs", "bias=hs,grads=bias", "Dv=16,shared_kv=1", "mask=causal_lower_right"],
)
def test_the_math_backend_gives_right_gradients(text):
    problem = parse_shape(f"B=2,H=4,Hkv=2,Sq=37,Sk=53,D=32,dtype=fp32,op=backward,{text}")
    case = case_of(problem)
    call = peer_call(BACKWARD_PEERS["math"], problem, case.tensors, case.answer)
    for _ in range(2):  # the recorded graph stays
        outputs = call()
        assert list(outputs) == [spec.name for spec in problem.outputs]
        assert all(outputs[spec.name].shape == spec.shape for spec in problem.outputs)


def test_gradients_of_new_inputs_in_the_same_memory_are_those_of_the_new_do():
    case = case_of(PROBLEM)
    call = BACKWARD_PEERS["math"].make(PROBLEM, case.tensors)
    before = call()["dv"].clone()
    case.tensors["do"].mul_(2)
    torch.testing.assert_close(call()["dv"], 2 * before)


def test_wrong_gradients_are_named():
    def halved(problem, tensors):
        call = PEERS["math"].make(problem, tensors)
        return lambda: call() * 0.5

    case = case_of(PROBLEM)
    with pytest.raises(PeerRefused, match="Its answer is wrong: dq: the largest error"):
        peer_call(Peer(backward_of(halved), "torch"), PROBLEM, case.tensors, case.answer)


def test_a_peer_without_a_backward_pass_is_refused():
    def forward_only(problem, tensors):
        return lambda: tensors["q"].detach()

    case = case_of(PROBLEM)
    with pytest.raises(PeerRefused, match="It has no backward pass"):
        peer_call(Peer(backward_of(forward_only), "torch"), PROBLEM, case.tensors, case.answer)
    with pytest.raises(PeerRefused, match="gradient of a log-sum-exp"):
        backward_of(forward_only)(PROBLEM.with_(lse=True), case.tensors)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return 2 * x, x * y

    @staticmethod
    def backward(ctx, of_double, of_product):
        x, y = ctx.saved_tensors
        return 2 * of_double + of_product * y, of_product * x


class Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, times):
        ctx.save_for_backward(times)
        return x * times

    @staticmethod
    def backward(ctx, of_product):
        return of_product * ctx.saved_tensors[0], None


def test_what_a_peer_saved_may_be_written_again():
    """FlashAttention 4 saves the starts of packed sequences, which a bench writes before each call."""
    problem = PROBLEM.with_(seqused="3:53")

    def make(problem, tensors):
        q, k, v = (tensors[name] for name in problem.tensors)
        return lambda: Repeated.apply(q, tensors["seqused"][0]) + 0 * (k.sum() + v.sum())

    tensors = case_of(problem).tensors
    call = backward_of(make)(problem, tensors)
    tensors["seqused"].fill_(2)
    torch.testing.assert_close(call()["dq"], 2 * tensors["do"])


class Half(Doubled):
    @staticmethod
    def backward(ctx, of_double, of_product):
        return Doubled.backward(ctx, of_double, of_product)[0], None


def test_a_step_that_gives_no_gradient_is_refused():
    x, y = torch.randn(2, 3, 4, requires_grad=True).unbind(0)
    for function in (Doubled, Half):
        leaves = [one.detach().requires_grad_() for one in (x, y)]
        walk = Walk(function.apply(*(one * 1 for one in leaves))[1], leaves)
        if function is Half:
            with pytest.raises(PeerRefused, match="does not give all gradients"):
                walk(torch.ones(3, 4))
        else:
            torch.testing.assert_close(walk(torch.ones(3, 4)), [y.detach(), x.detach()])


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_a_walk_gives_what_the_engine_gives(compiled):
    def steps(x, y):
        double, product = Doubled.apply(x, y)
        parts = torch.cat((double.sin(), y.exp()), -1).unbind(0)
        return (parts[0] * parts[1]).cumsum(-1) + (product if not compiled else 0 * double).sum()

    x, y = (torch.randn(2, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    function = torch.compile(steps, backend="aot_eager") if compiled else steps
    out = function(x, y)
    gradient = torch.randn_like(out)
    with torch.no_grad():
        found = Walk(out, [x, y])(gradient)
    for one, right in zip(found, torch.autograd.grad(steps(x, y), (x, y), gradient), strict=True):
        torch.testing.assert_close(one, right)
