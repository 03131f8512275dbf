"""backward_scalar computes every variant's gradients, with the same bits in every run, and faults of it are found."""

import pytest

from evoattn.families.registry import FAMILIES
from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig
from tests.families import on_interpreter
from tests.families.on_interpreter import small_faults

L4, FAMILY = GPUS["l4"], FAMILIES["backward_scalar"]
SMALL = {"BLOCK_M": 16, "BLOCK_N": 16, "THREADS": 64, "BLOCKS_PER_SM": 1}
VARIANTS = [
    "dtype=fp32 mask=causal_lower_right window=20:0",
    "mask=causal_lower_right lse=1 layout=bshd Dv=40",
    "dtype=bf16 window=20:9 softcap=3 scale=0.3",
    "alibi=1 mask=causal sink=1 grads=sinks lse=1",
    "bias=bhs grads=bias softcap=4",
    "bias=s grads=bias+sinks sink=1",
    "Dv=8 shared_kv=1 bias=hs",
    "seqused=3:60 mask=causal_lower_right",
    "varlen=3:60 B=3 mask=causal_lower_right sink=1 grads=sinks alibi=1",
    "score=where(q>=k-5,s*gate[h]-0.1*s*s,-inf) tables=gate:fp32:4",
    "bias=hs grads=bias score=3*tanh(s*gate[h]) tables=gate:fp32:4",
]


def problem_of(text):
    batch = "" if "B=" in text else "B=2 "
    return parse_shape(f"{batch}H=4 Hkv=2 S=60 D=24 op=backward {text}")


def built(problem, params=SMALL, *edits):
    config = KernelConfig("backward_scalar", params)
    assert FAMILY.why_invalid(problem, config, L4) is None
    return on_interpreter.built(FAMILY, problem, config, L4, *edits)


@pytest.mark.slow
@pytest.mark.parametrize("text", VARIANTS)
@pytest.mark.sampled(4)
def test_it_serves_every_variant(text):
    """On the first two small cases and, in turns, on one of the others."""
    problem = problem_of(text)
    kernel = built(problem)
    assert small_faults(kernel, problem, VARIANTS.index(text)) == [] and kernel.unordered(problem) == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "params, text",
    [
        ({"BLOCK_M": 32, "BLOCK_N": 16, "THREADS": 128, "BLOCKS_PER_SM": 1}, "D=72 mask=causal"),
        ({"BLOCK_M": 16, "BLOCK_N": 32, "THREADS": 128, "BLOCKS_PER_SM": 1}, "D=96 Dv=64"),
        ({"BLOCK_M": 32, "BLOCK_N": 64, "THREADS": 256, "BLOCKS_PER_SM": 1}, "D=8 window=20:9"),
    ],
)
@pytest.mark.sampled(4)
def test_other_tiles(params, text):
    problem = parse_shape(f"B=1 H=2 S=200 op=backward {text}")
    assert small_faults(built(problem, params), problem, len(text)) == []


FAULTS = [
    ("      __syncthreads();  // nobody reads the last tile any more\n", "", "mask=causal"),
    ("lse == NEGATIVE_INFINITY ? -NEGATIVE_INFINITY : lse * LOG2_E", "lse * LOG2_E", "bias=hs"),
    ("LSE_GRADIENT ? delta - dlse_gmem[place] : delta", "delta", "lse=1"),
    ("mask.end_query(first_key + keys - 1)", "mask.end_query(first_key)", "window=20:9"),
    ("mask.first_query(first_key) / BLOCK_M", "mask.first_query(first_key + BLOCK_N) / BLOCK_M", "mask=causal"),
    ("shift *= score.slope(", "shift *= 0.f * score.slope(", "softcap=3"),
    ("head < (kv_head + 1) * group; ++head) {", "head < kv_head * group + 1; ++head) {", "mask=full"),
]


@pytest.mark.slow
@pytest.mark.parametrize("old, new, text", FAULTS)
@pytest.mark.sampled(4, edits=True)
def test_faults_are_found(old, new, text):
    problem = problem_of(text)
    assert small_faults(built(problem, SMALL, (old, new, None)), problem)
