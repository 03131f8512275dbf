"""A device made of host memory: it reads a launch's arguments as a GPU would, and computes attention with torch from
what they point to. So an answer is right only if every pointer, stride, length, tensor map and the scale are."""

import contextlib
import ctypes
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from evoattn.backends.base import LaunchError
from evoattn.backends.cubins import Cubin
from evoattn.backends.driver_launch import LaunchConfig
from evoattn.families.base import Family
from evoattn.families.mask_blocks import KERNEL as PACK
from evoattn.families.registry import load_space
from evoattn.families.variants import COMPILED, variant_given
from evoattn.model.gpu import GPUS, GpuSpec
from evoattn.model.launch import TensorMap
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.ops.check import record_check, recorded_check
from evoattn.ops.runtime import Runtime
from evoattn.portfolio import pick
from tests.ops.fake_variants import attend, changed, sequences, shapes_of, tensor_at, values_of


@dataclass(frozen=True)
class Pick(pick.Pick):
    why: str = "the test says so"


TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
PLAIN = [ctypes.c_uint64] * 4 + [ctypes.c_int32] * 4 + [ctypes.c_int64] * 12 + [ctypes.c_float]
"""`families.base.attention_args`."""
MAPPED = [None] * 4 + [ctypes.c_uint64] * 4 + [ctypes.c_int32] * 5 + [ctypes.c_int64] * 3 + [ctypes.c_float]
"""Of flash_wgmma: maps of q, k, v and o; o, lse, two scratch buffers; sizes; strides of o; the scale."""


MACHINE = "a fake GPU, driver 1.0"
BUILT: dict[str, tuple[Cubin, Path]] = {}
"""Of each machine code the first of this process, and the folder with the record of its check."""


def build(family: Family, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, folder: Path) -> Cubin:
    """In place of NVRTC: what the fake device has to know of the source. What an earlier test found right is not
    checked again, as on a real machine: the check takes longer than the test."""
    variants = [name for name in problem.variants if name in (*COMPILED, "appended")]
    constants = dict(family=family.name, dtype=problem.dtype, mask=problem.mask, head_dim=problem.head_dim)
    constants |= dict(head_dim_v=problem.head_dim_v, lse=problem.lse, variants=variants, config=pick.whole(config).id)
    if problem.score or problem.blocks:
        constants |= dict(score=problem.score, tables=problem.tables, predicate=problem.predicate)
        variants += ["blocks"] * bool(problem.blocks)
    constants["taken"] = [field.needed for field in variant_given(problem)]
    code = json.dumps(constants).encode()
    cubin = Cubin(code, hashlib.sha256(code).hexdigest(), "source", "recipe")
    first, checked = BUILT.setdefault(cubin.digest, (cubin, folder))
    if checked != folder and recorded_check(first, MACHINE, checked) == "":
        folder.mkdir(parents=True, exist_ok=True)
        record_check(cubin, MACHINE, folder, config, "")
    return cubin


@dataclass
class Launched:
    """One launch that arrived."""

    kernel: str
    stream: int
    grid: tuple[int, int, int]
    smem_bytes: int
    addresses: tuple[int, ...]
    scale_log2: float


