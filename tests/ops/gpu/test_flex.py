"""What people write in FlexAttention's language, by kernels on a GPU: right, without waiting for the device, and right
again in the replay of a graph."""

import ctypes

import pytest
import torch

import evoattn
from benchmarks.flex.mods import MODS, Shape
from evoattn.backends.platform import CudaPlatform
from evoattn.families.mask_blocks import LISTS
from evoattn.ops import block_masks, flex
from evoattn.ops.runtime import Runtime, current
from evoattn.portfolio.pick import lasting_pick, next_picks
from tests.ops.gpu.gpu_problems import ON_A_GPU, without_waiting
from tests.ops.gpu.test_training import backward_kernels, require_near

pytestmark = ON_A_GPU
SHAPES = [Shape(2, 8, 700, 700, "cuda"), Shape(2, 8, 3, 1300, "cuda")]
NAMES = (
    *("window", "causal_documents", "logical_documents", "global_window", "windows_of_heads", "neighbours_2d"),
    *("jagged", "tree_of_bits", "any_pairs", "chosen_causal_blocks", "t5_bias", "dense_bias", "alibi"),
    *("causal_softcap_in_window", "hidden_by_score"),
)


def made(shape):
    """Query, key and value, of a K/V head for four."""
    generator = torch.Generator("cuda").manual_seed(3)
    sizes = [(2, 8, shape.queries, 64), (2, 2, shape.keys, 64), (2, 2, shape.keys, 64)]
    return [torch.randn(size, generator=generator, device="cuda").bfloat16() for size in sizes]


@pytest.mark.parametrize("shape", SHAPES, ids=["prefill", "decode"])
@pytest.mark.parametrize("name", NAMES)
def test_right_without_waiting_and_in_a_graph(name, shape, monkeypatch):
    monkeypatch.setattr(block_masks, "LEAST_SCORES", 0)
    q, k, v = made(shape)
    written = MODS[name](shape)
    mask = written.block_mask(shape)
    words = dict(score_mod=written.score_mod, block_mask=mask, enable_gqa=True)
    assert "FlexAttention of torch" not in evoattn.explain(q, k, v, **words)
    for _ in range(3):  # traces, compiles, loads, checks: what runs first, what is chosen, numbers as constants
        evoattn.flex_attention(q, k, v, **words)
        evoattn.settle()
    own = None if mask is None else block_masks.authoritative(mask, shape.keys)
    wide = [t.float() for t in (q, k, v)]
    exact, low = (flex.TORCH(*t, written.score_mod, own, enable_gqa=True).float() for t in (wide, (q, k, v)))
    allowed = 3 * (low - exact).abs().max() + 0.01
    out = without_waiting(lambda: evoattn.flex_attention(q, k, v, **words))
    assert (out.float() - exact).abs().max() <= allowed
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = evoattn.flex_attention(q, k, v, **words)
    replayed.zero_()
    graph.replay()
    assert torch.equal(replayed, out)


def test_a_function_that_says_a_window_enqueues_what_the_window_does():
    """Also where its numbers are lengths, which could be tensors of their own."""
    q, k, v = made(Shape(2, 8, 1, 1024, "cuda"))
    diagonal, past = 1023, 1024
    near = lambda b, h, q, k: (k - q <= diagonal) & (q + diagonal - k <= past)
    mask = evoattn.create_block_mask(near, None, None, 1, 1024, "cuda")

    def nodes_of(call):
        call()
        graph, count = torch.cuda.CUDAGraph(keep_graph=True), ctypes.c_size_t()
        with torch.cuda.graph(graph):
            call()
        nodes = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes
        assert nodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)) == 0
        return count.value

    named = nodes_of(lambda: evoattn.attention(q, k, v, enable_gqa=True, causal=True, window=(past, 0)))
    assert nodes_of(lambda: evoattn.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)) == named > 0


