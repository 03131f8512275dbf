"""`create_block_mask`: a `BlockMask` of torch's FlexAttention whose lists a kernel makes on the device, of the traced
`mask_mod`. Torch's own function makes one number for each pair of a query and a key first."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from evoattn.backends.base import LaunchError
from evoattn.backends.kernel_files import KernelFiles
from evoattn.backends.versions import nvrtc_version
from evoattn.families import mask_blocks
from evoattn.families.mask_blocks import LISTS, STATES, MaskShape
from evoattn.model import forks
from evoattn.model.paths import cubin_cache
from evoattn.model.records import Candidate
from evoattn.model.score import Table, Tree, parse_predicate, parse_tables
from evoattn.model.space import KernelConfig
from evoattn.ops import flex, mods
from evoattn.ops.arguments import Score, is_ordinary
from evoattn.ops.kernel import Cubin, LoadedKernel, Platform
from evoattn.ops.plan import launch_again, record_check, recorded_check
from evoattn.ops.runtime import current

TORCH = torch_flex.create_block_mask
BLOCK = 128
"""Rows and keys of a block where none are given: torch's number."""
CHECKED = 300
"""Queries and keys, at most, of the mask that a new kernel makes first, beside torch's function."""
FOLDER = "masks"
"""In the user's cache of compiled kernels."""

_loaded: dict[tuple[str, int], LoadedKernel | None] = {}
"""By source and device; None for a kernel that is of no use."""
_sources: dict[tuple[str, str], tuple[str, tuple[Table, ...]]] = {}
"""By predicate and tables."""
MOST_SOURCES = 1024
_lock = forks.Lock()


def create_block_mask(
    mask_mod: Any,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = BLOCK,
    _compile: bool = False,
    **words: Any,
) -> BlockMask:
    """`torch.nn.attention.flex_attention.create_block_mask`, with its arguments, errors and lists, made by a kernel.

    `mask_mod(b, h, q_idx, kv_idx)` is traced when it is new, and captured tensors are read at each call. `B` and `H`
    are the batches and heads of the lists, 1 where None; `BLOCK_SIZE` queries and keys share a block. The lists take
    4 · rows · keys bytes for each of four kinds, of so many blocks, and nothing of the size of the mask is made. A new
    kernel is compiled once, for all lengths, and its first mask is compared with torch's. Torch's function answers on a
    CPU, in compiled code, for functions that are no expressions, and for other arguments than `separate_full_blocks`.
    """
    own = None
    if not (_compile or words.keys() - {"separate_full_blocks"} or torch.compiler.is_compiling()):
        sizes = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else tuple(BLOCK_SIZE)
        numbers = (1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN, *sizes)
        if len(numbers) == 6 and all(type(one) is int for one in numbers):
            own = _made(mask_mod, MaskShape(*numbers), device, words.get("separate_full_blocks", True))
    if own is not None:
        return own
    if device is not None:  # where none is given versions of torch take another
        words["device"] = device
    if _compile:
        words["_compile"] = True
    return TORCH(mask_mod, B, H, Q_LEN, KV_LEN, BLOCK_SIZE=BLOCK_SIZE, **words)


def _made(mask_mod: Any, shape: MaskShape, device: Any, separate: bool) -> BlockMask | None:
    """The mask by a kernel; None where torch's function is to make it, or to refuse it."""
    runtime = current.runtime()
    platform = runtime.platform
    where = torch.device(runtime.device_type if device is None else device)
    made = torch.empty(0)  # of a class of its own where a mode watches
    if platform is None or where.type != runtime.device_type or shape.why_not() or not separate:
        return None
    if not is_ordinary(made, made, made):
        return None
    if where.index is None:
        where = torch.device(where.type, platform.current_device())
    try:
        said = flex.said_by((None, mask_mod), where)
    except TypeError:  # of what is no function
        return None
    if isinstance(said, str):
        return None
    given = said[0].traced.tables(said[1])
    if any(table.device != where or not is_ordinary(table, table, table) for table in given.values()):
        return None
    text, tables = _printed(said[0].traced.predicate, given)
    kernel = _kernel(platform, where, text, (mask_mod, shape, given, tables))
    if kernel is None:
        return None
    try:
        lists = _run(platform, kernel, where, shape, given, tables)
    except LaunchError:
        return None
    return _mask_of(lists, shape, mask_mod)


def _mask_of(lists: list[Tensor], shape: MaskShape, mask_mod: Any) -> BlockMask:
    lengths, sizes = (shape.seqlen_q, shape.seqlen_k), (shape.block_rows, shape.block_keys)
    named: dict[str, Any] = dict(zip(LISTS, lists, strict=True))
    return BlockMask(lengths, **named, BLOCK_SIZE=sizes, mask_mod=mask_mod)


def _printed(predicate: str, given: dict[str, Tensor]) -> tuple[str, tuple[Table, ...]]:
    """The source of the kernels, and the tables as these calls have them."""
    described = Score.of_texts("", predicate, given).tables
    known = predicate, described
    printed = _sources.get(known)
    if printed is None:
        shown: Tree = parse_predicate(predicate, described, True).tree if predicate else mods.TRUE
        tables = parse_tables(described) if described else ()
        printed = mask_blocks.source(shown, tables), tables
        with _lock:
            if len(_sources) >= MOST_SOURCES:
                _sources.clear()
            _sources[known] = printed
    return printed


