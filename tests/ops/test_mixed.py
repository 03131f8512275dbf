"""Packed queries over pages by `evoattn.attention_mixed`: torch's answer and a kernel's are those of each sequence
alone, and batches of other sizes find the plan that is there."""

import itertools

import pytest
import torch

import evoattn
from evoattn.correctness.reference import exact_attention, exact_lse
from evoattn.model.problem import AttentionProblem
from evoattn.ops.runtime import current
from evoattn.ops.torch_answer import NoKernel
from tests.ops.fake_device import CacheDevice, fake_runtime, split_kv_pick

HEADS, KV_HEADS, DIM, PAGE, PAGES, MOST = 4, 2, 64, 16, 5, 18
BATCHES = {
    "decodes, then prompts": ([1, 1, 1, 40, 7], [80, 0, 33, 77, 7]),
    "drafts of several lengths": ([3, 0, 2, 30], [50, 9, 1, 30]),
    "decodes alone": ([1, 1, 1], [5, 80, 17]),
    "a prompt alone": ([23], [64]),
}


class Batch:
    """Queries of these lengths over so many keys each, in pages in random order."""

    def __init__(self, queries, used, seed=1, rows_behind=0):
        draw = torch.Generator().manual_seed(seed)
        self.queries, self.used = queries, used
        self.starts = [0, *itertools.accumulate(queries)]
        total = self.starts[-1] + rows_behind
        self.q = torch.randn(total, HEADS, DIM, generator=draw).half()
        self.pages = [torch.randn(PAGES * MOST, PAGE, KV_HEADS, DIM, generator=draw).half() for _ in "kv"]
        self.table = torch.randperm(PAGES * MOST, generator=draw).view(-1, PAGES)[: len(used)].int()
        for b, keys in enumerate(used):
            self.table[b, -(-keys // PAGE) :] = 999  # no page

    def asked(self, **words):
        table = self.table.clamp(max=len(self.pages[0]) - 1)
        lengths = torch.tensor(self.used).int(), torch.tensor(self.starts).int()
        words = {"causal": True} | words
        return evoattn.attention_mixed(self.q, *self.pages, table, *lengths, max(self.queries), **words)

    def expected(self, b, **fields):
        """(output, log-sum-exp) of a sequence, `[heads, queries, …]`."""
        rows = self.queries[b], self.used[b]
        shape = dict(seqlen_q=rows[0], seqlen_k=rows[1], head_dim=DIM, mask="causal_lower_right")
        problem = AttentionProblem(1, HEADS, KV_HEADS, **shape, **fields)
        q = self.q[self.starts[b] : self.starts[b + 1]].transpose(0, 1)[None]
        k, v = (t[self.table[b, : -(-rows[1] // PAGE)].long()].flatten(0, 1)[: rows[1]].transpose(0, 1)[None]
                for t in self.pages)  # fmt: skip
        return exact_attention(problem, q, k, v, torch.float64)[0], exact_lse(problem, q, k)[0]

    def check(self, answer, lse=None, **fields):
        for b, (queries, used) in enumerate(zip(self.queries, self.used, strict=True)):
            some = slice(self.starts[b], self.starts[b + 1])
            if not queries:
                continue
            if not used:
                assert not answer[some].any()
                continue
            out, sums = self.expected(b, **fields)
            assert torch.allclose(answer[some].transpose(0, 1).double(), out, atol=2e-3)
            if lse is not None:
                assert torch.allclose(lse[:, some].double(), sums, atol=1e-3)


@pytest.fixture
def device(tmp_path):
    fake = CacheDevice()
    with current.use(fake_runtime(fake, tmp_path, split_kv_pick)):
        yield fake


@pytest.mark.parametrize("name", BATCHES)
def test_torch_s_answer(name):
    batch = Batch(*BATCHES[name])
    batch.check(*batch.asked(return_lse=True))
    taken = torch.empty_like(batch.q)
    assert batch.asked(out=taken, window=(20, 0)) is taken
    batch.check(taken, window="20:0")


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("behind", [0, 9])
def test_a_kernel_answers_in_one_launch(device, name, behind):
    batch = Batch(*BATCHES[name], rows_behind=behind)
    batch.check(batch.asked(strict=True))
    device.launches.clear()
    taken = torch.empty_like(batch.q)
    assert batch.asked(strict=True, out=taken) is taken
    assert len(device.launches) == 1
    batch.check(taken)


def test_a_call_like_one_before_is_only_launched(device):
    """Without a `Call`: of queries in one piece, of a third of fused rows, and of heads that lie behind one another."""
    batch, runtime, calls = Batch(*BATCHES["decodes, then prompts"]), current.runtime(), []
    attend = runtime.attend
    runtime.attend = lambda call: calls.append(call) or attend(call)
    whole, fused = batch.q, torch.cat([batch.q] * 3, 2)[..., :DIM]
    for batch.q in (whole, fused, whole.transpose(0, 1).contiguous().transpose(0, 1)):
        for words in ({}, {"out": torch.empty(whole.shape, dtype=whole.dtype)}):
            for known in (False, True):
                calls.clear()
                batch.check(batch.asked(strict=True, **words))
                assert len(calls) == (not known)
    calls.clear()
    expected, taken = batch.asked(), batch.q.clone()
    assert not calls
    with torch.enable_grad():
        batch.q.requires_grad_()
        batch.check(batch.asked().detach())
    batch.q = taken  # which the answer takes the place of
    assert torch.equal(batch.asked(out=taken), expected) and len(calls) == 2


def test_batches_of_other_sizes_find_the_plan(device):
    """17 and 18 sequences, 43 and 44 rows, the longest of 27 and 28: sizes that round to the same."""
    batches = [Batch([1] * 16 + [27 + more], [30] * 17, more) for more in range(2)]
    batches.append(Batch([1] * 16 + [27, 1], [30 - i for i in range(18)]))
    batches[0].check(batches[0].asked(strict=True))
    known = dict(current.runtime().plans)
    for batch in batches[1:]:
        batch.check(batch.asked(strict=True))
    assert current.runtime().plans == known
    Batch([1] * 16 + [60], [70] * 17).asked(strict=True)
    assert len(current.runtime().plans) > len(known)


@pytest.mark.slow
def test_compiled_code_calls_one_op(device):
    batch = Batch(*BATCHES["decodes, then prompts"])
    compiled = torch.compile(lambda: batch.asked(), backend="eager", fullgraph=True)
    with current.use(current.runtime()):
        batch.check(compiled())
    assert device.launches


def test_what_does_not_fit_is_one_sentence(device):
    batch = Batch([1, 1, 9], [9, 9, 9])
    for words, said in (
        ({"causal": "upper_left"}, "lower right one"),
        ({"sinks": torch.zeros(3)}, "sinks must have one value"),
    ):
        with pytest.raises(ValueError, match=said):
            batch.asked(**words)
    batch.asked(out=torch.empty_like(batch.q))
    for rows in (10, 12):  # a plan that is known does not hide it
        with pytest.raises(ValueError, match="out must be"):
            batch.asked(out=torch.empty_like(torch.cat((batch.q, batch.q)))[:rows])
    with pytest.raises(ValueError, match="out cannot be given where gradients are wanted"):
        batch.asked(out=torch.empty_like(batch.q).requires_grad_())
    batch.asked()
    batch.used = [9, 9]
    with pytest.raises(ValueError, match="seqused_k must be int32"):
        batch.asked()
    batch.used, batch.pages = [9, 9, 9], [t.float() for t in batch.pages]
    with pytest.raises(NoKernel):
        batch.asked(strict=True)


@pytest.mark.parametrize("sinks", [False, True])
def test_a_shared_prefix_is_computed_once_and_merged(sinks):
    """The recipe of docs/serves.md: the prefix as one sequence of all queries, what follows in pages, then one sum."""
    batch, prefix = Batch([1, 1, 1, 40, 7], [20, 5, 33, 77, 7]), 48
    draw = torch.Generator().manual_seed(5)
    k, v = (torch.randn(prefix, KV_HEADS, DIM, generator=draw).half() for _ in "kv")
    given = {"sinks": torch.randn(HEADS, generator=draw).half()} if sinks else {}
    q = batch.q.transpose(0, 1)[None]
    words = dict(enable_gqa=True, return_lse=True)
    before, sums = evoattn.attention(q, k.transpose(0, 1)[None], v.transpose(0, 1)[None], **words)
    behind, others = batch.asked(return_lse=True, **given)
    outputs = torch.stack((before[0].transpose(0, 1), behind)).float()
    merged, _ = evoattn.flash_attn.flash_attn_combine(outputs, torch.stack((sums[0].T, others.T)))
    for b, keys in enumerate(batch.used):
        some = slice(batch.starts[b], batch.starts[b + 1])
        pages = batch.table[b, : -(-keys // PAGE)].long()
        whole = [torch.cat((part, t[pages].flatten(0, 1)[:keys])) for part, t in zip((k, v), batch.pages, strict=True)]
        problem = AttentionProblem(
            1, HEADS, KV_HEADS, batch.queries[b], prefix + keys, DIM, mask="causal_lower_right", sink=sinks
        )
        tensors = [t.transpose(0, 1)[None] for t in (batch.q[some], *whole)]
        expected = exact_attention(problem, *tensors, torch.float64, others=given)[0].transpose(0, 1)
        assert torch.allclose(merged[some].double(), expected, atol=3e-3)
