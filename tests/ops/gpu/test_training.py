"""Gradients by kernels on a GPU: right beside float64, the same where that is promised, in graphs, on streams, in
compiled code and with checkpoints."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import evoattn
from evoattn.ops import torch_answer
from evoattn.ops.given import call_of
from evoattn.ops.runtime import Runtime
from tests.ops.gpu.gpu_problems import ON_A_GPU

pytestmark = ON_A_GPU
SHAPE = dict(batch=2, heads=4, kv_heads=4, rows=300, keys=300, dim=64, dim_v=0, layout="bhsd", dtype=torch.float16)
LLAMA = dict(batch=2, heads=8, kv_heads=2, rows=512, keys=512, dim=128, layout="bshd", dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def with_gradients(runtime):
    with torch.enable_grad():
        yield


def made(seed=1, **shape):
    """q, k and v that want gradients, `SHAPE` but for what is given."""
    has = SHAPE | shape
    generator = torch.Generator("cuda").manual_seed(seed)

    def one(heads, rows, dim):
        bshd = has["layout"] == "bshd"
        sizes = (has["batch"], rows, heads, dim) if bshd else (has["batch"], heads, rows, dim)
        tensor = torch.randn(sizes, generator=generator, device="cuda").to(has["dtype"])
        return (tensor.transpose(1, 2) if bshd else tensor).requires_grad_()

    keys = has["kv_heads"], has["keys"]
    return one(has["heads"], has["rows"], has["dim"]), one(*keys, has["dim"]), one(*keys, has["dim_v"] or has["dim"])


def numbers(*shape, seed=7):
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def changed(words, change):
    """The words with tensors changed that want gradients."""
    return {name: change(w).detach().requires_grad_() if name in ("bias", "sinks") else w for name, w in words.items()}


def gradients(attend, tensors, words, grads):
    """Of `attend`, and its answer."""
    answer = attend(*tensors, **words)
    outputs = (answer,) if isinstance(answer, torch.Tensor) else answer
    grads = [grad.to(out.dtype) if grad.dtype != torch.float32 else grad for grad, out in zip(grads, outputs)]
    inputs = [*tensors, *(w for name, w in words.items() if name in ("bias", "sinks"))]
    return torch.autograd.grad(outputs, inputs, grads)


def by_torch(query, key, value, **words):
    if "cu_seqlens_q" in words:
        call = call_of(query, key, value, words)
        return call.given_back(torch_answer.answer(call))
    return torch_answer.answer(call_of(query, key, value, words))


def require_near(found, low, exact, softcap=False):
    """flash-attention's rule: twice the error of torch in the same dtype, three times with a softcap."""
    for one, rounded, right in zip(found, low, exact, strict=True):
        assert one.shape == right.shape and torch.isfinite(one).all()
        near = (right + 0.3 - 0.3 - right).abs().max() + torch.finfo(one.dtype).eps * right.abs().max()
        bound = (3 if softcap else 2) * (rounded.double() - right).abs().max() + 2 * near + 3e-4 * softcap
        assert (one.double() - right).abs().max() <= bound


@contextmanager
def backward_kernels():
    """How often a kernel ran a backward pass meanwhile: one entry each."""
    ran, differentiates = [], Runtime.differentiates

    def counted(self, *given):
        done = differentiates(self, *given)
        ran.extend([done] * done)
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runtime, "differentiates", counted)
        yield ran


def require_right(tensors, words, lse=False, attend=evoattn.attention):
    q, _, v = tensors
    grads = [numbers(*q.shape[:-1], v.shape[-1]).to(q.dtype)]
    if lse:
        words, grads = words | {"return_lse": True}, [*grads, numbers(*q.shape[:-1], seed=8)]
    if lse and "cu_seqlens_q" in words:
        grads[1] = grads[1].t().contiguous()
    own = changed(words, lambda w: w)
    with backward_kernels() as ran:
        found = gradients(attend, tensors, own | {"strict": True}, grads)
    assert ran, "no kernel ran the backward pass"
    low = gradients(by_torch, tensors, own, grads)
    double = [tensor.detach().double().requires_grad_() for tensor in tensors]
    wide = changed(words, lambda w: w.double())
    exact = gradients(by_torch, double, wide, [grads[0].double(), *grads[1:]])
    require_near(found, low, exact, bool(words.get("softcap")))