@dataclass
class FakeDevice:
    """A `Platform` on the CPU. Set its fields to make it misbehave."""

    gpu: GpuSpec | None = GPUS["h100"]
    device_type: str = "cpu"
    now: int = 0
    """The current stream."""
    is_capturing: bool = False
    status: int = 0
    """What the next launches answer."""
    error: float = 0.0
    """Added to every output."""
    here: int = -1
    launches: list[Launched] = field(default_factory=list)
    loads: int = 0
    encoded: list[tuple[TensorMap, int]] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    contexts: int = 0
    outside: int = 0
    guards: list[int] = field(default_factory=list)
    _modules: list[dict] = field(default_factory=list)
    _functions: list[tuple[dict, str]] = field(default_factory=list)

    lost_in_fork: Callable[[], bool] = bool  # False

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def spec(self, index: int) -> GpuSpec | None:
        return self.gpu

    def identity(self, index: int) -> str:
        return MACHINE

    def stream(self, index: int) -> int:
        return self.now

    def capturing(self) -> bool:
        return self.is_capturing

    def current_device(self) -> int:
        return self.here

    @contextlib.contextmanager
    def guard(self, index: int) -> Iterator[None]:
        self.guards.append(index)
        yield

    def make_context_current(self, index: int) -> None:
        self.contexts += 1

    def load(self, cubin: bytes) -> int:
        assert not self.is_capturing
        self.loads += 1
        if cubin.startswith(b"\x7fELF"):
            raise LaunchError("A fake device runs no machine code.")
        self._modules.append(json.loads(cubin))
        return len(self._modules)

    def function(self, module: int, name: str) -> int:
        assert not self.is_capturing
        self._functions.append((self._modules[module - 1], name))
        return len(self._functions)

    def allow_shared_memory(self, function: int, smem_bytes: int) -> None:
        assert smem_bytes <= GPUS["h100"].smem_per_block

    def encode_map(self, tensor: TensorMap, address: int, destination: int) -> None:
        if address % 16 or any(stride % 16 for stride in tensor.strides_bytes):
            raise LaunchError("The driver refused the tensor map.")
        self.encoded.append((tensor, address))
        (ctypes.c_uint64 * 2).from_address(destination)[:] = [address, len(self.encoded) - 1]

    def move_map(self, destination: int, address: int) -> None:
        self.moved.append(address)
        ctypes.c_uint64.from_address(destination).value = address

    def outside_pools(self, make, index: int, stream: int) -> torch.Tensor:
        self.outside += 1
        return make()

    def describe(self, status: int) -> str:
        return f"fake error {status}"

    def synchronize(self, index: int) -> None:
        pass

    def launch(self, config: ctypes.c_void_p, function: ctypes.c_void_p, arguments: ctypes.c_void_p, _: None) -> int:
        if self.status:
            return self.status
        launch = LaunchConfig.from_address(config.value or 0)
        kernel, name = self._functions[(function.value or 0) - 1]
        if name == PACK:  # the fake kernel asks the predicate itself
            return 0
        plain = MAPPED if kernel["family"] == "flash_wgmma" else PLAIN
        values = values_of(kernel, plain, arguments.value or 0)
        values, others = values[: len(plain)], values[len(plain) :]
        packed = sequences(others) if "varlen" in kernel["variants"] else []
        totals = (packed[-1][0].stop, packed[-1][1].stop) if packed else None
        if plain is MAPPED:
            tensors, lse = self._mapped(kernel, values, totals)
        else:
            tensors, lse = self._plain(kernel, values, totals), None
        grid = launch.grid_x, launch.grid_y, launch.grid_z
        addresses = tuple(t.data_ptr() for t in tensors)
        self.launches.append(Launched(name, launch.stream or 0, grid, launch.smem_bytes, addresses, values[-1]))
        q, k, v, o = tensors
        for number, (rows, keys) in enumerate(packed or [(slice(None), slice(None))]):
            parts = q[:, :, rows], k[:, :, keys], v[:, :, keys], o[:, :, rows], None if lse is None else lse[..., rows]
            attend(kernel | {"sequence": number}, *parts, values[-1] / math.log2(math.e), others, self.error)
        return 0

    def _plain(self, kernel: dict, values: list, totals: tuple[int, int] | None) -> tuple[torch.Tensor, ...]:
        heads, kv_heads, seqlen_q, seqlen_k = values[4:8]
        batch = kernel.get("batch") or self._batch
        if totals:
            batch, (seqlen_q, seqlen_k) = 1, totals
        shapes = shapes_of(kernel, (batch, heads, seqlen_q), (batch, kv_heads, seqlen_k))
        strides = [(*values[8 + 3 * i : 11 + 3 * i], 1) for i in range(4)]
        return tuple(tensor_at(values[i], shapes[i], strides[i], TORCH[kernel["dtype"]]) for i in range(4))

    _batch = 1
    """Which a plain launch says by its grid alone: a test sets it."""

    def _mapped(
        self, kernel: dict, values: list, totals: tuple[int, int] | None
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        batch, heads, kv_heads, seqlen_q, seqlen_k = values[8:13]
        if totals:
            batch, (seqlen_q, seqlen_k) = 1, totals
        shapes = shapes_of(kernel, (batch, heads, seqlen_q), (batch, kv_heads, seqlen_k))
        tensors = []
        for at, shape in zip(values[:4], shapes, strict=True):
            address, number = (ctypes.c_uint64 * 2).from_address(at)
            tensor, _ = self.encoded[number]
            row, *others = tensor.strides_bytes
            strides = others[-1] // 2, others[0 if totals else -2] // 2, row // 2, 1
            tensors.append(tensor_at(address, shape, strides, TORCH[kernel["dtype"]]))
        assert tensors[3].data_ptr() == values[4]
        assert tensors[3].stride()[1:3] == tuple(values[14:16])
        assert totals or tensors[3].stride(0) == values[13]
        lse = tensor_at(values[5], shapes[0][:3], (heads * seqlen_q, seqlen_q, 1), torch.float32) if values[5] else None
        return tuple(tensors), lse


WGMMA = {
    **dict(BLOCK_M=64, BLOCK_N=64, STAGES=1, BLOCKS_PER_SM=1, PRODUCER="warp", OVERLAP=False, PING_PONG=False),
    **dict(RESCALE="always", KEY_SPLIT=1, SCHEDULE="single", TILE_ORDER="by_head", CAUSAL_SKIP=False),
    **dict(POLYNOMIAL_EIGHTHS=0, Q_IN_REGISTERS=False, STORE="rows", PART_TILES=0, PARTS_MERGE="memory"),
    **dict(GROUP_ROWS=False, KEYS_AT_ONCE=0),
}


def wgmma_pick(problem: AttentionProblem, gpu: GpuSpec) -> Pick | None:
    """One small kernel for everything that flash_wgmma takes but keys in use, which `CacheDevice` has."""
    if problem.dtype == "fp32" or problem.head_dim > 256 or problem.seqused:
        return None
    config = load_space("flash_wgmma", gpu).make_config(WGMMA)
    return Pick("flash_wgmma", config)


def fake_runtime(device: FakeDevice, folder: Path, pick=wgmma_pick) -> Runtime:
    return Runtime(device, pick, folder, build=build)


def tensors(batch=2, heads=4, kv_heads=2, seqlen_q=37, seqlen_k=45, head_dim=64, dtype=torch.float16, layout="bhsd"):
    generator = torch.Generator().manual_seed(1)

    def one(heads, seqlen):
        if layout == "bshd":
            return torch.randn(batch, seqlen, heads, head_dim, generator=generator).to(dtype).transpose(1, 2)
        return torch.randn(batch, heads, seqlen, head_dim, generator=generator).to(dtype)

    return one(heads, seqlen_q), one(kv_heads, seqlen_k), one(kv_heads, seqlen_k)


def near(answer, expected):
    return torch.allclose(answer.float(), expected.float(), atol=2e-3, rtol=2e-3)


class Graphs(list):
    """A compiler's backend: it keeps the graphs, and has them run as they are."""

    def __call__(self, module, _):
        self.append(module)
        return module


def reference(q, k, v, **flags):
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True, **flags)


