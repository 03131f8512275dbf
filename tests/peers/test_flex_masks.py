"""The block mask of FlexAttention, made a stripe at a time, is torch's own; packed sequences see themselves alone."""

import pytest
import torch
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_block_mask

from evoattn.correctness.reference import make_answer, make_inputs
from evoattn.model.problem import AttentionProblem
from evoattn.peers import flex
from evoattn.peers.table import Peer, peer_call

PACKED = AttentionProblem(4, 4, 2, 37, 53, 16, varlen="37+1+0+20/53+9+4+1", mask="causal_lower_right", layout="bshd")
MASKS = [
    AttentionProblem(1, 2, 2, 300, 300, 16, mask="causal_upper_left"),
    AttentionProblem(1, 2, 2, 200, 300, 16, mask="causal_lower_right", window="50:0"),
    AttentionProblem(3, 2, 2, 70, 300, 16, seqused="1:300"),
    PACKED,
]


@pytest.mark.parametrize("stripe", [1, 1 << 26])
@pytest.mark.parametrize("problem", MASKS, ids=lambda p: p.describe())
def test_it_is_torch_s(problem, stripe):
    tensors = make_inputs(problem, 1, "cpu")
    visible = flex.visible_keys(problem, tensors)
    rows, keys = problem.shape("q")[2], problem.shape("k")[2]
    batches = problem.batch if problem.seqused else None
    ours = flex.block_mask(visible, batches, rows, keys, (128, 64), torch.device("cpu"), stripe)
    theirs = create_block_mask(visible, batches, None, rows, keys, "cpu", (128, 64))
    assert ours.shape == theirs.shape and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
    for count, index in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        places = torch.arange(getattr(theirs, index).shape[-1]) < getattr(theirs, count)[..., None]
        assert torch.equal(getattr(ours, index)[places], getattr(theirs, index)[places])


def test_all_keys_need_no_mask():
    assert flex.visible_keys(MASKS[0].with_(mask="full"), {}) is None


ONE = AttentionProblem(1, 2, 2, 8, 32, 16, mask="full")


@pytest.mark.parametrize(
    "problem, fields",
    [
        *((PACKED, {"mask": "causal_upper_left"}), (PACKED, {"sink": True, "softcap": 3.0})),
        *(
            pytest.param(PACKED, fields, marks=pytest.mark.slow)
            for fields in ({}, {"mask": "full"}, {"window": "9:0"}, {"mask": "full", "window": "5:2"})
        ),
        (ONE, {"softcap": 1.0}),
        (ONE, {"heads": 4, "kv_heads": 1, "seqlen_q": 1, "value_dim": 8}),  # heads of one query are rows
    ],
    ids=str,
)
def test_answers_are_right(problem, fields):
    problem = problem.with_(**fields)
    tensors = make_inputs(problem, 1, "cpu")
    peer = Peer(lambda p, t: flex.make(p, t, compiler=lambda function: function), "torch")
    assert peer_call(peer, problem, tensors, make_answer(problem, tensors))().shape == problem.shape("o")


@pytest.mark.parametrize(
    "fields",
    [{}, {"predicate": "(q-k<9)|(t[b,k]==1)", "tables": "t:int64:2x50", "score": "s*2"}],
    ids=["batches", "score"],
)
def test_block_lists_are_right(fields):
    blocks = "16x16:4/0/4" if fields else "b:16x16:13+9"  # uncompiled, only functions count
    problem = MASKS[0].with_(batch=2, seqlen_q=40, seqlen_k=50, mask="causal_upper_left", blocks=blocks, **fields)
    tensors = make_inputs(problem, 1, "cpu")
    if fields:
        tensors["kv_num_blocks"].fill_(4)
        tensors["kv_indices"].copy_(torch.arange(4))
    peer = Peer(lambda p, t: flex.make(p, t, compiler=lambda function: function), "torch")
    assert peer_call(peer, problem, tensors, make_answer(problem, tensors))().shape == problem.shape("o")


@pytest.mark.parametrize(("head_dim", "options"), [(256, None), (264, flex.LARGE_HEADS)])
def test_small_tiles_are_for_large_heads(monkeypatch, head_dim, options):
    given = []
    monkeypatch.setattr(flex_attention, "flex_attention", lambda q, k, v, **how: (given.append(how), (q, None))[1])
    problem = AttentionProblem(1, 2, 2, 8, 32, head_dim, mask="full", softcap=2.0)
    flex.make(problem, make_inputs(problem, 1, "cpu"), lambda function: function)()
    assert [how["kernel_options"] for how in given] == [options]


@pytest.mark.slow
def test_a_process_that_asks_for_many_problems_gets_each_compiled():
    """Torch's limit is eight variants of one function."""
    made = []

    def compiler(function):
        def backend(graph, inputs):
            made.append(graph)
            return graph

        return torch.compile(function, backend=backend, dynamic=False)

    for length in range(17, 27):
        problem = MASKS[0].with_(seqlen_q=length, seqlen_k=length, window="5:0")
        flex.make(problem, make_inputs(problem, 1, "cpu"), compiler)()
    assert len(made) == 10
