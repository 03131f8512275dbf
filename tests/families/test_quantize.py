"""The kernel that quantises: right in all that it makes, wrong with a line of it changed, and NaN where there is no
number."""

from dataclasses import replace

import pytest
import torch

from evoattn.backends.interpreter import InterpreterBackend
from evoattn.families.registry import FAMILIES
from evoattn.families.render import render
from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig
from evoattn.ops.beside import Wanted, quantize_by_torch
from tests.families.on_interpreter import built, small_faults

FAMILY = FAMILIES["quantize"]
CONFIG = dict(BLOCK_M=16, BLOCK_N=1, THREADS=128, VECTOR_WIDTH=8)
BLOCK, OF_BLOCKS = "op=quantize kv=e4m3 scales=block", {"BLOCK_M": 128}
HEAD, SMOOTH = "op=quantize kv=e4m3 scales=head", "op=quantize_smooth kv=e4m3 scales=head turned"
PAIR = "op=quantize_kv kv=e4m3 scales=block turned"
E4M3 = torch.float8_e4m3fn


def kernel(shape, gpu="h100", *edits, **genes):
    problem = parse_shape(f"B=1 H=2 S=50 {shape}")
    return built(FAMILY, problem, KernelConfig("quantize", CONFIG | genes), GPUS[gpu], *edits), problem


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "gpu", "genes"),
    [
        (f"D=64 bf16 {HEAD}", "l4", {}),
        ("D=96 fp16 op=quantize kv=e5m2", "h100", dict(VECTOR_WIDTH=4)),
        ("D=64 bf16 op=quantize", "a100", {}),  # conversions of its own: there are none before sm_89
        ("D=24 fp16 op=quantize kv=e5m2 scales=token", "a100", {}),
        ("D=128 bf16 op=quantize kv=int8 scales=token", "a100", {}),
        (f"D=320 Dv=32 bf16 {SMOOTH}", "h100", {}),
        ("D=24 fp16 op=quantize_smooth kv=int8 scales=token", "a100", {}),
        ("D=64 bf16 op=quantize_smooth kv=e4m3 scales=block turned", "h100", dict(BLOCK_M=128, THREADS=256)),
        (f"D=80 bf16 {HEAD} turned", "h100", dict(BLOCK_M=32)),
        ("D=32 bf16 op=quantize kv=e4m3 scales=block turned", "h100", dict(BLOCK_M=128)),
        ("D=48 e4m3 op=turn turned", "h100", dict(BLOCK_M=32)),
        (f"D=64 Dv=32 bf16 {PAIR}", "h100", dict(BLOCK_M=128, VECTOR_WIDTH=4)),
        ("D=48 fp16 op=quantize_kv kv=int8", "h100", {}),
    ],
)
@pytest.mark.sampled(2)
def test_it_is_right(shape, gpu, genes):
    assert small_faults(*kernel(shape, gpu, **genes), len(shape)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "old", "new"),
    [
        (HEAD, "fmaxf(most, sizes_gmem[part])", "sizes_gmem[part]"),
        (HEAD, "fmaxf(most / LARGEST, LEAST_MADE)", "most / LARGEST"),
        (f"{HEAD} turned", "at[i][c] = Vector<uint32_t, PAIRS>{};", ""),
        (
            f"{HEAD} turned",
            "__syncthreads();\n    for (int i = threadIdx.x; i < DIM * GROUPS",
            "for (int i = threadIdx.x; i < DIM * GROUPS",
        ),
        (SMOOTH, "fmaxf(fabsf(low - mean[0]), fabsf(high - mean[1]))", "fabsf(low - mean[0])"),
        (SMOOTH, "2 * sample + 1", "2 * sample"),
        (BLOCK, "if ((!ALL && row_of(i) >= count) || !has(c)) continue;", "if (!has(c)) continue;"),
        (BLOCK, "scale_of(block_max(kept.size()))", "scale_of(kept.size())"),
        (
            PAIR,
            "quantize_rows<HEAD_DIM_V, TURNED, false>(of, v_scale_gmem",
            "quantize_rows<HEAD_DIM_V, TURNED, false>(of, scale_gmem",
        ),
        (HEAD, "is_finite(high) ? pair | 0x7fffu", "is_finite(low) ? pair | 0x7fffu"),
        (HEAD, "pair | 0x7fff0000u", "0x7fff7fffu"),
        (SMOOTH, "__syncthreads();\n    mean_smem = mean", "mean_smem = mean"),
        (SMOOTH, "mean[column] = x;\n    }\n    __syncthreads();", "mean[column] = x;\n    }"),
    ],
)
@pytest.mark.sampled(3, edits=True)
def test_a_fault_is_found(shape, old, new):
    genes = OF_BLOCKS if shape in (BLOCK, PAIR) else {}
    found, problem = kernel(f"D=64 bf16 {shape}", "h100", (old, new), **genes)
    assert small_faults(found, problem)


