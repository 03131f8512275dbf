"""A trial as one .cu file that plain nvcc builds: provenance, the recorded kernel byte for byte, a check of its answer, a timing."""

from __future__ import annotations

import hashlib
import math
import re
import textwrap

from evoattn.families import registry
from evoattn.families.base import Family, starts_zeroed
from evoattn.model.dtype import DTYPES
from evoattn.model.launch import Buffer, KernelArg, KernelLaunch, Scalar, TensorMap
from evoattn.model.paths import TEMPLATES
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Study, Timing, Trial
from evoattn.model.space import KernelConfig
from evoattn.storage import Storage, StorageError
from evoattn.timing.peers.labels import peer_label

BEGIN = "// ==== evoattn: begin of the recorded kernel ===="
END = "// ==== evoattn: end of the recorded kernel ===="
"""Lines around the recorded source. The line break before END is the marker's, so that the text between is the source byte for byte."""
CHECK = TEMPLATES / "export" / "check.cuh"
TENSOR_MAP = TEMPLATES / "export" / "check_tensor_map.cuh"
COMMENT_WIDTH = 136
HEADERS = ("algorithm", "cmath", "cstdio", "cstdlib", "cstring", "vector", "cuda_runtime.h")
TENSOR_MAP_HEADERS = ("cuda.h",)
TENSOR_MAP_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}
OVERLAP = """\
    cudaLaunchAttribute overlap = {};                             // it may begin before the launch before it has ended
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;"""
CPP_TYPES = {"int32": "int", "int64": "long long", "float32": "float"}
MASK_OF_NO_KEY = "A query that sees no key has the output 0."
LOWEST_SM = 75
"""What nvcc 13 still builds for: families that run on any GPU ask for no more."""


def export_source(storage: Storage, trial: Trial) -> str:
    """The text of one .cu file for a recorded trial, of whatever state, that has a source.

    `nvcc -arch=sm_XX kernel.cu -o kernel && ./kernel` prints errors and times, exit code 0 only if the answer is right before and
    after the timing. Raises `StorageError` if the trial has no source, or its source or its record is not what this version wrote,
    and `FamilyError` if its family is not here any more.
    """
    if trial.source_hash is None:
        raise StorageError(
            f"Trial {trial.number} ({trial.state}) never became source, and cannot be exported; choose another trial."
        )
    source = storage.source(trial.source_hash)
    if hashlib.sha256(source.encode()).hexdigest() != trial.source_hash:
        raise StorageError(
            f"The source of trial {trial.number} is not what was recorded; use another copy of the database."
        )
    study = storage.study(trial.study_id)
    problem, family = AttentionProblem(**study.problem), registry.lookup(trial.family)
    if problem.masking.past is not None:
        raise StorageError(f"The exported check cannot tell which keys {problem.mask} hides; use `evoattn reproduce`.")
    config = KernelConfig(trial.family, trial.config)
    try:
        gpu = study.spec
        launches, workspace = family.launches(problem, config, gpu), family.workspace(problem, config, gpu)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise StorageError(
            f"Trial {trial.number} is not of this version's {trial.family} ({error!r}); export it with the evoattn that made it."
        ) from None
    least = _least_sm(family, source, launches)
    guard, end_guard = _target_guard(*least)
    return "\n".join(
        (
            _comment(_provenance(storage, study, trial, problem, launches)),
            *(f"#include <{header}>" for header in HEADERS + TENSOR_MAP_HEADERS * _has_tensor_maps(launches)),
            _requirement(*least),
            *guard,
            BEGIN,
            source,
            END,
            "",
            "namespace evoattn_check {",
            _constants(problem, least[0], launches, workspace),
            _launcher(launches, _buffers(problem, workspace)),
            CHECK.read_text().rstrip(),
            "}  // namespace evoattn_check",
            "",
            "int main() { return evoattn_check::run(); }",
            *end_guard,
            "",
        )
    )


def _comment(lines: list[str]) -> str:
    """`lines` as `//` comments. What they quote comes from a database, and nothing in it can end a comment or go on into the next line:
    only printable ASCII is kept, without backslashes, comment signs or the `??/` that old compilers read as a backslash."""
    rows = []
    for line in lines:
        text = re.sub(r"[^ -~]", "?", line.replace("µ", "u")).replace("\\", "|")
        text = re.sub(r"\?+", "?", text).replace("*/", "* /").replace("/*", "/ *")
        rows += textwrap.wrap(text, COMMENT_WIDTH, subsequent_indent="    ") or [""]
    return "\n".join(f"// {row}".rstrip() for row in rows) + "\n"


