"""`batch_invariant`: the argument and `evoattn.enable` reach the choice of a kernel on every way, and torch never
answers in its place."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import evoattn
from evoattn import NoKernel
from evoattn.families import registry
from evoattn.model.problem import AttentionProblem
from evoattn.ops.call import Call
from evoattn.ops.runtime import current
from evoattn.ops.torch_answer import PROMISE
from evoattn.portfolio.pick import lasting_pick, pick
from tests.ops.fake_backward import TrainingDevice, pick_either, training_runtime
from tests.ops.fake_device import FakeDevice, fake_runtime, near

WORDS = dict(batch_invariant=True)


def tensors(rows: int = 40, keys: int = 70) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, 2, length, 64, dtype=torch.float16) for length in (rows, keys, keys))


@pytest.fixture
def asked(tmp_path):
    """The problems of which a kernel was picked, on a fake device."""
    problems: list[AttentionProblem] = []

    def picked(problem, gpu):
        problems.append(problem)
        return lasting_pick(problem, gpu)

    with current.use(fake_runtime(FakeDevice(), tmp_path, picked)):
        yield problems


@pytest.fixture
def everywhere(asked):
    evoattn.enable(batch_invariant=True)
    try:
        yield asked
    finally:
        evoattn.disable()


@pytest.mark.slow
def test_the_argument_picks_by_the_recipe(asked):
    q, k, v = tensors()
    out = evoattn.attention(q, k, v, causal=True, **WORDS)
    assert near(out, evoattn.attention(q, k, v, causal=True))
    assert [problem.batch_invariant for problem in asked] == [True, False]
    assert "the same bits in every batch" in evoattn.explain(q, k, v, causal=True, **WORDS)
    assert "the same bits" not in evoattn.explain(q, k, v, causal=True)


def test_packed_and_paged_calls_have_the_argument(tmp_path):
    problems: list[AttentionProblem] = []
    q, k, v = (x[0].transpose(0, 1) for x in tensors())
    starts = torch.tensor([0, 40], dtype=torch.int32), torch.tensor([0, 70], dtype=torch.int32)
    pages = torch.randn(8, 16, 2, 64, dtype=torch.float16)
    table, used = torch.arange(8, dtype=torch.int32)[None], torch.tensor([100], dtype=torch.int32)
    with current.use(fake_runtime(FakeDevice(), tmp_path, lambda problem, gpu: problems.append(problem))):
        with pytest.raises(NoKernel):
            evoattn.attention_varlen(q, k, v, *starts, 40, 70, causal=True, batch_invariant=True)
        with pytest.raises(NoKernel):
            evoattn.attention_paged(q[None, :1], pages, pages.clone(), table, used, batch_invariant=True)
    assert [(bool(p.varlen), bool(p.page), p.batch_invariant) for p in problems] == [
        (True, False, True),
        (False, True, True),
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dropout_p": 0.5}, "dropout"),
        ({"scale": -1.0}, "scale"),
        ({"attn_mask": torch.zeros(40, 70)}, "mask"),  # float32 beside fp16
    ],
)
def test_torch_never_answers(asked, change, reason):
    with pytest.raises(NoKernel, match=reason):
        evoattn.attention(*tensors(), **WORDS, **change)
    if "scale" not in change:
        assert "NoKernel is raised" in evoattn.explain(*tensors(), **WORDS, **change)


def test_what_no_family_promises_is_refused(asked):
    wide = [torch.randn(1, 2, 40, 512, dtype=torch.float16) for _ in range(3)]
    with pytest.raises(NoKernel, match="batch_invariant"):
        evoattn.attention(*wide, batch_invariant=True)


@pytest.mark.slow
def test_enable_holds_for_every_call_until_disable(everywhere):
    q, k, v = tensors()
    out = evoattn.attention(q, k, v)
    assert near(F.scaled_dot_product_attention(q, k, v), out)
    mask = torch.randint(0, 2, (40, 70), dtype=torch.bool)
    mask[:, 0] = True
    F.scaled_dot_product_attention(q, k, v, mask)
    assert len(everywhere) >= 2 and all(problem.batch_invariant for problem in everywhere)
    assert any(problem.bias for problem in everywhere)
    with pytest.raises(NoKernel, match="dropout"):
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
    with pytest.raises(NoKernel):
        F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    evoattn.disable()
    assert not PROMISE.everywhere
    F.scaled_dot_product_attention(q.double(), k.double(), v.double())


def test_compiled_calls_keep_the_argument():
    from evoattn.ops import custom_op

    for words in ({}, {"window": (5, -1)}):
        for flags in ((False, True), (True, False), (True, True)):
            call = Call(*tensors(), deterministic=flags[0], batch_invariant=flags[1], **words)
            again = custom_op._call(*custom_op.operands(call))
            assert (again.deterministic, again.batch_invariant) == flags


def test_an_estimated_kernel_runs_without_a_race(asked):
    """Of head_dim 40 nothing was timed: without the promise torch would be asked, or raced."""
    narrow = [torch.randn(1, 2, 40, 40, dtype=torch.float16) for _ in range(3)]
    evoattn.attention(*narrow, batch_invariant=True)
    problem = asked[-1]
    found = pick(problem, current.runtime().platform.spec(0))
    assert found.estimated and registry.lookup(found.family).row_bits(problem, found.config)


def test_training_takes_the_recipe_and_deterministic_gradients(tmp_path):
    """The forward kernel is that of a call that asks for the log-sum-exp, and what was not timed runs, too."""
    problems: list[AttentionProblem] = []

    def picked(problem, gpu):
        problems.append(problem)
        if problem.op == "forward":
            return lasting_pick(problem, gpu)
        return replace(pick_either(problem, gpu), estimated=True)

    fake = TrainingDevice()
    with current.use(training_runtime(fake, tmp_path, picked)):
        leaves = [x.requires_grad_() for x in tensors()]
        evoattn.attention(*leaves, batch_invariant=True).sum().backward()
    asked = {(p.op, p.lse, p.batch_invariant, p.deterministic) for p in problems}
    assert asked == {("forward", True, True, False), ("backward", False, False, True)}
    assert fake.backwards and all(leaf.grad is not None for leaf in leaves)
