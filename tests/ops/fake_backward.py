"""A family of backward kernels, and the fake device that runs them: it reads the arguments of a launch as a GPU would,
and computes gradients out of the answer and the log-sum-exp that it finds there."""

import ctypes
import hashlib
import json
import math
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from evoattn.backends.cubins import Cubin
from evoattn.backends.driver_launch import LaunchConfig
from evoattn.backends.loaded import BACKWARD_TENSORS
from evoattn.families import registry
from evoattn.families.base import Family
from evoattn.families.variants import COMPILED
from evoattn.model.backward import parse_grads
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import Buffer, KernelLaunch, Scalar
from evoattn.model.mask import FULL_AND_CAUSAL
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.ops.arguments import autograd_at_work
from evoattn.ops.check import record_check
from evoattn.ops.runtime import Runtime
from tests.ops.fake_device import MACHINE, TORCH, FakeDevice, Launched, Pick, build, wgmma_pick
from tests.ops.fake_variants import tensor_at

NAME = "fake_backward"
TENSORS = ("q", "k", "v", "o", "lse", *BACKWARD_TENSORS, "sinks", "slopes", "bias", "cu_seqlens_q", "cu_seqlens_k")
SIZES = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "rows", "keys", "past", "ahead")
STRIDED = ("q", "k", "v", "o", "dq", "dk", "dv")
TYPES = [ctypes.c_uint64] * (len(TENSORS) + 1) + [ctypes.c_int32] * len(SIZES)
TYPES += [ctypes.c_int64] * (3 * len(STRIDED) + 2) + [ctypes.c_float] * 2
SCRATCH_BYTES = 512


class FakeBackward(Family):
    """Every gradient of 16 bits; deterministic where its config says so."""

    name, summary, devices = NAME, "a test's", "any GPU"
    operations, dtypes, masks, writes_lse = ("backward",), ("fp16", "bf16"), FULL_AND_CAUSAL, True
    variants = ("window", "softcap", "sink", "alibi", "bias", "value_dim", "varlen")

    def genes(self, config):
        raise NotImplementedError

    def refuse(self, problem, gpu):
        return f"{NAME} has a head_dim of at most 128." if problem.head_dim > 128 else None

    def why_not(self, problem, config, gpu, redundant=True):
        if problem.deterministic and not config.params["DETERMINISTIC"]:
            return f"{NAME} adds in any order."
        return None

    def constants(self, problem, config, gpu):
        raise NotImplementedError

    def work(self, problem, config, registers=0):
        raise NotImplementedError

    def workspace(self, problem, config, gpu):
        return {"sums": SCRATCH_BYTES}

    def launches(self, problem, config, gpu):
        there = {spec.name for spec in (*problem.inputs, *problem.outputs)}
        pointers = [Buffer(name) if name in there else Scalar("int64", 0) for name in TENSORS]
        rows, keys, masking = problem.shape("q")[2], problem.shape("k")[2], problem.masking
        sizes = [getattr(problem, name) for name in SIZES[:5]] + [rows, keys, masking.past, masking.ahead]
        strides = [stride for tensor in STRIDED for stride in problem.strides(tensor)[:3]]
        args = [*pointers, Buffer("sums"), *(Scalar("int32", -1 if size is None else size) for size in sizes)]
        of_bias = problem.strides("bias")[:2] if problem.bias else (0, 0)
        args += [Scalar("int64", stride) for stride in (*strides, *of_bias)]
        args += [Scalar("float32", problem.softmax_scale), Scalar("float32", problem.softcap)]
        return (KernelLaunch(NAME, (problem.heads, problem.batch, 1), (32, 1, 1), 0, tuple(args)),)


FAMILY = FakeBackward()


def lookup(name: str) -> Family:
    return FAMILY if name == NAME else registry.lookup(name)