PLAIN = {
    "full": ({}, {}),
    "ragged": (dict(rows=203, keys=331), {}),
    "causal": ({}, {"is_causal": True}),
    "lower right": (dict(rows=200, keys=300), {"causal": True}),
    "rows without keys": (dict(rows=300, keys=200), {"causal": True}),
    "grouped": (LLAMA, {"is_causal": True}),
    "scale": (dict(layout="bshd"), {"scale": 0.2}),
    "D 128": (dict(dim=128, dtype=torch.bfloat16), {"is_causal": True}),
    "D 256": (dict(dim=256, rows=150, keys=150), {}),
    "D 96": (dict(dim=96, layout="bshd"), {"is_causal": True}),
    "192/128": (dict(dim=192, dim_v=128, dtype=torch.bfloat16), {"is_causal": True}),
}
VARIANTS = {
    "window": (LLAMA, lambda: {"causal": True, "window": (64, 0)}),
    "window of both sides": ({}, lambda: {"window": (30, 50)}),
    "softcap": ({}, lambda: {"softcap": 20.0, "is_causal": True}),
    "softcap and the usual scale": ({}, lambda: {"softcap": 1.0, "scale": 0.125, "is_causal": True}),
    "sinks": (LLAMA, lambda: {"sinks": numbers(8).bfloat16(), "causal": True, "window": (100, 0)}),
    "slopes": ({}, lambda: {"alibi_slopes": numbers(4).abs() / 8, "causal": True}),
    "bias": ({}, lambda: {"bias": numbers(4, 300, 300).half()}),
    "bias of all batches": (dict(keys=303), lambda: {"bias": numbers(1, 4, 300, 303).half()}),
    "bias of a row": ({}, lambda: {"bias": numbers(2, 1, 1, 300).half()}),
}