CONFIG = {
    **dict(COMPUTE="fma", LOAD="registers", BLOCK_M=4, BLOCK_N=32, WARPS=2, STAGES=1, VECTOR_BYTES=16, DOT_LANES=8),
    **dict(SPLITS=1, MERGE="kernel", DEPENDENT_LAUNCH="none", BLOCKS_PER_SM=1),
}
SPLIT_KV = [ctypes.c_uint64] * 4 + [ctypes.c_int32] * 4 + [ctypes.c_int64] * 12 + [ctypes.c_float]
SPLIT_KV += [ctypes.c_int32] * 4 + [ctypes.c_uint64] * 3
"""The arguments of split_kv before those of variants."""


class CacheDevice(FakeDevice):
    """Computes what the arguments of a launch of split_kv say of keys in use and pages; what merges splits finds the
    answer there, and adds `merge_error` to its first number."""

    merge_error: float = 0.0

    def launch(self, config, function, arguments, _):
        if self.status:
            return self.status
        kernel, name = self._functions[(function.value or 0) - 1]
        if name == "split_kv_merge":
            (o,) = (ctypes.c_void_p * 1).from_address(arguments.value)
            tensor_at(ctypes.c_uint64.from_address(o).value, (1,), (1,), TORCH[kernel["dtype"]]).add_(self.merge_error)
            self.launches.append(name)
            return 0
        values = values_of(kernel, SPLIT_KV, arguments.value)
        heads, kv_heads, seqlen_q, seqlen_k = values[4:8]
        batch, dtype, dim = LaunchConfig.from_address(config.value).grid_z, TORCH[kernel["dtype"]], kernel["head_dim"]
        strides = [(*values[8 + 3 * i : 11 + 3 * i], 1) for i in range(4)]
        scale, others = values[20] / math.log2(math.e), values[28:]
        seqused, table, page_bits, table_pages = others[11:15]
        if "varlen" in kernel["variants"]:
            packed = sequences(others)
            whole = (1, heads, packed[-1][0].stop, dim)
            all_q, all_o = (tensor_at(values[i], whole, strides[i], dtype) for i in (0, 3))
            q, o = ([tensor[0, :, rows] for rows, _ in packed] for tensor in (all_q, all_o))
            lengths = [keys.stop - keys.start for _, keys in packed]
        else:
            q, o = (tensor_at(values[i], (batch, heads, seqlen_q, dim), strides[i], dtype) for i in (0, 3))
            lengths = tensor_at(seqused, (batch,), (1,), torch.int32).tolist()
        if "appended" in kernel["variants"]:
            addresses, new_strides, pages = values[-8:-4], values[-4:-1], values[-1]
            for address, at, which in zip(addresses[:2], addresses[2:], (1, 2), strict=True):
                new = tensor_at(address, (batch, kv_heads, seqlen_q, dim), (*new_strides, 1), dtype)
                lying = (pages, kv_heads, 1 << page_bits, dim) if table else (batch, kv_heads, seqlen_k, dim)
                rows = tensor_at(table, (batch, table_pages), (table_pages, 1), torch.int32) if table else None
                cache = tensor_at(at, lying, strides[which], dtype).transpose(1, 2)
                for b, i in itertools.product(range(batch), range(seqlen_q)):
                    key = lengths[b] + i
                    if key < 0:
                        continue
                    row = (rows[b, key >> page_bits], key & ((1 << page_bits) - 1)) if table else (b, key)
                    cache[row] = new[b, :, i]
            lengths = [count + seqlen_q for count in lengths]
        for b, keys in enumerate(lengths):
            seqlen_q = q[b].shape[1]
            if not keys:
                o[b][:] = 0
            if not keys or not seqlen_q:
                continue
            if table:
                row = tensor_at(table, (batch, table_pages), (table_pages, 1), torch.int32)[b]
                pages = row[: -(-keys >> page_bits)].long()
                shape = (int(pages.max()) + 1, kv_heads, 1 << page_bits, dim)
                caches = (tensor_at(values[i], shape, strides[i], dtype)[pages] for i in (1, 2))
                k, v = (t.transpose(0, 1).flatten(1, 2)[:, :keys] for t in caches)
            else:
                shape = (batch, kv_heads, seqlen_k, dim)
                k, v = (tensor_at(values[i], shape, strides[i], dtype)[b, :, :keys] for i in (1, 2))
            k, v = (t.double().repeat_interleave(heads // kv_heads, dim=0) for t in (k, v))
            own = list(others[:11])
            own[2] += keys - seqlen_k
            own[7] += b * own[8] * dtype.itemsize
            products = q[b][None].double() @ k[None].transpose(-1, -2)
            scores, sinks = changed(products, kernel["variants"], kernel["mask"], own, dtype)
            scores = scores * scale
            if kernel["mask"] == "causal_lower_right":
                seen = torch.ones(seqlen_q, keys, dtype=torch.bool).tril(keys - seqlen_q)
                scores = scores.masked_fill(~seen, -math.inf)
            if sinks is not None:
                scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
                v = torch.cat((v, torch.zeros_like(v[:, :1])), 1)
            o[b][:] = (torch.softmax(scores, -1).nan_to_num(0) @ v)[0]
        self.launches.append(name)
        return 0


def split_kv_pick(problem: AttentionProblem, gpu: GpuSpec) -> Pick | None:
    """One small kernel with one launch, for keys in use and pages alone."""
    if not (problem.seqused or problem.page):
        return None
    return Pick("split_kv", load_space("split_kv", gpu).make_config(CONFIG))
