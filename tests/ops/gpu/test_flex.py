"""What people write in FlexAttention's language, by kernels on a GPU: right, without waiting for the device, and right
again in the replay of a graph."""

import pytest
import torch

import evoattn
from benchmarks.flex.mods import MODS, Shape
from evoattn.ops import block_masks, flex
from tests.ops.gpu.gpu_problems import ON_A_GPU, without_waiting

pytestmark = ON_A_GPU
SHAPES = [Shape(2, 8, 700, 700, "cuda"), Shape(2, 8, 3, 1300, "cuda")]
NAMES = (
    *(
        "window",
        "causal_documents",
        "logical_documents",
        "global_window",
        "windows_of_heads",
        "neighbours_2d",
        "jagged",
    ),
    *(
        "tree_of_bits",
        "any_pairs",
        "chosen_causal_blocks",
        "t5_bias",
        "dense_bias",
        "alibi",
        "causal_softcap_in_window",
    ),
)


@pytest.mark.parametrize("shape", SHAPES, ids=["prefill", "decode"])
@pytest.mark.parametrize("name", NAMES)
def test_right_without_waiting_and_in_a_graph(name, shape):
    generator = torch.Generator("cuda").manual_seed(3)
    sizes = [(2, 8, shape.queries, 64), (2, 2, shape.keys, 64), (2, 2, shape.keys, 64)]
    q, k, v = (torch.randn(size, generator=generator, device="cuda").bfloat16() for size in sizes)
    written = MODS[name](shape)
    mask = written.block_mask(shape)
    words = dict(score_mod=written.score_mod, block_mask=mask, enable_gqa=True)
    assert "FlexAttention of torch" not in evoattn.explain(q, k, v, **words)
    evoattn.flex_attention(q, k, v, **words)  # traces, compiles, loads, checks
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
