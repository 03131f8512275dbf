"""The C++ host code of every family against its `launches` and `workspace`, over random problems, configs and numbers
of SMs. What an exported header asks of the CUDA runtime, heard by a stand-in for it: addresses, values, tensor maps,
attributes."""

import itertools
import json
import random
import subprocess
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from evoattn.export.host_code import host_code
from evoattn.families.base import starts_zeroed
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model import gpu
from evoattn.model.dtype import DTYPES, WIDE_DTYPES
from evoattn.model.launch import Buffer, KernelLaunch, Scalar, TensorMap
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, SearchSpace, spelling
from evoattn.samplers.base import ConfigPool
from tests.export.host_driver import GXX, HOST, build, line, named_argument, python_launch, run
from tests.export.kernels import HOPPER_GENES, recorded

needs_gxx = pytest.mark.skipif(GXX is None, reason="there is no g++")

CASES, PROBLEMS_A_CONFIG, TRIES = 210, 10, 40
H100 = gpu.lookup("h100")
HEAD_DIMS = {"large_head": (512, 1024, 2048), "large_head_mma": (512, 1024), "flash_scalar": (4, 32, 64, 128)}
SM_COUNTS = (1, 7, 78, 114, 132)
MASKS = ("full", "causal_upper_left", "causal_lower_right")


@dataclass(frozen=True)
class Strided(AttentionProblem):
    """A problem whose tensors have strides of their own."""

    seed: int = 0

    def strides(self, tensor):
        draw = random.Random(f"{self.seed} {tensor}")
        row = self.head_dim * draw.randint(1, 9)
        return 8 * draw.randint(1, 1 << 30), 8 * draw.randint(1, 1 << 20), row, 1


def draw_problem(draw: random.Random, family: str, dtype: str, head_dim: int, mask: str) -> AttentionProblem:
    group, kv_heads = draw.choice((1, 2, 5, 8)), draw.choice((1, 2, 3, 8))
    lengths = [draw.choice((1, 17, 64, 100, 512, 1000, 4096, draw.randint(1, 9000))) for _ in range(2)]
    shape = (draw.choice((1, 2, 3, 16)), group * kv_heads, kv_heads, *lengths, head_dim, dtype, mask)
    layout, lse = draw.choice(("bhsd", "bshd")), FAMILIES[family].writes_lse and draw.random() < 0.5
    problem = AttentionProblem(*shape, layout, lse=lse)
    if draw.random() < 0.5:
        return problem
    return Strided(*shape, layout, lse=lse, seed=draw.randrange(1 << 30))


def spaces_of(family: str) -> list[SearchSpace]:
    """The family's search space once for every value of its genes that are words or flags, with that value alone."""
    space = FAMILIES[family].space(AttentionProblem(1, 1, 1, 64, 64, 64), H100)
    words = [(p.name, value) for p in space.parameters for value in p.values if not is_number(value)]
    return [space.restricted({name: (spelling(value),)}) for name, value in words] or [space]