def build_either(
    family: Family, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, folder: Path, checked: bool = True
) -> Cubin:
    """As `fake_device.build`; of a backward kernel, if `checked`, with a record that its check went well."""
    if family is not FAMILY:
        return build(family, problem, config, gpu, folder)
    variants = [name for name in problem.variants if name in (*COMPILED, "varlen")]
    constants = dict(family=NAME, dtype=problem.dtype, mask=problem.mask, dims=(problem.head_dim, problem.head_dim_v))
    constants |= dict(lse=problem.lse, variants=variants, grads=problem.grads, deterministic=problem.deterministic)
    code = json.dumps(constants).encode()
    cubin = Cubin(code, hashlib.sha256(code).hexdigest(), "source", "recipe")
    if checked:
        folder.mkdir(parents=True, exist_ok=True)
        record_check(cubin, MACHINE, folder, config, "")
    return cubin


def pick_either(problem: AttentionProblem, gpu: GpuSpec) -> Pick | None:
    if problem.op == "forward":
        return wgmma_pick(problem, gpu)
    return Pick(NAME, KernelConfig(NAME, {"DETERMINISTIC": True}), "it is the test's")


def training_runtime(device: FakeDevice, folder: Path, pick=pick_either, checked: bool = True) -> Runtime:
    return Runtime(device, pick, folder, build=partial(build_either, checked=checked), lookup=lookup)


class TrainingDevice(FakeDevice):
    """Runs both passes. `backwards` are the backward kernels that ran, by their constants."""

    backward_status: int = 0
    """What the next launches of the backward pass answer."""
    backward_error: float = 0.0
    """Added to the gradient of Q."""

    def __init__(self):
        super().__init__()
        self.backwards: list[dict] = []

    def launch(self, config, function, arguments, _):
        kernel, name = self._functions[(function.value or 0) - 1]
        if kernel["family"] != NAME:
            return super().launch(config, function, arguments, _)
        if self.status or self.backward_status:
            return self.status or self.backward_status
        launch = LaunchConfig.from_address(config.value or 0)
        pointers = (ctypes.c_void_p * len(TYPES)).from_address(arguments.value or 0)
        values = [kind.from_address(at).value for at, kind in zip(pointers, TYPES, strict=True)]
        at = dict(zip(TENSORS, values, strict=False))
        assert values[len(TENSORS)], "scratch memory"
        first = len(TENSORS) + 1
        sizes = dict(zip(SIZES, values[first:], strict=False))
        first += len(SIZES)
        strides = {name: (*values[first + 3 * i : first + 3 * i + 3], 1) for i, name in enumerate(STRIDED)}
        strides["bias"] = tuple(values[-4:-2])
        with autograd_at_work():
            differentiate(kernel, at, sizes, strides, *values[-2:]).add_(self.backward_error)
        self.backwards.append(kernel)
        grid = launch.grid_x, launch.grid_y, launch.grid_z
        self.launches.append(Launched(name, launch.stream or 0, grid, launch.smem_bytes, (), values[-2]))
        return 0


