"""Golden launches on a CUDA device, in a process that may hang or die. Only that process imports this."""

import sys
from pathlib import Path

import cupy
import numpy as np

from evoattn.backends import tensor_map
from evoattn.model.launch import STATIC_SMEM_LIMIT, TensorMap
from tests.ptx.golden.file import load


def run_from(first: int, folder: Path) -> None:
    """Run the launches of the folder's copy of the file, from number `first` on; each writes its outputs, or why it has
    none, when done."""
    cupy.zeros(1)
    for number, golden in enumerate(load(folder / "todo.bin")[0]):
        if number < first:
            continue
        try:
            module = cupy.cuda.function.Module()
            module.load(golden.ptx.encode())
            function = module.get_function(golden.entry)
            if golden.smem > STATIC_SMEM_LIMIT:
                cupy.cuda.driver.funcSetAttribute(
                    function.ptr, cupy.cuda.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, golden.smem
                )
            results = []
            for _ in range(2):
                arrays = [cupy.asarray(a.reshape(-1).view(np.uint8)) for a in golden.before]
                maps = [
                    np.void(
                        tensor_map.encode(
                            TensorMap("", "fp16", m["shape"], m["strides_bytes"], m["box"], m["swizzle_bytes"]),
                            arrays[m["address"]].data.ptr,
                        )
                    )
                    for m in golden.maps
                ]
                args = (*maps, *(np.uint64(a.data.ptr) for a in arrays), *golden.scalars)
                function((golden.blocks, 1, 1), (golden.threads, 1, 1), args, shared_mem=golden.smem)
                cupy.cuda.runtime.deviceSynchronize()
                results.append([cupy.asnumpy(a) for a in arrays])
            if any((a != b).any() for a, b in zip(*results)):
                raise RuntimeError("two runs differ")
            part = folder / f"{number}.part.npz"
            np.savez(part, *results[0])
            part.rename(folder / f"{number}.npz")
        except (cupy.cuda.driver.CUDADriverError, RuntimeError) as error:
            (folder / f"{number}.why").write_text(" ".join(str(error).split())[:200])
            if "two runs" not in str(error) and "INVALID_PTX" not in str(error):
                sys.exit(3)  # the context may be lost: a fresh process goes on
