"""evoattn behind `scaled_dot_product_attention`: in blocks, in threads, in compiled code, and gone afterwards."""

import asyncio
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import evoattn
from evoattn.ops import sdpa as room
from evoattn.ops.sdpa import capture, disable, enable, sdpa
from tests.ops.fake_device import near, reference, tensors

TORCHS = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def afterwards():
    torch.compiler.reset()
    yield
    disable()
    assert F.scaled_dot_product_attention is TORCHS
    assert room._users == 0


def launched(device, call=None):
    """How many launches one call of SDPA makes."""
    before = len(device.launches)
    q, k, v = tensors()
    answer = (call or F.scaled_dot_product_attention)(q, k, v, enable_gqa=True)
    assert near(answer, reference(q, k, v))
    return len(device.launches) - before


def test_a_block(device):
    with sdpa():
        launched(device)  # and the kernel's check
        assert launched(device) == 1
        with sdpa(on=False):
            assert launched(device) == 0
            with sdpa():
                assert launched(device) == 1
        assert launched(device) == 1
    assert launched(device) == 0
    assert F.scaled_dot_product_attention is TORCHS


def test_backends_that_are_chosen_inside_run(device):
    q, k, v = tensors()
    with sdpa():
        launched(device)
        with sdpa_kernel(SDPBackend.MATH):
            assert launched(device) == 0
            assert "`sdpa_kernel`" in evoattn.explain(q, k, v, enable_gqa=True)
            with sdpa():
                assert launched(device) == 1, "who says so last is heard"
        assert launched(device) == 1 and "`sdpa_kernel`" not in evoattn.explain(q, k, v, enable_gqa=True)
    with sdpa_kernel(SDPBackend.MATH):
        enable()
        assert launched(device) == 1
    disable()
    assert "`sdpa_kernel`" not in evoattn.explain(q, k, v, enable_gqa=True)


def test_a_block_is_of_one_task(device):
    with sdpa():
        launched(device)
    seen = {}

    async def one():
        with sdpa():
            await asyncio.sleep(0.02)
            seen["inside"] = launched(device)
            await asyncio.sleep(0.02)

    async def other():
        await asyncio.sleep(0.01)
        seen["beside"] = launched(device)
        with capture() as shapes:
            await asyncio.sleep(0.05)
        seen["recorded"] = len(shapes)

    async def both():
        await asyncio.gather(one(), other())

    asyncio.run(both())
    assert seen == {"inside": 1, "beside": 0, "recorded": 0}
    assert launched(device) == 0


def test_a_generator_s_block_ends_whoever_closes_it(device):
    with sdpa():
        launched(device)

    def steps():
        with sdpa(), capture():
            yield
            yield

    begun = steps()
    next(begun)
    assert launched(device) == 1
    thread = threading.Thread(target=begun.close)
    thread.start()
    thread.join()
    assert launched(device) == 0 and not room.recorders()


def test_another_library_s_wrapper_may_come_in_between(device):
    """As one that keeps what it found, and calls that."""
    enable()
    launched(device)
    found = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = lambda *words, **more: found(*words, **more)
    assert launched(device) == 1
    disable()
    assert launched(device) == 0
    enable()
    assert launched(device) == 1
    with sdpa(on=False):
        assert launched(device) == 0
    disable()
    assert launched(device) == 0
    F.scaled_dot_product_attention = TORCHS


def test_an_exception_ends_a_block(device):
    with pytest.raises(KeyError), sdpa():
        raise KeyError
    assert launched(device) == 0


def test_a_block_is_of_one_thread(device):
    inside, counts = threading.Event(), []
    with sdpa():
        launched(device)
        thread = threading.Thread(target=lambda: (counts.append(launched(device)), inside.set()))
        thread.start()
        inside.wait(300)
        thread.join()
        assert counts == [0]
        assert launched(device) == 1


