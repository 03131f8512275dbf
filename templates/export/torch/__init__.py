"""EVOATTN_SUMMARY

`attention(query, key, value, scale=None)` is also `torch.ops.EVOATTN_NAME.attention`. The first import builds the
folder with nvcc and the host compiler; later ones load what torch keeps of it.
"""

from pathlib import Path

import torch
from torch.utils.cpp_extension import load

_HERE = Path(__file__).parent

load(
    name="EVOATTN_NAME",
    sources=[str(_HERE / "binding.cpp"), str(_HERE / "kernel.cu")],
    extra_cuda_cflags=EVOATTN_NVCC_FLAGS,
)
attention = torch.ops.EVOATTN_NAME.attention
attention_lse = torch.ops.EVOATTN_NAME.attention_lse
