"""FlashAttention 3 is taken from whichever package holds it and takes the dtype; what is missing is one sentence."""

from types import SimpleNamespace

import pytest

from evoattn.correctness.reference import make_answer, make_inputs
from evoattn.model.problem import AttentionProblem
from evoattn.peers import fa3
from evoattn.peers.table import NOT_INSTALLED, PeerRefused, fa3_peer, peer_call
from evoattn.peers.variants import eight_bits, without_nan

PROBLEM = AttentionProblem(2, 4, 2, 24, 40, 16, mask="causal_lower_right")


def builds(**flags):
    """An import of the named stems' modules alone, each with its build flags; the function answers its stem."""

    def load(name):
        stem, _, part = name.rpartition("_")
        if stem not in flags:
            raise ModuleNotFoundError(f"No module named '{name}'")
        if part == "config":
            return SimpleNamespace(CONFIG={"build_flags": flags[stem]})
        return SimpleNamespace(flash_attn_func=lambda *tensors, **words: (stem, words))

    return load


WITHOUT_FP16 = {"FLASHATTENTION_DISABLE_FP16": True}


def refused(load) -> str:
    with pytest.raises(PeerRefused) as caught:
        peer_call(fa3_peer(load), PROBLEM, make_inputs(PROBLEM, 1, "cpu"), None)
    return str(caught.value)


def test_its_own_build_comes_before_fa3_fwd_and_chooses_the_splits():
    assert fa3_peer(builds(fa3_fwd=WITHOUT_FP16)).version(PROBLEM.with_(dtype="bf16")).startswith("fa3-fwd ")
    both = builds(fa3_fwd=WITHOUT_FP16, flash_attn={})
    for dtype in ("bf16", "fp16"):
        found = fa3.find(dtype, both)
        assert found.version.startswith("flash-attn-3 ")
        assert found.prepare(1, 2, 3, True, {"softcap": 2.0})() == (
            "flash_attn",
            {"causal": True, "num_splits": 0, "softcap": 2.0},
        )


def test_a_build_without_the_dtype_is_one_sentence_and_not_called_absent():
    assert refused(builds(fa3_fwd=WITHOUT_FP16)) == "fa3-fwd is built without fp16."


def test_without_any_it_is_one_sentence():
    said = refused(builds())
    assert said.startswith(f"flash-attn-3 {NOT_INSTALLED} (")
    assert "flash_attn_interface" in said and "fa3_fwd_interface" in said


def test_a_library_that_does_not_load_is_one_sentence():
    def cannot(name):
        raise OSError("libcudart.so.13: cannot open shared object file")

    assert "libcudart.so.13: cannot open" in refused(cannot)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_8_bits_come_with_their_scales_and_v_in_rows(layout):
    """The values that its arguments stand for are those of a problem whose V is turned."""
    turned = AttentionProblem(2, 4, 2, 24, 40, 16, "e4m3", scales="head", turned=True, layout=layout)

    def answer(q, k, v, **words):
        scales = [words[f"{name}_descale"] for name in "qkv"]
        assert words["causal"] is False and [one.shape for one in scales] == [(2, 2)] * 3
        q, k, v = (one.double().transpose(1, 2) for one in (q, k, v))
        q, k, v = (one.unflatten(1, (2, -1)) * s[:, :, None, None, None] for one, s in zip((q, k, v), scales))
        out = ((q @ k.mT) * 16**-0.5).softmax(-1) @ v
        return out.flatten(1, 2).transpose(1, 2).bfloat16()

    def load(name):
        if name == "fa3_fwd_interface":
            return SimpleNamespace(flash_attn_func=lambda *tensors, num_splits, **words: answer(*tensors, **words))
        raise ModuleNotFoundError(name)

    tensors = make_inputs(turned, 1, "cpu")
    call = peer_call(fa3_peer(load), turned, tensors, make_answer(turned, tensors))
    assert call().shape == (2, 4, 24, 16)


@pytest.mark.parametrize("more", [{"seqused": "8:40"}, {"seqlen_k": 48, "seqused": "8:40", "page": 16}])
def test_places_of_8_bits_that_no_sequence_uses_are_numbers(more):
    """What an attention function multiplies by 0 must not be NaN."""
    problem = AttentionProblem(
        **dict(batch=2, heads=4, kv_heads=2, seqlen_q=1, seqlen_k=40, head_dim=16) | more, dtype="e4m3"
    )
    tensors = make_inputs(problem, 1, "cpu")
    clean = without_nan(problem, tensors)
    for name in "kv":
        unused = tensors[name].float().isnan()
        assert unused.any() and not clean[name].float()[unused].any()
        assert clean[name].float()[~unused].equal(tensors[name].float()[~unused])
        assert clean[name].stride() == tensors[name].stride() and clean[name].dtype == tensors[name].dtype


def test_a_value_within_key_has_key_s_scale():
    problem = AttentionProblem(2, 4, 2, 24, 40, 16, "e4m3", shared_kv=True, value_dim=16)
    tensors = make_inputs(problem, 1, "cpu")
    _, _, descales = eight_bits(problem, tensors)
    assert descales["v_descale"].equal(tensors["k_scale"].expand(2, 2))
