"""`evoattn.tune` on a GPU: what it finds is timed beside what runs today, kept, taken and right."""

import pytest

import evoattn
from evoattn.backends.platform import CudaPlatform
from evoattn.ops.runtime import Runtime, current
from evoattn.portfolio.wins import Wins
from tests.ops.gpu.gpu_problems import ON_A_GPU, flags, inputs, require_right

pytestmark = [*ON_A_GPU, pytest.mark.slow]
SHAPES = ["B=2,H=8,S=1024,D=64,dtype=fp16,mask=full", "B=1,H=32,Hkv=8,Sq=1,Sk=4096,D=128,dtype=bf16,mask=full"]


def test_what_is_found_is_taken_and_right(folder, tmp_path):
    wins = Wins(tmp_path / "wins.json")
    with current.use(Runtime(CudaPlatform(), current.best_known, folder), wins):
        result = evoattn.tune(SHAPES, "20s")  # a fifth is for comparisons, the first of which starts the peers
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