@pytest.mark.parametrize(("shape", "threads"), [(f"D=128 bf16 {BLOCK}", 256), (f"D=128 bf16 {PAIR}", 256)])
def test_rows_of_a_block_fit_the_registers_of_its_threads(shape, threads):
    problem = parse_shape(f"B=1 H=2 S=5000 {shape}")
    for few in (threads // 2, threads):
        config = KernelConfig("quantize", CONFIG | {"BLOCK_M": 128, "THREADS": few, "VECTOR_WIDTH": 4})
        why = str(FAMILY.why_invalid(problem, config, GPUS["h100"]))
        assert ("registers of rows" if few < threads else "None") in why


def test_the_mean_s_sums_fit_shared_memory():
    """Each thread has one for each of its columns."""
    shape = "B=1 H=2 S=50 D={} bf16 op=quantize_smooth kv=e4m3 scales=token"
    for dim, threads, fits in ((256, 1024, True), (512, 512, True), (512, 1024, False)):
        config = KernelConfig("quantize", CONFIG | {"THREADS": threads, "BLOCK_M": 512})
        wrong = FAMILY.why_impossible(parse_shape(shape.format(dim)), config, GPUS["h100"]) or ""
        assert ("1024 threads of 16 sums each are over" in wrong) is not fits, wrong


def test_a_source_whose_mean_is_of_all_rows_is_outdated():
    config = KernelConfig("quantize", CONFIG)
    source = render(FAMILY, parse_shape(f"B=1 H=2 S=50 D=64 bf16 {SMOOTH}"), config, GPUS["h100"]).source
    before = source.replace("SAMPLED", "ALL")
    assert FAMILY.why_outdated(config, source) is None and "memory" in (FAMILY.why_outdated(config, before) or "")
    others = before.replace("bool SMOOTH = true", "bool SMOOTH = false")  # whose kernels are as they were
    assert FAMILY.why_outdated(config, others) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        (HEAD, Wanted(E4M3, "head", 2)),
        ("op=quantize kv=int8 scales=head", Wanted(torch.int8, "head", 2)),
        ("op=quantize kv=e4m3 scales=token", Wanted(E4M3, "token", 2)),
        (SMOOTH, Wanted(E4M3, "head", 2, smooth=True)),
        (f"Dv=32 {PAIR}", Wanted(E4M3, "block", 2)),
    ],
)
def test_nan_and_infinities_are_nan_and_count_for_no_scale(shape, wanted):
    made, problem = kernel(f"D=64 bf16 {shape}", "l4", **(OF_BLOCKS if PAIR in shape else {}))
    given = [torch.randn(x.shape, generator=torch.Generator().manual_seed(4)).bfloat16() for x in problem.inputs]
    for x in given:
        x[0, 0, 3, 5], x[0, 1, 7, 9], x[0, 1, 40], x[0, 1, 2, 31] = torch.nan, torch.inf, -torch.inf, -torch.inf
    made_of = {one.name: torch.zeros(one.shape, dtype=getattr(torch, one.dtype)) for one in problem.outputs}
    buffers = {one.name: x.flatten() for one, x in zip(problem.inputs, given, strict=True)}
    buffers |= {name: one.view(-1) for name, one in made_of.items()}
    buffers |= {name: torch.zeros(size, dtype=torch.uint8) for name, size in made.workspace(problem).items()}
    assert not InterpreterBackend().run(made.compiled, made.launches(problem), buffers)
    for x, of in zip(given, ("", "v_"), strict=False):
        right = quantize_by_torch(x, replace(wanted, turned=of == "v_", smooth=wanted.smooth and not of))
        numbers, scale = made_of[f"{of}numbers"].float(), made_of[f"{of}scale"]
        assert torch.equal(scale, right.scale) and scale.isfinite().all()
        assert torch.equal(numbers.nan_to_num(999), right.numbers.float().nan_to_num(999))
        assert int(numbers.isnan().sum()) == (0 if wanted.dtype == torch.int8 else 3 + x.shape[-1])
