"""A trial as one CUDA header that a project includes, and as a folder that `torch.utils.cpp_extension.load` builds."""

import json
import keyword
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from evoattn.export.host_code import host_code
from evoattn.export.recorded import Recorded, Target, comment, plain, provenance
from evoattn.model.dtype import DTYPES
from evoattn.model.errors import WrongUse
from evoattn.model.paths import TEMPLATES
from evoattn.model.records import Trial
from evoattn.model.whole_file import write_file
from evoattn.storage import Storage, StorageError

_WORD = re.compile(r"EVOATTN_[A-Z_]+[A-Z]")


def fill(text: str, words: Mapping[str, str]) -> str:
    """`text` with each word replaced once; what is put in is left alone. Raises `KeyError` on an unknown word."""
    return _WORD.sub(lambda match: words[match[0]], text)


HOST = TEMPLATES / "export"
NO_LAUNCH = """\
#else  // nvcc reads the file once more for another target, and throws its host code away
static cudaError_t launch(const Problem&, const Tensors&, void*, cudaStream_t) { return cudaErrorInvalidDevice; }"""
ENTRY = 'extern "C" __global__'
_KERNEL_NAME = re.compile(rf"{re.escape(ENTRY)}[^;{{]*?\b([a-z]\w*)\(", re.S)
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<([^>\n]+)>", re.M)
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.M)


def export_header(storage: Storage, trial: Trial) -> str:
    """The text of a header, without problem constants and without `main`, that any number of files may include.

    Raises what `recorded_for_host` raises."""
    recorded = recorded_for_host(storage, trial)
    return header(recorded, provenance(storage, recorded))


def recorded_for_host(storage: Storage, trial: Trial) -> Recorded:
    """A trial of the plain forward pass, of any scale. Raises `StorageError` on another one, and what `Recorded.read`
    raises."""
    recorded = Recorded.read(storage, trial)
    problem = recorded.problem
    unknown = [*[f"op={problem.op}"] * (problem.op != "forward"), *problem.variants]
    if problem.element.bytes == 1:
        unknown.append(problem.dtype)
    if unknown:
        raise StorageError(
            f"This export does not know {', '.join(unknown)}; take --format check, or call the kernel by "
            "`evoattn.load`."
        )
    return recorded


def namespace_of(recorded: Recorded) -> str:
    """A C++ name of its own for every kernel, so that one program can have several."""
    return f"evoattn_{recorded.trial.family}_{str(recorded.trial.source_hash)[:8]}"


def header(recorded: Recorded, about: list[str]) -> str:
    """The header of a recorded kernel, with the lines `about` it first."""
    name, target, source = namespace_of(recorded), Target.of(recorded), recorded.source
    guard, end_guard = target.guard
    code = host_code(recorded.family, recorded.problem, recorded.config, recorded.study.spec)
    kernels = (f'{{"{kernel}", (const void*)kernels::{kernel}}}' for kernel in _KERNEL_NAME.findall(source))
    words = {
        "COMMENT": comment([*_usage(recorded, name, target), "", *about]),
        "NAME": name,
        "INCLUDES": "\n".join(f"#include <{header}>" for header in dict.fromkeys(_INCLUDE.findall(source))),
        "HOST": "\n".join((_host("host.h"), code, _host("api.h"))).rstrip(),
        "LAUNCH": _host("launch.cuh").rstrip(),
        "REQUIREMENT": target.requirement,
        "GUARD": "\n".join(guard),
        "END_GUARD": "\n".join([NO_LAUNCH, *end_guard] if end_guard else []),
        "SOURCE": source.replace(ENTRY, "__global__").rstrip(),
        "UNDEFINE": "\n".join(f"#undef {macro}" for macro in dict.fromkeys(_MACRO.findall(source))),
        "KERNELS": ", ".join(kernels),
    }
    return fill(_host("header.cuh.in"), {f"EVOATTN_{word}": text for word, text in words.items()})


def _host(name: str) -> str:
    return (HOST / name).read_text(encoding="utf-8")


def _usage(recorded: Recorded, name: str, target: Target) -> list[str]:
    problem, lse = recorded.problem, ", with the log-sum-exp" if recorded.problem.lse else ""
    return [
        f"Attention of head_dim {problem.head_dim}, {problem.dtype}, mask {problem.mask}{lse}: any batch, heads, "
        f"lengths and strides. For {target.words}: nvcc -std=c++17 -arch={target.name}.",
        "",
        f"  namespace attention = {name};",
        "  attention::Problem problem = {batch, heads, kv_heads, seqlen_q, seqlen_k,",
        "                                {q_batch_stride, q_head_stride, q_row_stride}, {k}, {v}, {o}, scale};",
        "  size_t bytes;  // of scratch memory on this device",
        "  attention::workspace_size(problem, &bytes);",
        "  attention::clear_workspace(problem, workspace, stream);  // once, before the first launch",
        "  attention::launch(problem, {q, k, v, o, lse}, workspace, stream);",
        "",
        "Strides are in elements. launch gives cudaErrorInvalidValue for what why_not(problem, tensors) has a sentence "
        "for. Launches that may run at the same time need a workspace each.",
    ]


HEADER = "attention.cuh"
TORCH_CPP = {"fp16": "kHalf", "bf16": "kBFloat16", "fp32": "kFloat"}
"""Dtypes as torch's C++ names them."""


def export_torch(storage: Storage, trial: Trial, folder_name: str) -> dict[str, str]:
    """The texts of the folder's files by their names; `folder_name` is what it will be called.

    Raises what `recorded_for_host` raises."""
    recorded = recorded_for_host(storage, trial)
    about, target, problem = provenance(storage, recorded), Target.of(recorded), recorded.problem
    words = {
        "EVOATTN_SUMMARY": f"Attention by a kernel that evoattn found ({plain(about[0])}).",
        "EVOATTN_NAME": namespace_of(recorded),
        "EVOATTN_FOLDER": folder_name,
        "EVOATTN_DTYPE": TORCH_CPP[problem.dtype],
        "EVOATTN_TORCH_DTYPE": DTYPES[problem.dtype].torch,
        "EVOATTN_HEAD_DIM": str(problem.head_dim),
        "EVOATTN_MASK": problem.mask,
        "EVOATTN_NVCC_FLAGS": json.dumps(["-O3", *target.nvcc_flags]),
        "EVOATTN_DEVICES": target.words,
    }
    files = {HEADER: header(recorded, about)}
    for path in sorted((HOST / "torch").iterdir()):
        files[path.name.removesuffix(".in")] = fill(path.read_text(encoding="utf-8"), words)
    return files


def write_folder(files: dict[str, str], folder: Path) -> None:
    """Create `folder` with the files. Raises `WrongUse` if something else lies there, or if Python cannot import it."""
    if folder.exists() and (not folder.is_dir() or {path.name for path in folder.iterdir()} - set(files)):
        raise WrongUse(f"{folder} is there already and holds something else; choose another name with -o.")
    name = folder.resolve().name
    if not name.isidentifier() or keyword.iskeyword(name) or name in {*sys.stdlib_module_names, "torch", "numpy"}:
        raise WrongUse(
            f"Python imports the folder by its name, and cannot take {name!r}; give -o another one, such as "
            "my_attention."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_file(folder / name, text)
