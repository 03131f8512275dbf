"""What an exported header asks of the CUDA runtime, heard by a stand-in for it: addresses, values, tensor maps,
attributes."""

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from evoattn.export.host_code import host_code
from evoattn.model.dtype import DTYPES
from evoattn.model.launch import Buffer, KernelLaunch, Scalar, TensorMap
from tests.export.host_driver import GXX, HOST
from tests.export.kernels import HOPPER_GENES, recorded

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
