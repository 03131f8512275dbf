"""A kernel on one device: its machine code, compiled once and kept on disk, its loaded module, the arguments of its
launches; and what the op asks of a machine, which `CudaPlatform` asks torch, and libcuda by ctypes."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING

import torch

from evoattn.backends import tensor_map
from evoattn.backends.driver_launch import PROGRAMMATIC_STREAM_SERIALIZATION, LaunchAttribute, LaunchConfig
from evoattn.families.base import starts_zeroed
from evoattn.families.block_list import BUFFERS
from evoattn.families.variants import SEQUENCES
from evoattn.model.backward import parse_grads
from evoattn.model.launch import STATIC_SMEM_LIMIT, KernelLaunch, Scalar, TensorMap
from evoattn.model.problem import AttentionProblem

if TYPE_CHECKING:  # only a check has one
    from evoattn.model.records import CompiledKernel


import contextlib
import hashlib
import json
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from evoattn.backends.base import ContextLost, LaunchError
from evoattn.backends.cache_folder import keep_small, mark_used, read_own, write_whole
from evoattn.backends.kernel_files import OPTIONS
from evoattn.backends.versions import driver_version, nvrtc_version, template_digest
from evoattn.families.base import Family
from evoattn.model.gpu import GpuSpec, detect_devices
from evoattn.model.paths import TEMPLATES
from evoattn.model.space import KernelConfig

TENSORS = ("q", "k", "v", "o", "lse")
TERMS = ("sinks", "slopes", "bias", "seqused", "table", "cu_seqlens_q", "cu_seqlens_k", "k_scale", "v_scale")
"""The inputs of variants as launches name them (`AttentionProblem.term_shapes`), after the scratch memory, in the order
of `arguments.TERMS`."""
BACKWARD_TENSORS = ("do", "dlse", "dq", "dk", "dv", "dbias", "dsinks")
"""What launches of the backward pass have beside these, after the others; gradients of tables come behind them."""
SCRATCH, ZEROED = 5, 6
"""Indices, after the tensors, of the two allocations that hold a call's scratch buffers."""
SCRATCH_ALIGNMENT = 256
SCALARS = {"int32": "i4x", "int64": "q", "float32": "f4x"}
"""Of `struct`: an argument in a slot."""
SLOT = 8
"""Bytes of an argument that is no tensor map: the widest is an address or an int64."""

Place = tuple[int, int]
"""Where a buffer lies: its index among the addresses of a call, and bytes behind that address."""


_Users = tuple[list[tuple[int, int]], list[tuple[int, int]]]
"""Of one address: the tensor maps (address in host memory, offset) and the slots (number, offset) that hold it."""