def _provenance(
    storage: Storage, study: Study, trial: Trial, problem: AttentionProblem, launches: tuple[KernelLaunch, ...]
) -> list[str]:
    info, timing, versions = (
        trial.compile_info,
        trial.timing,
        study.versions | next(iter(storage.environments(trial)), {}),
    )
    lines = [
        f"evoattn {versions.get('evoattn', '?')}: trial {trial.number} of study {study.name} ({trial.created_at})",
        f"problem: {problem.describe()}. {MASK_OF_NO_KEY}" if problem.causal else f"problem: {problem.describe()}",
        f"state: {trial.state}" + (f": {trial.reason}" if trial.reason else ""),
        f"family: {trial.family}; config: " + " ".join(f"{k}={v}" for k, v in trial.config.items()),
        f"source: sha256 {trial.source_hash}, made by {trial.operator}"
        + (f" of trials {list(trial.parents)}" if trial.parents else ""),
        "launches: "
        + "; ".join(
            f"{n.kernel} grid {n.grid} block {n.block}, {n.smem_bytes} bytes of shared memory" for n in launches
        ),
    ]
    if info:
        lines.append(
            f"compiled by {info.compiler} {' '.join(info.options)}: {info.registers} registers, {info.spill_bytes} bytes spilled, "
            f"{info.static_smem_bytes} bytes of static shared memory"
        )
    where = f"{versions.get('device', study.gpu)}, {versions.get('driver', 'no driver')}"
    if timing and timing.median_us > 0:
        lines.append(f"measured on {where}: {_timed(timing)}, {problem.flops / timing.median_us / 1e6:.2f} TFLOP/s")
        for name, timings in storage.peers(study).items():
            latest = timings[-1]
            ratio = (
                f", {latest.median_us / timing.median_us:.3f} x its speed in the same rounds"
                if latest.interleaved_with(timing)
                else ""
            )
            lines.append(f"against {peer_label(name)}: {_timed(latest)}{ratio}")
        lines += [
            f"against {peer_label(name)}: refused ({sentence})" for name, sentence in storage.refusals(study).items()
        ]
    else:
        lines.append(f"never timed: judged for {study.gpu} ({study.arch}) without that GPU")
    return lines + [
        "",
        f"build and run: nvcc -arch={study.arch} kernel.cu -o kernel && ./kernel",
        "the recorded kernel alone, to compare its sha256:",
        "  sed '1,/^.. ==== evoattn: begin/d; /^.. ==== evoattn: end/,$d' kernel.cu | head -c -1 | sha256sum",
    ]


def _timed(timing: Timing) -> str:
    stage, cache = timing.protocol.get("stage", "?"), timing.protocol.get("cache", "?")
    return (
        f"{timing.median_us:.3f} us per call (median of {len(timing.samples_us)}, p10 {timing.quantile_us(0.1):.3f}, "
        f"p90 {timing.quantile_us(0.9):.3f}; {stage}, {cache} L2)"
    )


def _least_sm(family: Family, source: str, launches: tuple[KernelLaunch, ...]) -> tuple[int, str]:
    """(least compute capability as `80`, its name) out of the family's own words, e.g. `sm_80 and newer` or `sm_90a`, and of what this
    kernel needs beyond them: wgmma; or launches that overlap, of clusters, with tensor maps."""
    if "wgmma.mma_async.sync" in source:
        return 90, "sm_90a"
    found = re.search(r"sm_(\d+)a?", family.devices)
    least = (int(found[1]), found[0]) if found else (LOWEST_SM, f"sm_{LOWEST_SM}")
    hopper = any(
        n.overlaps or math.prod(n.cluster) > 1 or any(isinstance(a, TensorMap) for a in n.args) for n in launches
    )
    return max(least, (90, "sm_90")) if hopper else least


def _requirement(number: int, name: str) -> str:
    """An `#error` for an -arch that the kernel's instructions do not exist on."""
    newer = "" if name.endswith("a") else " or newer"
    return f"""
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < {number}0
#error "this kernel needs {name}: build with nvcc -arch={name}{newer}"
#endif
"""


def _target_guard(number: int, name: str) -> tuple[list[str], list[str]]:
    """(lines before, lines after) all code of an `a` target: nvcc 13.0 asked for sm_90a compiles for compute_90 too, which must see none of it."""
    if not name.endswith("a"):
        return [], []
    return [f"#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM{number}_ALL)"], ["#endif", ""]


def _buffers(problem: AttentionProblem, workspace: dict[str, int]) -> list[str]:
    return ["q", "k", "v", "o", *["lse"] * problem.lse, *workspace]


