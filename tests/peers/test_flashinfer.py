"""FlashInfer as it is told of a problem: stubs have the signatures of flashinfer-python 0.7.2 and compute what it is
documented to, out of what `plan` and `run` get."""

from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch

from evoattn.correctness.reference import make_answer, make_inputs
from evoattn.model.problem import AttentionProblem
from evoattn.peers import flashinfer
from evoattn.peers.table import Peer, PeerRefused, peer_call

DENSE = AttentionProblem(1, 4, 2, 24, 24, 16, mask="causal_upper_left")
PACKED = AttentionProblem(4, 4, 2, 37, 53, 16, varlen="37+1+0+20/53+9+4+1", mask="causal_lower_right", layout="bshd")
USED = AttentionProblem(3, 4, 2, 5, 70, 16, seqused="0:64", mask="causal_lower_right", layout="bshd")
LATENT = AttentionProblem(2, 8, 1, 1, 128, 24, value_dim=16, shared_kv=True)


def test_pages_are_those_with_keys_in_use():
    for problem, size, pages in (
        (AttentionProblem(3, 1, 1, 1, 24, 16, seqused="0:24"), 8, 3),
        (AttentionProblem(3, 1, 1, 1, 24, 16, seqused="0:24", page=4), 4, 6),
    ):
        lengths = problem.key_lengths
        table = torch.arange(3 * pages).flip(0).view(3, pages).int() if problem.page else torch.arange(9).view(3, 3)
        found = flashinfer.pages_of(problem, {"q": torch.zeros(1), "table": table}, size)
        used = [-(-keys // size) for keys in lengths]
        starts, rows, last = found.indexes
        assert starts.tolist() == [0, *accumulate(used)] and 0 in lengths
        assert rows.tolist() == [page for row, count in zip(table.tolist(), used, strict=True) for page in row[:count]]
        assert last.tolist() == [keys and (keys - 1) % size + 1 for keys in lengths]


def attend(q, k, v, planned, sinks=None):
    """One sequence, `[rows, heads, head_dim]` in and out."""
    group = planned["num_qo_heads"] // planned["num_kv_heads"]
    k, v = (t.double().repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) * planned["sm_scale"]
    if cap := planned.get("logits_soft_cap"):
        scores = cap * torch.tanh(scores / cap)
    ahead = torch.arange(k.shape[1]) - torch.arange(len(q))[:, None] - (k.shape[1] - len(q))
    past = planned.get("window_left", -1)
    hidden = (ahead > 0) & planned["causal"] | (ahead < -past) & (past >= 0)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        assert sinks.dtype == torch.float32
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
        v = torch.nn.functional.pad(v, (0, 0, 0, 1))
    weights = torch.softmax(scores, -1).nan_to_num()
    return (weights @ v).transpose(0, 1).to(q.dtype)


class Ragged:
    """`BatchPrefillWithRaggedKVCacheWrapper`."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", backend="auto", jit_args=None, jit_kwargs=None):
        assert kv_layout == "NHD" and float_workspace_buffer.dtype == torch.uint8
        self.backend, self.jit_args, self.jit_kwargs = backend, jit_args, jit_kwargs

    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, causal=False,
        window_left=-1, logits_soft_cap=None, sm_scale=None, q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
        self.planned = locals()

    def run(self, q, k, v, *args):
        starts, starts_k = self.planned["qo_indptr"].tolist(), self.planned["kv_indptr"].tolist()
        sinks = checked_sinks(self, args)
        places = zip(starts, starts[1:], starts_k, starts_k[1:], strict=False)
        return torch.cat([attend(q[a:b], k[c:d], v[c:d], self.planned, sinks) for a, b, c, d in places])


class Paged(Ragged):
    """`BatchPrefillWithPagedKVCacheWrapper`."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", backend="auto", jit_args=None, jit_kwargs=None):
        assert kv_layout == "HND" and backend == "fa2"
        super().__init__(float_workspace_buffer, "NHD", backend, jit_args, jit_kwargs)

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, causal=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        metadata = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        assert all(tensor.dtype == torch.int32 for tensor in metadata)
        self.planned = locals()

    def run(self, q, paged_kv_cache, *args):
        planned, out = self.planned, []
        indptr, last = planned["paged_kv_indptr"].tolist(), planned["paged_kv_last_page_len"].tolist()
        starts = planned["qo_indptr"].tolist()
        for i, (a, b) in enumerate(pairwise(starts)):
            pages = planned["paged_kv_indices"][indptr[i] : indptr[i + 1]].long()
            keys = max(0, len(pages) - 1) * planned["page_size"] + last[i]
            whole = (cache[pages].transpose(1, 2).flatten(0, 1)[:keys] for cache in paged_kv_cache)
            out.append(attend(q[a:b], *whole, planned, checked_sinks(self, args)))
        return torch.cat(out)


def checked_sinks(wrapper, args):
    if wrapper.jit_args is None:
        assert not args
        return None
    assert wrapper.jit_args[7:11] == [["sink"], ["float"], ["sm_scale"], ["double"]]
    assert wrapper.jit_args[-1] == f"code of {wrapper.backend}" and args[1] == wrapper.planned["sm_scale"]
    assert wrapper.jit_kwargs["use_sliding_window"] == (wrapper.planned["window_left"] >= 0)
    return args[0]


class Latent:
    """`BatchMLAPagedAttentionWrapper`."""

    def __init__(self, float_workspace_buffer, backend="auto"):
        assert backend == "fa3"

    def plan(
        self, *, metadata, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type
    ):
        self.planned = locals()

    def run(self, *, query, kv_cache):
        planned = self.planned
        qo, kv, table, lengths = (tensor.tolist() for tensor in planned["metadata"])
        words = {"num_qo_heads": planned["num_heads"], "num_kv_heads": 1}
        words |= {"sm_scale": planned["sm_scale"], "causal": planned["causal"]}
        assert kv_cache.shape[1:] == (planned["page_size"], planned["head_dim_ckv"] + planned["head_dim_kpe"])
        out = []
        for i, keys in enumerate(lengths):
            cache = kv_cache[table[kv[i] : kv[i + 1]]].flatten(0, 1)[:keys, None]
            out.append(attend(query[qo[i] : qo[i + 1]], cache, cache[..., : planned["head_dim_ckv"]], words))
        return torch.cat(out)


LIBRARY = SimpleNamespace(
    BatchPrefillWithRaggedKVCacheWrapper=Ragged,
    BatchPrefillWithPagedKVCacheWrapper=Paged,
    mla=SimpleNamespace(
        BatchMLAPagedAttentionWrapper=Latent, MLAPlanMetadata=SimpleNamespace(csr=lambda *tensors: tensors)
    ),
    jit=SimpleNamespace(
        attention=SimpleNamespace(
            variants=SimpleNamespace(attention_sink_decl={name: f"code of {name}" for name in ("fa2", "fa3")})
        )
    ),
)
PEER = Peer(lambda p, t: flashinfer.make(p, t, lambda name: LIBRARY), "flashinfer-python")


@pytest.mark.slow
@pytest.mark.parametrize(
    "problem",
    [
        DENSE.with_(window="9:0", scale=0.4),
        DENSE.with_(softcap=3.0),
        DENSE.with_(sink=True, window="5:0"),
        DENSE.with_(head_dim=64, sink=True),
        DENSE.with_(value_dim=8),
        DENSE.with_(seqlen_q=5, mask="causal_lower_right"),
        PACKED,
        PACKED.with_(mask="full"),
        PACKED.with_(window="9:0", sink=True),
        USED,
        USED.with_(page=16),
        USED.with_(page=16, window="9:0", layout="bhsd"),
        USED.with_(page=16, mask="full", seqlen_q=1, sink=True),
        DENSE.with_(batch=3, seqlen_q=1, seqlen_k=40, mask="full", sink=True),
        DENSE.with_(batch=3, seqlen_q=5, seqlen_k=40, mask="causal_lower_right"),
        LATENT,
        LATENT.with_(seqlen_k=70, seqlen_q=2, mask="causal_lower_right"),
    ],
    ids=lambda problem: problem.describe(),
)
def test_it_is_right(problem, monkeypatch):
    monkeypatch.setattr(flashinfer, "WORKSPACE", 1 << 10)  # its zeros take longer than all else
    tensors = make_inputs(problem, 1, "cpu")
    assert peer_call(PEER, problem, tensors, make_answer(problem, tensors))().shape == problem.shape("o")


@pytest.mark.parametrize(
    "problem, words",
    [
        (DENSE, "no flag of SDPA"),
        (DENSE.with_(dtype="fp32", window="9:0"), "fp16 and bf16 only"),
        (DENSE.with_(alibi=True), "FlashInfer has no alibi"),
        (DENSE.with_(sink=True, softcap=3.0), "no softcap beside sinks"),
        (DENSE.with_(mask="full", window="5:2"), "behind the diagonal only"),
        (DENSE.with_(seqlen_k=40, window="9:0"), "another one than this"),
        (LATENT.with_(sink=True), "latent attention is asked for"),
    ],
    ids=str,
)
def test_what_it_has_no_kernel_for_is_said(problem, words):
    with pytest.raises(PeerRefused, match=words):
        PEER.make(problem, make_inputs(problem, 1, "cpu"))
