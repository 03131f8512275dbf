"""Peers: right ones stand, wrong or absent ones give a sentence; torch's refusals name the real reason."""

import sys
import types

import pytest
import torch

from evoattn.correctness.reference import make_answer, make_inputs
from evoattn.model.problem import AttentionProblem
from evoattn.timing.peers import fa3
from evoattn.timing.peers import table as baselines

PROBLEM = AttentionProblem(1, 4, 2, 24, 24, 16, mask="causal_upper_left")


@pytest.fixture(autouse=True)
def look_again():
    """What was found in one test is not in the next."""
    fa3.find.cache_clear()
    yield
    fa3.find.cache_clear()


def inputs(problem=PROBLEM):
    tensors = make_inputs(problem, 1, "cpu")
    return tensors, make_answer(problem, tensors)


def fake_flash(answer):
    """A `flash_attn_interface` whose function answers what `answer(q, k, v, causal)` gives, [B, S, H, D] in and out."""
    module = types.ModuleType("flash_attn_interface")
    module.flash_attn_func = answer
    return module


def honest(q, k, v, causal, num_splits=0):
    assert num_splits == 0  # FA3 chooses
    assert q.stride(-1) == 1 and q.shape == (1, 24, 4, 16)
    out = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal, enable_gqa=True
    )
    return out.transpose(1, 2), None


def test_math_is_right_on_the_cpu():
    tensors, answer = inputs()
    assert baselines.peer_call(baselines.PEERS["math"], PROBLEM, tensors, answer)().shape == PROBLEM.shape("o")


def test_flash_attention_gets_views_and_gives_the_logical_shape(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash(honest))
    tensors, answer = inputs()
    assert baselines.peer_call(baselines.PEERS["fa3"], PROBLEM, tensors, answer)().shape == PROBLEM.shape("o")


def test_a_peer_that_computes_another_mask_is_refused(monkeypatch):
    monkeypatch.setitem(
        sys.modules, "flash_attn_interface", fake_flash(lambda q, k, v, causal, num_splits: honest(q, k, v, False))
    )
    with pytest.raises(baselines.PeerRefused, match="answer is wrong"):
        baselines.peer_call(baselines.PEERS["fa3"], PROBLEM, *inputs())


@pytest.mark.parametrize(
    "name, problem, words",
    [
        ("fa4", PROBLEM, "not installed"),
        ("fa4", PROBLEM.with_(dtype="fp32"), "fp16 and bf16 only"),
        ("fa3", PROBLEM.with_(seqlen_k=30), "causal_lower_right"),
    ],
)
def test_refusals_are_sentences(monkeypatch, name, problem, words):
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)  # absent, whatever this machine has
    with pytest.raises(baselines.PeerRefused, match=words):
        baselines.peer_call(baselines.PEERS[name], problem, *inputs(problem))


def test_the_reason_is_the_backend_s_own():
    said = [
        "Memory efficient kernel not used because: (Triggered internally at sdp_utils.cpp:1.)",
        "For dense input, both fused kernels require query, key and value to have the same num_heads. "
        "(Triggered internally at x:2.)",
        "Flash attention kernel not used because: (Triggered internally at x:3.)",
        "Flash attention has been runtime disabled.",
        "CuDNN attention kernel not used because:",
        "cuDNN attention has been runtime disabled. (Triggered internally at x:4.)",
    ]
    assert baselines.refusal(said, "No available kernel.").startswith("For dense input, both fused kernels require")
    assert baselines.refusal(said[2:], "No available kernel.") == "No available kernel."