def differentiate(kernel: dict, at: dict, sizes: dict, strides: dict, scale: float, softcap: float) -> torch.Tensor:
    """Write the gradients of what lies at these addresses; that of Q."""
    packed = "varlen" in kernel["variants"]
    batch, heads, kv_heads = 1 if packed else sizes["batch"], sizes["heads"], sizes["kv_heads"]
    rows, keys, (dim, dim_v) = sizes["rows"], sizes["keys"], kernel["dims"]
    dtype, grads = TORCH[kernel["dtype"]], parse_grads(kernel["grads"])
    shapes = {
        "q": (heads, rows, dim),
        "k": (kv_heads, keys, dim),
        "v": (kv_heads, keys, dim_v),
        "o": (heads, rows, dim_v),
    }

    def tensor(name: str, like: str = "") -> torch.Tensor:
        shape = (batch, *shapes[(like or name).removeprefix("d")])
        return tensor_at(at[name], shape, strides[like or name], dtype)

    q, k, v, o, do = tensor("q"), tensor("k"), tensor("v"), tensor("o"), tensor("do", "o")
    found = {name: tensor(name) for name in ("dq", "dk", "dv")}
    of_rows = (batch, heads, rows), (heads * rows, rows, 1), torch.float32
    lse = tensor_at(at["lse"], *of_rows)
    dlse = tensor_at(at["dlse"], *of_rows) if kernel["lse"] else torch.zeros_like(lse)
    assert kernel["lse"] or not at["dlse"]
    sinks = tensor_at(at["sinks"], (heads,), (1,), dtype).double() if "sink" in kernel["variants"] else None
    slopes = tensor_at(at["slopes"], (heads, 1, 1), (1, 1, 1), torch.float32) if "alibi" in kernel["variants"] else None
    dsinks = tensor_at(at["dsinks"], (heads,), (1,), torch.float32) if "sinks" in grads else torch.zeros(heads)
    dsinks.zero_()
    for tensors in found.values():
        tensors.fill_(math.nan) if not packed else tensors.zero_()
    spans = [(slice(0, rows), slice(0, keys))]
    if packed:
        starts = [
            tensor_at(at[name], (sizes["batch"] + 1,), (1,), torch.int32).tolist()
            for name in ("cu_seqlens_q", "cu_seqlens_k")
        ]
        spans = [(slice(*a), slice(*b)) for a, b in zip(*(list(pairwise(s)) for s in starts), strict=True)]
    width = -(-keys // 8) * 8
    for some, of in spans:
        queries = q[:, :, some].double().detach().requires_grad_()
        own = k[:, :, of].double().repeat_interleave(heads // kv_heads, 1).detach().requires_grad_()
        values = v[:, :, of].double().repeat_interleave(heads // kv_heads, 1)
        i, j = torch.arange(queries.shape[2])[:, None], torch.arange(own.shape[2])
        diagonal = i + (0 if kernel["mask"] == "causal_upper_left" else own.shape[2] - queries.shape[2])
        bias = None
        with torch.enable_grad():
            scores = queries @ own.mT * scale
            if "softcap" in kernel["variants"]:
                scores = softcap * torch.tanh(scores / softcap)
            if slopes is not None:
                scores = scores - slopes * (j - diagonal).abs()
            if "bias" in kernel["variants"]:
                of_bias = (*strides["bias"], width, 1)
                bias = tensor_at(at["bias"], (batch, heads, rows, width), of_bias, dtype)[..., :keys].double()
                bias = bias.detach().requires_grad_()
                scores = scores + bias
        hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool)
        if kernel["mask"] != "full":
            hidden |= j > diagonal
        if "window" in kernel["variants"]:
            hidden |= (j < diagonal - sizes["past"]) if sizes["past"] >= 0 else False
            hidden |= (j > diagonal + sizes["ahead"]) if sizes["ahead"] >= 0 else False
        sums = lse[:, :, some, None].double()
        weights = torch.exp(scores.detach() - sums).masked_fill(hidden | torch.isneginf(sums), 0)
        grad = do[:, :, some].double()
        delta = (grad * o[:, :, some].double()).sum(-1, keepdim=True) - dlse[:, :, some, None].double()
        of_scores = weights * (grad @ values.mT - delta)
        dq, dk, *dbias = torch.autograd.grad(scores, [queries, own, *([] if bias is None else [bias])], of_scores)
        found["dq"][:, :, some] = dq.to(dtype)
        found["dk"][:, :, of] = dk.unflatten(1, (kv_heads, -1)).sum(2).to(dtype)
        found["dv"][:, :, of] = (weights.mT @ grad).unflatten(1, (kv_heads, -1)).sum(2).to(dtype)
        if sinks is not None:
            dsinks -= (torch.exp(sinks[:, None, None] - sums) * delta).sum((0, 2, 3)).float()
        if "bias" in grads:
            shape = (batch if strides["bias"][0] else 1, heads if strides["bias"][1] else 1, rows, width)
            made = tensor_at(at["dbias"], shape, contiguous_strides(shape), torch.float32)[..., :keys]
            made.copy_(dbias[0].sum_to_size(made.shape))
    return found["dq"]


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
