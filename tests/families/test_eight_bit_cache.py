"""K and V of 8 bits under 16-bit queries: kernels right on the interpreter, by dtype, granularity of scales, masks,
pages and ugly lengths; faults of each are found."""

from dataclasses import replace

import pytest
import torch

from evoattn.backends.interpreter import InterpreterBackend
from evoattn.correctness.cases import make_case, proof_of
from evoattn.correctness.validate import check, run_case
from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from tests.families.on_interpreter import built, judged

SPLIT = dict(
    COMPUTE="mma", LOAD="registers", BLOCK_M=8, BLOCK_N=64, WARPS=2, STAGES=1, VECTOR_BYTES=16, DOT_LANES=4, SPLITS=3,
    MERGE="last_block", DEPENDENT_LAUNCH="none", BLOCKS_PER_SM=1,
)  # fmt: skip
MMA = dict(
    BLOCK_M=32, BLOCK_N=32, WARPS=2, KEY_WARPS=1, STAGES=2, SCHEDULE="together", SMEM_LAYOUT="swizzled",
    Q_PLACE="direct", RESCALE="vote", ROW_SUM="add", O_STORE="shared", BLOCK_ORDER="rows", BLOCKS_PER_SM=1,
)  # fmt: skip
WGMMA = dict(
    BLOCK_M=128, BLOCK_N=64, STAGES=2, BLOCKS_PER_SM=1, PRODUCER="warpgroup", OVERLAP=True, PING_PONG=False,
    RESCALE="always", KEY_SPLIT=1, SCHEDULE="single", TILE_ORDER="by_head", CAUSAL_SKIP=False, POLYNOMIAL_EIGHTHS=0,
    Q_IN_REGISTERS=True, STORE="rows", PART_TILES=0, PARTS_MERGE="memory", KEYS_AT_ONCE=0, GROUP_ROWS=False,
)  # fmt: skip
GENES = {"split_kv": SPLIT, "flash_mma": MMA, "flash_wgmma": WGMMA}
FMA = {"COMPUTE": "fma", "BLOCK_M": 4, "BLOCK_N": 32, "DOT_LANES": 8, "VECTOR_BYTES": 8}
NARROW = {"BLOCK_N": 32}
RING, TMA = {"LOAD": "cp_async", "STAGES": 2}, {"LOAD": "tma", "STAGES": 2, "MERGE": "cluster"}
OVERLAP = {"SCHEDULE": "overlapped", "O_STORE": "direct"}
PADDED = {"SMEM_LAYOUT": "padded", "STAGES": 1, "SCHEDULE": "split"}
SPLIT_KEYS = {"KEY_WARPS": 2, "SCHEDULE": "split", "BLOCK_N": 64}
LAZY, KEYS = {"RESCALE": "lazy", "ROW_SUM": "mma"}, {"KEY_WARPS": 2, "BLOCK_M": 16, "WARPS": 1}
ROWS, AGAIN = {"GROUP_ROWS": True}, {"GROUP_ROWS": True, "RESCALE": "lazy_after", "Q_IN_REGISTERS": False}
SHARED = {"STAGES": 1, "Q_IN_REGISTERS": False, "STORE": "tensor_map"}
SHARERS = {"BLOCK_M": 64, "KEY_SPLIT": 3, "RESCALE": "lazy_8", "POLYNOMIAL_EIGHTHS": 2}
SHAPE = "B=2,H=4,Hkv=2,Sk=239,"
RIGHT = [
    ("split_kv", "Sq=3,D=64,dtype=bf16,kv=e4m3", {}, "h100", "large_logits"),
    ("split_kv", "Sq=3,D=64,dtype=bf16,kv=e4m3,mask=causal_lower_right", {"VECTOR_BYTES": 4}, "a100", "late_huge_key"),
    ("split_kv", "Sq=3,D=80,dtype=fp16,kv=e5m2,scales=head,layout=bshd", RING, "l4", "extreme_terms"),
    ("split_kv", "Sq=3,D=128,dtype=bf16,kv=int8,scales=token,softcap=5,sink=1,lse=1", RING, "h100", "extreme_terms"),
    ("split_kv", "Sq=3,D=64,dtype=bf16,kv=e4m3,scales=token,seqused=0:239,page=16", NARROW, "l4", "extreme_terms"),
    ("split_kv", "Sq=3,D=64,dtype=bf16,kv=int8,scales=head,seqused=0:99,page=32,window=9:0", TMA, "h100", "plain"),
    ("split_kv", "Sq=3,D=128,dtype=fp16,kv=e4m3,scales=token,layout=bshd,alibi=1", TMA, "h100", "huge_keys_within"),
    ("split_kv", "Sq=3,D=64,dtype=bf16,kv=e4m3,scales=head", TMA | {"VECTOR_BYTES": 8}, "h100", "huge_keys_within"),
    ("split_kv", "Sq=3,D=160,dtype=bf16,kv=e5m2,seqused=0:239", TMA | {"VECTOR_BYTES": 8}, "h100", "plain"),
    ("split_kv", "Sq=3,D=32,dtype=bf16,kv=int8,scales=token,varlen=1:200", FMA | {"DOT_LANES": 4}, "l4", "plain"),
    ("split_kv", "Sq=3,D=40,dtype=fp16,kv=e5m2,scales=token", FMA | RING, "l4", "extreme_terms"),
    ("split_kv", "Sq=3,D=64,dtype=bf16,kv=e4m3,scales=head,varlen=1:200,page=64,lse=1", FMA | RING, "l4", "plain"),
    ("flash_mma", "Sq=70,D=64,dtype=bf16,kv=e4m3,mask=causal_lower_right", {}, "h100", "large_logits"),
    ("flash_mma", "Sq=70,D=96,dtype=fp16,kv=e5m2,scales=head,layout=bshd", {"ROW_SUM": "mma"}, "a100", "extreme_terms"),
    ("flash_mma", "Sq=40,D=128,dtype=bf16,kv=int8,scales=token,softcap=5,sink=1,lse=1", OVERLAP, "l4", "extreme_terms"),
    ("flash_mma", "Sq=40,D=64,dtype=bf16,kv=e4m3,scales=token,seqused=0:239,page=16", PADDED, "l4", "extreme_terms"),
    ("flash_mma", "Sq=40,D=64,dtype=bf16,kv=e4m3,scales=head,varlen=1:200,page=32,window=70:0", LAZY, "l4", "plain"),
    ("flash_mma", "Sq=40,D=32,dtype=fp16,kv=int8,scales=token,varlen=1:200,alibi=1,lse=1", KEYS, "l4", "plain"),
    ("flash_mma", "Sq=40,D=32,Dv=64,dtype=e4m3,scales=head,mask=causal,lse=1", SPLIT_KEYS, "l4", "extreme_terms"),
    ("flash_mma", "Sq=40,D=96,dtype=e4m3,window=70:9,softcap=20,sink=1,varlen=1:200", OVERLAP, "rtx5090", "plain"),
    ("flash_mma", "Sq=9,D=64,dtype=e4m3,scales=head,seqused=1:239,page=16", {"SMEM_LAYOUT": "padded"}, "l4", "plain"),
    ("flash_mma", "Sq=9,D=32,Dv=64,dtype=int8,scales=head,mask=causal,lse=1", SPLIT_KEYS, "a100", "extreme_terms"),
    ("flash_mma", "Sq=40,D=64,dtype=int8,varlen=1:200,sink=1", LAZY | KEYS, "h100", "large_logits"),
    ("flash_wgmma", "Sq=70,D=64,dtype=bf16,kv=e4m3,mask=causal_lower_right,lse=1", AGAIN, "h200", "large_logits"),
    ("flash_wgmma", "Sq=70,D=64,dtype=bf16,kv=e5m2,mask=causal_lower_right", ROWS, "h200", "large_logits"),
    ("flash_wgmma", "Sq=40,D=80,dtype=bf16,kv=e4m3,scales=head", {"Q_IN_REGISTERS": False}, "h100", "plain"),
    ("flash_wgmma", "Sq=40,D=128,dtype=bf16,kv=e4m3,scales=token,seqused=0:239,page=16", ROWS, "h100", "extreme_terms"),
    ("flash_wgmma", "Sq=40,D=96,dtype=fp16,kv=e5m2,scales=head,layout=bshd", {"BLOCK_N": 48}, "h100", "extreme_terms"),
    ("flash_wgmma", "Sq=40,D=128,dtype=bf16,kv=int8,seqused=0:239,page=16,softcap=5,sink=1", ROWS, "h100", "plain"),
    ("flash_wgmma", "Sq=40,D=64,Dv=32,dtype=bf16,kv=e4m3,scales=head,varlen=1:200,page=64", ROWS, "h100", "plain"),
    ("flash_wgmma", "Sq=40,D=256,dtype=bf16,kv=e4m3,scales=head,window=70:0", SHARED, "h100", "extreme_terms"),
    ("flash_wgmma", "Sq=40,D=64,dtype=bf16,kv=int8,scales=token,seqused=0:239,page=16,lse=1", ROWS, "h100", "plain"),
    ("flash_wgmma", "Sq=40,D=64,dtype=fp16,kv=e4m3,scales=token,varlen=1:200,softcap=5", ROWS, "h100", "extreme_terms"),
    ("flash_wgmma", "Sq=3,D=64,dtype=bf16,kv=int8,scales=head", ROWS | SHARERS, "h100", "late_huge_key"),
]  # fmt: skip