class LaunchArguments:
    """The arguments of one `KernelLaunch` in one block of host memory, as cuLaunchKernelEx reads them.

    `bind` writes addresses into it, `set_stream` the stream; the driver copies all of it when the launch is enqueued.
    Neither is safe without a lock where threads share the launch.
    """

    def __init__(self, launch: KernelLaunch, function: int, places: dict[str, Place], platform: Platform) -> None:
        """`places` has every buffer that the launch names."""
        self.kernel = launch.kernel
        self._platform = platform
        maps = len([argument for argument in launch.args if argument.__class__ is TensorMap])
        slots = len(launch.args) - maps
        self._memory = ctypes.create_string_buffer(maps * tensor_map.BYTES + slots * SLOT + tensor_map.ALIGNMENT)
        begin = -(-ctypes.addressof(self._memory) // tensor_map.ALIGNMENT) * tensor_map.ALIGNMENT
        next_map, first_slot = begin, begin + maps * tensor_map.BYTES
        self._maps: list[tuple[TensorMap, int, Place]] = []
        self._slots: list[tuple[int, Place]] = []
        self._users: dict[int, _Users] = {}
        self._sequences: int | None = None
        addresses, kinds = [], ["<"]
        values: list[int | float] = []
        for argument in launch.args:
            if isinstance(argument, TensorMap):
                self._maps.append((argument, next_map, places[argument.buffer]))
                addresses.append(next_map)
                next_map += tensor_map.BYTES
                continue
            addresses.append(first_slot + len(values) * SLOT)
            if argument.__class__ is Scalar:
                if argument.name == SEQUENCES:
                    self._sequences = len(values)
                kinds.append(SCALARS[argument.ctype])
                values.append(argument.value)
            else:
                self._slots.append((len(values), places[argument.name]))
                kinds.append("Q")
                values.append(0)
        struct.pack_into("".join(kinds), self._memory, first_slot - ctypes.addressof(self._memory), *values)
        self._slot_values = (ctypes.c_uint64 * slots).from_address(first_slot)
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self._attribute = LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION)
        self._attribute.value.programmatic_stream_serialization_allowed = 1
        self._config = LaunchConfig(
            *launch.grid, *launch.block, launch.smem_bytes, None, ctypes.pointer(self._attribute), int(launch.overlaps)
        )
        self.config = ctypes.c_void_p(ctypes.addressof(self._config))
        self.function = ctypes.c_void_p(function)
        self.arguments = ctypes.c_void_p(ctypes.addressof(self._pointers))
        for _, memory, (index, offset) in self._maps:
            self._users.setdefault(index, ([], []))[0].append((memory, offset))
        for slot, (index, offset) in self._slots:
            self._users.setdefault(index, ([], []))[1].append((slot, offset))
        self._bound: tuple[int, ...] | None = None

    def set_stream(self, stream: int) -> None:
        """The CUstream of the next launches."""
        self._config.stream = stream

    def set_sizes(self, sequences: int, rows: int, addresses: tuple[int, ...]) -> None:
        """How many packed sequences and rows of queries the next launches, of these addresses, have: at most as many
        as this one was made for."""
        if self._sequences is not None:
            self._slot_values[self._sequences] = sequences
        for i, (tensor, memory, place) in enumerate(self._maps):
            if tensor.rows_at is not None:
                self._maps[i] = told, memory, (index, offset) = tensor.with_rows(rows), memory, place
                if self._bound is not None:
                    self._platform.encode_map(told, addresses[index] + offset, memory)

    def bind(self, addresses: tuple[int, ...]) -> None:
        """The device addresses of the next launches, in the order that the places count. Raises `LaunchError`."""
        before, self._bound = self._bound, None
        if before is None:
            for tensor, memory, (index, offset) in self._maps:
                self._platform.encode_map(tensor, addresses[index] + offset, memory)
            for slot, (index, offset) in self._slots:
                self._slot_values[slot] = addresses[index] + offset
        else:
            for index, (maps, slots) in self._users.items():
                address = addresses[index]
                if before[index] != address:
                    for memory, offset in maps:
                        self._platform.move_map(memory, address + offset)
                    for slot, offset in slots:
                        self._slot_values[slot] = address + offset
        self._bound = addresses


def own_tables(problem: AttentionProblem) -> tuple[str, ...]:
    """The buffers of the tables of the problem's own expressions, then of its block lists, then the scales of queries
    of 8 bits, in the order of calls."""
    tables = (table.buffer for table in problem.own_tables)
    return (*tables, *(BUFFERS if problem.blocks else ()), *(["q_scale"] if "q_scale" in problem.scale_shapes else []))


def tensor_places(problem: AttentionProblem) -> dict[str, Place]:
    """Where the tensors of a call lie among its addresses."""
    names = (*TENSORS, "", "", *TERMS, *own_tables(problem))
    if problem.op == "backward":
        wanted = (table.buffer for table in problem.own_tables if table.buffer in parse_grads(problem.grads))
        names = (*names, *BACKWARD_TENSORS, *(f"d{name}" for name in wanted))
    return {name: (i, 0) for i, name in enumerate(names) if name}


def operation_places(problem: AttentionProblem) -> dict[str, Place]:
    """The same of an operation beside attention, in the order of its specs, past those of scratch memory."""
    names = [spec.name for spec in (*problem.inputs, *problem.outputs)]
    return {name: (i if i < SCRATCH else i + 2, 0) for i, name in enumerate(names)}


def scratch_places(workspace: dict[str, int]) -> tuple[dict[str, Place], int, int]:
    """Where scratch buffers of these sizes lie, and the bytes of the two allocations: of anything, and of zeros."""
    places: dict[str, Place] = {}
    sizes = {SCRATCH: 0, ZEROED: 0}
    for name, size in workspace.items():
        index = ZEROED if starts_zeroed(name) else SCRATCH
        places[name] = index, sizes[index]
        sizes[index] += -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
    return places, sizes[SCRATCH], sizes[ZEROED]


