"""A `BlockMask` of torch's FlexAttention as kernels take it: its lists where tiles are parts of its blocks, else a
table of what each block is. The lists say what is seen, also where `mask_mod` says more.

And the lists of a new mask, made by a kernel on the device, of the traced `mask_mod`: torch's own function makes one
number for each pair of a query and a key first. A `score_mod` that hides keys by -inf becomes such lists in each call,
as captured tensors may change from call to call, so that hidden tiles are not computed."""

import copy
import hashlib
import math
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from evoattn.backends.base import LaunchError
from evoattn.backends.compiler import KernelFiles
from evoattn.backends.cubins import Cubin
from evoattn.backends.loaded import LoadedKernel
from evoattn.backends.platform import Platform
from evoattn.backends.versions import nvrtc_version
from evoattn.families import mask_blocks
from evoattn.families.mask_blocks import LISTS, STATES, MaskShape
from evoattn.model import forks
from evoattn.model.mask import Band
from evoattn.model.paths import cubin_cache
from evoattn.model.records import Candidate
from evoattn.model.remembered import remember
from evoattn.model.score import Table, Tree, depends_on, parse_predicate, parse_tables
from evoattn.model.score_lines import Bounds
from evoattn.model.space import KernelConfig
from evoattn.ops import mods
from evoattn.ops.arguments import Score, is_ordinary
from evoattn.ops.call import Call
from evoattn.ops.check import record_check, recorded_check
from evoattn.ops.plan import launch_again
from evoattn.ops.runtime import current
from evoattn.ops.torch_answer import EMPTY, FULL, PARTIAL, is_promised, states_of

LARGEST_BLOCK = 4096
"""Rows or keys: tiles past the last key of a block are looked at."""
LEAST_BLOCK = 16
"""No tile is smaller."""
TABLE = "blocks"
"""The name of the table of what each block is."""
WHOLE = 1 << 30
"""Rows and keys of the one block of the mask that torch makes where none is given."""
UNREAD, LIKELY_BLOCKS = "?", 16
"""In place of the counts of a mask that only a compiled graph has seen; blocks of which some would be seen by rows."""
ALONE = forks.Lock()
"""Around torch's FlexAttention, which patches modules while it traces: of several threads at once it raises from
within, by `CURRENT_PATCHER is None` (2.11)."""
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
_lock = forks.Lock()


@dataclass
class Kept:
    """What was found out of a mask, once. `parts` are the tensors that it was found out of."""

    parts: tuple[Any, ...]
    agrees: dict[Band, bool] = field(default_factory=dict)
    """Whether it shows just what a band shows."""
    counts: str = ""
    """See `evoattn.model.block_list`; empty until lists are asked for."""
    no_full: tuple[Tensor, Tensor] | None = None
    """Lists without an entry, for a mask that has none of FULL blocks."""
    versions: tuple[int, ...] = ()
    """Of the lists, when `agrees` was found out: they may change in place."""
    again: Callable[[int], BlockMask] | None = None
    """Of a mask that `created` made: makes it with blocks of so many rows and keys."""
    captured: tuple[Tensor, ...] = ()
    """What its function reads."""
    read: tuple[int, ...] = ()
    """`_versions` of what was captured when the mask was made."""
    finer: BlockMask | None = None
    """See `finer`."""


_kept: weakref.WeakKeyDictionary[BlockMask, Kept] = weakref.WeakKeyDictionary()


