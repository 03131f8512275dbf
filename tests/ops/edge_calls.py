"""Calls at the edges of what SDPA takes, and beyond: what it answers the op answers, what it raises the op raises."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Call = tuple[tuple[Any, ...], dict[str, Any]]
HIDDEN_ROW = "a hidden row"


class Calls:
    """Makes the calls on a device. `none_kernel_sees` are those that no kernel is asked for."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(3)

    def random(self, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype).to(self.device)

    def qkv(self, dim=64, value_dim=None, dtype=torch.float16, kv_heads=4) -> tuple[Tensor, Tensor, Tensor]:
        shapes = (2, 4, 9, dim), (2, kv_heads, 13, dim), (2, kv_heads, 13, dim if value_dim is None else value_dim)
        return tuple(self.random(*shape, dtype=dtype) for shape in shapes)  # type: ignore[return-value]

    def of_shapes(self) -> dict[str, Call]:
        """Dimensions, sizes and strides."""
        r = self.random
        calls: dict[str, Call] = {"plain": (self.qkv(), {})}
        for front in ((), (4,), (1, 4), (2, 3, 4)):
            tensors = r(*front, 9, 64), r(*front, 13, 64), r(*front, 13, 64)
            calls[f"{len(front) + 2} dimensions"] = tensors, {}
            calls[f"{len(front) + 2} dimensions, causal"] = tensors, {"is_causal": True}
        calls["one dimension"] = (r(64), r(64), r(64)), {}
        sizes = {"batch": (0, 4, 9, 13, 64), "heads": (2, 0, 9, 13, 64), "queries": (2, 4, 0, 13, 64)}
        sizes |= {"keys": (2, 4, 9, 0, 64), "columns": (2, 4, 9, 13, 0)}
        for name, (b, h, rows, keys, dim) in sizes.items():
            tensors = r(b, h, rows, dim), r(b, h, keys, dim), r(b, h, keys, dim)
            calls[f"no {name}"], calls[f"no {name}, causal"] = (tensors, {}), (tensors, {"is_causal": True})
        calls["no columns of v"] = self.qkv(value_dim=0), {}
        q, k, v = self.qkv()
        calls["one batch of keys"] = (q, k[:1], v[:1]), {}
        calls["one head of keys"] = (q, k[:, :1], v[:, :1]), {}
        for heads in (1, 2, 3, 8):
            for grouped in (False, True):
                calls[f"{heads} K/V heads, {grouped}"] = self.qkv(kv_heads=heads), {"enable_gqa": grouped}
        calls["heads of k and v differ"] = (q, k[:, :2], v[:, :1]), {"enable_gqa": True}
        calls["grouped, three dimensions"] = (q[0], k[0, :2], v[0, :2]), {"enable_gqa": True}
        for dim in (1, 4, 7, 20, 72):
            calls[f"head_dim {dim}"] = self.qkv(dim), {}
        calls["head_dim 32 of v"], calls["head_dim 96 of v"] = (
            (self.qkv(value_dim=32), {}),
            (self.qkv(value_dim=96), {}),
        )
        calls["columns first"] = tuple(t.mT.contiguous().mT for t in self.qkv()), {}
        calls["expanded heads"] = (q, k[:, :1].expand(-1, 4, -1, -1), v[:, :1].expand(-1, 4, -1, -1)), {}
        calls["expanded rows"] = (q, k[:, :, :1].expand(-1, -1, 13, -1), v), {}
        calls["expanded batches"] = (q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1)), {}
        odd = self.random(2 * 4 * 9 * 64 + 3)[3:].view(2, 4, 9, 64)  # on any device, so that all have the same numbers
        if self.device == "cpu":  # elsewhere torch's own kernels read by misaligned loads
            calls["odd start"] = (odd, k, v), {}
        return calls

    def of_values(self) -> dict[str, Call]:
        """Dtypes, flags, scales, and numbers that are none."""
        q, k, v = self.qkv()
        calls: dict[str, Call] = {}
        dtypes = torch.float64, torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.complex64
        for dtype in (*dtypes, torch.float8_e4m3fn):
            calls[str(dtype)] = tuple(t.to(dtype) for t in (q, k, v)), {}
        calls["two dtypes"] = (q, k.float(), v), {}
        for scale in (0.0, -0.5, float("inf"), float("nan"), 2, True, 1e-30):
            calls[f"scale {scale}"] = (q, k, v), {"scale": scale}
        for flag in (1, 0, None):
            calls[f"is_causal {flag}"], calls[f"gqa {flag}"] = (
                ((q, k, v), {"is_causal": flag}),
                ((q, k, v), {"enable_gqa": flag}),
            )
        for name in ("nan", "inf"):  # torch's flash attention of a CPU answers 0 to a query of NaN
            keys = k.clone()
            keys[0, 0, 5] = float(name)
            calls[f"{name} in k"], calls[f"{name} in k, causal"] = (
                ((q, keys, v), {}),
                ((q, keys, v), {"is_causal": True}),
            )
        calls["gradients"] = (q.float().requires_grad_(), k.float(), v.float()), {}
        for name, wrong in {"list": [1, 2], "none": None, "number": 3.0}.items():
            calls[f"q is a {name}"] = (wrong, k, v), {}
        calls["sparse"] = (q.float().to_sparse(), k.float(), v.float()), {}
        return calls

    def of_masks(self) -> dict[str, Call]:
        """`attn_mask`s of every dtype and shape."""
        q, k, v = self.qkv()
        seen = torch.rand(9, 13, generator=self.generator).to(self.device) > 0.4
        row = seen.clone()
        row[3] = False
        r = self.random
        masks: dict[str, Any] = {"bool": seen, HIDDEN_ROW: row, "number": r(9, 13)}
        hidden = torch.zeros_like(row, dtype=torch.float16).masked_fill(~row, -torch.inf)
        masks[f"{HIDDEN_ROW} of numbers"] = hidden
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.complex64):
            masks[str(dtype)] = r(9, 13).to(dtype)
        shapes = (
            (),
            (13,),
            (4, 9, 13),
            (2, 1, 1, 13),
            (2, 4, 9, 13),
            (1, 13),
            (9, 1),
            (1, 2, 4, 9, 13),
            (9, 12),
            (8, 13),
        )
        masks |= {str(list(shape)): r(*shape) for shape in shapes}
        masks["gradients"] = r(9, 13).requires_grad_()
        masks["list"] = [1]
        calls: dict[str, Call] = {f"mask {name}": ((q, k, v), {"attn_mask": mask}) for name, mask in masks.items()}
        wide = tuple(t.float() for t in (q, k, v))
        calls["mask float16 beside float32"] = wide, {"attn_mask": r(9, 13)}
        calls["mask float32 beside bfloat16"] = tuple(t.bfloat16() for t in wide), {"attn_mask": r(9, 13).float()}
        calls["mask and is_causal"] = (q, k, v), {"attn_mask": r(9, 13), "is_causal": True}
        for flag in (0, None):
            calls[f"mask, is_causal {flag}"] = (q, k, v), {"attn_mask": r(9, 13), "is_causal": flag}
        calls["mask, grouped"] = (q, k[:, :2], v[:, :2]), {"attn_mask": r(9, 13), "enable_gqa": True}
        calls["mask, grouped without asking"] = (q, k[:, :2], v[:, :2]), {"attn_mask": r(9, 13)}
        for name, part in {"3": (0,), "2": (0, 0), "5": (None,)}.items():
            calls[f"mask, {name} dimensions"] = tuple(t[part] for t in (q, k, v)), {"attn_mask": r(9, 13)}
        calls["mask of three, three dimensions"] = (q[0], k[0], v[0]), {"attn_mask": r(4, 9, 13)}
        calls["mask without keys"] = (q, k[:, :, :0], v[:, :, :0]), {"attn_mask": r(9, 0)}
        calls["mask without queries"] = (q[:, :, :0], k, v), {"attn_mask": r(0, 13)}
        return calls

    def all(self) -> dict[str, Call]:
        """Every call by its name."""
        return self.of_shapes() | self.of_values() | self.of_masks()