class LoadedKernel:
    """One cubin in the context of one device. `failure` is empty, or the reason why it is not launched any more."""

    def __init__(self, cubin: bytes, platform: Platform, index: int) -> None:
        """Raises `LaunchError` where the driver refuses the module."""
        self.index, self.failure = index, ""
        self._platform = platform
        with platform.guard(index):
            platform.make_context_current(index)
            self._module = platform.load(cubin)
        self._functions: dict[str, int] = {}
        self._smem: dict[str, int] = {}

    def holds(self, launches: tuple[KernelLaunch, ...]) -> bool:
        """Whether the functions of `launches` are loaded, so that binding them loads nothing."""
        return all(
            one.kernel in self._functions and one.smem_bytes <= max(STATIC_SMEM_LIMIT, self._smem.get(one.kernel, 0))
            for one in launches
        )

    def _function(self, launch: KernelLaunch) -> int:
        if launch.kernel not in self._functions:
            self._functions[launch.kernel] = self._platform.function(self._module, launch.kernel)
        function = self._functions[launch.kernel]
        if launch.smem_bytes > max(STATIC_SMEM_LIMIT, self._smem.get(launch.kernel, 0)):
            self._platform.allow_shared_memory(function, launch.smem_bytes)
            self._smem[launch.kernel] = launch.smem_bytes
        return function

    def bound(self, launches: tuple[KernelLaunch, ...], places: dict[str, Place]) -> tuple[LaunchArguments, ...]:
        """The launches, ready to be bound. Raises `LaunchError`."""
        with self._platform.guard(self.index):
            self._platform.make_context_current(self.index)
            return tuple(LaunchArguments(one, self._function(one), places, self._platform) for one in launches)


class KernelBackend:
    """The `Backend` that a check runs a loaded kernel with: the launches of a call, then a wait."""

    name = "op"

    def __init__(self, kernel: LoadedKernel, platform: Platform) -> None:
        self.device = platform.device(kernel.index)
        self._kernel, self._platform = kernel, platform

    def run(
        self, compiled: CompiledKernel, launches: tuple[KernelLaunch, ...], buffers: dict[str, torch.Tensor]
    ) -> tuple[str, ...]:
        """See `Backend.run`; `compiled` is what is loaded already. Raises `LaunchError` or `ContextLost`."""
        places = {name: (index, 0) for index, name in enumerate(buffers)}
        addresses = tuple(buffer.data_ptr() for buffer in buffers.values())
        with self._platform.guard(self._kernel.index):
            stream = self._platform.stream(self._kernel.index)
            for packed in self._kernel.bound(launches, places):
                packed.bind(addresses)
                packed.set_stream(stream)
                if status := self._platform.launch(packed.config, packed.function, packed.arguments, None):
                    words = self._platform.describe(status)
                    raise error_of(status, f"The launch of {packed.kernel} failed: {words}.")
            self._platform.synchronize(self._kernel.index)
        return ()


# Enumerators of cuda.h.
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
INVALID_CONTEXT, INVALID_HANDLE = 201, 400
NO_CONTEXT = frozenset((INVALID_CONTEXT, INVALID_HANDLE))
"""What a launch answers in a thread in which the device's context is not current yet."""
FAULTS = frozenset((700, 702, 714, 715, 716, 717, 718, 719))
"""What cuda.h's CUresult says of a kernel that went wrong while it ran: ILLEGAL_ADDRESS, LAUNCH_TIMEOUT,
HARDWARE_STACK_ERROR, ILLEGAL_INSTRUCTION, MISALIGNED_ADDRESS, INVALID_ADDRESS_SPACE, INVALID_PC and LAUNCH_FAILED (all
CUDA_ERROR_…). The context is lost with it. Every other status says something of the machine at that moment, too: no
memory, a capture in another thread."""


def error_of(status: int, sentence: str) -> LaunchError | ContextLost:
    """What to raise for a status of the driver: `ContextLost` for a kernel's own fault, else `LaunchError`."""
    return (ContextLost if status in FAULTS else LaunchError)(sentence)


