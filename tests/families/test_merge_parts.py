"""merge_parts: its reference is attention over all keys; what it is not for."""

import pytest
import torch

from evoattn.correctness import merge
from evoattn.correctness.reference import exact_attention, exact_lse
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.shape_text import parse_shape

L4, FAMILY, SPACE = GPUS["l4"], FAMILIES["merge_parts"], load_space("merge_parts", GPUS["l4"])
STARTS = SPACE.starting_configs()


def test_its_reference_is_attention_over_all_keys():
    whole, keys = AttentionProblem(1, 2, 2, 50, 60, 16, "fp32", lse=True), (slice(0, 23), slice(23, 60))
    q, k, v = (torch.randn(whole.shape(name), generator=torch.Generator().manual_seed(3)) for name in "qkv")
    parts, sums = [], []
    for some in keys:
        part = whole.with_(seqlen_k=some.stop - some.start)
        parts.append(exact_attention(part, q, k[:, :, some], v[:, :, some], torch.float64))
        sums.append(exact_lse(part, q, k[:, :, some]))
    problem = whole.with_(op="merge", seqlen_k=2)
    answer = merge.make_answer(problem, {"parts": torch.stack(parts), "part_sums": torch.stack(sums)})
    torch.testing.assert_close(answer["o"].values, exact_attention(whole, q, k, v, torch.float64))
    torch.testing.assert_close(answer["lse"].values, exact_lse(whole, q, k))


def test_what_it_is_not_for():
    with pytest.raises(ProblemError, match="parts of 16 bits"):
        parse_shape("B=1,H=2,S=50,D=16,dtype=fp32,op=merge_narrow")
    with pytest.raises(ProblemError, match="take window out"):
        parse_shape("B=1,H=2,S=50,D=16,window=9:0,op=merge")
    reason = FAMILY.why_unsupported(parse_shape("B=1,H=2,S=50,D=2048,op=merge"), L4)
    assert reason and "up to 1024" in reason
    few = parse_shape("B=1,H=2,Sq=50,Sk=1,D=16,op=merge")
    assert "loaded together" in (FAMILY.why_invalid(few, STARTS[2], L4) or "")
