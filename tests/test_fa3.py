"""FlashAttention 3 is taken from whichever package holds it; the operators inside vLLM get what their schemas ask for."""

import sys
import types

import pytest
import torch

from evoattn import fa3
from evoattn.baselines import PEERS, PeerRefused, peer_call
from evoattn.problem import AttentionProblem
from evoattn.reference import make_answer, make_inputs

PROBLEM = AttentionProblem(2, 4, 2, 24, 40, 16, mask="causal_lower_right")
FWD = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, "
    "Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, "
    "Tensor? k_descale, Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, "
    "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, Tensor? s_aux, int cp_world_size, "
    "int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)
SCHEDULE = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, int headdim, int headdim_v, "
    "ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
    "Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal, int window_size_left, int window_size_right, bool has_softcap, "
    "int num_splits, bool? pack_gqa, int sm_margin) -> Tensor"
)
"""Both as in vllm 0.20.2's _vllm_fa3_C.abi3.so."""


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch, tmp_path):
    """Whatever this machine has: no FlashAttention 3, and an empty folder first on the path."""
    for name in ("flash_attn_interface", "flash_attn_config", "fa3_fwd_interface", "fa3_fwd_config", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.syspath_prepend(str(tmp_path))
    fa3.find.cache_clear()
    yield
    fa3.find.cache_clear()


def interface(monkeypatch, stem, said, **flags):
    module, config = types.ModuleType(f"{stem}_interface"), types.ModuleType(f"{stem}_config")
    module.flash_attn_func = lambda *tensors, **words: (said, words)
    config.CONFIG = {"build_flags": flags}
    monkeypatch.setitem(sys.modules, f"{stem}_interface", module)
    monkeypatch.setitem(sys.modules, f"{stem}_config", config)


def vllm_library(monkeypatch, tmp_path):
    """A folder on the path with nothing of vLLM but the library's file; the paths that are loaded."""
    monkeypatch.delitem(sys.modules, "vllm")
    library = tmp_path / "vllm" / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so"
    library.parent.mkdir(parents=True)
    library.touch()
    (tmp_path / "vllm-0.20.2.dist-info").mkdir()
    (tmp_path / "vllm-0.20.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.4\nName: vllm\nVersion: 0.20.2\n")
    loaded = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    return library, loaded


def test_its_own_build_comes_first_then_fa3_fwd_where_it_takes_the_dtype_then_vllm(monkeypatch, tmp_path):
    library, loaded = vllm_library(monkeypatch, tmp_path)
    assert fa3.find("bf16").version == "vllm 0.20.2's FA3, without its dense kernels" and loaded == [str(library)]
    assert "vllm" not in sys.modules
    interface(monkeypatch, "fa3_fwd", "second", FLASHATTENTION_DISABLE_FP16=True)
    fa3.find.cache_clear()
    assert fa3.find("bf16").version.startswith("fa3-fwd ") and fa3.find("fp16").version.startswith("vllm 0.20.2")
    interface(monkeypatch, "flash_attn", "first")
    fa3.find.cache_clear()
    for dtype in ("bf16", "fp16"):
        found = fa3.find(dtype)
        assert found.version.startswith("flash-attn-3 ") and found.prepare(1, 2, 3, True)() == ("first", {"causal": True, "num_splits": 0})


def test_without_any_it_is_one_sentence():
    with pytest.raises(PeerRefused, match="^flash-attn-3 is not installed .*flash_attn_interface.*fa3_fwd_interface.*no vllm"):
        peer_call("fa3", PROBLEM, make_inputs(PROBLEM, 1, "cpu"), None)


def test_a_library_for_another_torch_is_one_sentence(monkeypatch, tmp_path):
    vllm_library(monkeypatch, tmp_path)

    def refuse(path):
        raise OSError(f"Could not load this library: {path}")

    monkeypatch.setattr(torch.ops, "load_library", refuse)
    with pytest.raises(PeerRefused, match="Could not load this library"):
        peer_call("fa3", PROBLEM, make_inputs(PROBLEM, 1, "cpu"), None)


@pytest.fixture
def operators():
    """The operators of vLLM's library on the CPU, under their true schemas: torch checks every argument's name and kind."""
    library = torch.library.Library("_vllm_fa3_C", "DEF")
    library.define(FWD)
    library.define(SCHEDULE)
    calls = []

    def fwd(q, k, v, *rest):
        names = [a.name for a in torch.ops._vllm_fa3_C.fwd.default._schema.arguments][3:]
        given = dict(zip(names, rest, strict=True))
        calls.append(given)
        assert given["seqused_k"].tolist() == [k.shape[1]] * len(q) and given["scheduler_metadata"].tolist() == [7]
        mask = torch.nn.attention.bias.causal_lower_right(q.shape[1], k.shape[1]) if given["is_causal"] else None
        out = torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=mask, scale=given["softmax_scale"], enable_gqa=True)
        return [out.transpose(1, 2), q.new_zeros(1)]

    library.impl("fwd", fwd, "CPU")
    library.impl("get_scheduler_metadata", lambda *words: torch.tensor([7], dtype=torch.int32), "CPU")
    yield calls
    library._destroy()


@pytest.mark.parametrize("problem", [PROBLEM, PROBLEM.with_(mask="full", dtype="bf16", layout="bshd")])
def test_the_operators_inside_vllm_are_given_what_their_schemas_ask(monkeypatch, tmp_path, operators, problem):
    vllm_library(monkeypatch, tmp_path)
    tensors = make_inputs(problem, 1, "cpu")
    call = peer_call("fa3", problem, tensors, make_answer(problem, tensors))
    assert call().shape == problem.shape("o")
    given = operators[-1]
    assert (given["is_causal"], given["window_size_left"], given["window_size_right"], given["num_splits"]) == (problem.causal, -1, -1, 0)
    assert given["pack_gqa"] is None and given["cu_seqlens_q"] is None and given["softmax_scale"] == problem.softmax_scale
    assert PEERS["fa3"].version(problem).startswith("vllm 0.20.2's FA3")
