"""A family of backward kernels, and the fake device that runs them: it reads the arguments of a launch as a GPU would,
and computes gradients, as the reference does, out of the answer and the log-sum-exp that it finds there."""

import ctypes
import hashlib
import json
from functools import partial
from pathlib import Path

import torch

from evoattn.backends.cubins import Cubin
from evoattn.backends.driver_launch import LaunchConfig
from evoattn.backends.loaded import BACKWARD_TENSORS
from evoattn.correctness.gradients import exact_gradients
from evoattn.families import registry
from evoattn.families.base import Family
from evoattn.families.variants import COMPILED
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import Buffer, KernelLaunch, Scalar
from evoattn.model.mask import FULL_AND_CAUSAL
from evoattn.model.operation import TensorSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.ops.arguments import autograd_at_work
from evoattn.ops.check import record_check
from evoattn.ops.runtime import Runtime
from tests.ops.fake_device import MACHINE, FakeDevice, Launched, Pick, build, wgmma_pick
from tests.ops.fake_variants import tensor_at

NAME = "fake_backward"
STARTS = "cu_seqlens_q", "cu_seqlens_k"
TENSORS = ("q", "k", "v", "o", "lse", *BACKWARD_TENSORS, "sinks", "slopes", "bias", *STARTS)
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
        smem = int(config.params.get("SMEM", 0))
        return (KernelLaunch(NAME, (problem.heads, problem.batch, 1), (32, 1, 1), smem, tuple(args)),)


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


def training_runtime(device: FakeDevice, folder: Path, pick=pick_either, checked: bool = True, race=None) -> Runtime:
    return Runtime(device, pick, folder, build=partial(build_either, checked=checked), lookup=lookup, race=race)


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
    has, (dim, dim_v), bias, window = kernel["variants"], kernel["dims"], "", ""
    assert kernel["lse"] or not at["dlse"]
    if "bias" in has:
        bias = "".join(name for name, stride in zip("bh", strides["bias"], strict=True) if stride) + "s"
    if "window" in has:
        window = f"{sizes['past']}:{sizes['ahead'] if kernel['mask'] == 'full' else 0}"
    starts = (tensor_at(at[name], (sizes["batch"] + 1,), (1,), torch.int32) for name in STARTS if "varlen" in has)
    problem = AttentionProblem(
        *(sizes[name] for name in SIZES[:5]), *(dim, kernel["dtype"], kernel["mask"]), op="backward", value_dim=dim_v,
        lse=kernel["lse"], grads=kernel["grads"], scale=scale, softcap=softcap * ("softcap" in has), sink="sink" in has,
        alibi="alibi" in has, bias=bias, window=window,
        varlen="/".join("+".join(map(str, one.diff().tolist())) for one in starts),
    )  # fmt: skip

    def lying(spec: TensorSpec) -> torch.Tensor:
        like = "o" if spec.name == "do" else spec.name
        own = (*strides["bias"], *spec.strides[2:]) if like == "bias" else strides.get(like, spec.strides)
        return tensor_at(at[spec.name], spec.shape, own, getattr(torch, spec.dtype))

    made = exact_gradients(problem, {spec.name: lying(spec) for spec in problem.inputs}, torch.float64).values
    outputs = {spec.name: lying(spec) for spec in problem.outputs}
    for name, tensor in outputs.items():
        tensor.copy_(made[name])
    return outputs["dq"]