def why_not(mask: BlockMask, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> str:
    """One reason, without a full stop, why a mask is none of such a call; empty where it is."""
    if not isinstance(mask, BlockMask):
        return "block_mask is no BlockMask"
    if getattr(mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        return "block_mask is a slice of another"
    counts, indices = mask.kv_num_blocks, mask.kv_indices
    rows, keys = mask.BLOCK_SIZE
    if min(rows, keys) < 1:
        return f"block_mask has blocks of {rows} queries and {keys} keys"
    if tuple(mask.seq_lengths) != (seqlen_q, seqlen_k):
        return f"block_mask is of {mask.seq_lengths[0]} queries and {mask.seq_lengths[1]} keys"
    sizes, blocks = tuple(counts.shape), -(-seqlen_q // rows)
    if counts.dim() != 3 or sizes[0] not in (1, batch) or sizes[1] not in (1, heads) or sizes[2] != blocks:
        return f"block_mask has lists of shape {list(sizes)}"
    if tuple(indices.shape[:3]) != sizes:
        return f"block_mask has lists of shape {list(indices.shape)}"
    for lists in (mask.full_kv_num_blocks, mask.full_kv_indices):
        if lists is not None and tuple(lists.shape[:3]) != sizes:
            return f"block_mask has FULL lists of shape {list(lists.shape)}"
    return ""


def _parts(mask: BlockMask) -> tuple[Any, ...]:
    return mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices, mask.BLOCK_SIZE


def is_kept(mask: BlockMask) -> bool:
    """Whether the mask is known as it is."""
    found = _kept.get(mask)
    return found is not None and all(one is other for one, other in zip(found.parts, _parts(mask), strict=True))


def is_known(mask: BlockMask, band: Band | None) -> bool:
    """Whether a call need not wait for the device to know more of it. `band`: see `agrees`; None for a predicate that
    is none."""
    if not is_kept(mask):
        return False
    known = kept(mask)
    shown = False if band is None else known.agrees.get(band)
    return bool(shown or (shown is False and known.counts))


def kept(mask: BlockMask) -> Kept:
    """What is known of a mask that fits. Counts stay where lists change in place: they choose kernels alone."""
    if not is_kept(mask):
        _kept[mask] = Kept(_parts(mask))
    known, versions = _kept[mask], _versions(_parts(mask)[:4])
    if known.versions != versions:
        known.agrees.clear()
        known.again = known.finer = None
        known.versions = versions
    return known


def _versions(tensors: Iterable[Tensor | None]) -> tuple[int, ...]:
    """Torch's counts of changes in place, which tensors of inference mode have not."""
    return tuple(0 if one is None or one.is_inference() else one._version for one in tensors)


def counted(mask: BlockMask) -> Kept:
    """The same with the counts of its lists; the first call waits for the device."""
    known = kept(mask)
    if not known.counts:
        no_full, counts = none_full(mask), _counts(mask.kv_num_blocks, mask.full_kv_num_blocks)
        known.no_full, known.counts = no_full, counts  # filled by now, for threads with other streams too
    return known


FINER, MOST_FINER = 64, 1 << 20
"""Rows and keys of the blocks of small tiles, and how many of these a head may have at most."""
CLEARLY = 0.97
"""Of the time over larger blocks: finer ones are made by two launches more."""
_finer: dict[Hashable, bool] = {}
"""Whether masks of a kind and of such counts are better with finer blocks."""


def finer(mask: BlockMask, kind: Hashable, us_of: Callable[[BlockMask], float]) -> BlockMask:
    """A mask that `created` made as lists for small tiles, `FINER` rows and keys to a block, where kernels should take
    less time over them by `us_of`; else the mask as it is. They are made and kept when they are first asked for, not in
    a capture, and are gone when its function is another, or its lists or what that captures have changed in place since
    it was made. `kind`: what `us_of` depends on beside a mask. The first of a kind waits for the device."""
    known = counted(mask)
    if _versions(known.captured) != known.read:
        return mask
    made, again = known.finer, known.again  # once: another thread may change them meanwhile
    if made is not None:
        return made if made.mask_mod is mask.mask_mod else mask
    if again is None or (mask.kv_num_blocks.is_cuda and torch.cuda.is_current_stream_capturing()):
        return mask
    known.again, kind = None, (kind, known.counts)
    better = _finer.get(kind)
    try:
        made = mask if better is False else again(FINER)
    except LaunchError:
        return mask
    if made is mask or made.mask_mod is not mask.mask_mod:
        return mask
    if better is None:
        better = remember(_finer, kind, us_of(made) < CLEARLY * us_of(mask))
    if not better:
        return mask
    counted(made)  # waits, so that a thread that finds these lists, with another stream, reads them filled
    known.finer = made
    return made


def none_full(mask: BlockMask) -> tuple[Tensor, Tensor] | None:
    """Lists without an entry, for a mask that has none of FULL blocks; None for others."""
    if mask.full_kv_num_blocks is not None:
        return None
    return torch.zeros_like(mask.kv_num_blocks, dtype=torch.int32), torch.zeros_like(mask.kv_indices)


def _counts(partial_blocks: Tensor, full_blocks: Tensor | None) -> str:
    """`Kept.counts` of the numbers of PARTIAL and FULL blocks; waits for the device. They are few, and counted on the
    CPU: a process loads each of torch's kernels when it first runs, for milliseconds."""
    some = partial_blocks.cpu()
    each = some * 0 if full_blocks is None else full_blocks.cpu()
    means = some.double().mean().item(), each.double().mean().item(), int((some + each).max())
    partial, whole, most = map(_rounded, means)
    return f"{partial}/{whole}/{max(most, partial + whole)}"


def likely(text: str, blocks: int) -> str:
    """The text of an unread mask with counts that a mask of so many blocks of keys may have."""
    few = max(1, min(blocks, LIKELY_BLOCKS) // 2)
    return text.replace(UNREAD, f"{few}/{few}/{2 * few}")


_read: dict[tuple[Any, ...], str] = {}
"""Texts of masks that were unread."""
MOST_ON_CPU = 1 << 18
"""Entries of lists that are compared with a band on the CPU."""


def told(text: str, lists: tuple[Tensor | None, ...]) -> str:
    """The text of an unread mask with the counts of the first mask like it, of the same sizes: they matter for the
    choice of a kernel alone, and are read from the device once. A graph that is being captured reads none."""
    counts, indices, full, _ = lists
    assert counts is not None and indices is not None and full is not None
    key = text, indices.shape, indices.device
    if (found := _read.get(key)) is None:
        if counts.is_cuda and torch.cuda.is_current_stream_capturing():
            return likely(text, indices.shape[-1])
        found = remember(_read, key, text.replace(UNREAD, _counts(counts, full)))
    return found


def _rounded(count: float) -> int:
    """The nearest number of two significant bits, 0 for none, so that masks that differ little have one plan."""
    step = 1 << max(0, int(count).bit_length() - 2)
    return max(int(count > 0), int(count / step + 0.5) * step)


def text_of(mask: BlockMask, known: Kept) -> str:
    """As `AttentionProblem.blocks`; empty where kernels have no such blocks."""
    rows, keys = mask.BLOCK_SIZE
    if not all(LEAST_BLOCK <= size <= LARGEST_BLOCK and size % LEAST_BLOCK == 0 for size in (rows, keys)):
        return ""
    by = "b" * (mask.kv_num_blocks.shape[0] > 1) + "h" * (mask.kv_num_blocks.shape[1] > 1)
    return f"{by}{':' * bool(by)}{rows}x{keys}:{known.counts}"


def lists_of(mask: BlockMask, known: Kept, seqlen_k: int) -> tuple[Tensor, ...]:
    """The four lists as kernels read them."""
    columns = -(-seqlen_k // mask.BLOCK_SIZE[1])
    full = known.no_full or (mask.full_kv_num_blocks, mask.full_kv_indices)
    made: list[Tensor] = []
    for counts, indices in ((mask.kv_num_blocks, mask.kv_indices), full):
        assert counts is not None and indices is not None
        width = indices.shape[-1]
        if width < columns:
            indices = torch.nn.functional.pad(indices, (0, columns - width))
        made += [one.to(torch.int32).contiguous() for one in (counts, indices[..., :columns])]
    return tuple(made)


def table_of(mask: BlockMask, seqlen_k: int, device: str | None = None) -> Tensor:
    """What each block is, int32 `[batch or 1, heads or 1, blocks of rows, blocks of keys]`, on the mask's device unless
    another is given."""
    columns = -(-seqlen_k // mask.BLOCK_SIZE[1])
    partial, full = (mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)
    lists: Any = (partial, full)
    if device is not None:
        lists = tuple(tuple(None if one is None else one.to(device) for one in pair) for pair in lists)
    return states_of(lists, columns)


def expression_of(mask: BlockMask, score: str, predicate: str) -> str:
    """The score with what blocks and predicate hide at -inf, of a table `TABLE`."""
    rows, keys = mask.BLOCK_SIZE
    block = f"{TABLE}[b,h,q//{rows},k//{keys}]"
    seen = f"({block}=={FULL})|(({block}=={PARTIAL})&{predicate})" if predicate else f"{block}>{EMPTY}"
    return f"where({seen},{score or 's'},-inf)"


def agrees(mask: BlockMask, known: Kept, band: Band) -> bool:
    """Whether the lists, with a predicate that shows this band, show just the band. The first call of a band waits for
    the device."""
    if band not in known.agrees:
        small = mask.kv_indices.numel() <= MOST_ON_CPU  # where torch's own kernels need not be loaded first
        table = table_of(mask, band.seqlen_k, "cpu" if small else None)
        device = table.device
        firsts, lasts = [], []
        for size, count, length in zip(mask.BLOCK_SIZE, table.shape[2:], (band.seqlen_q, band.seqlen_k), strict=True):
            first = torch.arange(count, device=device) * size
            firsts.append(first)
            lasts.append((first + size - 1).clamp(max=length - 1))
        least, most = firsts[1] - lasts[0][:, None], lasts[1] - firsts[0][:, None]  # of key - query
        low = -band.seqlen_q if band.lowest is None else band.lowest
        high = band.seqlen_k if band.highest is None else band.highest
        empty, full = (most < low) | (least > high), (least >= low) & (most <= high)
        fits = (empty & (table != FULL)) | (full & (table != EMPTY)) | (~empty & ~full & (table == PARTIAL))
        known.agrees[band] = bool(fits.all())
    return known.agrees[band]


def authoritative(mask: BlockMask, seqlen_k: int) -> BlockMask:
    """The same mask with a `mask_mod` that knows the lists: torch's FlexAttention asks that alone where it is not
    compiled."""
    table, inner, (rows, keys) = table_of(mask, seqlen_k), mask.mask_mod, mask.BLOCK_SIZE
    by_batch, by_head = (int(size > 1) for size in table.shape[:2])

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        block = table[b * by_batch, h * by_head, q // rows, k // keys]
        return (block == FULL) | ((block == PARTIAL) & inner(b, h, q, k))

    made = copy.copy(mask)
    made.mask_mod = seen
    return made


def created(
    mask_mod: Any,
    shape: MaskShape,
    where: torch.device,
    predicate: str,
    given: dict[str, Tensor],
    bounds: Bounds | None,
) -> BlockMask | None:
    """The mask of a function that says `predicate` of the tables `given`, by a kernel; None where there is none.
    `bounds` of a predicate that is a band and no more: the mask is known to show just that."""
    platform = current.runtime().platform
    if platform is None or any(
        table.device != where or not is_ordinary(table, table, table) for table in given.values()
    ):
        return None
    text, tables = _printed(predicate, given)
    kernel = _kernel(platform, where, text, (mask_mod, shape, given, tables))
    if kernel is None:
        return None
    try:
        lists = _run(platform, kernel, where, shape, given, tables)
    except LaunchError:
        return None
    made, sizes = _mask_of(lists, shape, mask_mod), (shape.block_rows, shape.block_keys)
    if bounds is not None:
        kept(made).agrees[Band(shape.seqlen_q, shape.seqlen_k, *bounds)] = True
    elif (
        sizes == (BLOCK, BLOCK)
        and math.prod(shape.blocks) * (BLOCK // FINER) ** 2 <= MOST_FINER
        and not any(table.is_inference() for table in given.values())  # which may change unseen
    ):

        def again(size: int) -> BlockMask:
            finer = replace(shape, block_rows=size, block_keys=size)
            return _mask_of(_run(platform, kernel, where, finer, given, tables), finer, mask_mod)

        known, captured = kept(made), tuple(given.values())
        known.again, known.captured, known.read = again, captured, _versions(captured)
    return made


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
            remember(_sources, known, printed)
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
    return all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(own, theirs, strict=True))


def _lists_by_pairs(mask_mod: Any, shape: MaskShape, device: torch.device) -> list[Tensor] | None:
    """`LISTS` of a small mask of one batch and head, of what the function says of all pairs at once; None where it
    takes none at once. Torch's own function, which takes all, imports its compilers: seconds. On the CPU but for the
    function, as kernels that sort would have to be loaded."""
    from evoattn.peers.flex import block_mask  # with it the peers, which other calls need not wait for

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.as_tensor(mask_mod(*(one.to(device) for one in (b, h, i, j)))).bool().cpu()

    sizes = shape.block_rows, shape.block_keys
    try:
        made = block_mask(seen, None, shape.seqlen_q, shape.seqlen_k, sizes, torch.device("cpu"))
    except Exception:  # the function's own
        return None
    return [getattr(made, name) for name in LISTS]


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
            launch.binding.bind(addresses)
            launch.set_stream(stream)
            if status := platform.launch(launch.config, launch.function, launch.arguments, None):
                launch_again(platform, device.index, launch, status)
    return lists


LEAST_SCORES = 1 << 26
"""Of all heads. Making lists takes some 10 to 20 µs, fewer scores some 50."""
MOST_SHARE = 0.75
"""Of the blocks that are computed: lists of more save less than they cost."""
_worth: dict[Hashable, str] = {}
"""The counts of the first mask of such a condition and size; empty where lists are not worth it."""


def mask_of_scores(
    call: Call, predicate: str, tables: dict[str, Tensor], score_mod: Callable[..., Any] | None
) -> BlockMask | None:
    """The mask of a call whose `score_mod` shows what `predicate` says of `tables`; None where all scores are to be
    computed. The first of a kind waits for the device; none is made of it while a graph is being captured."""
    query, key, where = call.query, call.key, call.query.device
    (batch, heads, rows, _), keys = query.shape, key.shape[2]
    own = {name: table for name, table in tables.items() if f"{name}[" in predicate}
    if batch * heads * rows * keys < LEAST_SCORES or is_promised(call.batch_invariant):
        return None
    if any(table.requires_grad for table in own.values()):
        return None
    described = Score.of_texts("", predicate, own).tables
    kind = predicate, described, query.shape, keys, where
    counts = _worth.get(kind)
    if counts == "" or (counts is None and query.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    tree = parse_predicate(predicate, described, True).tree
    by_batch, by_head = (depends_on(tree, name) for name in "bh")
    shape = MaskShape(batch if by_batch else 1, heads if by_head else 1, rows, keys, BLOCK, BLOCK)

    def shown(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert score_mod is not None
        score: Tensor = score_mod(torch.ones((), device=q.device), b, h, q, k)
        return score > -torch.inf

    made = None if shape.why_not() else created(shown, shape, where, predicate, own, None)
    if counts is None:
        counts = "" if made is None else counted(made).counts
        partial, full, _ = map(int, (counts or "0/0/0").split("/"))
        counts = counts if partial + full <= MOST_SHARE * shape.blocks[1] else ""
        remember(_worth, kind, counts)
    if made is None or not counts:
        return None
    known = kept(made)
    known.counts, known.again = counts, None  # of finer lists, new in each call, counts would be waited for
    return made
