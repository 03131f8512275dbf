"""The one table of element types: what each is called wherever a name or a size of it is needed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dtype:
    """One element type of Q, K, V and O.

    Nothing here imports torch: `getattr(torch, dtype.torch)` is its dtype there.
    """

    name: str
    bytes: int
    torch: str
    """Name in `torch`."""
    cuda: str
    """Type in `templates/device`."""
    tensor_map: str
    """Enumerator of `CUtensorMapDataType` after `CU_TENSOR_MAP_DATA_TYPE_` (cuda.h)."""
    tensor_map_code: int
    """Its value."""
    spellings: tuple[str, ...]
    """How a user may write it, in any case."""
    on_tensor_cores: bool = True
    """Whether tensor cores multiply it as it is; fp32 goes to the CUDA cores, or is split by the family."""


DTYPES: dict[str, Dtype] = {
    dtype.name: dtype
    for dtype in (
        Dtype(
            "fp16",
            bytes=2,
            torch="float16",
            cuda="Fp16",
            tensor_map="FLOAT16",
            tensor_map_code=6,
            spellings=("fp16", "float16", "half", "f16", "torch.float16", "torch.half"),
        ),
        Dtype(
            "bf16",
            bytes=2,
            torch="bfloat16",
            cuda="Bf16",
            tensor_map="BFLOAT16",
            tensor_map_code=9,
            spellings=("bf16", "bfloat16", "torch.bfloat16"),
        ),
        Dtype(
            "fp32",
            bytes=4,
            torch="float32",
            cuda="Fp32",
            tensor_map="FLOAT32",
            tensor_map_code=7,
            spellings=("fp32", "float32", "float", "f32", "torch.float32", "torch.float"),
            on_tensor_cores=False,
        ),
    )
}
