"""FlashAttention 3 is taken from whichever package holds it and takes the dtype; what is missing is one sentence."""

import sys
import types

import pytest

from evoattn.correctness.reference import make_inputs
from evoattn.model.problem import AttentionProblem
from evoattn.timing.peers import fa3
from evoattn.timing.peers.table import NOT_INSTALLED, PEERS, PeerRefused, peer_call

PROBLEM = AttentionProblem(2, 4, 2, 24, 40, 16, mask="causal_lower_right")


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch):
    """Whatever this machine has: no FlashAttention 3."""
    for stem in fa3.PACKAGES:
        monkeypatch.setitem(sys.modules, f"{stem}_interface", None)
        monkeypatch.setitem(sys.modules, f"{stem}_config", None)
    fa3.find.cache_clear()
    yield
    fa3.find.cache_clear()


def install(monkeypatch, stem, said, **flags):
    module, config = types.ModuleType(f"{stem}_interface"), types.ModuleType(f"{stem}_config")
    module.flash_attn_func = lambda *tensors, **words: (said, words)
    config.CONFIG = {"build_flags": flags}
    monkeypatch.setitem(sys.modules, f"{stem}_interface", module)
    monkeypatch.setitem(sys.modules, f"{stem}_config", config)
    fa3.find.cache_clear()


def refused(problem) -> str:
    with pytest.raises(PeerRefused) as caught:
        peer_call(PEERS["fa3"], problem, make_inputs(problem, 1, "cpu"), None)
    return str(caught.value)


def test_its_own_build_comes_before_fa3_fwd_and_chooses_the_splits(monkeypatch):
    install(monkeypatch, "fa3_fwd", "second", FLASHATTENTION_DISABLE_FP16=True)
    assert PEERS["fa3"].version(PROBLEM.with_(dtype="bf16")).startswith("fa3-fwd ")
    install(monkeypatch, "flash_attn", "first")
    for dtype in ("bf16", "fp16"):
        found = fa3.find(dtype)
        assert found.version.startswith("flash-attn-3 ") and found.prepare(1, 2, 3, True)() == (
            "first",
            {"causal": True, "num_splits": 0},
        )


def test_a_build_without_the_dtype_is_one_sentence_and_not_called_absent(monkeypatch):
    install(monkeypatch, "fa3_fwd", "second", FLASHATTENTION_DISABLE_FP16=True)
    assert refused(PROBLEM) == "fa3-fwd is built without fp16."


def test_without_any_it_is_one_sentence():
    said = refused(PROBLEM)
    assert (
        said.startswith(f"flash-attn-3 {NOT_INSTALLED} (")
        and "flash_attn_interface" in said
        and "fa3_fwd_interface" in said
    )


def test_a_library_that_does_not_load_is_one_sentence(monkeypatch):
    def cannot(name):
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(fa3.importlib, "import_module", cannot)
    assert "libcudart.so.13: cannot open" in refused(PROBLEM)