def outcome(function: Callable[..., Tensor], call: Call) -> Tensor | Exception:
    """What a call returns or raises. A device that fails at anything is no outcome."""
    try:
        return function(*call[0], **call[1])
    except torch.AcceleratorError:
        raise
    except Exception as error:
        return error


def torchs(call: Call) -> Tensor | Exception:
    """What torch makes of a call; of tensors without heads, by whose number kernels of torch 2.11 divide, which ends
    the process, its formula's answer."""
    if any(isinstance(tensor, Tensor) and tensor.dim() > 2 and not tensor.shape[-3] for tensor in call[0]):
        return torch._scaled_dot_product_attention_math(*call[0], **call[1])[0]
    return outcome(torch._C._nn.scaled_dot_product_attention, call)


def difference(ours: Tensor | Exception, torchs: Tensor | Exception) -> str:
    """What is not the same in two outcomes; empty if they are."""
    if isinstance(ours, Exception) or isinstance(torchs, Exception):
        return "" if type(ours) is type(torchs) else f"{ours!r:.200} is not {torchs!r:.200}"
    about = [(t.shape, t.dtype, t.device, t.requires_grad) for t in (ours, torchs)]
    if about[0] != about[1]:
        return f"{about[0]} is not {about[1]}"
    one, other = (t.detach().to(torch.complex128) for t in (ours, torchs))
    if torch.allclose(one, other, atol=4e-3, rtol=2e-2, equal_nan=True):
        return ""
    return f"the numbers differ, {int(one.isnan().sum())} and {int(other.isnan().sum())} are NaN"
