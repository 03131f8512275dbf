"""New keys that split_kv writes into caches before it reads them."""

import pytest

from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import ProblemError
from evoattn.model.shape_text import parse_shape
from tests.families.on_interpreter import built, small_faults

FMA = dict(COMPUTE="fma", LOAD="cp_async", BLOCK_M=4, BLOCK_N=32, WARPS=2, STAGES=2, VECTOR_BYTES=16, DOT_LANES=8)
FMA |= dict(SPLITS=3, MERGE="kernel", DEPENDENT_LAUNCH="none", BLOCKS_PER_SM=1)
TMA = FMA | dict(COMPUTE="mma", LOAD="tma", BLOCK_M=8, BLOCK_N=64, WARPS=4, DOT_LANES=4)
LAST, CLUSTER = TMA | dict(MERGE="last_block"), TMA | dict(MERGE="cluster", SPLITS=2)
SHAPE = "B=3,H=4,Hkv=2,Sq=2,Sk=500,appended=1,"
RIGHT = [
    ("D=64,dtype=bf16,seqused=9:500,mask=causal_lower_right", FMA, "l4"),
    ("D=64,dtype=fp16,seqused=9:500,page=8,layout=bshd", FMA, "a100"),
    ("D=32,dtype=fp32,seqused=9:500,page=16,window=40:0,mask=causal_lower_right,sink=1", FMA | {"DOT_LANES": 4}, "l4"),
    ("D=128,dtype=bf16,seqused=9:500,page=16,layout=bshd,mask=causal_lower_right,lse=1", LAST, "h100"),
    ("D=64,dtype=fp16,seqused=9:500,page=64,softcap=5,mask=causal_lower_right", CLUSTER, "h100"),
    ("D=64,dtype=bf16,seqused=9:500", TMA, "h100"),
]


def kernel_of(words, params, gpu, *edits):
    problem, family = parse_shape(SHAPE + words), registry.lookup("split_kv")
    config = load_space("split_kv", GPUS[gpu]).make_config(params)
    assert family.why_impossible(problem, config, GPUS[gpu]) is None
    return built(family, problem, config, GPUS[gpu], *edits), problem


@pytest.mark.slow
@pytest.mark.parametrize(("words", "params", "gpu"), RIGHT)
@pytest.mark.sampled(3)
def test_right(words, params, gpu):
    assert small_faults(*kernel_of(words, params, gpu)) == []


FAULTS = [
    ("write(given.v, given.v_cache, keys.v_strides);", "(void)0;"),
    ("write(given.k, given.k_cache, keys.k_strides)", "write(given.v, given.k_cache, keys.k_strides)"),
    ("at = __ldg(keys.pages_gmem + (key >> keys.page_bits))", "at = __ldg(keys.pages_gmem)"),
    ("row = keys.row_in_page(key);", "row = key;"),
    ("(key - before) * given.from.row", "key * given.from.row"),
    ("keys.kv_head * given.from.head", "0 * given.from.head"),
    ("keys.batch * given.from.batch", "0 * given.from.batch"),
    ("first = max(first, max(before, 0));", "first = max(first, max(before + 1, 0));"),
    (
        "first_key, min(seqlen_k, first_key + split_keys), THREADS",
        "first_key, min(seqlen_k, first_key + split_keys) - 1, THREADS",
    ),
    ("APPENDED ? seqlen_q : 0", "0"),
    ("__syncthreads();  // warps read keys", "// warps read keys"),
]


@pytest.mark.slow
@pytest.mark.parametrize("edit", FAULTS)
@pytest.mark.sampled(4, edits=True)
def test_a_fault_is_found(edit):
    assert small_faults(*kernel_of(*RIGHT[3], edit)) != []


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("Sq=1,Sk=90,D=64,appended=1", "write seqused"),
        ("Sq=1,Sk=90,D=64,appended=1,varlen=1:90,page=16", "write seqused"),
        ("Sq=1,Sk=90,D=64,appended=1,seqused=1:90,kv=e4m3", "exclude each other"),
        ("Sq=1,Sk=90,D=64,appended=1,seqused=1:90,op=backward", "forward pass"),
    ],
)
def test_what_cannot_be(words, fault):
    with pytest.raises(ProblemError, match=fault):
        parse_shape("B=2,H=4,Hkv=2,dtype=bf16," + words)


@pytest.mark.parametrize(
    ("words", "params", "why"),
    [
        ("Sq=3,Sk=500,D=64,seqused=9:500", TMA | dict(BLOCK_M=8), "has all rows"),
        ("Sq=1,Sk=500,D=64,seqused=9:500", FMA | dict(LOAD="registers"), "LOAD=registers"),
        ("Sq=1,Sk=500,D=64,seqused=9:500,mask=causal,window=100:0", TMA, "has no new ones"),
    ],
)
def test_what_a_kernel_does_not_serve(words, params, why):
    problem = parse_shape("B=2,H=8,Hkv=2,dtype=bf16,appended=1," + words)
    config = load_space("split_kv", GPUS["h100"]).make_config(params)
    assert why in (registry.lookup("split_kv").why_impossible(problem, config, GPUS["h100"]) or "")
