"""Gradients of `evoattn.attention` by kernels of the backward pass, on the fake device, beside float64."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import evoattn
from evoattn.ops import shapes
from evoattn.ops.runtime import current
from evoattn.ops.torch_answer import NoKernel
from tests.ops.fake_backward import NAME, TrainingDevice, pick_either, training_runtime
from tests.ops.fake_device import Pick, tensors


@pytest.fixture
def device(tmp_path):
    fake = TrainingDevice()
    with current.use(training_runtime(fake, tmp_path)):
        yield fake


def leaves(*given, **words):
    """Tensors that want gradients: q, k and v, and those of the words that are floating."""
    wanted = [tensor.detach().clone().requires_grad_() for tensor in given]
    named = {
        name: w.clone().requires_grad_() if isinstance(w, torch.Tensor) and name in ("bias", "sinks") else w
        for name, w in words.items()
    }
    return wanted, named


def gradients(call, tensors, words, grad, grad_lse=None):
    """Of `call`, a function as `evoattn.attention`."""
    answer = call(*tensors, **words)
    outputs, grads = ([answer], [grad]) if grad_lse is None else (list(answer), [grad, grad_lse])
    inputs = [*tensors, *(w for w in words.values() if isinstance(w, torch.Tensor) and w.requires_grad)]
    return torch.autograd.grad(outputs, inputs, grads)


def in_double(words):
    return {
        name: w.detach().double().requires_grad_(w.requires_grad)
        if isinstance(w, torch.Tensor) and w.is_floating_point()
        else w
        for name, w in words.items()
    }


def require_near(found, expected):
    for one, right in zip(found, expected, strict=True):
        assert one.shape == right.shape
        scale = max(1.0, float(right.abs().max()))
        assert (one.double() - right).abs().max() < 4e-3 * scale


def require_right(given, words, lse=False, call=evoattn.attention):
    """The gradients of a call beside those of the same in float64, which torch computes."""
    q, _, v = given
    generator = torch.Generator().manual_seed(5)
    grad = torch.randn(*q.shape[:-1], v.shape[-1], generator=generator).to(q.dtype)
    grad_lse = torch.randn(q.shape[:-1], generator=generator) if lse else None
    if lse:
        words = words | {"return_lse": True}
    mine, mine_words = leaves(*given, **words)
    found = gradients(call, mine, mine_words | {"strict": True}, grad, grad_lse)
    double = [t.detach().double().requires_grad_() for t in given]
    right = gradients(call, double, in_double(mine_words), grad.double(), grad_lse)
    require_near(found, right)
    for one, tensor in zip(found, mine, strict=False):
        assert one.dtype == tensor.dtype and one.stride() == torch.empty_like(tensor).stride()


VARIANTS = {
    "plain": {},
    "causal": {"is_causal": True},
    "lower right": {"causal": True},
    "scale": {"scale": 0.3},
    "window": {"window": (7, 3)},
    "causal window": {"causal": True, "window": (9, -1)},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.linspace(-1, 2, 4).half()},
    "sinks and rows without keys": {"sinks": torch.linspace(-1, 2, 4).half(), "window": (2, 0)},
    "slopes": {"alibi_slopes": torch.linspace(0.1, 0.5, 4), "causal": True},
    "a bias": {"bias": torch.randn(2, 4, 37, 45, generator=torch.Generator().manual_seed(3)).half()},
    "everything": {
        "bias": torch.randn(2, 4, 37, 45, generator=torch.Generator().manual_seed(3)).half(),
        **dict(sinks=torch.linspace(-1, 2, 4).half(), softcap=4.0, window=(20, 5), scale=0.2),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("name", list(VARIANTS))
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_gradients_are_right(device, layout, name, lse):
    require_right(tensors(layout=layout), {"enable_gqa": True, **VARIANTS[name]}, lse)
    assert len(device.backwards) == 1


def test_a_log_sum_exp_that_nothing_follows_from_has_no_gradient_to_read(device):
    """Kernels that were planned for one would read at address 0."""
    mine, _ = leaves(*tensors())
    out, _ = evoattn.attention(*mine, enable_gqa=True, return_lse=True, strict=True)
    torch.autograd.grad(out, mine, torch.ones_like(out))
    assert [one["lse"] for one in device.backwards] == [False]


@pytest.mark.parametrize(
    "shape", [(45,), (37, 45), (1, 45), (4, 37, 1), (4, 1, 1), (2, 1, 37, 45), (1, 4, 1, 45)], ids=str
)
def test_a_bias_gets_a_gradient_of_its_own_shape(device, shape):
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(3)).half()
    require_right(tensors(), {"enable_gqa": True, "bias": bias})
    assert len(device.backwards) == 1 and device.backwards[0]["grads"] == "bias"


def test_a_mask_tensor_that_is_learned(device):
    mask = torch.randn(4, 37, 45, generator=torch.Generator().manual_seed(3)).half()
    (q, k, v), mask = leaves(*tensors())[0], mask.requires_grad_()
    evoattn.attention(q, k, v, mask, enable_gqa=True).float().square().sum().backward()
    d, m = [t.detach().double().requires_grad_() for t in (q, k, v)], mask.detach().double().requires_grad_()
    F.scaled_dot_product_attention(*d, m, enable_gqa=True).square().sum().backward()
    require_near([q.grad, k.grad, v.grad, mask.grad], [*(t.grad for t in d), m.grad])
    assert len(device.backwards) == 1


def test_a_head_dim_of_value(device):
    q, k, v = tensors()
    require_right((q, k, v[..., :32]), {"enable_gqa": True}, lse=True)
    assert len(device.backwards) == 1


def test_a_value_within_key_has_a_gradient_of_its_own(device):
    q, k, _ = tensors()
    (q, k), _ = leaves(q, k)
    evoattn.attention(q, k, k[..., :32], enable_gqa=True, strict=True).float().square().sum().backward()
    a, b = q.detach().double().requires_grad_(), k.detach().double().requires_grad_()
    F.scaled_dot_product_attention(a, b, b[..., :32], enable_gqa=True).square().sum().backward()
    require_near([q.grad, k.grad], [a.grad, b.grad])
    assert len(device.backwards) == 1


def grads_of_answer():
    yield "of a sum", lambda out: torch.ones((), dtype=out.dtype).expand(out.shape)
    yield "in other order", lambda out: torch.randn(2, 37, 4, 64).half().transpose(1, 2)
    yield "of columns apart", lambda out: torch.randn(*out.shape, 2).half()[..., 0]
    yield "at an odd address", lambda out: torch.randn(out.numel() + 1).half()[1:].view(out.shape)
    yield "negated", lambda out: torch._neg_view(torch.randn(out.shape).half())


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in grads_of_answer()])
def test_the_gradient_of_the_answer_may_lie_anyhow(device, make):
    mine, _ = leaves(*tensors())
    out = evoattn.attention(*mine, enable_gqa=True)
    grad = make(out)
    double = [t.detach().double().requires_grad_() for t in mine]
    right = torch.autograd.grad(F.scaled_dot_product_attention(*double, enable_gqa=True), double, grad.double())
    require_near(torch.autograd.grad(out, mine, grad), right)
    assert len(device.backwards) == 1


def test_packed_qkv(device):
    """As models split one projection: strides of three times the rows."""
    packed = torch.randn(2, 33, 3, 4, 64, generator=torch.Generator().manual_seed(1)).half().requires_grad_()
    double = packed.detach().double().requires_grad_()
    for one, attend in ((packed, evoattn.attention), (double, F.scaled_dot_product_attention)):
        q, k, v = (one[:, :, i].transpose(1, 2) for i in range(3))
        attend(q, k, v, is_causal=True).double().square().sum().backward()
    require_near([packed.grad], [double.grad])
    assert len(device.backwards) == 1


@pytest.mark.slow
@pytest.mark.parametrize("words", [{}, {"causal": True}, {"window": (5, 2)}, {"sinks": torch.ones(4).half()}], ids=str)
@pytest.mark.parametrize("lse", [False, True], ids=["", "lse"])
def test_packed_sequences(device, words, lse):
    starts_q, starts_k = (torch.tensor(s, dtype=torch.int32) for s in ([0, 5, 5, 30], [0, 9, 20, 41]))
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, h, 64, generator=generator).half() for n, h in ((30, 4), (41, 2), (41, 2)))

    def call(q, k, v, **words):
        answer = evoattn.attention_varlen(q, k, v, starts_q, starts_k, 25, 21, **words)
        return answer if not lse else (answer[0], answer[1].t())

    require_right((q, k, v), words, lse, call)
    assert len(device.backwards) == 1


def halves_by_lse(q, k, v, **words):
    """Attention over two halves of the keys, merged by their log-sum-exps, as ring attention does."""
    parts = [
        evoattn.attention(q, k[:, :, half], v[:, :, half], return_lse=True, **words)
        for half in (slice(0, 24), slice(24, 45))
    ]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    return sum((out * torch.exp(one - lse)[..., None].to(out.dtype)).to(out.dtype) for out, one in parts)


def test_halves_merged_by_their_log_sum_exps_have_the_gradients_of_the_whole(device):
    mine, _ = leaves(*tensors())
    halves_by_lse(*mine, enable_gqa=True, strict=True).float().square().sum().backward()
    double = [t.detach().double().requires_grad_() for t in mine]
    F.scaled_dot_product_attention(*double, enable_gqa=True).square().sum().backward()
    require_near([t.grad for t in mine], [t.grad for t in double])
    assert len(device.backwards) == 2 and all(kernel["lse"] for kernel in device.backwards)


def test_the_log_sum_exp_alone_is_differentiable(device):
    mine, _ = leaves(*tensors())
    evoattn.attention(*mine, enable_gqa=True, return_lse=True)[1].square().sum().backward()
    q, k, _ = (t.detach().double().requires_grad_() for t in mine)
    torch.logsumexp(q @ k.repeat_interleave(2, 1).mT / 8, -1).square().sum().backward()
    require_near([mine[0].grad, mine[1].grad], [q.grad, k.grad])
    assert not mine[2].grad.any()


def test_one_frozen_input(device):
    q, k, v = tensors()
    q.requires_grad_()
    evoattn.attention(q, k, v, enable_gqa=True, strict=True).sum().backward()
    assert q.grad is not None and k.grad is None and len(device.backwards) == 1


FALLBACKS = {
    name: words
    for name, words in VARIANTS.items()
    if name in ("plain", "lower right", "softcap", "everything", "slopes")
}


@pytest.mark.slow
@pytest.mark.parametrize("lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("name", list(FALLBACKS))
def test_a_backward_pass_that_cannot_be_launched_is_torchs(device, name, lse):
    """After a kernel has answered; the next call is torch's altogether."""
    words = {"enable_gqa": True, **FALLBACKS[name]}
    evoattn.attention(*tensors(), **words, return_lse=True, strict=True)
    before, device.backward_status = len(device.launches), 701
    with pytest.warns(RuntimeWarning, match="fake error 701"):
        require_right(tensors(), words, lse)
    assert not device.backwards and len(device.launches) == before + 1
    mine, mine_words = leaves(*tensors(), **words)
    evoattn.attention(*mine, **mine_words, return_lse=lse)
    assert len(device.launches) == before + 1
    assert "fake error 701" in evoattn.explain(*mine, **mine_words, return_lse=lse)


