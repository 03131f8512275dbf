"""The `kernels` package of Hugging Face: a folder that its `get_local_kernel`, or a repository of its hub, holds.

    python -m evoattn.integrations.hf_kernels FOLDER

writes `build/torch-universal`, pure Python that has FlashAttention 3's functions from the evoattn that is installed. A
repository may not name evoattn's needs (NVRTC, CuPy), so that `pip install` of evoattn comes first. The layout:
https://github.com/huggingface/kernels/blob/main/docs/source/kernel-requirements.md; `Metadata` of kernels 0.17.2 reads
these fields."""

import json
import sys
from pathlib import Path

VARIANT = Path("build") / "torch-universal"
MODULE = '''"""FlashAttention 3's functions, by the kernels of evoattn, which has to be installed."""

from evoattn.flash_attn import *
from evoattn.flash_attn import __all__
'''
METADATA = {
    "id": "_evoattn_1",
    "name": "evoattn",
    "version": 1,
    "license": "see evoattn",
    "python-depends": [],
    "backend": {"type": "cuda"},
}


def write(folder: Path) -> Path:
    """Write the variant into `folder`, which is made if it is not there; where it lies. What is there already under
    these names is replaced."""
    place = folder / VARIANT
    place.mkdir(parents=True, exist_ok=True)
    (place / "__init__.py").write_text(MODULE, encoding="utf-8")
    (place / "metadata.json").write_text(json.dumps(METADATA, indent=2) + "\n", encoding="utf-8")
    return place


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m evoattn.integrations.hf_kernels FOLDER", file=sys.stderr)
        return 2
    print(f'{write(Path(arguments[0]))}; kernels.get_local_kernel(Path("{arguments[0]}")) loads it.')
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