def _constants(
    problem: AttentionProblem, minimum_sm: int, launches: tuple[KernelLaunch, ...], workspace: dict[str, int]
) -> str:
    """The problem and the limits as constants for `templates/export_check.cuh`."""
    sizes = [_elements(problem, t) * problem.element_bytes for t in "qkvo"] + [
        4 * math.prod(problem.lse_shape)
    ] * problem.lse
    sizes += workspace.values()
    strides = "\n".join(
        f"constexpr long {t.upper()}_STRIDES[3] = {{{', '.join(map(str, problem.strides(t)[:3]))}}};" for t in "qkvo"
    )
    return f"""\
enum class Dtype {{ fp16, bf16, fp32 }};
enum {{ Q, K, V, O }};                                            // the first four buffers
constexpr int LSE = 4;                                          // the next, if there is one
constexpr bool HAS_LSE = {str(problem.lse).lower()};
constexpr char PROBLEM[] = "{problem.with_().describe()}";
constexpr Dtype DTYPE = Dtype::{problem.dtype};
constexpr size_t ELEMENT_BYTES = {problem.element_bytes};
constexpr long BATCH = {problem.batch}, HEADS = {problem.heads}, KV_HEADS = {problem.kv_heads};
constexpr long SEQLEN_Q = {problem.seqlen_q}, SEQLEN_K = {problem.seqlen_k}, HEAD_DIM = {problem.head_dim};
constexpr bool CAUSAL = {str(problem.causal).lower()};
constexpr long CAUSAL_OFFSET = {problem.causal_offset};           // query i sees keys j <= i + CAUSAL_OFFSET
{strides}
constexpr double FLOPS = {problem.flops}.0;                       // 4 * HEAD_DIM for every query-key pair that the mask lets through
constexpr int BUFFERS = {len(sizes)};
constexpr size_t BUFFER_BYTES[BUFFERS] = {{{", ".join(map(str, sizes))}}};     // {", ".join(_buffers(problem, workspace))}
constexpr bool STARTS_ZEROED[BUFFERS] = {{{", ".join(str(starts_zeroed(name)).lower() for name in _buffers(problem, workspace))}}};
constexpr int MINIMUM_SM = {minimum_sm};
constexpr int LARGEST_SMEM = {max(n.smem_bytes for n in launches)};          // bytes of dynamic shared memory per block
"""


def _elements(problem: AttentionProblem, tensor: str) -> int:
    batch, heads, seqlen, dim = problem.shape(tensor)
    return batch * heads * seqlen * dim


def _launcher(launches: tuple[KernelLaunch, ...], buffers: list[str]) -> str:
    """`allow_shared_memory()` and `launch(buffer, stream)`: the family's launches in order, each argument by its exact type."""
    lines = ["void require(cudaError_t status, const char* call, int line);", ""]
    lines += [TENSOR_MAP.read_text()] * _has_tensor_maps(launches) + ["inline void allow_shared_memory() {"]
    for n in launches:
        call = f"cudaFuncSetAttribute((const void*)::{n.kernel}, cudaFuncAttributeMaxDynamicSharedMemorySize, {n.smem_bytes})"
        lines += [f"  require({call},", f'          "shared memory of {n.kernel}", __LINE__);']
    lines += ["}", "inline void launch(void* (&buffer)[BUFFERS], cudaStream_t stream) {"]
    for n in launches:
        grid, block = (", ".join(map(str, shape)) for shape in (n.grid, n.block))
        values = [
            f"    {CPP_TYPES[a.ctype]} argument_{i} = {_literal(a.value)};"
            for i, a in enumerate(n.args)
            if isinstance(a, Scalar)
        ]
        values += [
            f"    CUtensorMap argument_{i} = {_tensor_map(a, buffers)};"
            for i, a in enumerate(n.args)
            if isinstance(a, TensorMap)
        ]
        addresses = ", ".join(_address(i, a, buffers) for i, a in enumerate(n.args))
        call = f"cudaLaunchKernel((const void*)::{n.kernel}, dim3({grid}), dim3({block}), arguments, {n.smem_bytes}, stream)"
        if n.overlaps:
            values += [
                OVERLAP,
                f"    cudaLaunchConfig_t config = {{dim3({grid}), dim3({block}), {n.smem_bytes}, stream, &overlap, 1}};",
            ]
            call = f"cudaLaunchKernelExC(&config, (const void*)::{n.kernel}, arguments)"
        lines += [
            "  {",
            *values,
            f"    void* arguments[] = {{{addresses}}};",
            f"    require({call},",
            f'            "launch of {n.kernel}", __LINE__);',
            "  }",
        ]
    return "\n".join([*lines, "}", ""])


def _has_tensor_maps(launches: tuple[KernelLaunch, ...]) -> bool:
    return any(isinstance(a, TensorMap) for n in launches for a in n.args)


def _tensor_map(tensor_map: TensorMap, buffers: list[str]) -> str:
    """A call of `tensor_map` in `templates/export_tensor_map.cuh`."""
    lists = ", ".join(
        f"{{{', '.join(map(str, values))}}}" for values in (tensor_map.shape, tensor_map.strides_bytes, tensor_map.box)
    )
    return (
        f"tensor_map(buffer[{buffers.index(tensor_map.buffer)}], CU_TENSOR_MAP_DATA_TYPE_{DTYPES[tensor_map.dtype].tensor_map}, "
        f"CU_TENSOR_MAP_SWIZZLE_{TENSOR_MAP_SWIZZLES[tensor_map.swizzle_bytes]}, {lists})"
    )


def _literal(value: int | float) -> str:
    """A C++ literal; a float is written as the double it is and converted to the argument's type, as NumPy does."""
    return f"float({value!r})" if isinstance(value, float) else str(value)


def _address(index: int, argument: KernelArg, buffers: list[str]) -> str:
    return f"&buffer[{buffers.index(argument.name)}]" if isinstance(argument, Buffer) else f"&argument_{index}"