@pytest.mark.parametrize(
    "name", ("causal", "documents_of_batches", "windows_of_heads", "any_pairs", "sliding_tiles", "tree")
)
def test_block_masks_have_the_lists_of_torch(name, monkeypatch):
    shape = Shape(2, 4, 704, 1296, "cuda")
    written = MODS[name](shape)
    sizes = (
        shape.batch if written.by_batch else None,
        shape.heads if written.by_head else None,
        shape.queries,
        shape.keys,
    )
    theirs = block_masks.TORCH(written.mask_mod, *sizes, "cuda", (128, 64))
    evoattn.create_block_mask(written.mask_mod, *sizes, "cuda", (128, 64))  # compiles, checks
    monkeypatch.setattr(block_masks, "TORCH", None)  # a kernel answers
    mask = without_waiting(lambda: evoattn.create_block_mask(written.mask_mod, *sizes, "cuda", (128, 64)))
    assert mask.BLOCK_SIZE == theirs.BLOCK_SIZE and mask.seq_lengths == theirs.seq_lengths
    assert all(torch.equal(getattr(mask, name), getattr(theirs, name)) for name in LISTS)


@pytest.mark.parametrize("name", ("causal_documents", "alibi_by_slopes", "t5_bias", "relative_bias"))
def test_compiled_code_has_the_eager_answer_and_gradients(name, tmp_path):
    with current.use(Runtime(CudaPlatform(), lasting_pick, tmp_path, others=next_picks)), torch.enable_grad():
        require_same(name)


def require_same(name):
    shape = Shape(2, 8, 700, 700, "cuda")
    written = MODS[name](shape)
    mask = written.block_mask(shape)
    cells = (written.score_mod.__closure__ or ()) if written.score_mod else ()
    tables = [c.cell_contents for c in cells if isinstance(c.cell_contents, torch.Tensor)]
    tables = [one.requires_grad_() for one in tables if one.is_floating_point()]
    leaves = [one.requires_grad_() for one in made(shape)]

    def layer(q, k, v):
        return evoattn.flex_attention(q, k, v, written.score_mod, mask, enable_gqa=True).float().square().sum()

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True)
    found = torch.autograd.grad(compiled(*leaves), [*leaves, *tables])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.autograd.grad(compiled(*leaves), [*leaves, *tables])
    assert any("evoattn::attention_backward" in event.key for event in profile.key_averages())
    expected = torch.autograd.grad(layer(*leaves), [*leaves, *tables])
    for one, exact in zip(found, expected, strict=True):
        assert (one.float() - exact.float()).abs().max() <= 0.02 * exact.float().abs().max()


def test_gradients_by_the_lists_that_a_score_makes(tmp_path, monkeypatch):
    """A score that is -inf says what is hidden. Deterministic gradients have the same bits twice."""
    monkeypatch.setattr(block_masks, "LEAST_SCORES", 0)
    score_mod, leaves = MODS["hidden_by_score"](SHAPES[0]).score_mod, [one.requires_grad_() for one in made(SHAPES[0])]

    def gradients(attend, dtype=torch.bfloat16):
        given = [one.detach().to(dtype).requires_grad_() for one in leaves]
        out = attend(*given, score_mod, enable_gqa=True)
        return torch.autograd.grad(out, given, torch.ones_like(out) - leaves[0].detach())

    with torch.enable_grad():
        low, exact = gradients(flex.TORCH), gradients(flex.TORCH, torch.float64)
    with current.use(Runtime(CudaPlatform(), lasting_pick, tmp_path, others=next_picks)), torch.enable_grad():
        with evoattn.capture() as shapes, backward_kernels() as ran:
            found = gradients(evoattn.flex_attention)
        assert ran and all(entry.problem.blocks for entry in shapes.entries), shapes.entries
        require_near(found, low, exact)
        torch.use_deterministic_algorithms(True)
        try:
            first, second = (gradients(evoattn.flex_attention) for _ in range(2))
        finally:
            torch.use_deterministic_algorithms(False)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    require_near(first, low, exact)