def test_enable_is_of_all_threads(device):
    enable()
    enable()
    launched(device)
    counts = []
    thread = threading.Thread(target=lambda: counts.append(launched(device)))
    thread.start()
    thread.join()
    assert counts == [1]
    with sdpa(on=False):
        assert launched(device) == 0
    disable()
    assert launched(device) == 0
    disable()


def test_multihead_attention_modules(device):
    layer = torch.nn.MultiheadAttention(256, 4, batch_first=True).half().eval()
    x = torch.randn(2, 64, 256).half()
    with torch.no_grad():
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            expected = layer(x, x, x, need_weights=False)[0]
            with sdpa():
                answer = layer(x, x, x, need_weights=False)[0]
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert device.launches
    assert torch.allclose(answer.float(), expected.float(), atol=2e-3)


def test_masks_dropout_and_gradients_stay_torchs(device):
    q, k, v = tensors(kv_heads=4)
    mask = torch.zeros(37, 45, dtype=torch.float16)
    with sdpa():
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, mask), TORCHS(q, k, v, mask))
        torch.manual_seed(0)
        dropped = F.scaled_dot_product_attention(q, k, v, None, 0.5)
        torch.manual_seed(0)
        assert torch.equal(dropped, TORCHS(q, k, v, None, 0.5))
        wanted = q.float().requires_grad_()
        F.scaled_dot_product_attention(wanted, k.float(), v.float()).sum().backward()
    assert wanted.grad is not None
    assert not device.launches


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("lengths", [(37, 45), (45, 45)])
def test_torchs_causal_biases(device, make, lengths):
    q, k, v = tensors(kv_heads=4, seqlen_q=lengths[0], seqlen_k=lengths[1])
    expected = TORCHS(q, k, v, make(*lengths))
    with sdpa():
        answer = F.scaled_dot_product_attention(q, k, v, make(*lengths))
        assert device.launches, "a kernel knows both masks"
        with sdpa(on=False):
            assert torch.equal(F.scaled_dot_product_attention(q, k, v, make(*lengths)), expected)
        doubles = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), make(*lengths))
    assert near(answer, expected)
    assert near(doubles, expected)


@pytest.mark.slow
def test_compiled_code_follows(device):
    compiled = torch.compile(
        lambda q, k, v, enable_gqa: F.scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa),
        fullgraph=True,
        backend="aot_eager",
    )
    with torch.no_grad():
        assert launched(device, compiled) == 0
        with sdpa():
            launched(device, compiled)
            assert launched(device, compiled) == 1
            with sdpa(on=False):
                assert launched(device, compiled) == 0
        assert launched(device, compiled) == 0


@pytest.mark.slow
def test_compiled_layers_of_torch_follow(device):
    """Torch's compilers take the attention of its own layers for one operator, and keep its code on the disk by that:
    where it is seen through, the graph says whose attention it is."""
    layer = torch.nn.TransformerEncoderLayer(64, 1, 16, dropout=0.0, batch_first=True).half()
    compiled = torch.compile(torch.nn.Sequential(layer), fullgraph=True, backend="aot_eager")
    given = torch.randn(1, 8, 64).half()

    def launches():
        before = len(device.launches)
        assert near(compiled(given), expected)
        return len(device.launches) - before

    with torch.no_grad():
        expected = layer(given)
        with sdpa():
            launches()  # and the kernel's check
            assert launches() == 1
            with sdpa(on=False):
                assert launches() == 0
        assert launches() == 0
        with sdpa():
            assert launches() == 1


@pytest.mark.slow
@pytest.mark.parametrize("words", [{}, {"need_weights": False, "is_causal": True}, {"average_attn_weights": False}])
def test_torchs_layers_say_the_same_when_they_are_seen_through(words):
    heads, words = torch.nn.MultiheadAttention(64, 2, add_bias_kv=not words, batch_first=True), dict(words)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(8)
    q, k, v = (torch.randn(2, 8, 64) for _ in range(3))
    expected = heads(q, k, v, attn_mask=mask, **words)
    with sdpa():
        found = heads(q, k, v, attn_mask=mask, **words)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert torch.jit.script(heads)(q, k, v)[0].shape == q.shape
        compiled = torch.compile(heads, fullgraph=True, backend="eager")
        assert torch.allclose(compiled(q, k, v, attn_mask=mask, **words)[0], expected[0], atol=1e-6)
        words["key_padding_mask"] = torch.zeros(2, 8)  # torch cannot trace what checks it
        expected = heads(q, k, v, attn_mask=mask, **words)
        assert torch.allclose(compiled(q, k, v, attn_mask=mask, **words)[0], expected[0], atol=1e-6)