def kernel_of(family, problem, genes, gpu, *edits):
    config = load_space(family, GPUS[gpu]).make_config(GENES[family] | genes)
    reason = registry.lookup(family).why_impossible(problem, config, GPUS[gpu])
    assert reason is None, reason
    return built(registry.lookup(family), problem, config, GPUS[gpu], *edits, machine_code=False)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "words", "genes", "gpu", "kind"), RIGHT)
@pytest.mark.sampled(4)
def test_right(family, words, genes, gpu, kind):
    problem = parse_shape(SHAPE + words)
    result = judged(kernel_of(family, problem, genes, gpu), problem, kind, repeat=True)
    assert result.passed, result.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kv", "gpu", "code"),
    [
        ("split_kv", "e4m3", "h100", 0x7F),
        ("split_kv", "e4m3", "a100", 0xFF),
        ("flash_mma", "e5m2", "l4", 0x7D),
        ("flash_mma", "e4m3", "a100", 0x7F),
        ("flash_wgmma", "e4m3", "h100", 0xFF),
    ],
)
def test_a_code_that_is_not_a_number_stays_one(family, kv, gpu, code):
    problem = parse_shape(f"B=1,H=2,Hkv=1,Sq=3,Sk=40,D=32,dtype=bf16,kv={kv}")
    genes = {"VECTOR_BYTES": 8, "SPLITS": 1, "MERGE": "kernel"} if family == "split_kv" else {}
    case = make_case("plain", problem, 1, "cpu", double=True)
    case.tensors["v"].view(torch.uint8)[0, 0, 7, 5] = code
    _, outputs = run_case(InterpreterBackend(), kernel_of(family, problem, genes, gpu), case)
    assert outputs is not None
    columns = outputs["o"].isnan().all(2)[0].all(0)
    assert columns.nonzero().flatten().tolist() == [5] and outputs["o"].isnan().sum() == 6


