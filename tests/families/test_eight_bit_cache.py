"""K and V of 8 bits under 16-bit queries: kernels right on the interpreter, by dtype, granularity of scales, masks,
pages and ugly lengths; faults of each are found."""

import pytest

from evoattn.families import registry
from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import load_space
from tests.families.on_interpreter import built, judged

SPLIT = dict(
    COMPUTE="mma", LOAD="registers", BLOCK_M=8, BLOCK_N=64, WARPS=2, STAGES=1, VECTOR_BYTES=16, DOT_LANES=4, SPLITS=3,
    MERGE="last_block", DEPENDENT_LAUNCH="none", BLOCKS_PER_SM=1,
)  # fmt: skip
FMA = {"COMPUTE": "fma", "BLOCK_M": 4, "BLOCK_N": 32, "DOT_LANES": 8, "VECTOR_BYTES": 8}
RING, TMA = {"LOAD": "cp_async", "STAGES": 2}, {"LOAD": "tma", "STAGES": 2, "MERGE": "cluster"}
SHAPE = "B=2,H=4,Hkv=2,Sq=3,Sk=239,"
RIGHT = [
    ("split_kv", "D=64,dtype=bf16,kv=e4m3", {}, "h100", "large_logits"),
    ("split_kv", "D=64,dtype=bf16,kv=e4m3,mask=causal_lower_right", {"VECTOR_BYTES": 4}, "a100", "late_huge_key"),
    ("split_kv", "D=80,dtype=fp16,kv=e5m2,scales=head,layout=bshd", RING, "l4", "extreme_terms"),
    ("split_kv", "D=128,dtype=bf16,kv=int8,scales=token,softcap=5,sink=1", RING, "h100", "extreme_terms"),
    ("split_kv", "D=64,dtype=bf16,kv=e4m3,scales=token,seqused=0:239,page=16", {"BLOCK_N": 32}, "l4", "extreme_terms"),
    ("split_kv", "D=64,dtype=bf16,kv=int8,scales=head,seqused=0:239,page=32,window=70:0", TMA, "h100", "plain"),
    ("split_kv", "D=128,dtype=fp16,kv=e4m3,scales=token,layout=bshd,alibi=1", TMA, "h100", "huge_keys_within"),
    ("split_kv", "D=32,dtype=bf16,kv=int8,scales=token,varlen=1:200", FMA | {"DOT_LANES": 4}, "l4", "plain"),
    ("split_kv", "D=40,dtype=fp16,kv=e5m2,scales=token", FMA | RING, "l4", "extreme_terms"),
    ("split_kv", "D=64,dtype=bf16,kv=e4m3,scales=head,varlen=1:200,page=64", FMA | RING, "l4", "plain"),
]  # fmt: skip


def kernel_of(family, problem, genes, gpu, *edits):
    config = load_space(family, GPUS[gpu]).make_config(SPLIT | genes)
    reason = registry.lookup(family).why_impossible(problem, config, GPUS[gpu])
    assert reason is None, reason
    return built(registry.lookup(family), problem, config, GPUS[gpu], *edits, machine_code=False)


@pytest.mark.parametrize(("family", "words", "genes", "gpu", "kind"), RIGHT)
def test_right(family, words, genes, gpu, kind):
    problem = parse_shape(SHAPE + words)
    result = judged(kernel_of(family, problem, genes, gpu), problem, kind, repeat=True)
    assert result.passed, result.reason
