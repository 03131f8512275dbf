"""Bring the peers of `evoattn bench` that no plain `pip install` next to torch brings: FlashAttention 3 and 4, into a folder of their own.

    python scripts/fetch_peers.py FOLDER [--python-version 3.12]

FlashAttention 3 has no wheel of its own for this torch: it is the one library of vLLM's wheel that holds it, for the torch that this vLLM is
built for. All comes through pip, from the index that pip is set up for; prints the PYTHONPATH under which the peers are found.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

VLLM = "vllm==0.20.2"
"""Built for torch 2.11 and CUDA 13."""
FA3_FILES = ("vllm/vllm_flash_attn/_vllm_fa3_C*.so", "vllm-*.dist-info/METADATA")
FA4 = (
    "flash-attn-4==4.0.0b36", "nvidia-cutlass-dsl==4.8.1", "nvidia-cutlass-dsl-libs-base==4.8.1", "nvidia-cutlass-dsl-libs-core==4.8.1",
    "nvidia-cutlass-dsl-libs-cu13==4.8.1", "quack-kernels==0.6.5", "apache-tvm-ffi==0.1.15.post2", "torch-c-dlpack-ext==0.1.5",
)
"""FlashAttention 4 with what it needs beside torch; without their own needs, which would bring another torch."""
DSL = "nvidia_cutlass_dsl/dsl_packages"
"""Put on the path by a .pth file, which a folder on PYTHONPATH does not obey."""
GLIBC = range(39, 16, -1)
"""Minor versions of glibc 2 whose platform tags are tried for another Python: pip matches them one by one."""


def pip(*words: str) -> None:
    """Run pip for wheels without their needs. Raises `SystemExit` with a sentence where it fails."""
    command = [sys.executable, "-m", "pip", *words]
    if subprocess.run(command).returncode:
        raise SystemExit(f"pip failed: {' '.join(command[2:])}")


def fetch(folder: Path, python_version: str | None) -> list[Path]:
    """Bring both peers into `folder`; the folders to put on PYTHONPATH.

    `python_version` as pip has it, for x86-64 Linux; else the running one.
    """
    other = ["--python-version", python_version, "--implementation", "cp"] if python_version else []
    other += [word for minor in GLIBC if python_version for word in ("--platform", f"manylinux_2_{minor}_x86_64")]
    wheels = ["--no-deps", "--only-binary=:all:", *other]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        pip("download", *wheels, "--dest", scratch, VLLM)
        (wheel,) = Path(scratch).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if any(fnmatch(name, pattern) for pattern in FA3_FILES):
                    archive.extract(name, folder)
    pip("install", *wheels, "--upgrade", "--target", str(folder), *FA4)
    return [folder, *(path for path in [folder / DSL] if path.is_dir())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python-version", help="for another Python than the running one, as pip has it")
    words = parser.parse_args()
    paths = fetch(words.folder.resolve(), words.python_version)
    print(f"export PYTHONPATH={':'.join(map(str, paths))}")


if __name__ == "__main__":
    main()
