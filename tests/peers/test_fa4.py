"""FlashAttention 4 gets what its functions take, by their names: stubs have the signatures of flash-attn-4 4.0.0b36."""

import sys
from types import SimpleNamespace

import pytest
import torch

from evoattn.correctness.reference import make_answer, make_inputs
from evoattn.model.problem import AttentionProblem
from evoattn.peers.fa4 import find_score_mod
from evoattn.peers.table import PeerRefused, fa4_peer, peer_call

DENSE = AttentionProblem(2, 4, 2, 24, 24, 16, mask="causal_upper_left", layout="bshd")
PACKED = AttentionProblem(3, 4, 2, 37, 53, 16, varlen="37+1+20/53+9+1", mask="causal_lower_right", layout="bshd")


class Stub:
    """The module `flash_attn.cute`; answers O, `[batch, seqlen, heads, head_dim]`, and keeps what it got."""

    def __init__(self, out: torch.Tensor) -> None:
        self.out, self.got, self.name = out, {}, ""

    def __call__(self, module: str) -> SimpleNamespace:
        assert module == "flash_attn.cute"
        return SimpleNamespace(flash_attn_func=self.dense, flash_attn_varlen_func=self.varlen)

    def dense(
        self, q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None),
        learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, score_mod=None, aux_tensors=None,
    ):  # fmt: skip
        return self._keep("dense", locals())

    def varlen(
        self, q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,
        softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1,
        pack_gqa=None, score_mod=None, aux_tensors=None,
    ):  # fmt: skip
        return self._keep("varlen", locals())

    def _keep(self, name, got):
        self.name, self.got = name, got
        return self.out, None


def called(problem):
    """What its function got for a right answer."""
    tensors = make_inputs(problem, 1, "cpu")
    answer = make_answer(problem, tensors)
    out = answer["o"].values.to(tensors["q"].dtype).transpose(1, 2)
    stub = Stub(out[0] if problem.varlen else out)
    peer = fa4_peer(stub, score_mod=lambda name: name)
    assert peer_call(peer, problem, tensors, answer)().shape == problem.shape("o")
    return stub, tensors


def test_packed_sequences():
    stub, tensors = called(PACKED.with_(window="9:0"))
    assert stub.name == "varlen" and stub.got["q"].shape == (58, 4, 16) and stub.got["q"].is_contiguous()
    assert stub.got["cu_seqlens_k"] is tensors["cu_seqlens_k"] and stub.got["causal"]
    assert (stub.got["max_seqlen_q"], stub.got["max_seqlen_k"], stub.got["window_size"]) == (37, 53, (9, 0))


def test_sinks_are_given_as_they_are():
    stub, tensors = called(DENSE.with_(sink=True, softcap=3.0, scale=0.5))
    assert stub.name == "dense" and stub.got["learnable_sink"] is tensors["sinks"]
    assert (stub.got["softcap"], stub.got["softmax_scale"]) == (3.0, 0.5)


@pytest.mark.parametrize("field, name", [({"alibi": True}, "add_slopes"), ({"bias": "s"}, "add_bias")], ids=str)
def test_slopes_and_a_bias_are_a_function_of_the_scores(field, name):
    stub, tensors = called(DENSE.with_(seqlen_q=20, seqlen_k=20, **field))
    assert stub.got["score_mod"] == name
    (added,) = stub.got["aux_tensors"]
    assert torch.equal(added, tensors["slopes"]) if name == "add_slopes" else added.shape == (2, 4, 20, 20)


class Held(list):
    def store(self, vector):
        self.append(vector[0])


def test_what_the_functions_of_the_scores_say(monkeypatch):
    """In Python, where the language's words do as they say."""
    cute = SimpleNamespace(jit=lambda f: f, full_like=torch.full_like, make_rmem_tensor=lambda count, kind: Held())
    monkeypatch.setitem(sys.modules, "cutlass", SimpleNamespace(cute=cute, Int32=int, Float32=float))
    add_slopes, add_bias = map(find_score_mod.__wrapped__, ("add_slopes", "add_bias"))
    sizes, slopes, bias = SimpleNamespace(seqlen_q=5, seqlen_k=9), torch.tensor([2.0, 0.5]), torch.randn(2, 2, 5, 9)
    for q, k in ((0, 0), (3, 7), (3, 8), (4, 1)):
        place = torch.tensor([7.0]), [1], [1], [q], [k], sizes
        assert add_slopes(*place, [slopes]).item() == 7.0 - 0.5 * abs(q + 4 - k)
        assert add_bias(*place, [bias]).item() == 7.0 + bias[1, 1, q, k]


def test_one_function_of_the_scores_is_all():
    problem = DENSE.with_(alibi=True, softcap=3.0)
    with pytest.raises(PeerRefused, match="no softcap beside slopes"):
        fa4_peer(Stub(torch.empty(0))).make(problem, make_inputs(problem, 1, "cpu"))


def test_without_its_language_it_is_refused_as_absent():
    def absent(name):
        raise ModuleNotFoundError("No module named 'cutlass'")

    problem = DENSE.with_(alibi=True)
    tensors = make_inputs(problem, 1, "cpu")
    with pytest.raises(PeerRefused, match=r"not installed \(No module named 'cutlass'"):
        peer_call(fa4_peer(Stub(torch.empty(0)), score_mod=absent), problem, tensors, None)