def _kernel(
    platform: Platform, device: torch.device, text: str, of: tuple[Any, MaskShape, dict[str, Tensor], tuple[Table, ...]]
) -> LoadedKernel | None:
    """The kernel of a source, compiled, loaded and checked once; None where it is of no use."""
    known = text, device.index
    if known in _loaded or platform.capturing():
        return _loaded.get(known)
    with _lock:
        if known not in _loaded:
            try:
                _loaded[known] = _checked(platform, device, text, *of)
            except Exception as error:  # of the compiler, the driver, or the function itself
                warnings.warn(f"evoattn: torch makes a block mask: {error}", RuntimeWarning, stacklevel=4)
                _loaded[known] = None
    return _loaded[known]


def _checked(
    platform: Platform,
    device: torch.device,
    text: str,
    mask_mod: Any,
    shape: MaskShape,
    given: dict[str, Tensor],
    tables: tuple[Table, ...],
) -> LoadedKernel | None:
    """The kernel, which has made a small mask as torch does, here or in an earlier process; None where its lists are
    others, and for a GPU that is not known. Raises what a compiler, the driver or the function raise. `shape`: the mask
    that is wanted, past whose rows and keys captured tensors may have nothing to read."""
    gpu = platform.spec(device.index)
    if gpu is None:
        return None
    candidate = Candidate("mask_blocks", {}, "", text, gpu.arch)
    folder = cubin_cache() / FOLDER
    files = KernelFiles(folder, nvrtc_version())
    compiled = files.get(candidate)
    if compiled is None:
        from evoattn.backends.compiler import compile_source

        compiled = compile_source(text, gpu.arch)
        files.put(candidate, compiled)
    kernel = LoadedKernel(compiled.cubin, platform, device.index)
    source, digest = candidate.source_hash, hashlib.sha256(compiled.cubin).hexdigest()
    cubin, machine = Cubin(compiled.cubin, digest, source, source), platform.identity(device.index)
    wrong = recorded_check(cubin, machine, folder)
    if wrong is None:
        small = MaskShape(1, 1, min(CHECKED, shape.seqlen_q), min(CHECKED, shape.seqlen_k), BLOCK, BLOCK)
        own = _run(platform, kernel, device, small, given, tables)
        theirs = _lists_by_pairs(mask_mod, small, device)
        if theirs is None or not _same(own, theirs):
            made = TORCH(mask_mod, 1, 1, small.seqlen_q, small.seqlen_k, device, BLOCK)
            theirs = [getattr(made, name) for name in LISTS]
        wrong = "" if _same(own, theirs) else "the kernel's lists were others"
        record_check(cubin, machine, folder, KernelConfig("mask_blocks", {}), wrong)
    if wrong:
        warnings.warn(f"evoattn: torch makes a block mask: {wrong}.", RuntimeWarning, stacklevel=5)
        return None
    return kernel


def _same(own: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(own, theirs, strict=True))


def _lists_by_pairs(mask_mod: Any, shape: MaskShape, device: torch.device) -> list[Tensor] | None:
    """`LISTS` of a small mask of one batch and head, of what the function says of all pairs at once; None where it
    takes none at once. Torch's own function, which takes all, imports its compilers: seconds."""
    zero, rows, keys = (torch.arange(n, device=device) for n in (1, shape.seqlen_q, shape.seqlen_k))
    try:
        seen = torch.as_tensor(mask_mod(zero, zero, rows[:, None], keys)).bool().expand(shape.seqlen_q, shape.seqlen_k)
    except Exception:  # the function's own
        return None
    (row_blocks, key_blocks), sizes = shape.blocks, (shape.block_rows, shape.block_keys)
    whole = seen.new_zeros(row_blocks * sizes[0], key_blocks * sizes[1])
    whole[: shape.seqlen_q, : shape.seqlen_k] = seen
    blocks = whole.view(row_blocks, sizes[0], key_blocks, sizes[1])
    full = blocks.all(3).all(1)
    partial = blocks.any(3).any(1) & ~full
    lists = []
    for kind in (partial, full, partial.T, full.T):
        numbers = torch.argsort(kind.int(), dim=-1, descending=True, stable=True)
        lists += [one.int()[None, None] for one in (kind.sum(-1), numbers)]
    return lists


def _run(
    platform: Platform,
    kernel: LoadedKernel,
    device: torch.device,
    shape: MaskShape,
    given: dict[str, Tensor],
    tables: tuple[Table, ...],
) -> list[Tensor]:
    """`LISTS`, enqueued on the current stream. Raises `LaunchError`."""
    rows, keys = shape.blocks
    lists = [torch.empty(sizes, dtype=torch.int32, device=device) for sizes in shape.list_shapes]
    states = torch.empty(shape.batches * shape.heads * rows * keys, dtype=torch.uint8, device=device)
    buffers = {STATES: states, **dict(zip(LISTS, lists, strict=True))}
    buffers |= {table.buffer: one.detach().contiguous() for table, one in zip(tables, given.values(), strict=True)}
    places = {name: (number, 0) for number, name in enumerate(buffers)}
    addresses = tuple(one.data_ptr() for one in buffers.values())
    with platform.guard(device.index):
        stream = platform.stream(device.index)
        for launch in kernel.bound(mask_blocks.launches(shape, tables), places):
            launch.bind(addresses)
            launch.set_stream(stream)
            if status := platform.launch(launch.config, launch.function, launch.arguments, None):
                launch_again(platform, device.index, launch, status)
    return lists
