"""The one table of element types: what each is called wherever a name or a size of it is needed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Dtype:
    """One element type of Q, K, V or O.

    Nothing here imports torch: `getattr(torch, dtype.torch)` is its dtype there."""

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
    mma_k: int
    """Products that one `mma.sync` or `wgmma` sums up for an element of its result, 32 bytes of a row; of fp32 as
    tf32."""
    on_tensor_cores: bool = True
    """Whether tensor cores multiply it as it is; fp32 goes to the CUDA cores, or is split by the family."""
    largest: float = 0.0
    """Of a type of 8 bits the largest number, which a quantisation makes the largest of its values; 0 for others."""
    answers: str = ""
    """The dtype of O and of what is added to scores, where Q has this one; empty for its own."""
    may_query: bool = True
    """Whether Q may have it."""


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
            mma_k=16,
            spellings=("fp16", "float16", "half", "f16", "torch.float16", "torch.half"),
        ),
        Dtype(
            "bf16",
            bytes=2,
            torch="bfloat16",
            cuda="Bf16",
            tensor_map="BFLOAT16",
            tensor_map_code=9,
            mma_k=16,
            spellings=("bf16", "bfloat16", "torch.bfloat16"),
        ),
        Dtype(
            "fp32",
            bytes=4,
            torch="float32",
            cuda="Fp32",
            tensor_map="FLOAT32",
            tensor_map_code=7,
            mma_k=8,
            spellings=("fp32", "float32", "float", "f32", "torch.float32", "torch.float"),
            on_tensor_cores=False,
        ),
        Dtype(
            "e4m3",
            bytes=1,
            torch="float8_e4m3fn",
            cuda="E4m3",
            tensor_map="UINT8",
            tensor_map_code=0,
            mma_k=32,
            spellings=("e4m3", "float8_e4m3fn", "fp8", "fp8_e4m3", "torch.float8_e4m3fn"),
            largest=448.0,
            answers="bf16",
        ),
        Dtype(
            "e5m2",
            bytes=1,
            torch="float8_e5m2",
            cuda="E5m2",
            tensor_map="UINT8",
            tensor_map_code=0,
            mma_k=32,
            spellings=("e5m2", "float8_e5m2", "fp8_e5m2", "torch.float8_e5m2"),
            largest=57344.0,
            answers="bf16",
            may_query=False,
        ),
        Dtype(
            "int8",
            bytes=1,
            torch="int8",
            cuda="Int8",
            tensor_map="UINT8",
            tensor_map_code=0,
            mma_k=32,
            spellings=("int8", "s8", "i8", "torch.int8"),
            largest=127.0,
            answers="bf16",
        ),
    )
}
QUERY_DTYPES = tuple(name for name, dtype in DTYPES.items() if dtype.may_query)
"""Those that Q may have."""
KEY_DTYPES = tuple(name for name, dtype in DTYPES.items() if dtype.bytes == 1)
"""Those of 8 bits, which K and V may have where Q has another; their values are multiplied by scales."""
WIDE_DTYPES = tuple(name for name, dtype in DTYPES.items() if dtype.bytes > 1)
"""Those of 16 and 32 bits, which need no scales."""
