"""Peers: right ones stand, wrong or absent ones give a sentence; torch's refusals name the real reason."""

from types import SimpleNamespace

import pytest
import torch

from evoattn.correctness.reference import make_answer, make_inputs
from evoattn.model.problem import AttentionProblem
from evoattn.peers import flex
from evoattn.peers.table import PEERS, Peer, PeerRefused, fa3_peer, fa4_peer, peer_call, refusal
from evoattn.peers.variants import added_to_scores, has_a_flag

PROBLEM = AttentionProblem(1, 4, 2, 24, 24, 16, mask="causal_upper_left")


def inputs(problem=PROBLEM):
    tensors = make_inputs(problem, 1, "cpu")
    return tensors, make_answer(problem, tensors)


def flash(answer):
    """FlashAttention 3 whose function answers what `answer(q, k, v, causal)` gives, [B, S, H, D] in and out."""
    return fa3_peer(lambda name: SimpleNamespace(flash_attn_func=answer, CONFIG={"build_flags": {}}))


def absent(name):
    raise ModuleNotFoundError(f"No module named '{name}'")


def honest(q, k, v, causal, num_splits=0):
    assert num_splits == 0  # FA3 chooses, FA4 has none
    assert q.stride(-1) == 1 and q.shape == (1, 24, 4, 16)
    out = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal, enable_gqa=True
    )
    return out.transpose(1, 2), None


def test_math_is_right_on_the_cpu():
    tensors, answer = inputs()
    assert peer_call(PEERS["math"], PROBLEM, tensors, answer)().shape == PROBLEM.shape("o")


VARIANTS = [
    {"window": "9:0", "scale": 0.4},
    {"window": "9:0", "mask": "causal_lower_right", "seqlen_k": 40},
    {"bias": "hs", "mask": "full", "window": "5:7"},
    {"alibi": True},
    {"bias": "bhs", "batch": 2},
    {"softcap": 3.0, "sink": True},
    {"sink": True, "alibi": True},
    {"value_dim": 32},
    {"value_dim": 8, "shared_kv": True, "window": "9:0"},
    {"value_dim": 8, "shared_kv": True, "mask": "full", "seqlen_q": 1, "kv_heads": 1},
    {"mask": "causal_lower_right", "seqlen_q": 5},
]


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
@pytest.mark.slow
def test_variants_by_sdpa_and_flex_attention(fields):
    """Either they are right or they say what they do not have; FlexAttention, here not compiled, has all."""
    problem = PROBLEM.with_(**fields)
    tensors, answer = inputs(problem)
    flexible = Peer(lambda p, t: flex.make(p, t, compiler=lambda function: function), "torch")
    assert peer_call(flexible, problem, tensors, answer)().shape == problem.shape("o")
    if {"softcap", "sink"} & set(problem.variants):
        with pytest.raises(PeerRefused, match=r"SDPA has no (softcap|sink)"):
            peer_call(PEERS["math"], problem, tensors, answer)
    else:
        assert peer_call(PEERS["math"], problem, tensors, answer)().shape == problem.shape("o")


def test_sdpa_has_the_gradient_of_a_bias_where_all_keys_are_seen():
    for fields in ({}, {"mask": "full", "window": "5:7"}, {"mask": "full"}):
        problem = PROBLEM.with_(bias="hs", **fields)
        tensors = make_inputs(problem, 1, "cpu")
        tensors["bias"].requires_grad_()
        if problem.mask == "full" and not problem.window:
            assert added_to_scores(problem, tensors).requires_grad
            continue
        with pytest.raises(PeerRefused, match="no gradient of a bias"):
            added_to_scores(problem, tensors)


def test_flash_attention_s_options():
    def gets(q, k, v, causal, **options):
        seen.update(options, causal=causal)
        return honest(q, k, v, causal)

    def load(name):
        return SimpleNamespace(flash_attn_func=gets, CONFIG={"build_flags": {}})

    problem, seen = PROBLEM.with_(window="9:0", softcap=2.0, scale=0.5), {}
    fa3_peer(load).make(problem, inputs(problem)[0])()
    assert seen == {"causal": True, "num_splits": 0, "window_size": (9, 0), "softcap": 2.0, "softmax_scale": 0.5}
    with_sinks, seen = PROBLEM.with_(sink=True), {}
    fa4_peer(load).make(with_sinks, inputs(with_sinks)[0])()
    assert seen["learnable_sink"].shape == (4,)
    with pytest.raises(PeerRefused, match="FlashAttention 3 has no sink"):
        fa3_peer(load).make(with_sinks, inputs(with_sinks)[0])
    with pytest.raises(PeerRefused, match="no flag of SDPA"):
        PEERS["flex"].make(PROBLEM, inputs()[0])


def test_flash_attention_gets_views_and_gives_the_logical_shape():
    tensors, answer = inputs()
    assert peer_call(flash(honest), PROBLEM, tensors, answer)().shape == PROBLEM.shape("o")


def test_a_peer_that_computes_another_mask_is_refused():
    wrong = flash(lambda q, k, v, causal, num_splits: honest(q, k, v, False))
    with pytest.raises(PeerRefused, match="answer is wrong"):
        peer_call(wrong, PROBLEM, *inputs())


@pytest.mark.parametrize(
    "peer, problem, words",
    [
        (fa4_peer(absent), PROBLEM, "not installed"),
        (fa4_peer(absent), PROBLEM.with_(dtype="fp32"), "fp16 and bf16 only"),
        (fa3_peer(absent), PROBLEM.with_(seqlen_k=30), "causal_lower_right"),
    ],
)
def test_refusals_are_sentences(peer, problem, words):
    with pytest.raises(PeerRefused, match=words):
        peer_call(peer, problem, *inputs(problem))


@pytest.mark.parametrize(
    "fields, has", [({}, True), ({"head_dim": 256}, True), ({"head_dim": 264}, False), ({"softcap": 9.0}, False)]
)
def test_what_sdpa_s_fused_kernels_compute_by_their_flags(fields, has):
    assert has_a_flag(PROBLEM.with_(**fields)) is has
    assert has_a_flag(PROBLEM.with_(mask="causal_lower_right", **fields)) is has
    assert not has_a_flag(PROBLEM.with_(mask="causal_lower_right", seqlen_k=30, **fields))


def test_each_peer_is_made_by_a_function_of_a_package():
    assert all(callable(peer.make) and isinstance(peer.package, str) for peer in PEERS.values())


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
    assert refusal(said, "No available kernel.").startswith("For dense input, both fused kernels require")
    assert refusal(said[2:], "No available kernel.") == "No available kernel."
    assert refusal(["It is deprecated."], "head_dim is over 256.") == "head_dim is over 256."