@pytest.mark.parametrize("lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("name", list(PLAIN))
def test_gradients_are_right(name, lse):
    shape, words = PLAIN[name]
    require_right(made(**shape), {"enable_gqa": True, **words}, lse)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_gradients_of_variants_are_right(name):
    shape, make = VARIANTS[name]
    require_right(made(**shape), {"enable_gqa": True, **make()})


@pytest.mark.parametrize("lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("words", [{}, {"causal": True}, {"causal": True, "window": (40, 0)}], ids=str)
def test_packed_sequences(words, lse):
    lengths = [0, 100, 1, 333, 64, 0, 207]
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()[1:]
    total, most = sum(lengths), max(lengths)
    tensors = [numbers(total, h, 128, seed=s).bfloat16().requires_grad_() for s, h in enumerate((8, 2, 2))]
    words = words | dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=most, max_seqlen_k=most)
    require_right(tensors, words, lse, evoattn.attention_varlen)


def test_a_gradient_that_is_expanded():
    tensors = made(**LLAMA)
    evoattn.attention(*tensors, is_causal=True, enable_gqa=True, strict=True).sum().backward()
    double = [t.detach().double().requires_grad_() for t in tensors]
    F.scaled_dot_product_attention(*double, is_causal=True, enable_gqa=True).sum().backward()
    low = [t.detach().clone().requires_grad_() for t in tensors]
    by_torch(*low, is_causal=True, enable_gqa=True).sum().backward()
    require_near([t.grad for t in tensors], [t.grad for t in low], [t.grad for t in double])


def test_halves_merged_by_their_log_sum_exps_have_the_gradients_of_the_whole():
    q, k, v = made(dim=128, rows=256, keys=512)
    grad, found = numbers(2, 4, 256, 128).half(), []
    parts = [evoattn.attention(q, k[:, :, h], v[:, :, h], return_lse=True, strict=True) for h in halves(512)]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    whole = sum(out.float() * torch.exp(one - lse)[..., None] for out, one in parts)
    found = torch.autograd.grad(whole, (q, k, v), grad.float())
    double = [t.detach().double().requires_grad_() for t in (q, k, v)]
    exact = torch.autograd.grad(F.scaled_dot_product_attention(*double), double, grad.double())
    for one, right in zip(found, exact, strict=True):
        assert (one.double() - right).abs().max() <= 4e-3 * right.abs().max()


def halves(keys):
    return slice(0, keys // 2), slice(keys // 2, keys)


def test_the_same_bits_where_they_are_asked_for():
    tensors, grad = made(**LLAMA), numbers(2, 8, 512, 128).bfloat16()
    words = dict(is_causal=True, enable_gqa=True, deterministic=True, strict=True)
    first = gradients(evoattn.attention, tensors, words, [grad])
    for _ in range(50):
        again = gradients(evoattn.attention, tensors, words, [grad])
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_graph_of_a_training_step_replays_with_other_contents():
    tensors, grad = made(**LLAMA), numbers(2, 8, 512, 128).bfloat16()
    words = dict(is_causal=True, enable_gqa=True, strict=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients(evoattn.attention, tensors, words, [grad])
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(evoattn.attention, tensors, words, [grad])
    for seed in (3, 4):
        fresh = made(**LLAMA, seed=seed)
        with torch.no_grad():
            for old, new in zip(tensors, fresh, strict=True):
                old.copy_(new)
        graph.replay()
        expected = gradients(evoattn.attention, fresh, words, [grad])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def test_two_streams():
    streams = [torch.cuda.Stream() for _ in range(2)]
    cases = [(made(**LLAMA, seed=seed), numbers(2, 8, 512, 128, seed=seed).bfloat16()) for seed in (1, 2)]
    words = dict(is_causal=True, enable_gqa=True, strict=True, deterministic=True)
    expected = [gradients(evoattn.attention, tensors, words, [grad]) for tensors, grad in cases]
    torch.cuda.synchronize()
    answers = [[], []]
    for _ in range(30):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                answers[i].append(gradients(evoattn.attention, cases[i][0], words, [cases[i][1]]))
    torch.cuda.synchronize()
    for found, right in zip(answers, expected, strict=True):
        assert all(torch.equal(a, b) for one in found for a, b in zip(one, right, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant):
    def layer(*three):
        return evoattn.attention(*three, is_causal=True, enable_gqa=True, strict=True)

    tensors, grad = made(**LLAMA), numbers(2, 8, 512, 128).bfloat16()
    checkpoint(layer, *tensors, use_reentrant=reentrant).backward(grad)
    for one, other in zip(tensors, gradients(layer, tensors, {}, [grad]), strict=True):
        torch.testing.assert_close(one.grad, other, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_code(mode):
    def layer(q, k, v):
        return evoattn.attention(q * 2, k, v, is_causal=True, enable_gqa=True, strict=True)

    compiled, grad = torch.compile(layer, fullgraph=True, mode=mode), numbers(2, 8, 512, 128).bfloat16()
    for seed in range(4):
        tensors = made(**LLAMA, seed=seed)
        found = [one.clone() for one in gradients(compiled, tensors, {}, [grad])]
        expected = gradients(layer, tensors, {}, [grad])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=4e-2, rtol=4e-2)


def test_opcheck():
    from evoattn.ops.custom_op import attention_lse_op

    tensors = made(batch=1, rows=200, keys=200, layout="bshd")
    results = torch.library.opcheck(
        attention_lse_op, (*tensors, "causal_upper_left", True, 0.2, False), atol=2e-2, rtol=2e-2
    )
    assert set(results.values()) == {"SUCCESS"}


def test_capture_times_both_passes():
    tensors = made(**LLAMA)
    with evoattn.capture() as recorded:
        for _ in range(3):
            evoattn.attention(*tensors, is_causal=True, enable_gqa=True).sum().backward()
    assert {entry.problem.op for entry in recorded.entries} == {"forward", "backward"}
    assert all(entry.count == 3 and entry.us > 0 for entry in recorded.entries)


def losses(name: str, padded: bool) -> list[float]:
    """Of 20 steps of a Llama of two layers."""
    import transformers

    torch.manual_seed(0)
    sizes = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=2, vocab_size=1000)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=2, attn_implementation=name)
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator, found = torch.Generator("cuda").manual_seed(0), []
    tokens = torch.randint(1000, (4, 256), generator=generator, device="cuda")
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, 200:], mask[3, 31:] = 0, 0
    for _ in range(20):
        words = {"attention_mask": mask} if padded else {}
        loss = model(input_ids=tokens, labels=tokens.masked_fill(mask == 0, -100), **words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("padded", [False, True])
def test_a_llama_trains_as_with_sdpa(padded):
    pytest.importorskip("transformers")
    from evoattn.integrations.transformers import NAME, register

    register()
    with backward_kernels() as ran:
        ours = losses(NAME, padded)
    assert ran, "no kernel ran the backward pass"
    theirs = losses("sdpa", padded)
    assert ours[-1] < ours[0] / 2
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 0.1
