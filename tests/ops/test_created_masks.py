"""Lists of block masks by the printed kernels, on the interpreter, beside those of torch's `create_block_mask`.

Of `mask_blocks.cuh` and `score_range.cuh`."""

import ctypes
import itertools
import math
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex

from benchmarks.flex.mods import MODS, Shape, Written
from evoattn.backends import compiler
from evoattn.backends.base import LaunchError
from evoattn.backends.interpreter import InterpreterBackend
from evoattn.families.mask_blocks import LISTS, STATES, MaskShape, launches
from evoattn.model.block_list import parse_blocks
from evoattn.model.mask import Band
from evoattn.model.records import CompiledKernel
from evoattn.model.remembered import MOST
from evoattn.ops import block_masks, flex
from evoattn.ops.runtime import current
from tests.support.compiles import NOT_KNOWN, ptx_kept

pytestmark = pytest.mark.slow

SHAPE = Shape(2, 2, 77, 131)


def lists_of(mask_mod, shape):
    said = flex.said_by((None, mask_mod), torch.device("cpu"))
    assert not isinstance(said, str), said
    given = said[0].traced.tables(said[1])
    text, tables = block_masks._printed(said[0].traced.predicate, given)
    rows, keys = shape.blocks
    lists = {n: torch.full(size, -7, dtype=torch.int32) for n, size in zip(LISTS, shape.list_shapes, strict=True)}
    buffers = {STATES: torch.full((shape.batches * shape.heads * rows * keys,), 9, dtype=torch.uint8), **lists}
    buffers |= {table.buffer: one.contiguous() for table, one in zip(tables, given.values(), strict=True)}
    faults = InterpreterBackend().run(ptx_kept(text, "sm_90a"), launches(shape, tables), buffers)
    assert not faults, faults[0]
    return lists


PAIRS = torch.rand(20, 20, generator=torch.Generator().manual_seed(1)) < 0.7


