"""Gradients in compiled code, and the ops of torch's registry that have them."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import evoattn
from evoattn.ops.arguments import TERMS
from evoattn.ops.call import Call
from evoattn.ops.custom_op import attention_lse_op, attention_op, backward_op, operands, variant_lse_op
from evoattn.ops.runtime import current
from tests.ops.fake_backward import TrainingDevice, training_runtime
from tests.ops.fake_device import Graphs, tensors
from tests.ops.test_training import VARIANTS, leaves, require_near, require_right


@pytest.fixture
def device(tmp_path):
    fake = TrainingDevice()
    with current.use(training_runtime(fake, tmp_path)):
        yield fake


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()


def variant_arguments(wanted, **words):
    mine, _ = leaves(*tensors(seqlen_q=5, seqlen_k=7)) if wanted else (tensors(seqlen_q=5, seqlen_k=7), None)
    return operands(Call(*mine, enable_gqa=True, **words))


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [False, True])
def test_opcheck(device, wanted):
    mine = leaves(*tensors())[0] if wanted else tensors()
    results = torch.library.opcheck(attention_lse_op, (*mine, "causal_upper_left", True, None, False, False))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.slow
def test_opcheck_of_a_variant(device):
    sinks, bias = torch.ones(4).half().requires_grad_(), torch.randn(4, 5, 7).half().requires_grad_()
    arguments = variant_arguments(True, softcap=2.0, window=(4, 1), terms=(sinks, None, bias, *[None] * 4))
    results = torch.library.opcheck(variant_lse_op, arguments)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.slow
@pytest.mark.parametrize("lse", [False, True])
def test_opcheck_of_the_backward_pass(device, lse):
    sinks, bias = torch.ones(4).half(), torch.randn(4, 5, 7).half()
    arguments = variant_arguments(False, terms=(sinks, None, bias, *[None] * 4))
    out, of_rows = variant_lse_op(*arguments)
    grad_lse = torch.randn_like(of_rows) if lse else None
    results = torch.library.opcheck(
        backward_op, (torch.randn_like(out), grad_lse, out, of_rows, "bias+sinks", *arguments[:-1], False)
    )
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lse"), [(name, i % 2 > 0) for i, name in enumerate(VARIANTS) if name != "everything"] + [("plain", True)]
)
@pytest.mark.sampled(2)
def test_compiled_gradients_are_right(device, name, lse):
    compiled = torch.compile(evoattn.attention, fullgraph=True, backend="aot_eager")
    require_right(tensors(), {"enable_gqa": True, **VARIANTS[name]}, lse, compiled)
    assert len(device.backwards) == 1


@pytest.mark.slow
def test_inductor(device):
    """The forward pass and the backward one, between products: their buffers are Inductor's own, and it writes no C++,
    whose compile takes ten seconds."""
    turn, back = (torch.randn(64, 64, generator=torch.Generator().manual_seed(i)).half() / 8 for i in (5, 6))

    def layer(q, k, v):
        return evoattn.attention(q @ turn, k, v, is_causal=True, enable_gqa=True) @ back

    mine, _ = leaves(*tensors())
    out = torch.compile(layer, fullgraph=True)(*mine)
    wanted = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).half()
    out.backward(wanted)
    other, _ = leaves(*tensors())
    layer(*other).backward(wanted)
    require_near([t.grad for t in mine], [t.grad.double() for t in other])
    assert len(device.backwards) == 2


@pytest.mark.slow
def test_packed_sequences(device):
    starts = torch.tensor([0, 5, 5, 30], dtype=torch.int32)
    q, k, v = (torch.randn(30, h, 64, generator=torch.Generator().manual_seed(1)).half() for h in (4, 2, 2))

    def call(q, k, v, **words):
        return evoattn.attention_varlen(q, k, v, starts, starts, 25, 25, causal=True, **words)

    require_right((q, k, v), {}, False, torch.compile(call, fullgraph=True, backend="aot_eager"))
    assert len(device.backwards) == 1


@pytest.mark.slow
def test_other_lengths_need_no_other_graph(device):
    graphs = Graphs()
    compiled = torch.compile(
        lambda q, k, v: evoattn.attention(q, k, v, enable_gqa=True, strict=True),
        fullgraph=True,
        dynamic=True,
        backend=graphs,
    )
    for length in (45, 50, 61):
        mine, _ = leaves(*tensors(seqlen_q=length, seqlen_k=length))
        compiled(*mine).sum().backward()
    assert len(graphs) == 1 and "evoattn.attention_lse" in graphs[0].code
    assert len(device.backwards) == 3


@pytest.mark.slow
def test_what_no_backward_kernel_serves_is_compiled_as_sdpa(device):
    graphs = Graphs()
    mine, _ = leaves(*tensors(head_dim=192, kv_heads=4))
    torch.compile(evoattn.attention, fullgraph=True, backend=graphs)(*mine).sum().backward()
    assert "scaled_dot_product_attention" in graphs[0].code and not device.launches


@pytest.mark.slow
def test_a_call_that_kernels_turn_out_not_to_serve(device):
    """Which shows when it runs: torch computes both passes, each in its op."""
    q, _, v = tensors()
    apart = torch.randn(2, 2, 45, 65).half()[..., :64]  # rows at odd addresses
    compiled = torch.compile(evoattn.attention, fullgraph=True, backend="aot_eager")
    mine = [q.requires_grad_(), apart, v]
    compiled(*mine, enable_gqa=True).float().square().sum().backward()
    double = q.detach().double().requires_grad_()
    F.scaled_dot_product_attention(double, apart.double(), v.double(), enable_gqa=True).square().sum().backward()
    require_near([q.grad], [double.grad])
    assert not device.launches


@pytest.mark.slow
def test_checkpointing(device):
    def layer(q, k, v):
        return checkpoint(evoattn.attention, q, k, v, enable_gqa=True, use_reentrant=False)

    mine, _ = leaves(*tensors())
    torch.compile(layer, fullgraph=True, backend="aot_eager")(*mine).sum().backward()
    other, _ = leaves(*tensors())
    layer(*other).sum().backward()
    require_near([t.grad for t in mine], [t.grad.double() for t in other])
    assert len(device.backwards) == 2


@pytest.mark.slow
def test_deterministic(device):
    compiled = torch.compile(evoattn.attention, fullgraph=True, backend="aot_eager")
    mine, _ = leaves(*tensors())
    compiled(*mine, enable_gqa=True, deterministic=True).sum().backward()
    assert device.backwards[-1]["deterministic"]
    torch.use_deterministic_algorithms(True)
    try:
        compiled(*mine, enable_gqa=True).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert device.backwards[-1]["deterministic"]
    compiled(*mine, enable_gqa=True).sum().backward()
    assert not device.backwards[-1]["deterministic"]


@pytest.mark.slow
def test_autocast_and_sdpa(device):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    mine = [t.float().requires_grad_() for t in tensors(kv_heads=4)]
    with evoattn.sdpa():
        layer(*mine).sum().backward()
    assert len(device.backwards) == 1 and mine[0].grad.dtype == torch.float32


def test_the_ops_themselves(device):
    mine, _ = leaves(*tensors())
    with pytest.raises(RuntimeError, match="without the log-sum-exp"):
        attention_op(*mine, "full", True, None, False)
    out, _ = attention_lse_op(*mine, "full", True, None, False)
    (first,) = torch.autograd.grad(out.float().square().sum(), mine[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="evoattn's backward pass has no derivative"):
        first.sum().backward()
    slopes = torch.ones(4, requires_grad=True)
    with pytest.raises(RuntimeError, match="kernels compute none of alibi_slopes"):
        variant_lse_op(*operands(Call(*mine, enable_gqa=True, terms=(None, slopes, *[None] * 5))))


def test_a_score_with_tables_by_the_op(device):
    mine, _ = leaves(*tensors())
    gates = [torch.tensor([0.5, 1.0, 2.0, 0.1], requires_grad=True) for _ in range(2)]
    score, exact = (evoattn.Score("s * gate[h] + far[q]", gate=gate, far=torch.zeros(99)) for gate in gates)
    call = Call(*mine, enable_gqa=True, terms=(*[None] * len(TERMS), *score.tensors), score=score)
    variant_lse_op(*operands(call))[0].float().square().sum().backward()
    double = [t.detach().double().requires_grad_() for t in mine]
    evoattn.attention(*double, enable_gqa=True, score=exact).square().sum().backward()
    require_near([t.grad for t in (*mine, gates[0])], [t.grad for t in (*double, gates[1])])


def test_fake_tensors(device):
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t).requires_grad_() for t in tensors(layout="bshd")]
        evoattn.attention(*fakes, enable_gqa=True).sum().backward()
    assert [t.grad.stride() for t in fakes] == [t.stride() for t in fakes]
    assert not device.launches
