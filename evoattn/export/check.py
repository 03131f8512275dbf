"""A trial as one .cu file that plain nvcc builds: provenance, the recorded kernel, a check of its answer, a timing."""

from collections.abc import Iterable

from evoattn.export.kept import kept_case, kept_constants
from evoattn.export.recorded import Recorded, Target, comment, provenance
from evoattn.families.base import starts_zeroed
from evoattn.families.includes import resolve
from evoattn.model.dtype import DTYPES
from evoattn.model.forward import LSE, MAIN, TERMS
from evoattn.model.launch import Buffer, KernelArg, KernelLaunch, Scalar, TensorMap
from evoattn.model.mask import MASKS
from evoattn.model.paths import TEMPLATES
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Trial
from evoattn.model.variant import EIGHT_BITS
from evoattn.storage import Storage

UNKNOWN = ("blocks", "score", *EIGHT_BITS)
"""Variants whose inputs and answer the C++ reference does not make."""


def has_reference(problem: AttentionProblem) -> bool:
    """Whether `templates/export/check/forward.cuh` makes the problem's inputs and answer; other programs keep those of
    a small problem (`kept.py`)."""
    known = problem.op == "forward" and problem.element.bytes > 1 and not (problem.varlen and problem.page)
    return known and not set(problem.variants) & set(UNKNOWN)


def buffers_of(problem: AttentionProblem, workspace: Iterable[str]) -> list[str]:
    """Names of the buffers in their order. Where V lies within K the buffer of V is empty."""
    return [*MAIN, *[LSE] * problem.lse, *problem.term_shapes, *workspace]


def problem_constants(
    problem: AttentionProblem, minimum_sm: int, launches: tuple[KernelLaunch, ...], workspace: dict[str, int]
) -> str:
    """The problem of the forward pass and the limits."""
    buffers = buffers_of(problem, workspace)
    past, ahead = problem.masking.past or 0, problem.masking.ahead or 0
    places = {name: buffers.index(name) if name in problem.term_shapes else -1 for name in TERMS}
    bias = problem.strides("bias")[:3] if problem.bias else (0, 0, 0)
    queries, keys = zip(*problem.sequences, strict=True)
    strides = "\n".join(f"constexpr long {t.upper()}_STRIDES[3] = {_list(problem.strides(t)[:3])};" for t in MAIN)
    return f"""\
{buffer_constants(problem, minimum_sm, launches, _sizes(problem, buffers) | workspace)}\
enum {{ {", ".join(MAIN).upper()} }};  // the first buffers
constexpr int LSE = {len(MAIN)};  // the next, if there is one
constexpr bool HAS_LSE = {_cpp(problem.lse)};
constexpr Dtype DTYPE = Dtype::{problem.dtype};
constexpr size_t ELEMENT_BYTES = {problem.element_bytes};
constexpr long BATCH = {problem.batch}, HEADS = {problem.heads}, KV_HEADS = {problem.kv_heads};
constexpr long SEQLEN_K = {problem.seqlen_k}, HEAD_DIM = {problem.head_dim}, VALUE_DIM = {problem.head_dim_v};
constexpr long QUERIES[BATCH] = {_list(queries)};  // of each sequence
constexpr long KEYS[BATCH] = {_list(keys)};        // that it has in use, at most SEQLEN_K
constexpr long ROWS = {problem.head_rows[0]};  // of a head of Q and O
constexpr bool PACKED = {_cpp(bool(problem.varlen))};     // the sequences lie end to end
constexpr bool SHARED_KV = {_cpp(problem.shared_kv)};  // V is the first columns of K
constexpr long PAGE = {problem.page or 1}, TABLE_PAGES = {problem.table_pages if problem.page else 0};
constexpr bool CAUSAL = {_cpp(MASKS[problem.mask].causal)};
constexpr bool LOWER_RIGHT = {_cpp(problem.masking.ends_lower_right)};  // where the diagonal ends
constexpr double SCALE = {problem.softmax_scale!r}, SOFTCAP = {float(problem.softcap)!r};  // SOFTCAP 0: none
constexpr bool WINDOW = {_cpp(bool(problem.window))};
constexpr long PAST = {past}, AHEAD = {ahead};    // of the keys that a query sees with a window
// Buffers; -1: none.
constexpr int {", ".join(f"{name.upper()} = {place}" for name, place in places.items())};
constexpr long BIAS_STRIDES[3] = {_list(bias)};
{strides}
"""


def buffer_constants(
    problem: AttentionProblem, minimum_sm: int, launches: tuple[KernelLaunch, ...], sizes: dict[str, int]
) -> str:
    """What the checks of all operations are told: the problem's name, its buffers with their `sizes`, the limits."""
    outputs = {tensor.name for tensor in problem.outputs}
    return f"""\
enum class Dtype {{ {", ".join(DTYPES)} }};
constexpr char PROBLEM[] = "{problem.with_().describe()}";
constexpr double FLOPS = {problem.flops}.0;  // as evoattn counts those of the operation
constexpr int BUFFERS = {len(sizes)};
constexpr size_t BUFFER_BYTES[BUFFERS] = {_list(sizes.values())};     // {", ".join(sizes)}
constexpr bool STARTS_ZEROED[BUFFERS] = {_list(_cpp(starts_zeroed(name)) for name in sizes)};
constexpr bool IS_OUTPUT[BUFFERS] = {_list(_cpp(name in outputs) for name in sizes)};
constexpr int MINIMUM_SM = {minimum_sm};
constexpr int LARGEST_SMEM = {max(n.smem_bytes for n in launches)};  // bytes of dynamic shared memory per block
"""


