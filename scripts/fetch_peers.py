"""Bring the peers of `evoattn bench` that are no part of torch, FlashAttention 3 (bf16) and 4 and FlashInfer, into a
folder of their own.

    python scripts/fetch_peers.py FOLDER [--python-version 3.12]

All comes through pip, from the index that pip is set up for, without their own needs, which would bring another torch.
Prints the PYTHONPATH under which the peers are found. For FlashAttention 3 with fp16 build flash-attention's `hopper`
folder; that build is then preferred. FlashInfer compiles what it is asked for with nvcc, once for each head_dim,
dtype and variant, and keeps it in ~/.cache/flashinfer."""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

FA3 = ("fa3-fwd==0.0.3",)
"""The forward pass for torch 2.10 and later and CUDA 13, in bf16 and fp8."""
FA4 = (
    "flash-attn-4==4.0.0b36",
    "nvidia-cutlass-dsl==4.8.1",
    "nvidia-cutlass-dsl-libs-base==4.8.1",
    "nvidia-cutlass-dsl-libs-core==4.8.1",
    "nvidia-cutlass-dsl-libs-cu13==4.8.1",
    "quack-kernels==0.6.5",
    "apache-tvm-ffi==0.1.15.post2",
    "torch-c-dlpack-ext==0.1.5",
)
FLASHINFER = (
    "flashinfer-python==0.7.2.post1",
    *("click==8.5.1", "einops==0.8.2", "ninja==1.13.2", "nvidia-ml-py==13.615.71", "tabulate==0.10.0"),
)
"""And what it imports beside torch and FlashAttention 4's needs."""
DSL = "nvidia_cutlass_dsl/dsl_packages"
"""Put on the path by a .pth file, which a folder on PYTHONPATH does not obey."""
GLIBC = range(39, 16, -1)
"""Minor versions of glibc 2 whose platform tags are tried for another Python: pip matches them one by one."""


def pip(*options: str) -> None:
    """Run pip. Raises `SystemExit` with a sentence where it fails."""
    command = [sys.executable, "-m", "pip", *options]
    if subprocess.run(command).returncode:
        raise SystemExit(f"pip failed: {' '.join(command[2:])}")


def fetch(folder: Path, python_version: str | None, pip: Callable[..., None] = pip) -> list[Path]:
    """Bring all peers into `folder`; the folders to put on PYTHONPATH.

    `python_version` as pip has it, for x86-64 Linux; else the running one."""
    other = ["--python-version", python_version, "--implementation", "cp"] if python_version else []
    other += [word for minor in GLIBC if python_version for word in ("--platform", f"manylinux_2_{minor}_x86_64")]
    pip(
        "install",
        "--no-deps",
        "--only-binary=:all:",
        *other,
        "--upgrade",
        "--target",
        str(folder),
        *FA3,
        *FA4,
        *FLASHINFER,
    )
    return [folder, folder / DSL]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python-version", help="for another Python than the running one, as pip has it")
    options = parser.parse_args()
    paths = fetch(options.folder.resolve(), options.python_version)
    print(f"export PYTHONPATH={':'.join(map(str, paths))}")


if __name__ == "__main__":
    main()