def test_packed_sequences_whose_backward_pass_cannot_be_launched(device):
    device.backward_status = 701
    starts = torch.tensor([0, 5, 5, 30], dtype=torch.int32)
    q, k, v = (torch.randn(30, h, 64, generator=torch.Generator().manual_seed(1)).half() for h in (4, 2, 2))
    with pytest.warns(RuntimeWarning, match="fake error 701"):
        require_right(
            (q, k, v), {}, False, lambda q, k, v, **w: evoattn.attention_varlen(q, k, v, starts, starts, 25, 25, **w)
        )


def test_rows_are_made_some_at_a_time():
    from evoattn.ops.call import Call
    from evoattn.ops.gradients import Backward, by_rows

    q, k, v = (t.double() for t in tensors())
    call = Call(q, k, v, enable_gqa=True, softcap=2.0, mask="causal_lower_right")
    call.out, lse = evoattn.attention(q, k, v, enable_gqa=True, softcap=2.0, causal=True, return_lse=True)
    given = Backward(call, lse.double(), torch.randn_like(q), torch.randn(q.shape[:3]), ())
    whole, parts = by_rows(given), by_rows(given, 2 * 4 * 45 * 5)
    for one, other in zip(whole[:3], parts[:3], strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_by_the_formula_are_those_of_autograd():
    from evoattn.integrations import by_hand
    from evoattn.ops.call import Call
    from evoattn.ops.gradients import Backward, by_rows

    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    exact = [one.double().requires_grad_() for one in (*tensors(), sinks)]
    q, k, v, sinks = (one.detach() for one in exact)
    rows, keys = q.shape[2], k.shape[2]
    call = Call(q, k, v, enable_gqa=True, softcap=2.0, mask="causal_lower_right", terms=(sinks, *[None] * 8))
    words = dict(enable_gqa=True, softcap=2.0, causal=True, sinks=sinks)
    call.out, lse = evoattn.attention(q, k, v, return_lse=True, **words)
    grad = torch.randn(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(5))
    seen = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    by_hand.attention(*exact[:3], seen, 0.0, None, True, 2.0, exact[3]).transpose(1, 2).backward(grad)
    made = by_rows(Backward(call, lse.double(), grad, None, ("sinks",)))
    found = [one for one in made if one is not None]
    assert len(found) == 4
    for one, leaf in zip(found, exact, strict=True):
        torch.testing.assert_close(one, leaf.grad, atol=1e-6, rtol=1e-5)


def test_gradients_that_no_kernel_computes_are_torchs(device):
    (q, k, v), _ = leaves(*tensors())
    slopes = torch.ones(4, requires_grad=True)
    with pytest.raises(NoKernel, match="gradients are wanted, and kernels compute none of alibi_slopes"):
        evoattn.attention(q, k, v, enable_gqa=True, alibi_slopes=slopes, strict=True)
    evoattn.attention(q, k, v, enable_gqa=True, alibi_slopes=slopes).sum().backward()
    assert slopes.grad is not None and not device.launches


def test_a_head_dim_that_no_backward_kernel_serves(device):
    mine, _ = leaves(*tensors(head_dim=192))
    evoattn.attention(*mine, enable_gqa=True).sum().backward()
    assert not device.launches, "torch computes both passes"
    said = evoattn.explain(*mine, enable_gqa=True)
    assert "SDPA runs: gradients are wanted, and" in said and "at most 128" in said


def test_without_gradients_nothing_changes(device):
    mine, _ = leaves(*tensors())
    with torch.no_grad():
        evoattn.attention(*mine, enable_gqa=True, strict=True)
    assert device._modules[0]["lse"] is False and len(device._modules) == 1


def test_explain_says_both_kernels(device):
    mine, _ = leaves(*tensors())
    said = evoattn.explain(*mine, enable_gqa=True)
    assert said.startswith("flash_wgmma") and f"; for the gradients {NAME}" in said
    assert not device.loads


def test_twice_is_one_clear_error(device):
    mine, _ = leaves(*tensors())
    out = evoattn.attention(*mine, enable_gqa=True)
    (first,) = torch.autograd.grad(out.float().square().sum(), mine[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="evoattn's backward pass has no derivative"):
        first.sum().backward()


def test_twice_is_an_error_where_a_bias_alone_is_learned(device):
    """Autograd would take its gradient for one that does not depend on it."""
    bias = torch.randn(4, 37, 45).half().requires_grad_()
    out = evoattn.attention(*tensors(), enable_gqa=True, bias=bias)
    (first,) = torch.autograd.grad(out.float().sum(), bias, create_graph=True)
    assert device.backwards
    with pytest.raises(RuntimeError, match="evoattn's backward pass has no derivative"):
        (first.sum() + bias.sum()).backward()


@pytest.fixture
def sometimes(tmp_path):
    """Kernels that add in any order."""

    def pick(problem, gpu):
        found = pick_either(problem, gpu)
        if found and found.family == NAME:
            return Pick(NAME, type(found.config)(NAME, {"DETERMINISTIC": False}))
        return found

    fake = TrainingDevice()
    with current.use(training_runtime(fake, tmp_path, pick)):
        yield fake


@pytest.mark.parametrize("by", ["argument", "torch"])
def test_deterministic_gradients_need_a_kernel_that_promises_them(device, sometimes, by, tmp_path):
    mine, _ = leaves(*tensors())
    words = {"enable_gqa": True, "deterministic": by == "argument"}
    torch.use_deterministic_algorithms(by == "torch")
    try:
        with pytest.raises(NoKernel, match="adds in any order"):
            evoattn.attention(*mine, **words, strict=True)
        evoattn.attention(*mine, **words).sum().backward()
        assert not sometimes.launches
        with current.use(training_runtime(device, tmp_path)):
            evoattn.attention(*mine, **words, strict=True).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert device.backwards[0]["deterministic"]
    evoattn.attention(*mine, enable_gqa=True, strict=True).sum().backward()
    assert not sometimes.backwards[-1]["deterministic"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(device, reentrant):
    mine, _ = leaves(*tensors())
    out = checkpoint(
        lambda *three: evoattn.attention(*three, enable_gqa=True, strict=True), *mine, use_reentrant=reentrant
    )
    out.float().square().sum().backward()
    double = [t.detach().double().requires_grad_() for t in mine]
    F.scaled_dot_product_attention(*double, enable_gqa=True).square().sum().backward()
    require_near([t.grad for t in mine], [t.grad for t in double])
    assert len(device.backwards) == 1


def test_what_is_saved_can_be_packed_away(device):
    """Nothing but `save_for_backward` holds a tensor until the backward pass."""
    mine, _ = leaves(*tensors())
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        out = evoattn.attention(*mine, enable_gqa=True)
    assert len(packed) == 5
    ctx = out.grad_fn
    assert ctx.plans.words.query is None and ctx.plans.words.out is None
    out.sum().backward()
    assert mine[0].grad is not None


def test_an_answer_that_was_changed_raises(device):
    mine, _ = leaves(*tensors())
    out = evoattn.attention(*mine, enable_gqa=True)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_autocast(device):
    given = [t.float() for t in tensors()]
    mine = [t.clone().requires_grad_() for t in given]
    with torch.autocast("cpu", dtype=torch.float16):
        evoattn.attention(*mine, enable_gqa=True, strict=True).float().square().sum().backward()
    double = [t.double().requires_grad_() for t in given]
    F.scaled_dot_product_attention(*double, enable_gqa=True).square().sum().backward()
    require_near([t.grad for t in mine], [t.grad for t in double])
    assert mine[0].grad.dtype == torch.float32 and len(device.backwards) == 1


@pytest.mark.parametrize("everywhere", [False, True])
def test_behind_sdpa(device, everywhere):
    mine, _ = leaves(*tensors(kv_heads=4))
    if everywhere:
        evoattn.enable()
    try:
        with evoattn.sdpa():
            F.scaled_dot_product_attention(*mine, is_causal=True).sum().backward()
    finally:
        evoattn.disable()
    assert len(device.backwards) == 1


def test_a_batch_of_gradients_is_torchs(device):
    """`is_grads_batched` runs the backward pass under vmap."""
    mine, _ = leaves(*tensors(seqlen_q=5, seqlen_k=6))
    out = evoattn.attention(*mine, enable_gqa=True, strict=True)
    several = torch.randn(2, *out.shape).half()
    found = torch.autograd.grad(out, mine, several, is_grads_batched=True, retain_graph=True)
    for i in range(2):
        right = torch.autograd.grad(out, mine, several[i], retain_graph=True)
        require_near([t[i] for t in found], [t.double() for t in right])


def test_a_second_call_of_a_kind_decides_nothing(device):
    runtime = current.runtime()
    for _ in range(2):
        mine, _ = leaves(*tensors())
        evoattn.attention(*mine, enable_gqa=True).sum().backward()
        kept = dict(runtime.plans), dict(runtime._trainings)
    assert (runtime.plans, runtime._trainings) == kept and device.loads == 2
    evoattn.attention(*mine, enable_gqa=True, scale=0.2).sum().backward()
    assert device.loads == 2 and len(runtime._trainings) > len(kept[1])


@pytest.mark.parametrize("changed", ["", "the layout", "the address", "the switch", "a failure"])
def test_the_plan_of_the_forward_pass_is_for_gradients_like_its_answer(device, changed):
    mine, _ = leaves(*tensors())
    out = evoattn.attention(*mine, enable_gqa=True, strict=True)
    grad = torch.randn_like(out)
    if changed == "the layout":
        grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    if changed == "the address":
        grad = torch.cat([grad.flatten()[:1], grad.flatten()])[1:].view(out.shape)
    if changed == "a failure":
        for plans in current.runtime()._trainings.values():
            plans.backward.kernel.failure = "it failed"
    torch.use_deterministic_algorithms(changed == "the switch")
    try:
        found = torch.autograd.grad(out, mine, grad)
    finally:
        torch.use_deterministic_algorithms(False)
    double = [t.detach().double().requires_grad_() for t in mine]
    require_near(found, gradients(evoattn.attention, double, {"enable_gqa": True}, grad.double()))
    assert len(device.backwards) == (0 if changed == "a failure" else 1)
    assert changed != "the switch" or device.backwards[0]["deterministic"]


def test_a_capture_that_meets_a_cold_kernel_is_torchs(device):
    mine, _ = leaves(*tensors())
    device.is_capturing = True
    with pytest.warns(RuntimeWarning, match="a CUDA graph is being captured"):
        evoattn.attention(*mine, enable_gqa=True).sum().backward()
    device.is_capturing = False
    evoattn.attention(*mine, enable_gqa=True, strict=True).sum().backward()
    device.is_capturing = True
    evoattn.attention(*mine, enable_gqa=True, strict=True).sum().backward()
    assert len(device.backwards) == 2


def test_warmup_loads_what_training_needs(device):
    problem = evoattn.AttentionProblem(2, 4, 2, 37, 45, 64, lse=True)
    said = evoattn.warmup([problem, problem.with_(lse=False, op="backward")])
    assert NAME in said[1] and device.loads == 2
    device.is_capturing = True
    mine, _ = leaves(*tensors())
    evoattn.attention(*mine, enable_gqa=True, strict=True).sum().backward()
    assert device.loads == 2 and len(device.backwards) == 1


def test_capture_records_both_passes(device):
    with evoattn.capture() as recorded:
        for words in ({}, {"return_lse": True}, {"deterministic": True}):
            mine, _ = leaves(*tensors())
            evoattn.attention(*mine, enable_gqa=True, **words)
        sinks = torch.ones(4).half().requires_grad_()
        evoattn.attention(*tensors(), enable_gqa=True, sinks=sinks)
        F.scaled_dot_product_attention(*mine, enable_gqa=True)
        evoattn.attention(*mine, enable_gqa=True, alibi_slopes=torch.ones(4, requires_grad=True))
    forward = evoattn.AttentionProblem(2, 4, 2, 37, 45, 64, lse=True)
    backward = forward.with_(op="backward", lse=False)
    counts = {entry.problem: entry.count for entry in recorded.entries}
    assert counts == {
        forward: 4,
        backward: 2,
        backward.with_(lse=True): 1,
        backward.with_(deterministic=True): 1,
        forward.with_(sink=True): 1,
        backward.with_(sink=True, grads="sinks"): 1,
    }
    assert recorded.missed == {"gradients are wanted, and kernels compute none of alibi_slopes": 1}


def test_autograd_tells_when_a_backward_pass_begins_and_ends():
    q, k, v = (t.float().requires_grad_() for t in tensors(kv_heads=4))
    told = []
    for _ in range(2):
        out = F.scaled_dot_product_attention(q, k, v)
        shapes.watch(out, q, lambda: told.append("begin"), lambda: told.append("end"))
        assert not told[2:]
        out.sum().backward()
    assert told == ["begin", "end"] * 2
    q.sum().backward()
    assert len(told) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [{}, {"return_lse": True}, {"sinks": torch.ones(4).half()}, {"softcap": 3.0}], ids=str
)
def test_a_backward_kernel_is_checked_at_its_first_use(tmp_path, words):
    """By the proof of its operation; where it is wrong, torch computes both passes from then on."""
    for error in (0.0, 0.5):
        fake = TrainingDevice()
        fake.backward_error = error
        with current.use(training_runtime(fake, tmp_path / str(error), checked=False)), warnings.catch_warnings():
            warnings.simplefilter("ignore" if error else "error", RuntimeWarning)
            mine, mine_words = leaves(*tensors(), **words)
            evoattn.attention(*mine, enable_gqa=True, **mine_words)
            assert len(fake.backwards) >= 1
            mine, mine_words = leaves(*tensors(), **words)
            said = evoattn.explain(*mine, enable_gqa=True, **mine_words)
            assert ("failed its check" in said) == bool(error)


def test_functions_of_flash_attention_have_gradients_by_kernels(device):
    from evoattn.flash_attn import flash_attn_func

    mine, _ = leaves(*(t.transpose(1, 2).contiguous() for t in tensors()))
    flash_attn_func(*mine, causal=True, deterministic=True).float().square().sum().backward()
    double = [t.detach().double().transpose(1, 2).requires_grad_() for t in mine]
    evoattn.attention(*double, causal=True, enable_gqa=True).square().sum().backward()
    require_near([t.grad.transpose(1, 2) for t in mine], [t.grad for t in double])
    assert device.backwards[0]["deterministic"]