def _sizes(problem: AttentionProblem, names: Iterable[str]) -> dict[str, int]:
    """Bytes of those of the buffers that are the problem's own, or are empty."""
    sizes = {tensor.name: tensor.bytes for tensor in (*problem.inputs, *problem.outputs)}
    return {name: sizes.get(name, 0) for name in names}


def _cpp(value: bool) -> str:
    return str(value).lower()


def _list(values: Iterable[object]) -> str:
    return f"{{{', '.join(map(str, values))}}}"


BEGIN = "// ==== evoattn: begin of the recorded kernel ===="
END = "// ==== evoattn: end of the recorded kernel ===="
"""Lines around the recorded source. The line break before END is the marker's, so that the text between is the source
byte for byte."""
CHECK = TEMPLATES / "export" / "check.cuh"
TENSOR_MAP = TEMPLATES / "export" / "check" / "tensor_map.cuh"
HEADERS = ("algorithm", "cmath", "cstdio", "cstdlib", "cstring", "utility", "vector", "cuda_runtime.h")
TENSOR_MAP_HEADERS = ("cuda.h",)
TENSOR_MAP_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}
OVERLAP = """\
    cudaLaunchAttribute overlap = {};                             // it may begin before the launch before it has ended
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;"""
CPP_TYPES = {"int32": "int", "int64": "long long", "float32": "float"}


def export_source(storage: Storage, trial: Trial) -> str:
    """The text of one .cu file for a recorded trial, of whatever state, that has a source.

    `nvcc -arch=sm_XX kernel.cu -o kernel && ./kernel` prints errors and times, exit code 0 only if the answer is right
    before and after the timing. Raises what `Recorded.read` raises."""
    recorded = Recorded.read(storage, trial)
    target = Target.of(recorded)
    guard, end_guard = target.guard
    how = [
        "",
        f"build and run: nvcc -arch={recorded.study.arch} kernel.cu -o kernel && ./kernel",
        "the recorded kernel alone, to compare its sha256:",
        "  sed '1,/^.. ==== evoattn: begin/d; /^.. ==== evoattn: end/,$d' kernel.cu | head -c -1 | sha256sum",
    ]
    if has_reference(recorded.problem):
        problem, launches, workspace = recorded.problem, recorded.launches, recorded.workspace
        buffers, proof = buffers_of(problem, workspace), "forward"
        constants = problem_constants(problem, target.number, launches, workspace)
    else:
        case, launches, workspace = kept_case(recorded)
        sizes = _sizes(case.problem, (*case.tensors, *case.answer)) | workspace
        buffers, proof = list(sizes), "kept"
        constants = buffer_constants(case.problem, target.number, launches, sizes) + kept_constants(case, buffers)
        how.append(f"The program checks and times a small problem of this kernel: {case.problem.describe()}.")
    check = CHECK.read_text(encoding="utf-8").replace("PROOF", proof)
    return "\n".join(
        (
            comment(provenance(storage, recorded) + how),
            *(f"#include <{header}>" for header in HEADERS + TENSOR_MAP_HEADERS * _has_tensor_maps(launches)),
            target.requirement,
            *guard,
            BEGIN,
            recorded.source,
            END,
            "",
            "namespace evoattn_check {",
            constants,
            _launcher(launches, buffers),
            resolve(check, TEMPLATES).rstrip(),
            "}  // namespace evoattn_check",
            "",
            "int main() { return evoattn_check::run(); }",
            *end_guard,
            "",
        )
    )


def _launcher(launches: tuple[KernelLaunch, ...], buffers: list[str]) -> str:
    """`allow_shared_memory()` and `launch(buffer, stream)`: the launches in order, each argument by its type."""
    lines = ["void require(cudaError_t status, const char* call, int line);", ""]
    lines += [TENSOR_MAP.read_text(encoding="utf-8")] * _has_tensor_maps(launches) + [
        "inline void allow_shared_memory() {"
    ]
    for n in launches:
        what = "cudaFuncAttributeMaxDynamicSharedMemorySize"
        call = f"cudaFuncSetAttribute((const void*)::{n.kernel}, {what}, {n.smem_bytes})"
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
        where = f"dim3({grid}), dim3({block})"
        call = f"cudaLaunchKernel((const void*)::{n.kernel}, {where}, arguments, {n.smem_bytes}, stream)"
        if n.overlaps:
            values += [OVERLAP, f"    cudaLaunchConfig_t config = {{{where}, {n.smem_bytes}, stream, &overlap, 1}};"]
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
    """A call of `tensor_map` in `templates/export/check/tensor_map.cuh`."""
    lists = ", ".join(
        f"{{{', '.join(map(str, values))}}}" for values in (tensor_map.shape, tensor_map.strides_bytes, tensor_map.box)
    )
    dtype = f"CU_TENSOR_MAP_DATA_TYPE_{DTYPES[tensor_map.dtype].tensor_map}"
    swizzle = f"CU_TENSOR_MAP_SWIZZLE_{TENSOR_MAP_SWIZZLES[tensor_map.swizzle_bytes]}"
    return f"tensor_map(buffer[{buffers.index(tensor_map.buffer)}], {dtype}, {swizzle}, {lists})"


def _literal(value: int | float) -> str:
    """A C++ literal; a float is written as the double it is and converted to the argument's type, as NumPy does."""
    return f"float({value!r})" if isinstance(value, float) else str(value)


def _address(index: int, argument: KernelArg, buffers: list[str]) -> str:
    return f"&buffer[{buffers.index(argument.name)}]" if isinstance(argument, Buffer) else f"&argument_{index}"
