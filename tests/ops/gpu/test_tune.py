"""`evoattn.tune` on a GPU: what it finds is timed beside what runs today, kept, taken and right."""

import pytest
import torch

import evoattn
from benchmarks.flex.mods import MODS, Shape
from evoattn.backends.platform import CudaPlatform
from evoattn.ops import block_masks, flex
from evoattn.ops.runtime import Runtime, current
from evoattn.portfolio.pick import next_picks
from evoattn.portfolio.wins import Wins
from tests.ops.gpu.gpu_problems import ON_A_GPU, flags, inputs, require_right

pytestmark = [*ON_A_GPU, pytest.mark.slow]
SHAPES = ["B=2,H=8,S=1024,D=64,dtype=fp16,mask=full", "B=1,H=32,Hkv=8,Sq=1,Sk=4096,D=128,dtype=bf16,mask=full"]


def test_what_is_found_is_taken_and_right(folder, tmp_path):
    wins = Wins(tmp_path / "wins.jsonl")
    with current.use(Runtime(CudaPlatform(), current.best_known, folder), wins):
        result = evoattn.tune(SHAPES, "60s")  # a fifth is for comparisons, the first of which starts the peers
        print(result)
        assert [row.before_us is not None and row.after_us is not None for row in result.rows] == [True, True]
        assert all(row.gain >= 1 for row in result.rows)
        for row in result.rows:
            q, k, v = inputs(row.problem)
            found = wins.find(row.problem, CudaPlatform().spec(0))
            assert (found is not None) == (row.after != row.before)
            if found:
                assert "your search measured" in evoattn.explain(q, k, v, **flags(row.problem))
                require_right(row.problem, q, k, v, evoattn.attention(q, k, v, **flags(row.problem), strict=True))


def test_captured_functions_and_block_masks_are_tuned(folder, tmp_path):
    """What FlexAttention's language says is timed as it is called, searched and compared, and what is found taken."""
    shape, wins = Shape(2, 8, 1500, 1500, "cuda"), Wins(tmp_path / "wins.jsonl")
    q, k, v = (torch.randn(2, 8, 1500, 64, device="cuda").bfloat16() for _ in range(3))
    written = [MODS[name](shape) for name in ("causal_documents", "relative_bias")]
    calls = [dict(score_mod=one.score_mod, block_mask=one.block_mask(shape)) for one in written]
    with current.use(Runtime(CudaPlatform(), current.best_known, folder, others=next_picks), wins):
        with evoattn.capture() as shapes:
            for _ in range(5):
                for words in calls:
                    evoattn.flex_attention(q, k, v, **words)
        assert [(one.count, bool(one.us)) for one in shapes.entries] == [(5, True)] * 2
        result = evoattn.tune(shapes, "60s")  # a fifth is for comparisons
        print(result)
        assert all(row.before_us and row.after_us and row.gain >= 1 for row in result.rows)
        for row, words in zip(sorted(result.rows, key=lambda row: bool(row.problem.score)), calls, strict=True):
            found = wins.find(row.problem, CudaPlatform().spec(0))
            assert (found is not None) == (row.after != row.before)
            said = evoattn.explain(q, k, v, **words)
            assert ("your search measured" in said) == (found is not None), said
            mask = words["block_mask"] and block_masks.authoritative(words["block_mask"], 1500)
            exact = flex.TORCH(q.float(), k.float(), v.float(), words["score_mod"], mask)
            assert (evoattn.flex_attention(q, k, v, **words).float() - exact).abs().max() < 0.03