@pytest.mark.slow
def test_a_compiled_layer_with_padding_heeds_a_promise_of_bits_that_comes_later():
    heads, x, padding = torch.nn.MultiheadAttention(64, 2, batch_first=True), torch.randn(2, 8, 64), torch.zeros(2, 8)
    call = lambda: heads(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    compiled = torch.compile(call, backend="aot_eager")
    try:
        evoattn.enable()
        assert torch.allclose(compiled(), call(), atol=1e-6)
        evoattn.enable(batch_invariant=True)
        for one in (call, compiled):
            with pytest.raises(RuntimeError, match="No kernel serves this call"):
                one()
    finally:
        evoattn.disable()
        torch.compiler.reset()


@pytest.mark.slow
def test_what_torch_does_not_trace_has_no_graph_of_ours_alone(device):
    """`layer.compile()` leaves the layers of `torch.nn` as they are, before torch 2.14, and a graph of one call costs
    more than the call: so does this, also after a reset. A trace of the caller goes through ours."""
    layer = torch.nn.TransformerEncoderLayer(64, 1, 16, dropout=0.0, batch_first=True).half()
    graphs = []
    layer.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
    with torch.no_grad(), sdpa():
        layer(torch.randn(1, 8, 64).half())  # and the kernel's check
        torch.compiler.reset()
        before = len(device.launches)
        layer(torch.randn(1, 8, 64).half())
        assert len(device.launches) == before + 1
        calls = [[node for node in graph.graph.nodes if node.op == "call_function"] for graph in graphs]
        assert all(len(made) > 1 for made in calls)


@pytest.mark.slow
def test_our_function_itself_is_compiled(device):
    """As torch's is, which `fullgraph` requires."""
    graphs = []
    backend = lambda graph, _: graphs.append(graph) or graph.forward
    with torch.no_grad(), sdpa():
        compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend=backend)
        launched(device, compiled)  # and the kernel's check
        assert launched(device, compiled) == 1
    assert len(graphs) == 1


def test_a_torch_without_its_own_names_for_that_is_served_too(monkeypatch):
    def ours(): ...

    monkeypatch.delattr("torch._C._dynamo.eval_frame._FrameAction")
    room._compiled_with_its_caller(ours)
    assert not vars(ours)


def test_wrong_arguments_raise_what_sdpa_raises(device):
    q, k, v = tensors()
    wrong = torch.zeros(3, 3, dtype=torch.float16)
    with pytest.raises(RuntimeError) as theirs:
        TORCHS(q, k, v, wrong, enable_gqa=True)
    with sdpa(), pytest.raises(RuntimeError) as ours:
        F.scaled_dot_product_attention(q, k, v, wrong, enable_gqa=True)
    assert str(ours.value) == str(theirs.value)
    with sdpa(), pytest.raises(TypeError):
        F.scaled_dot_product_attention(q, k)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchscript_compiles_what_calls_it():
    """To torch's own function, as it does without evoattn."""
    layer, x = Layer().eval(), torch.randn(2, 5, 16)
    with torch.no_grad():
        expected = layer(x)
        with sdpa():
            inside = torch.jit.script(layer)
            assert torch.allclose(inside(x), expected, atol=1e-6)
        enable()
        assert torch.allclose(torch.jit.script(layer)(x), expected, atol=1e-6)
        disable()
        assert torch.allclose(torch.jit.script(layer)(x), expected, atol=1e-6)
        assert torch.allclose(inside(x), expected, atol=1e-6)