MANY, LESS = 26_000_000, torch.tensor(-7)
OF_EACH_KIND = (
    lambda q, k: torch.where(k < 70, q, 50 - q) > 20,
    lambda q, k: torch.where(k < 70, q, 60 - q) > 20,
    lambda q, k: (q - k).abs() > 20,
    lambda q, k: (k & 31) < 31,
    lambda q, k: (k & -8) < 64,
    lambda q, k: k % 24 < 12,
    lambda q, k: (q - k) // LESS + (q - 3 * k) % LESS > -2,
    lambda q, k: q % 9 + k % 7 < 14,
    lambda q, k: q % 9 + (k % 7 - 5) > 3,
    lambda q, k: (q % 9 - 7) + k % 7 > -3,
    lambda q, k: torch.minimum(q, k * 2) > torch.maximum(50 - q, k - 70),
    lambda q, k: (-q * (k - 60) > 600) | ((q + 3) >> 2 == (k + 9) // 4),
    lambda q, k: -q * (k - 60) > -160,
    lambda q, k: q * (k - 60) > -1500,
    lambda q, k: q - (k - 100) > 110,
    lambda q, k: ((k >> 3) > 4) & (q >> 2 < 11),
    lambda q, k: q * 200 + k != 1007,  # of one lane's row
    lambda q, k: (q % 40 == 35) & (k > 20),  # of rows among which the remainder begins anew
    # Numbers that fit an int, between bounds that do not.
    lambda q, k: q * MANY - (q - 76) * MANY < 1_600_000_000,
    lambda q, k: (q - 76) * MANY - q * MANY > -1_600_000_000,
    lambda q, k: q * MANY + (76 - q) * MANY < 1_600_000_000,
    lambda q, k: (q - 76) * MANY + q * -MANY > -1_600_000_000,
)
"""Of a head each, for the operators whose ranges are not those of their arguments."""


def of_each_kind(b, h, q, k):
    found = (q % 40) < 20
    for head, shown in enumerate(OF_EACH_KIND, 1):
        found = torch.where(h == head, shown(q, k), found)
    return found


OF_BOTH = Written(
    mask_mod=lambda b, h, q, k: ((q * 7 + k * 3) % 31 != h) & (k < 128 - 40 * b - 16 * h) | (k > q + 90 + h),
    by_batch=True,
    by_head=True,
)
BARE = torch.ones(77, 144, dtype=torch.bool)  # rows of whole words
BARE[32:48, 64:] = BARE[48:, :64] = False
STARTS = torch.tensor([0] + [90] * 7 + [0] * 8)
OF_HASH = Written(mask_mod=lambda b, h, q, k: q > STARTS[(k * 30000001) % 16])
"""Products from key 72 on are no int, so that of a warp's keys some have one element and others may have any."""
OF_COARSE = Written(mask_mod=lambda b, h, q, k: PAIRS[q // 8 + 9 * b, k // 8], by_batch=True)
CUBE = ((torch.arange(77)[:, None, None] // 16 + torch.arange(3)) % 3 > 0).repeat(1, 33, 1)
OF_CUBE = Written(
    mask_mod=lambda b, h, q, k: torch.where(h == 0, CUBE[q, k // 4, q // 16 % 3], CUBE[q, k // 4, h]), by_head=True
)
"""Of elements along three dimensions, and along two with another behind them."""
OF_BARE = Written(mask_mod=lambda b, h, q, k: BARE[q, k])
"""A table of pairs with blocks of 48 rows and 32 keys of each kind, of which 32 by 32 pairs are all alike."""


@pytest.mark.parametrize(
    "name, blocks",
    [
        pytest.param("windows_of_heads", (16, 32), marks=pytest.mark.slow),
        ("documents_of_batches", (33, 3)),  # more blocks than a warp has lanes
        ("documents_of_batches", (16, 3)),  # and more lines than two launched blocks make
        ("any_pairs", (48, 70)),  # more rows, and more keys
        ("prefix_lm", (16, 32)),
        ("images_in_text", (16, 48)),  # keys that are asked for one by one
        ("of both", (40, 70)),
        ("of bare blocks", (48, 32)),
        ("of coarse pairs", (16, 32)),
        ("of a cube", (32, 32)),
        ("of each kind", (16, 32)),
        ("of a hash", (16, 32)),
    ],
)
def test_lists_are_torch_s(name, blocks):
    """Of heads, of batches, of a table of pairs, of none and of both; the last rows and keys fill no block."""
    own = {
        "of both": OF_BOTH,
        "of bare blocks": OF_BARE,
        "of coarse pairs": OF_COARSE,
        "of a cube": OF_CUBE,
        "of a hash": OF_HASH,
        "of each kind": Written(None, of_each_kind, by_head=True),
    }
    heads = len(OF_EACH_KIND) + 1 if name == "of each kind" else SHAPE.heads
    written = own.get(name) or MODS[name](SHAPE)
    sizes = SHAPE.batch if written.by_batch else 1, heads if written.by_head else 1
    found = lists_of(written.mask_mod, MaskShape(*sizes, SHAPE.queries, SHAPE.keys, *blocks))
    theirs = block_masks.TORCH(written.mask_mod, *sizes, SHAPE.queries, SHAPE.keys, "cpu", blocks)
    assert theirs.kv_num_blocks.any() and (name != "prefix_lm" or theirs.full_kv_num_blocks.any())
    for list_name, one in found.items():
        assert torch.equal(one, getattr(theirs, list_name)), list_name


def runs(*sizes, width, seed):
    """Whole numbers below 6 in runs along the last dimension; of the second and third head with others between."""
    chance = torch.Generator().manual_seed(seed)
    drawn = lambda *of: torch.randint(6, of, generator=chance)
    long = drawn(*sizes[:-1], -(-sizes[-1] // width)).repeat_interleave(width, -1)[..., : sizes[-1]]
    lone = torch.rand(sizes, generator=chance) < torch.tensor([0.0, 0.004, 0.04])[:, None]
    return torch.where(lone, drawn(*sizes), long)


@pytest.mark.parametrize(
    "rows, keys, blocks",
    [(100, 150, (16, 32)), (150, 210, (40, 70)), (200, 130, (96, 40)), (70, 230, (33, 3)), (220, 300, (100, 140))],
)
def test_lists_of_what_is_alike_in_parts_of_blocks_are_torch_s(rows, keys, blocks):
    """A block is known by the ranges of all of it, of each key, of its parts, or pair by pair, as it comes."""
    few, many = (runs(2, 3, rows, width=width, seed=width) for width in (2 * blocks[0], blocks[0] // 3))
    own, other = (runs(2, 3, keys, width=width, seed=width) for width in (2 * blocks[1], 1 + blocks[1] // 3))

    def seen(b, h, q, k):
        alike = (few[b, h, q] <= own[b, h, k]) | (many[b, h, q] < other[b, h, k] + h - 3 * b)
        return alike | (q + 2 * k > 2 * keys - 20 * h)

    found = lists_of(seen, MaskShape(2, 3, rows, keys, *blocks))
    theirs = block_masks.TORCH(seen, 2, 3, rows, keys, "cpu", blocks)
    assert theirs.full_kv_num_blocks.sum() > 9 and theirs.kv_num_blocks.sum() > 9
    for name, one in found.items():
        assert torch.equal(one, getattr(theirs, name)), name


@pytest.mark.parametrize("is_paired", [False, True])
def test_one_pair_of_a_block_decides_wherever_it_lies(is_paired):
    """Of a head all others are seen, of the other one all others are hidden."""
    at_rows, at_keys = (0, 31, 32, 39), (0, 31, 32, 63, 64, 69)
    rows, keys = torch.zeros(160, dtype=torch.int32), torch.zeros(420, dtype=torch.int32)
    rows[[40 * block + at for block, at in enumerate(at_rows)]] = 1
    keys[[70 * block + at for block, at in enumerate(at_keys)]] = 1
    pairs = rows[:, None] * keys
    of = (lambda q, k: pairs[q, k]) if is_paired else (lambda q, k: rows[q] * keys[k])
    found = lists_of(lambda b, h, q, k: of(q, k) == h, MaskShape(1, 2, 160, 420, 40, 70))
    assert (found["kv_num_blocks"] == 6).all() and (found["q_num_blocks"] == 4).all()
    assert not found["full_kv_num_blocks"].any() and not found["full_q_num_blocks"].any()


def test_parts_of_a_block_that_are_alike_decide():
    """Of 32 rows and keys each: one of four is seen or hidden whole, in all ways."""
    rows = torch.tensor([1, 2, 2, 1], dtype=torch.int32).repeat_interleave(32)
    keys = torch.tensor([*itertools.product(range(4), repeat=2)], dtype=torch.int32).flatten().repeat_interleave(32)
    seen = lambda b, h, q, k: (rows[q] & keys[k]) > 0
    found = lists_of(seen, MaskShape(1, 1, 128, 1024, 64, 64))
    theirs = block_masks.TORCH(seen, 1, 1, 128, 1024, "cpu", 64)
    assert all(torch.equal(one, getattr(theirs, name)) for name, one in found.items())


IDS = torch.arange(400) // 37


class OnInterpreter:
    """In place of `LoadedKernel`: makes lists in the memory that addresses say, of `IDS` and of numbers."""

    config = function = kernel = None
    shapes: ClassVar[list[MaskShape]] = []

    def __init__(self, code, platform, index):
        self.ptx = CompiledKernel(b"", code.decode(), NOT_KNOWN)

    def bound(self, launches, places):
        heads, *sizes = (one.value for one in launches[0].args[1:6])
        shape = MaskShape(launches[0].grid[2] // heads, heads, *sizes)
        self.shapes.append(shape)
        kinds = {STATES: (torch.uint8, (math.prod(shape.blocks) * launches[0].grid[2],))}
        kinds |= {name: (torch.int32, size) for name, size in zip(LISTS, shape.list_shapes, strict=True)}
        tables = launches[0].args[6:]  # of one dimension each, the others numbers
        for table, size in zip(tables[::2], tables[1::2], strict=True):
            kinds[table.name] = torch.int32 if size.value == 1 else IDS.dtype, (size.value,)
        self.launches, self.places, self.kinds = launches, places, kinds
        self.binding = self
        return [self]

    def bind(self, addresses):
        self.addresses = addresses

    def set_stream(self, stream):
        assert stream == 7

    def arguments(self):
        buffers = {}
        for name, (number, offset) in self.places.items():
            dtype, size = self.kinds[name]
            memory = (ctypes.c_char * (math.prod(size) * dtype.itemsize)).from_address(self.addresses[number] + offset)
            buffers[name] = torch.frombuffer(memory, dtype=dtype).view(size)
        assert not InterpreterBackend().run(self.ptx, self.launches, buffers)
        return 0


@pytest.fixture
def on_interpreter(monkeypatch, tmp_path, device):
    """Masks of the current runtime are made by kernels, with one that is checked first."""

    def compiled(text, arch):
        ptx = ptx_kept(text, arch).ptx
        return CompiledKernel(ptx.encode(), "", NOT_KNOWN)

    monkeypatch.setattr(compiler, "compile_source", compiled)
    monkeypatch.setattr(block_masks, "cubin_cache", lambda: tmp_path)
    monkeypatch.setattr(block_masks, "LoadedKernel", OnInterpreter)
    monkeypatch.setattr(OnInterpreter, "shapes", [])
    for name in ("_loaded", "_sources", "_worth"):
        monkeypatch.setattr(block_masks, name, {})
    launch = lambda config, function, arguments, _: device.status or arguments()
    monkeypatch.setattr(device, "launch", launch)
    device.now = 7
    return device


def same_lists(mask, mask_mod, *sizes):
    theirs = block_masks.TORCH(mask_mod, *sizes)
    return all(
        torch.equal(getattr(mask, name), getattr(theirs, name)) and getattr(mask, name).dtype == torch.int32
        for name in LISTS
    )


@pytest.mark.filterwarnings("error")
def test_a_kernel_makes_the_mask_behind_a_small_one_once(on_interpreter, tmp_path, monkeypatch):
    seen = lambda b, h, q, k: (IDS[q] == IDS[k]) & (q + 30 * h >= k)
    for turn in range(2):
        mask = flex.create_block_mask(seen, None, 2, 400, 280, "cpu", (64, 32))
        assert mask.mask_mod is seen and same_lists(mask, seen, 1, 2, 400, 280, "cpu", (64, 32))
        small, asked = MaskShape(1, 1, 300, 280, 128, 128), MaskShape(1, 2, 400, 280, 64, 32)
        assert OnInterpreter.shapes == [small, *[asked] * (turn + 1)]
    banded, plain = (flex.create_block_mask(of, 1, 1, 400, 280, "cpu") for of in (lambda b, h, q, k: q >= k, seen))
    assert block_masks.kept(banded).agrees == {Band(400, 280, None, 0): True} and not block_masks.kept(banded).again
    assert block_masks.kept(plain).agrees == {} and block_masks.kept(plain).again
    del OnInterpreter.shapes[3:]
    block_masks._loaded.clear()  # as in the next process
    monkeypatch.setattr(compiler, "compile_source", None)
    mask = flex.create_block_mask(seen, None, 2, 90, 280, "cpu", (64, 32))
    assert same_lists(mask, seen, 1, 2, 90, 280, "cpu", (64, 32)) and len(OnInterpreter.shapes) == 4


def test_torch_makes_the_mask_where_its_kernel_is_of_no_use(on_interpreter, monkeypatch):
    """The kernel is asked for once; of functions that take no pairs at once torch's first mask is the measure."""
    seen = lambda n: lambda b, h, q, k: compared[n](IDS[q], IDS[k])
    compared = (torch.eq, torch.ne, torch.lt, torch.gt, torch.le, torch.ge)
    whole = lambda b, h, q, k: seen(1)(b, h, q, k) if q.dim() == 0 else None
    nothing = lambda b, h, q, k: q < 0

    def made(mask_mod, asked):
        OnInterpreter.shapes.clear()
        assert same_lists(flex.create_block_mask(mask_mod, 1, 1, 90, 90, "cpu"), mask_mod, 1, 1, 90, 90, "cpu")
        assert len(OnInterpreter.shapes) == asked

    with warnings.catch_warnings(action="error"):
        made(seen(0), 2)
        made(whole, 2)
        on_interpreter.is_capturing = True
        made(seen(2), 0)
        on_interpreter.is_capturing = False
        on_interpreter.status = 5  # the driver refuses a later launch
        made(seen(0), 1)
    with pytest.warns(RuntimeWarning, match="fake error 5"):
        made(seen(3), 1)
    made(seen(3), 0)
    on_interpreter.status = 0
    made(seen(3), 0)
    with monkeypatch.context() as other, pytest.warns(RuntimeWarning, match="were others"):
        other.setattr(block_masks, "_lists_by_pairs", lambda mask_mod, shape, device: [torch.zeros(9)] * 8)
        other.setattr(
            block_masks, "TORCH", lambda _, *given, **words: torch_flex.create_block_mask(nothing, *given, **words)
        )
        flex.create_block_mask(seen(4), 1, 1, 90, 90, "cpu")
    block_masks._loaded.clear()
    with pytest.warns(RuntimeWarning, match="were others"):  # as its record says
        made(seen(4), 0)
    monkeypatch.setattr(compiler, "compile_source", None)
    with pytest.warns(RuntimeWarning, match="not callable"):
        made(seen(5), 0)
    on_interpreter.gpu = None
    block_masks._loaded.clear()
    made(seen(0), 0)


@pytest.mark.filterwarnings("error")
def test_scores_that_hide_keys_have_lists_where_they_are_many(on_interpreter, monkeypatch):
    """And blocks are hidden, of what may change from call to call."""
    tables = [IDS, IDS.float().requires_grad_()]
    query, key = torch.zeros(2, 3, 300, 16, dtype=torch.float16), torch.zeros(2, 3, 400, 16, dtype=torch.float16)
    call, shown = flex.Call(query, key, key), lambda b, h, q, k: (tables[0][q] == tables[0][k]) & (k > 9 * h)
    hides = lambda s, b, h, q, k: torch.where(shown(b, h, q, k), 2 * s, -torch.inf)

    def blocks(call):
        made = flex.calls(call, hides, None)
        first = made[0]()
        return first.blocks, len(made), first.score.predicate

    def lists(least, share, **changed):
        block_masks._worth.clear()
        monkeypatch.setattr(block_masks, "LEAST_SCORES", least)
        monkeypatch.setattr(block_masks, "MOST_SHARE", share)
        return [blocks(replace(call, **changed)) for _ in range(2)]

    named = [("h:128x128:2/0/3", 2, "((t0[q]==t0[k])&(k>(h*9)))")] * 2
    assert lists(2 * 3 * 300 * 400, 0.5) == named
    assert OnInterpreter.shapes[1:] == [MaskShape(1, 3, 300, 400, 128, 128)] * 2
    plain = [("", 1, "")] * 2
    assert lists(2 * 3 * 300 * 400 + 1, 0.5) == lists(0, 0.49) == lists(0, 1.0, batch_invariant=True) == plain
    assert len(OnInterpreter.shapes) == 4
    tables.reverse()
    assert lists(0, 1.0) == plain and len(OnInterpreter.shapes) == 4
    tables[:] = [IDS, None]
    more = [replace(call, query=query[:, :, :290]), replace(call, key=key[:, :, :390], value=key[:, :, :390]), call]
    kept = [blocks(one) and len(block_masks._worth) for one in (call, *more)]
    tables[:] = [IDS[:300].repeat(2), None]
    other = lambda s, b, h, q, k: torch.where(tables[0][q] < tables[0][k], s, -torch.inf)
    assert blocks(call) and flex.calls(call, other, None)
    assert [*kept, len(block_masks._worth)] == [1, 2, 3, 3, 5], "what is worth it is asked of each kind once"


def test_what_is_kept_of_masks_and_functions_has_a_limit(monkeypatch):
    """One text of expressions or one unread mask after the other is kept as `remember` keeps it."""
    kept = "_sources", "_read"
    for name in kept:
        monkeypatch.setattr(block_masks, name, dict.fromkeys(range(MOST - 1)))
    counts, sizes = torch.ones(1, 1, 1), []
    for length in range(1, 4):
        block_masks._printed(f"k<{length}", {})
        block_masks.told(f"{length}:{block_masks.UNREAD}", (counts, counts, counts, None))
        sizes.append([len(getattr(block_masks, name)) for name in kept])
    assert sizes == [[MOST] * 2, [1] * 2, [2] * 2]


def test_launches_have_room_for_so_many_heads_and_blocks():
    for sizes, fits in (
        ((255, 257, 9, 9, 1, 1), True),
        ((256, 256, 9, 9, 1, 1), False),
        ((1, 1, 1 << 17, 9, 1, 9), False),
        ((1, 1, 9, 1 << 30, 9, 9), False),
    ):
        assert (MaskShape(*sizes).why_not() == "") == fits


def test_torch_makes_masks_on_a_cpu_and_refuses_as_before():
    mask = flex.create_block_mask(MODS["causal"](SHAPE).mask_mod, None, None, 300, 300, "cpu")
    assert mask.kv_num_blocks.tolist() == [[[1, 1, 3]]] and mask.full_kv_num_blocks.tolist() == [[[0, 1, 0]]]
    with pytest.raises(AssertionError, match="mask_mod"):
        flex.create_block_mask(lambda s, b, h, q, k: s, 1, 1, 16, 16, "cpu")


def test_counts_of_a_mask_are_those_of_the_first_one_like_it_or_likely_ones(monkeypatch):
    monkeypatch.setattr(block_masks, "_read", {})
    counts, indices, full = torch.full((1, 1, 3), 2), torch.zeros(1, 1, 3, 5), torch.ones(1, 1, 3)
    unread = f"64x64:{block_masks.UNREAD}"
    for lists in ((counts, indices, full, None), (full, indices, counts, None)):
        assert block_masks.told(unread, lists) == "64x64:2/1/3"
    assert block_masks.told(f"h:{unread}", (full, indices, counts, None)) == "h:64x64:1/2/3"
    assert block_masks.told(unread, (full, indices[..., :4], counts, None)) == "64x64:1/2/3"
    few = [parse_blocks(block_masks.likely(unread, blocks)).counts for blocks in (1, 2, 9, 500)]
    assert few == [(1, 1, 2), (1, 1, 2), (4, 4, 8), (8, 8, 16)]
    assert parse_blocks(block_masks.likely(unread, 6)).counts == (3, 3, 6), "no more than there are"


def test_tables_of_other_kinds_have_other_kernels():
    made = [torch.zeros(9, dtype=dtype) for dtype in (torch.int32, torch.int64, torch.float32)]
    texts = {block_masks._printed("t0[q]<k", {"t0": table})[0] for table in (*made, *made, made[0][:5])}
    assert len(texts) == 3


def test_whether_small_tiles_are_better_is_asked_of_each_kind_of_calls(device, monkeypatch):
    kinds = []
    monkeypatch.setattr(block_masks, "finer", lambda mask, kind, us_of: kinds.append(kind) or mask)
    q, k, v = (torch.zeros(1, 2, 150, 64, dtype=torch.float16) for _ in "qkv")
    capped, more = lambda s, b, h, i, j: 3 * torch.tanh(s / 3), lambda s, b, h, i, j: s + h
    masks = [lambda b, h, i, j: IDS[i] == IDS[j], lambda b, h, i, j: IDS[i] <= IDS[j]]
    calls = [(q, k, v, score_mod, mask_mod) for score_mod in (None, capped, more) for mask_mod in masks]
    calls += [(q.bfloat16(), k.bfloat16(), v.bfloat16(), None, masks[0]), (q, k, v[..., :32], None, masks[0])]
    calls += [(q[:, :, :140], k, v, None, masks[0]), (q, k[:, :, :140], v[:, :, :140], None, masks[0])]
    for query, key, value, score_mod, mask_mod in [*calls, calls[0]]:
        mask = block_masks.TORCH(mask_mod, 1, 1, query.shape[2], key.shape[2], "cpu", 64)
        flex.calls(flex.Call(query, key, value), score_mod, mask)[0]()
    assert len(set(kinds)) == len(calls) == len(kinds) - 1


def test_no_kernel_makes_masks_without_a_device_or_of_tables_elsewhere(monkeypatch):
    shape, cpu, made = MaskShape(1, 1, 9, 9, 16, 16), torch.device("cpu"), []
    monkeypatch.setattr(block_masks, "_kernel", lambda *of: made.append(of))
    here, elsewhere = torch.zeros(9), torch.zeros(9, device="meta")
    for platform, table in ((None, here), ("a platform", elsewhere), (None, elsewhere), ("a platform", here)):
        assert not made
        with current.use(SimpleNamespace(platform=platform)):
            assert block_masks.created(None, shape, cpu, "t0[q]<k", {"t0": table}, None) is None
    assert made


def test_a_block_mask_is_asked_for_by_its_sizes(monkeypatch):
    asked = []
    monkeypatch.setattr(flex, "_created", lambda mask_mod, shape, device, apart: asked.append((shape, apart)))
    monkeypatch.setattr(block_masks, "TORCH", lambda *_, **__: None)  # other versions take other words
    seen = lambda b, h, q, k: q >= k
    flex.create_block_mask(seen, None, 3, 300, 200, "cpu")
    flex.create_block_mask(seen, 2, None, 300, 200, "cpu", BLOCK_SIZE=(64, 32), separate_full_blocks=False)
    flex.create_block_mask(seen, 1, 1, 300, 200, "cpu", BLOCK_SIZE=(torch.tensor(64), 32))
    assert asked == [(MaskShape(1, 3, 300, 200, 128, 128), True), (MaskShape(2, 1, 300, 200, 64, 32), False)]


def test_a_made_mask_asks_its_function_and_short_lists_are_padded():
    """Of ten blocks of rows and three of keys beside seven that there are by now."""
    shape = MaskShape(1, 2, 1280, 384, 128, 128)
    lists = [torch.zeros(size, dtype=torch.int32) for size in shape.list_shapes]
    mask = block_masks._mask_of(lists, shape, of_each_kind)
    assert mask.mask_mod is of_each_kind and mask.BLOCK_SIZE == (128, 128) and mask.seq_lengths == (1280, 384)
    found = block_masks.lists_of(mask, SimpleNamespace(no_full=None), 896)
    assert [tuple(one.shape) for one in found] == [(1, 2, 10), (1, 2, 10, 7)] * 2
    assert all(one.dtype == torch.int32 and one.is_contiguous() for one in found)


def test_small_tiles_have_lists_of_their_own(monkeypatch):
    """Where they should take less time, which is asked once for a kind of masks; not once what they are of changes."""
    ids, made, asked = torch.arange(300) // 40, [], []
    seen = lambda b, h, q, k: ids[q] == ids[k]

    def run(platform, kernel, device, shape, given, tables):
        assert (platform, kernel, device) == ("a platform", "kernel", torch.device("cpu"))
        made.append(shape.block_rows)
        sizes = shape.block_rows, shape.block_keys
        mask = torch_flex.create_block_mask(seen, 1, 1, shape.seqlen_q, shape.seqlen_k, "cpu", sizes)
        return [getattr(mask, name) for name in LISTS]

    def refuse(*_):
        raise LaunchError("no")

    def new():
        shape = MaskShape(1, 1, 300, 300, 128, 128)
        return block_masks.created(seen, shape, torch.device("cpu"), "t0[q]==t0[k]", {"t0": ids}, None)

    def finer(mask, kind="kind", us=1.0):
        def us_of(one):
            asked.append(one.BLOCK_SIZE[0])
            return us if one.BLOCK_SIZE[0] == 64 else 2.0

        return block_masks.finer(mask, (test_small_tiles_have_lists_of_their_own, kind), us_of)

    monkeypatch.setattr(block_masks, "_run", run)
    monkeypatch.setattr(block_masks, "_kernel", lambda *_: "kernel")
    with current.use(SimpleNamespace(platform="a platform")):
        first, second, third, fourth = (new() for _ in range(4))
        found = finer(first)
        assert found.BLOCK_SIZE == (64, 64) and found.kv_num_blocks.shape == (1, 1, 5) and found.mask_mod is seen
        again = finer(second)
        assert finer(first) is found and again.BLOCK_SIZE == (64, 64) and asked == [64, 128]
        assert block_masks.kept(again).counts, "they are filled before another stream may find them"
        assert finer(third, "other", 1.98) is third and finer(fourth, "other") is fourth
        assert made == [128] * 4 + [64] * 3
        monkeypatch.setattr(flex, "_us", lambda call: float(call.blocks.partition("x")[0]))
        q, other = torch.zeros(1, 2, 300, 64, dtype=torch.float16), new()
        calls = (
            flex.calls(flex.Call(q, q, q), None, other),
            flex.calls(flex.Call(q.clone().requires_grad_(), q, q), None, other),
        )
        assert [both[0]().blocks for both in calls] == ["64x64:3/0/3", "128x128:2/0/3"]
        other.mask_mod = lambda b, h, q, k: ids[q] == ids[k]
        assert flex.calls(flex.Call(q, q, q), None, other)[0]().blocks == "128x128:2/0/3"
        second.kv_num_blocks += 0
        assert finer(second) is second
        unread, another = new(), new()
        another.mask_mod = lambda b, h, q, k: ids[q] == ids[k]
        assert finer(another) is another, "its lists are of another function"
        ids += 1
        assert finer(first) is first and finer(unread) is unread, "blocks that its own lists hide stay hidden"
        with torch.inference_mode():
            ids = torch.arange(300) // 40
        unseen, ids = new(), torch.arange(300) // 40
        assert finer(unseen) is unseen, "torch counts no changes of what it captures"
        later = new()
        monkeypatch.setattr(block_masks, "_run", refuse)
        assert finer(later) is later, "the driver refuses the launch"


def test_another_thread_may_take_what_makes_finer_lists(monkeypatch):
    mask = torch_flex.create_block_mask(of_each_kind, 1, 1, 300, 300, "cpu")
    makers = iter([lambda size: mask])

    class Known:
        counts, captured, read, finer = "1/1/1", (), (), None
        again = property(lambda self: next(makers, None), lambda self, value: None)

    monkeypatch.setattr(block_masks, "counted", lambda _: Known())
    assert block_masks.finer(mask, "a kind", lambda _: 1.0) is mask


def test_counts_have_two_significant_bits():
    """So that masks that differ little have one plan."""
    assert [block_masks._rounded(count) for count in (0, 0.2, 1, 5, 6.9, 110)] == [0, 1, 1, 6, 6, 96]
