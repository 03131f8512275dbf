"""scripts/dtype_twins.py: which pairs of recorded kernels it times in both dtypes."""

from __future__ import annotations

from dtype_twins import DTYPES, drawn_pairs

from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import load_space
from scripts.cost.row import Row

H100 = GPUS["h100"]
SHORT = parse_shape("B=2,H=4,S=128,D=64,dtype=fp16")
ONE, TWO = (load_space(family, H100).starting_configs()[0] for family in ("flash_mma", "flash_wgmma"))


def rows(problem, *times):
    return [Row(H100, problem, config, 128, 0, us, "campaign") for config, us in zip((ONE, TWO), times, strict=False)]


def test_the_fastest_and_the_slowest_kernel_of_short_problems_of_both_dtypes():
    recorded = rows(SHORT, 5.0, 4.0) + rows(SHORT.with_(dtype="bf16"), 3.0, 3.5)
    assert drawn_pairs(recorded, H100, 2, 20) == [(SHORT, TWO, ONE), (SHORT.with_(dtype="bf16"), ONE, TWO)]


def test_no_long_problem_no_other_dtype_and_no_problem_of_one_kernel():
    recorded = rows(SHORT, 25.0, 24.0) + rows(SHORT.with_(dtype="fp32"), 5.0) + rows(SHORT.with_(batch=3), 4.0)
    assert drawn_pairs(recorded, H100, 2, 20) == []
    assert drawn_pairs(rows(SHORT, 5.0, 4.0), GPUS["h200"], 2, 20) == []


def test_so_many_of_each_dtype():
    problems = [SHORT.with_(batch=batch, dtype=dtype) for batch in range(1, 6) for dtype in DTYPES]
    pairs = drawn_pairs([row for problem in problems for row in rows(problem, 5.0, 4.0)], H100, 3, 20)
    assert [problem.dtype for problem, *_ in pairs] == ["fp16"] * 3 + ["bf16"] * 3
    assert len({problem for problem, *_ in pairs}) == 6