class Platform(Protocol):
    """The device side of the op. Tests put a recording one in its place.

    `launch(config, function, arguments, None)` is cuLaunchKernelEx: addresses in, the driver's status out, 0 for
    success.
    """

    device_type: str
    launch: Callable[[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, None], int]
    stream: Callable[[int], int]
    """The CUstream that torch's work on a device goes to at present in this thread."""
    capturing: Callable[[], bool]
    """Whether the current stream records into a CUDA graph."""
    current_device: Callable[[], int]
    guard: Callable[[int], contextlib.AbstractContextManager[object]]
    """Makes a device the current one."""
    lost_in_fork: Callable[[], bool]
    """Whether this process is a child that was forked from one that had used its devices: it cannot use them."""

    def device(self, index: int) -> torch.device:
        """Torch's name for a device."""
        ...

    def spec(self, index: int) -> GpuSpec | None:
        """The GPU, with the number of SMs that it really has; None if evoattn does not know it."""
        ...

    def identity(self, index: int) -> str:
        """Product and driver version: what a kernel's check is recorded for."""
        ...

    def make_context_current(self, index: int) -> None:
        """Make the device's primary context, which torch uses, current in this thread."""
        ...

    def load(self, cubin: bytes) -> int:
        """Load a module into the current context: its handle. Raises `LaunchError`."""
        ...

    def function(self, module: int, name: str) -> int:
        """The handle of a kernel of a module. Raises `LaunchError`."""
        ...

    def allow_shared_memory(self, function: int, smem_bytes: int) -> None:
        """Let a kernel have so much dynamic shared memory. Raises `LaunchError`."""
        ...

    def encode_map(self, tensor: TensorMap, address: int, destination: int) -> None:
        """Write the 128 bytes of a tensor map over the buffer at device `address` to host memory. Raises
        `LaunchError`.
        """
        ...

    def move_map(self, destination: int, address: int) -> None:
        """Point an encoded tensor map at another buffer of the same shape and strides. Raises `LaunchError`."""
        ...

    def outside_pools(self, make: Callable[[], torch.Tensor], index: int, stream: int) -> torch.Tensor:
        """What `make` allocates on a stream, from no pool of a CUDA graph that this thread may be allocating from."""
        ...

    def describe(self, status: int) -> str:
        """The driver's words for a status."""
        ...

    def synchronize(self, index: int) -> None:
        """Wait for the device. Raises `ContextLost` where a kernel went wrong, `LaunchError` on any other failure."""
        ...


