"""A trial as a folder that `torch.utils.cpp_extension.load` builds into an op."""

from __future__ import annotations

import json
import keyword
import sys
from pathlib import Path

from evoattn.export.header import HOST, header, namespace_of
from evoattn.export.provenance import plain, provenance
from evoattn.export.recorded import Recorded
from evoattn.export.target import Target
from evoattn.export.words import fill
from evoattn.model.dtype import DTYPES
from evoattn.model.errors import WrongUse
from evoattn.model.records import Trial
from evoattn.model.whole_file import write_file
from evoattn.storage import Storage

HEADER = "attention.cuh"
TORCH_CPP = {"fp16": "kHalf", "bf16": "kBFloat16", "fp32": "kFloat"}
"""Dtypes as torch's C++ names them."""


def export_torch(storage: Storage, trial: Trial, folder_name: str) -> dict[str, str]:
    """The texts of the folder's files by their names; `folder_name` is what it will be called.

    Raises what `Recorded.read` raises, and `WrongUse` for a family without host code in C++.
    """
    recorded = Recorded.read(storage, trial)
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