FAULTS = [
    ("split_kv", "kv=e4m3,scales=token", "order = half ? 0x7362 : 0x5140", "order = half ? 0x7362 : 0x5410"),
    ("split_kv", "kv=e4m3,scales=token", "__fdividef(s[r][n][e], scales.v[2 * n])", "s[r][n][e]"),
    ("split_kv", "kv=e4m3", "__uint_as_float(uint32_t(127 - TOP + exponent) << 23)", "1.f"),
    ("split_kv", "kv=int8,scales=head", "0x64806480", "0x64816480"),
    ("flash_mma", "kv=e4m3,scales=token", "0x3120", "0x3210"),
    ("flash_mma", "kv=e4m3,scales=token", "unit[m][e / 2] * k[n][e % 2]", "unit[m][e / 2] * k[n][0]"),
    ("flash_mma", "kv=e4m3,scales=token", "return __fdividef(p, v[n][e])", "return p"),
    ("flash_mma", "kv=e5m2,scales=head", ": key_scales.v_factor);", ": key_scales.k_factor);"),
    ("flash_mma", "dtype=e4m3,scales=head", "v_factor / WEIGHT_UNIT", "v_factor"),
    ("flash_mma", "dtype=e4m3,scales=head", "unit[m][1] = of_head", "unit[m][1] = 1.f"),
    ("flash_mma", "dtype=int8", "float(sums[m][n][e])", "float(sums[m][n][e / 2])"),
    ("flash_mma", "kv=int8", "word = FOURS ? lane % 2 * 2 + n % 2", "word = FOURS ? lane % 2 * 2"),
    ("flash_wgmma", "kv=e4m3", "place + (to_piece ^ 16)) = high", "place + (to_piece ^ 16)) = low"),
    ("flash_wgmma", "kv=e4m3", "return unit.inverse;", "return 1.f;"),
    ("flash_wgmma", "kv=e4m3,scales=token", "(place)[i + lane % 4]", "(place)[i]"),
    ("flash_wgmma", "kv=e4m3,scales=token", "= __fdividef(1.f, next_v)", "= 1.f"),
    ("flash_wgmma", "kv=e5m2", "[HALF + i / 4][i % 4] = pack4_e4m3(", "[HALF + i / 4][i % 4] = 0 * pack4_e4m3("),
    ("flash_wgmma", "kv=e4m3", "step % Tiles::DIM_STEPS", "step"),
    ("flash_wgmma", "kv=int8,scales=token", ": sums_before[row] * factor[row]", ": sums_before[row]"),
    ("flash_wgmma", "kv=int8", "turn = block.warp % 4 - 1;", "turn = block.warp % 4;"),
    ("flash_wgmma", "kv=int8,scales=head", "1.f : v.of(batch, kv_head)", "1.f : k.of(batch, kv_head)"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("family", "words", "old", "new"), FAULTS)
@pytest.mark.sampled(4, edits=True)
def test_a_fault_is_found(family, words, old, new):
    problem = parse_shape(f"B=2,H=4,Hkv=2,Sq=20,Sk=99,D=32,{'' if 'dtype' in words else 'dtype=bf16,'}{words}")
    genes = {"VECTOR_BYTES": 8, "BLOCK_N": 32, "SPLITS": 1, "MERGE": "kernel"} if family == "split_kv" else {}
    gpu = "h100" if family == "flash_wgmma" else "l4"
    result = judged(kernel_of(family, problem, genes, gpu, (old, new, None)), problem)
    assert not result.passed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "genes", "change"),
    [
        ("H=3,Hkv=3,Sq=5,Sk=330,kv=int8,scales=token", {"SCHEDULE": "balanced", "BLOCK_N": 48}, None),  # parts of keys
        ("H=3,Hkv=3,Sq=5,Sk=99,kv=int8,scales=token,scale=1e-4", {}, lambda tensors: tensors["q"].zero_()),
        ("H=4,Hkv=2,Sq=4,Sk=50,kv=int8,varlen=3+4/50+0", ROWS, lambda tensors: tensors["q"][:, :, 3:].mul_(1e12)),
        ("H=4,Hkv=2,Sq=4,Sk=50,kv=e4m3,varlen=3+4/50+0", ROWS, lambda tensors: tensors["q"][:, :, 3:].mul_(1e12)),
        ("H=1,Hkv=1,Sq=40,Sk=130,kv=e4m3", {}, lambda tensors: tensors["q"][:, :, 3::13].mul_(2.0**18)),
        ("H=1,Hkv=1,Sq=40,Sk=130,kv=e5m2,softcap=5", {}, lambda tensors: tensors["q"][:, :, 3::13].mul_(2.0**110)),
    ],
)
def test_converted_keys_of_shares_of_zeros_and_beside_other_sequences(words, genes, change):
    """Two SMs, whose blocks share three tiles of rows; queries of 0; large ones that the next sequence has, or that the
    warp has beside others, as padding may."""
    gpu, family = replace(GPUS["h100"], sm_count=2), registry.lookup("flash_wgmma")
    problem = parse_shape(f"B={2 if 'varlen' in words else 1},D=16,dtype=bf16,{words}")
    config = load_space("flash_wgmma", gpu).make_config(WGMMA | {"BLOCK_M": 64} | genes)
    case = make_case("plain", problem, 1, "cpu", double=True)
    if change:
        change(case.tensors)
        case = replace(case, answer=proof_of(problem).make_answer(problem, case.tensors, "plain", True))
    result = check(InterpreterBackend(), built(family, problem, config, gpu), case)
    assert result.passed, result.reason


def test_a_balanced_kernel_of_packed_sequences_becomes_one_by_a_counter():
    family, gpu = registry.lookup("flash_wgmma"), GPUS["h200"]
    problem = parse_shape("B=2,H=32,Hkv=8,Sq=64,Sk=2048,D=128,dtype=bf16,varlen=64+9/2048+99")
    config = load_space("flash_wgmma", gpu).make_config(WGMMA | ROWS | {"SCHEDULE": "balanced"})
    assert family.why_impossible(problem, config, gpu) is None
    found = family.over_eight_bits(problem.with_(kv="e4m3", scales="head"), config, gpu)
    assert found and found.params == config.params | {"SCHEDULE": "claimed"}