class CudaPlatform:
    """The `Platform` of a CUDA build of torch."""

    device_type = "cuda"

    def __init__(self) -> None:
        """Raises `OSError` where there is no driver, `AttributeError` where it is older than CUDA 12."""
        self._cuda = ctypes.CDLL("libcuda.so.1")
        launch = self._cuda.cuLaunchKernelEx
        launch.argtypes, launch.restype = (ctypes.c_void_p,) * 4, ctypes.c_int
        self.launch: Callable[[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, None], int] = launch
        self._move_map = self._cuda.cuTensorMapReplaceAddress
        self._move_map.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self.stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self.capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing
        self.current_device: Callable[[], int] = torch._C._cuda_getDevice
        self.guard: Callable[[int], contextlib.AbstractContextManager[object]] = torch.cuda.device
        self.lost_in_fork: Callable[[], bool] = torch.cuda._is_in_bad_fork
        self._wait: Callable[[int], None] = torch.cuda.synchronize
        self._specs: dict[int, GpuSpec | None] = {}

    def device(self, index: int) -> torch.device:
        return torch.device("cuda", index)

    def spec(self, index: int) -> GpuSpec | None:
        if index not in self._specs:  # torch counts the visible devices as the driver does
            here = {device.index: device for device in detect_devices()}
            self._specs[index] = here[index].spec if index in here else None
        return self._specs[index]

    def identity(self, index: int) -> str:
        return f"{torch.cuda.get_device_name(index)}, driver {driver_version()}"

    def make_context_current(self, index: int) -> None:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._require(self._cuda.cuDeviceGet(ctypes.byref(device), index), "find the device")
        self._require(self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "take the context")
        self._require(self._cuda.cuCtxSetCurrent(context), "make the context current")

    def load(self, cubin: bytes) -> int:
        module = ctypes.c_void_p()
        self._require(self._cuda.cuModuleLoadData(ctypes.byref(module), cubin), "load the module")
        return module.value or 0

    def function(self, module: int, name: str) -> int:
        function = ctypes.c_void_p()
        status = self._cuda.cuModuleGetFunction(ctypes.byref(function), ctypes.c_void_p(module), name.encode())
        self._require(status, f"find {name}")
        if hasattr(self._cuda, "cuFuncLoad"):  # CUDA 12.4; modules load lazily, and a capture must not meet that
            self._require(self._cuda.cuFuncLoad(function), f"load {name}")
        return function.value or 0

    def allow_shared_memory(self, function: int, smem_bytes: int) -> None:
        status = self._cuda.cuFuncSetAttribute(ctypes.c_void_p(function), MAX_DYNAMIC_SHARED_SIZE_BYTES, smem_bytes)
        self._require(status, f"give a block {smem_bytes} bytes of shared memory")

    def encode_map(self, tensor: TensorMap, address: int, destination: int) -> None:
        tensor_map.encode_at(destination, tensor, address)

    def move_map(self, destination: int, address: int) -> None:
        """See `Platform`. Raises `LaunchError` where the driver refuses."""
        status = self._move_map(destination, address)
        if status in NO_CONTEXT:  # a thread's first call; the device is the current one
            self.make_context_current(self.current_device())
            status = self._move_map(destination, address)
        if status:
            raise LaunchError(f"The driver refused to move a tensor map: {self.describe(status)}.")

    def outside_pools(self, make: Callable[[], torch.Tensor], index: int, stream: int) -> torch.Tensor:
        def work() -> torch.Tensor:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=index)):
                return make()

        with ThreadPoolExecutor(1) as thread:  # pools are of one thread
            return thread.submit(work).result()

    def describe(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorString(status, ctypes.byref(text))
        return f"{(text.value or b'unknown error').decode()} (CUDA error {status})"

    def synchronize(self, index: int) -> None:
        """See `Platform`. Raises `ContextLost` or `LaunchError`."""
        try:
            self._wait(index)
        except RuntimeError as error:  # words in place of a status, but a fault stays with the context
            status = self._cuda.cuCtxSynchronize()
            raise error_of(status, f"The kernel failed: {str(error).splitlines()[0]}") from None

    def _require(self, status: int, what: str) -> None:
        if status:
            raise LaunchError(f"The driver could not {what}: {self.describe(status)}.")


SUFFIX = ".kernel"
"""Of a file: one line of JSON about the cubin, then the cubin."""


@dataclass(frozen=True)
class Cubin:
    """One kernel's machine code. `digest` is its sha256, `source_hash` that of the CUDA source, `recipe` that of all
    that decides the code."""

    code: bytes
    digest: str
    source_hash: str
    recipe: str


def recipe_of(
    family: Family, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, templates: Path = TEMPLATES
) -> str:
    """sha256 over all that decides the machine code: template, constants, architecture, compiler version and options.

    As good as the hash of the rendered source, without rendering it.
    """
    constants = json.dumps(family.all_constants(problem, config, gpu), sort_keys=True, default=str)
    parts = (family.name, template_digest(family.name, templates), constants, gpu.arch, nvrtc_version(), *OPTIONS)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _read_cubin(path: Path, wanted: str) -> Cubin | None:
    """The cubin of the recipe `wanted` in a file, None where there is none. A file that is not whole, or of another
    recipe, is passed over with a warning."""
    data = read_own(path)
    if data is None:
        return None
    head, _, code = data.partition(b"\n")
    try:
        row = json.loads(head)
        if hashlib.sha256(code).hexdigest() == row["digest"] and row["recipe"] == wanted:
            mark_used(path)
            return Cubin(code, row["digest"], row["source"], wanted)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    warnings.warn(f"evoattn: the cached kernel {path} is damaged; it is compiled again.", RuntimeWarning, stacklevel=2)
    return None


def get_cubin(family: Family, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, folder: Path) -> Cubin:
    """The kernel's machine code from `folder`, or compiled now and put there. Raises `CompileError`."""
    wanted = recipe_of(family, problem, config, gpu)
    path = folder / f"{wanted}{SUFFIX}"
    found = _read_cubin(path, wanted)
    if found is None:
        found = _compile(family, problem, config, gpu, wanted)
        head = {"digest": found.digest, "source": found.source_hash, "recipe": wanted, "config": config.describe()}
        if write_whole(path, json.dumps(head).encode() + b"\n" + found.code):
            keep_small(folder)
    return found


def has_cubin(family: Family, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, folder: Path) -> bool:
    """Whether the kernel was compiled before, whatever is in its file."""
    return (folder / f"{recipe_of(family, problem, config, gpu)}{SUFFIX}").exists()


def _compile(family: Family, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, wanted: str) -> Cubin:
    """Render and compile; imports jinja2 and CuPy, which a process that finds its kernels on disk never does."""
    from evoattn.backends.compiler import compile_source
    from evoattn.families.render import render

    candidate = render(family, problem, config, gpu)
    code = compile_source(candidate.source, candidate.arch).cubin
    return Cubin(code, hashlib.sha256(code).hexdigest(), candidate.source_hash, wanted)