def is_number(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def draw_cases(family: str, count: int) -> list[tuple[AttentionProblem, KernelConfig, gpu.GpuSpec]]:
    """(problem, config, GPU) that the family does not refuse; a config meets problems that it was not drawn for."""
    draw, kind, cases = random.Random(family), FAMILIES[family], []
    for space in itertools.islice(itertools.cycle(spaces_of(family)), 20 * count):
        problem, config = next(filter(None, (draw_config(draw, space) for _ in range(TRIES))), (None, None))
        for i in range(PROBLEMS_A_CONFIG if config else 0):
            spec = replace(H100, sm_count=draw.choice(SM_COUNTS))
            other = draw_problem(draw, family, problem.dtype, problem.head_dim, problem.mask) if i else problem
            if kind.why_impossible(other, config, spec) is None:
                cases.append((other, config, spec))
        if len(cases) >= count:
            return cases
    raise AssertionError(f"{family}: only {len(cases)} cases")


def draw_config(draw: random.Random, space: SearchSpace) -> tuple[AttentionProblem, KernelConfig] | None:
    """A problem and a config that serves it; None where none was found: the problem may have hardly any."""
    family = FAMILIES[space.family]
    dtypes = [dtype for dtype in family.dtypes if dtype in WIDE_DTYPES]  # exports with a `plan` know no others
    head_dim = draw.choice(HEAD_DIMS.get(family.name, (16, 64, 80, 128, 256)))
    problem = draw_problem(draw, family.name, draw.choice(dtypes), head_dim, draw.choice(MASKS))
    gpu_of_search = replace(H100, sm_count=draw.choice(SM_COUNTS))
    if family.why_unsupported(problem, H100):
        return None

    def why(name, params):
        return family.why_invalid(problem, KernelConfig(name, params), gpu_of_search)

    pool = ConfigPool({family.name: space}, why, draw)
    params = pool.claim(family.name, {p.name: draw.choice(p.values) for p in space.parameters})
    return params and (problem, KernelConfig(family.name, params))


def compiled_for(problem: AttentionProblem, config: KernelConfig) -> tuple[object, ...]:
    """What one kernel has."""
    return config.id, problem.head_dim, problem.dtype, problem.mask, problem.lse


PLAIN_FAMILIES = [n for n, family in FAMILIES.items() if family.plain and "forward" in family.operations]


@pytest.mark.slow
@needs_gxx
@pytest.mark.parametrize("family", PLAIN_FAMILIES)
def test_cpp_plans_what_python_launches(family, tmp_path):
    cases = draw_cases(family, CASES)
    kernels: dict[tuple[object, ...], str] = {}
    for problem, config, spec in cases:
        if (key := compiled_for(problem, config)) not in kernels:
            kernels[key] = host_code(FAMILIES[family], problem, config, spec)
    program, order = build(list(kernels.values()), tmp_path), list(kernels)
    answers = run(program, [line(order.index(compiled_for(p, c)), p, spec.sm_count) for p, c, spec in cases])
    assert len(answers) == len(cases) >= 200
    for (problem, config, spec), answer in zip(cases, answers, strict=True):
        launches = FAMILIES[family].launches(problem, config, spec)
        workspace = FAMILIES[family].workspace(problem, config, spec)
        case = f"{problem} {config.describe()} {spec.sm_count} SMs"
        assert not answer["refused"], case
        expected = {name: [size, starts_zeroed(name)] for name, size in workspace.items()}
        assert {name: rest for name, *rest in answer["scratch"]} == expected, case
        scratch = [name for name, *_ in answer["scratch"]]
        planned = [
            launch | {"args": [named_argument(argument, scratch) for argument in launch["args"]]}
            for launch in answer["launches"]
        ]
        assert planned == [python_launch(launch) for launch in launches], case


@pytest.mark.slow
@needs_gxx
def test_cpp_makes_the_same_gangs(tmp_path):
    genes = {"SCHEDULE": "balanced", "BLOCK_M": 64, "TILE_ORDER": "by_head", "GROUP_ROWS": False, "BLOCKS_PER_SM": 1}
    config = KernelConfig("flash_wgmma", load_space("flash_wgmma", H100).starting_configs()[0].params | genes)
    draw, kind = random.Random(5), FAMILIES["flash_wgmma"]
    problems = [
        AttentionProblem(draw.randint(1, 12), 8 * group, 8, draw.randint(1, 600), keys, dim, layout=layout)
        for keys in (500, 4000, 30_000) for layout in ("bhsd", "bshd") for group in (1, 3) for dim in (80, 128)
        for _ in range(8)
    ]  # fmt: skip
    kernels = []
    for order, dim in itertools.product(("by_head", "heads_4", "all_heads"), (80, 128)):
        ordered = KernelConfig(config.family, config.params | {"TILE_ORDER": order})
        of_dim = [p for p in problems if p.head_dim == dim and kind.why_impossible(p, ordered, H100) is None]
        kernels.append((ordered, of_dim))
    program = build([host_code(kind, of_dim[0], ordered, H100) for ordered, of_dim in kernels], tmp_path)
    for number, (ordered, of_dim) in enumerate(kernels):
        answers = run(program, [line(number, p, 132) for p in of_dim])
        grids = [kind.launches(p, ordered, H100)[0].grid for p in of_dim]
        assert [answer["launches"][0]["grid"] for answer in answers] == list(map(list, grids))
        assert len({gang for _, gang, _ in grids}) > 1


@pytest.mark.slow
@needs_gxx
def test_cpp_refuses_more_rows_than_an_int32_counts(tmp_path):
    config = load_space("flash_wgmma", H100).starting_configs()[0]
    config = KernelConfig(config.family, config.params | {"GROUP_ROWS": True})
    most = AttentionProblem(1, 4, 1, 500_000_000, 4096, 8)
    program = build([host_code(FAMILIES["flash_wgmma"], most, config, H100)], tmp_path)
    problems = [most, most.with_(seqlen_q=700_000_000)]  # of which each query has four rows
    refused = [answer["refused"] for answer in run(program, [line(0, p, 132) for p in problems])]
    assert refused == [FAMILIES["flash_wgmma"].why_impossible(p, config, H100) is not None for p in problems]
    assert refused == [False, True]


SM_COUNT, WORKSPACE = 132, 1 << 20
ADDRESSES = {"q": 1 << 10, "k": 2 << 10, "v": 3 << 10, "o": 4 << 10, "lse": 5 << 10}
PROGRAM = """
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <cuda.h>
#include <cuda_runtime.h>
{host}
static Plan expected;
static int launched;
static CUresult encoder(CUtensorMap* map, CUtensorMapDataType dtype, cuuint32_t rank, void* address,
                        const cuuint64_t* shape, const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*,
                        CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                        CUtensorMapFloatOOBfill) {{
  uint64_t* said = (uint64_t*)map;  // what it was told, in place of what a driver makes of it
  *said++ = dtype, *said++ = (uint64_t)address, *said++ = swizzle == CU_TENSOR_MAP_SWIZZLE_128B, *said++ = rank;
  for (cuuint32_t i = 0; i < rank; i++) *said++ = shape[i] << 32 | box[i];
  for (cuuint32_t i = 0; i + 1 < rank; i++) *said++ = strides[i];
  return CUDA_SUCCESS;
}}
extern "C" {{
cudaError_t cudaGetDevice(int* device) {{ return *device = 0, cudaSuccess; }}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {{ return *value = {sm_count}, cudaSuccess; }}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** f, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {{
  return *f = (void*)encoder, *found = cudaDriverEntryPointSuccess, cudaSuccess;
}}
cudaError_t cudaFuncSetAttribute(const void* f, cudaFuncAttribute, int value) {{
  std::printf("%s{{\\"kernel\\": %d, \\"smem\\": %d, ", launched ? ", " : "", int((intptr_t)f), value);
  return cudaSuccess;
}}
cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t) {{
  std::printf("\\"cleared\\": [%zu, %d, %zu], ", (size_t)address, value, bytes);
  return cudaSuccess;
}}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void*, void** args) {{
  const bool overlaps = c->numAttrs && c->attrs->id == cudaLaunchAttributeProgrammaticStreamSerialization;
  std::printf("\\"grid\\": [%u, %u, %u], ", c->gridDim.x, c->gridDim.y, c->gridDim.z);
  std::printf("\\"block\\": [%u, %u, %u], ", c->blockDim.x, c->blockDim.y, c->blockDim.z);
  std::printf("\\"dynamic\\": %zu, \\"overlaps\\": %s, ", c->dynamicSmemBytes, overlaps ? "true" : "false");
  std::printf("\\"args\\": [");
  const Launch& launch = expected.launch[launched++];
  for (int i = 0; i < launch.count; i++) {{
    std::printf(i ? ", " : "");
    switch (launch.args[i].kind) {{
      case Argument::INT32: std::printf("%d", *(int*)args[i]); break;
      case Argument::FLOAT32: std::printf("%.9g", *(float*)args[i]); break;
      case Argument::TENSOR_MAP:
        for (int j = 0; j < 13; j++) std::printf("%s%llu", j ? ", " : "[", ((unsigned long long*)args[i])[j]);
        std::printf("]");
        break;
      default: std::printf("%lld", *(long long*)args[i]);
    }}
  }}
  std::printf("]}}");
  return cudaSuccess;
}}
}}
int main() {{
  const Problem p = {problem};
  expected = plan(p, {sm_count});
  const Kernel kernels[] = {{ {kernels} }};
  std::printf("{{");
  if (clear_workspace(p, (void*){workspace}, 0)) return 1;
  std::printf("\\"launches\\": [");
  if (run_all(p, {{(void*)(1 << 10), (void*)(2 << 10), (void*)(3 << 10), (void*)(4 << 10), (float*)(5 << 10)}},
              (void*){workspace}, kernels, 0))
    return 2;
  std::printf("]}}");
}}
"""


def cuda_include() -> Path:
    """A folder of CUDA's headers: of the pip packages, or of the toolkit."""
    spec = find_spec("nvidia")
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    found = [path for folder in folders for path in folder.glob("*/include")] + [Path("/usr/local/cuda/include")]
    needed = "cuda.h", "cuda_runtime.h", "crt/host_config.h"
    whole = (folder for folder in found if all((folder / name).exists() for name in needed))
    return next(whole, None) or pytest.skip("no CUDA headers")


def scratch_addresses(workspace: dict[str, int]) -> dict[str, int]:
    """Those that start zeroed first, each at a multiple of 256 bytes."""
    addresses, at = {}, WORKSPACE
    for name in sorted(workspace, key=lambda name: not name.endswith("_zeroed")):
        addresses[name], at = at, at + -(-workspace[name] // 256) * 256
    return addresses


def as_heard(argument: Buffer | Scalar | TensorMap, addresses: dict[str, int]) -> object:
    """An argument of `Family.launches` as the stand-in prints it."""
    if isinstance(argument, Buffer):
        return addresses[argument.name]
    if isinstance(argument, Scalar):
        return pytest.approx(argument.value, rel=1e-7) if argument.ctype == "float32" else argument.value
    said = [DTYPES[argument.dtype].tensor_map_code, addresses[argument.buffer], 1, len(argument.shape)]
    return said + [size << 32 | box for size, box in zip(argument.shape, argument.box)] + list(argument.strides_bytes)


def without_padding(heard: object) -> object:
    """A tensor map without what the encoder did not write."""
    return heard[: 3 + 2 * heard[3]] if isinstance(heard, list) else heard


@pytest.mark.slow
@pytest.mark.skipif(GXX is None, reason="there is no g++")
@pytest.mark.parametrize(
    ("family", "genes"),
    [
        *HOPPER_GENES.items(),
        ("large_head", None),
        ("flash_mma", None),
        ("flash_wgmma", {"KEY_SPLIT": 2, "STORE": "rows"}),
    ],
)
def test_the_runtime_is_asked_for_what_python_launches(database, tmp_path, family, genes):
    """KEY_SPLIT: results are merged in memory, by as many blocks as run at once."""
    kernel = recorded(database, family, "h100", genes)
    p, launches = kernel.problem, kernel.launches
    texts = [(HOST / "host.h").read_text(), host_code(kernel.family, p, kernel.config, kernel.study.spec)]
    texts += [(HOST / name).read_text() for name in ("api.h", "launch.cuh")]
    sizes = ", ".join(map(str, (p.batch, p.heads, p.kv_heads, p.seqlen_q, p.seqlen_k)))
    strides = ", ".join("{" + ", ".join(map(str, p.strides(t)[:3])) + "}" for t in "qkvo")
    source = tmp_path / "launches.cpp"
    source.write_text(
        PROGRAM.format(
            host="\n".join(texts),
            sm_count=SM_COUNT,
            workspace=WORKSPACE,
            problem=f"{{{sizes}, {strides}, {p.softmax_scale!r}}}",
            kernels=", ".join(f'{{"{launch.kernel}", (const void*){i + 1}}}' for i, launch in enumerate(launches)),
        )
    )
    subprocess.run([GXX, "-std=c++17", f"-isystem{cuda_include()}", source, "-o", tmp_path / "launches"], check=True)
    heard = json.loads(subprocess.run([tmp_path / "launches"], capture_output=True, check=True).stdout)
    scratch = scratch_addresses(kernel.workspace)
    zeroed = sum(-(-size // 256) * 256 for name, size in kernel.workspace.items() if name.endswith("_zeroed"))
    assert heard.get("cleared") == ([WORKSPACE, 0, zeroed] if zeroed else None)
    assert len(heard["launches"]) == len(launches)
    for i, (launch, said) in enumerate(zip(launches, heard["launches"], strict=True)):
        assert said["kernel"] == i + 1 and said["smem"] == said["dynamic"] == launch.smem_bytes
        require_same(launch, said, ADDRESSES | scratch)


def require_same(launch: KernelLaunch, said: dict, addresses: dict[str, int]) -> None:
    assert (tuple(said["grid"]), tuple(said["block"]), said["overlaps"]) == (launch.grid, launch.block, launch.overlaps)
    assert [without_padding(argument) for argument in said["args"]] == [as_heard(a, addresses) for a in launch.args]
