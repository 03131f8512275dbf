"""FlexAttention's language with kernels of ours: `flex_attention`, as torch has it, and `flex`, which puts it behind
torch's name.

The functions are traced into expressions (`evoattn.ops.mods`), block masks become lists or a table
(`evoattn.ops.block_masks`). What no kernel serves, torch's FlexAttention computes, and it raises the errors: for
arguments that do not fit nothing else is tried."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from evoattn.families.mask_blocks import MaskShape
from evoattn.model import forks
from evoattn.model.blocks import Blocks
from evoattn.model.mask import Band
from evoattn.model.remembered import MOST, remember
from evoattn.model.score import SCORE, Name, parse_predicate, parse_score, text_of
from evoattn.model.score_lines import Bias, Bounds, Slopes, added_of, band_of, hiding_of, masking_of, softcap_of
from evoattn.ops import block_masks, mods
from evoattn.ops.arguments import WATCHED, Score, is_ordinary
from evoattn.ops.attention import attend
from evoattn.ops.call import NO_TENSOR, Answer, Call, why_not_shapes
from evoattn.ops.choice import Refusal
from evoattn.ops.function_keys import key_of, with_tensors
from evoattn.ops.given import scored, with_added
from evoattn.ops.runtime import current
from evoattn.ops.shapes import is_recording, paused
from evoattn.ops.torch_answer import NoKernel, is_promised, refuse
from evoattn.portfolio.pick import canonical

TORCH = torch_flex.flex_attention
"""Torch's own function, whatever `flex` puts in its place."""
MOST_VALUES = 2
"""Of captured numbers that become constants."""
MAX_SCORES = "the largest scores are wanted, which kernels do not give"
NEW_IN_GRAPH = "its block mask is new and a CUDA graph is being captured; call it once before"


@dataclass(frozen=True)
class Said:
    """What a pair of functions says."""

    traced: mods.Traced
    softcap: float
    """Of a score that is a soft cap and no more; else 0."""
    added: Bias | Slopes | None
    """Of a score that adds this and does no more."""
    bounds: Bounds | None
    """Of a predicate that is a band and no more."""
    folds: bool = False
    """Whether numbers that the functions capture are constants of it, which could be arguments."""
    apart: Said | None = None
    """Of a score that hides keys, without a mask: the same with a predicate in place of its -inf."""

    @property
    def is_named(self) -> bool:
        """Whether kernels know it all by names, with numbers that are arguments of launches."""
        if self.apart is not None:
            return self.apart.is_named
        return self.bounds is not None and (self.softcap > 0 or not self.traced.score)


_known: dict[Hashable, Said | str] = {}
_values: dict[Hashable, tuple[Hashable, ...]] = {}
"""The keys of the first functions that differ in the values of their numbers alone."""
_numbers: dict[tuple[int, torch.device], Tensor] = {}
_lock = forks.Lock()
Mods = tuple[Callable[..., Any] | None, Callable[..., Any] | None]
"""`score_mod` and `mask_mod`."""


def said_by(both: Mods, device: torch.device, in_general: bool = False) -> tuple[Said, list[Tensor]] | str:
    """What the functions say, and the tensors that they capture; or one reason, without a full stop, why they are no
    expressions. Functions that differ in the values of captured tensors alone are traced once. Captured numbers are
    constants, of which compilers make more, of the first values; of others, and `in_general`, they are tensors, so that
    no kernel is compiled for each."""
    captured: list[Tensor] = []
    if in_general and _key_of(both, []) is not None:
        general = _in_general(both, device, True)
        said = _traced(general, _key_of(general, captured), captured)
        if not isinstance(said, str):
            return said, captured
        captured = []
    key = _key_of(both, captured)
    found = None if key is None else _known.get(key)
    if found is None and key is not None:
        inner: list[Tensor] = []
        general = _in_general(both, device, False)
        family = _key_of(general, inner)
        first = _values.get(family, ())
        if family != key and key not in first and len(first) >= MOST_VALUES:
            return said_by(both, device, True)
        found = _traced(both, key, captured)
        may_change = family != key and isinstance(_traced(general, family, inner), Said)
        if may_change and isinstance(found, Said) and not found.is_named:
            found = replace(found, folds=True)
            remember(_values, family, (*first, *({key} - {*first})))
            if key in _known:  # else it has a tensor that the key does not know
                _known[key] = found
    if found is None:
        found = _traced(both, None, captured)
    return found if isinstance(found, str) else (found, captured)


def _in_general(both: Mods, device: torch.device, filled: bool) -> Mods:
    """`with_tensors` of both, or both as they are where a tensor would not do as a number does."""
    with contextlib.suppress(mods.Untraceable):
        return with_tensors(both[0], device, filled), with_tensors(both[1], device, filled)
    return both


def _key_of(both: Mods, captured: list[Tensor]) -> Hashable | None:
    """One key of both functions; None where one has none."""
    keys = tuple(None if one is None else key_of(one, captured) for one in both)
    return None if any(one is not None and key is None for one, key in zip(both, keys, strict=True)) else keys


def _traced(both: Mods, key: Hashable | None, captured: list[Tensor]) -> Said | str:
    """As `said_by`, of what `_known` lacks or of functions without a key."""
    if key is not None and key in _known:
        return _known[key]
    before, found = len(captured), None
    try:
        traced = mods.trace(*both, captured)
        found = _said_of(traced, Score.of_texts("", "", traced.tables(captured)).tables)
    except mods.Untraceable as error:
        reason = str(error)
    except Exception as error:  # the functions' own, which torch raises where it runs them
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0].rstrip('.')}"
    if key is not None and before == len(captured):
        with _lock:
            remember(_known, key, found or reason)
    return found or reason


def _said_of(traced: mods.Traced, tables: str) -> Said:
    """What expressions say, of tables that are described so."""
    score = parse_score(traced.score, tables, True).tree if traced.score else Name(SCORE)
    bounds = band_of(parse_predicate(traced.predicate, tables, True).tree) if traced.predicate else (None, None)
    found = Said(traced, softcap_of(score), added_of(score), bounds)
    if traced.predicate or (hiding := hiding_of(score)) is None:
        return found
    shown, score = hiding
    text = "" if score == Name(SCORE) else text_of(score)
    return replace(found, apart=_said_of(replace(traced, score=text, predicate=text_of(shown)), tables))


NUMBERS = re.compile(r"(?<![\w.%/])(?<!\de[-+])\d{3,}(?![\w.])")
"""Whole ones in an expression that may be lengths, no exponents; by others it divides, which a compiler makes cheap."""


def _of_lengths(
    said: Said, tables: dict[str, Tensor], lengths: tuple[int, int], device: torch.device
) -> tuple[Said, dict[str, Tensor]]:
    """What functions say with arguments in place of numbers that are a mask's lengths, or one less, and the tables with
    these: so another length needs no other kernel."""
    given = {int(one) for text in (said.traced.score, said.traced.predicate) for one in NUMBERS.findall(text)}
    if not given or not (numbers := sorted(given & {n - less for n in lengths for less in (0, 1)})):
        return said, tables
    names = {str(number): f"t{len(tables) + place}" for place, number in enumerate(numbers)}

    def in_general(text: str) -> str:
        return NUMBERS.sub(lambda one: f"{names[one[0]]}[0]" if one[0] in names else one[0], text)

    def of_any(one: Said) -> Said:
        traced = replace(one.traced, score=in_general(one.traced.score), predicate=in_general(one.traced.predicate))
        return replace(one, traced=traced, apart=one.apart and of_any(one.apart))

    return of_any(said), tables | {name: _of_number(int(number), device) for number, name in names.items()}


def _of_number(number: int, device: torch.device) -> Tensor:
    """A tensor of it. Nothing waits for the device but the first copy, and graphs that read a kept one enqueue nothing:
    so none that is kept is ever freed."""
    if (kept := _numbers.get((number, device))) is not None:
        return kept
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.full((1,), number, dtype=torch.int32, device=device)
    with torch.inference_mode(False):
        made = torch.tensor([number], dtype=torch.int32, device=device)
    return _numbers.setdefault((number, device), made) if len(_numbers) < MOST else made


def calls(
    call: Call, score_mod: Callable[..., Any] | None, block_mask: BlockMask | None, in_general: bool = False
) -> list[Callable[[], Call]] | str:
    """What makes the calls of our op that answer to one of FlexAttention, the most promising first: `call` with what
    the functions and the mask say; `in_general`: see `said_by`. Or one reason, without a full stop, why there are none.
    """
    query, key, value = call.query, call.key, call.value
    if not all(isinstance(tensor, Tensor) for tensor in (query, key, value)):
        return NO_TENSOR
    if block_mask is not None and not isinstance(block_mask, BlockMask):
        return "block_mask is no BlockMask"
    if not is_ordinary(query, key, value):
        return WATCHED
    if reason := why_not_shapes(call):
        return reason
    (batch, heads, rows, _), keys = query.shape, key.shape[2]
    mask_mod = None if block_mask is None else block_mask.mask_mod
    if mask_mod is torch_flex.noop_mask:
        mask_mod = None
        if block_mask is not None and tuple(block_mask.BLOCK_SIZE) == (block_masks.WHOLE, block_masks.WHOLE):
            block_mask = None
    if block_mask is not None and (reason := block_masks.why_not(block_mask, batch, heads, rows, keys)):
        return reason
    found = said_by((score_mod, mask_mod), query.device, in_general)
    if isinstance(found, str):
        return found
    said, captured = found
    if call.folds and not said.folds:
        call = replace(call, folds=False)
    masking = _masking(said, rows, keys)
    is_new = block_mask is not None and not block_masks.is_known(block_mask, masking and masking[0])
    if is_new and query.is_cuda and torch.cuda.is_current_stream_capturing():
        return NEW_IN_GRAPH
    said, tables = _of_lengths(said, said.traced.tables(captured), (rows, keys), query.device)
    hiding: list[Callable[[], Call]] = []
    if block_mask is None and (apart := said.apart) is not None:
        if (masking := _masking(apart, rows, keys)) is not None:
            hiding = _all_ways(replace(call, mask=masking[1], window=masking[2]), apart, tables, None)
        elif (made := block_masks.mask_of_scores(call, apart.traced.predicate, tables, score_mod)) is not None:
            hiding = _all_ways(call, apart, tables, made)[:1]
    return hiding + _all_ways(call, said, tables, block_mask)


def _all_ways(
    call: Call, said: Said, tables: dict[str, Tensor], block_mask: BlockMask | None
) -> list[Callable[[], Call]]:
    """As `calls`; a mask is known, or no graph is being captured."""
    if not said.softcap:
        return _ways(call, said, said.traced.score, tables, block_mask)
    made = _ways(replace(call, softcap=said.softcap), said, "", tables, block_mask)
    if call.wants_gradients:  # kernels of a cap by its name may serve one of the passes alone
        made += _ways(call, said, said.traced.score, tables, block_mask)
    return made


def _masking(said: Said, rows: int, keys: int) -> tuple[Band, str, tuple[int, int] | None] | None:
    """The band that the predicate is, and the mask and the window of a call that shows just that; None where there is
    none."""
    if said.bounds is None or (found := masking_of(said.bounds, rows, keys)) is None:
        return None
    return Band(rows, keys, *said.bounds), *found


def _ways(
    call: Call, said: Said, score: str, tables: dict[str, Tensor], block_mask: BlockMask | None
) -> list[Callable[[], Call]]:
    """As `_all_ways`, with this expression of scores."""
    predicate, rows, keys = said.traced.predicate, call.query.shape[2], call.key.shape[2]

    named_by = functools.partial(with_added, added=said.added if score else None, tables=tables)

    def without_blocks(masked: Call) -> list[Callable[[], Call]]:
        named, own = named_by(masked), [lambda: scored(masked, score, "", tables)]
        if named is None:
            return own
        return [lambda: named, *own]  # kernels may know the name of neither such a head_dim nor such gradients

    if block_mask is None:
        return without_blocks(call)
    known = block_masks.kept(block_mask)
    masking = _masking(said, rows, keys)
    if masking is not None and block_masks.agrees(block_mask, known, masking[0]):
        return without_blocks(replace(call, mask=masking[1], window=masking[2]))

    def by_table() -> Call:
        named = {**tables, block_masks.TABLE: block_masks.table_of(block_mask, keys)}
        return scored(call, block_masks.expression_of(block_mask, score, predicate), "", named)

    def over(mask: BlockMask) -> Call:
        known = block_masks.counted(mask)
        lists = block_masks.lists_of(mask, known, keys)
        return scored(call, score, predicate, tables, block_masks.text_of(mask, known), lists)

    def by_lists() -> Call:
        if call.wants_gradients or is_promised(call.batch_invariant):
            return over(block_mask)
        query = call.query
        kind = score, predicate, call.softcap, query.dtype, query.device, query.shape, call.key.shape, call.value.shape
        return over(block_masks.finer(block_mask, kind, lambda mask: _us(over(mask))))

    text = block_masks.text_of(block_mask, block_masks.counted(block_mask))
    return [by_lists, by_table] if text else [by_table]


def _us(call: Call) -> float:
    """What a call should take by the cost model, in its unit of time; infinity where no kernel serves it."""
    choice = current.runtime().choice(call)
    if isinstance(choice, Refusal):
        return math.inf
    problem = choice.problem.as_searched
    end = current.climbs().get((canonical(problem), choice.gpu))
    if end is not None and end.config == choice.config:
        return end.score
    from evoattn.cost.cost import scores  # here: it imports NumPy and reads a file of weights

    return float(scores(problem, [choice.config], choice.gpu)[0])


def _for_torch(call: Call, mask: BlockMask | None) -> BlockMask | None:
    """The mask with which torch's function, uncompiled, gives the answer; the same one where it does not fit the call,
    which torch refuses."""
    query, key = call.query, call.key
    if mask is None or not (isinstance(query, Tensor) and isinstance(key, Tensor) and query.dim() == key.dim() == 4):
        return mask
    batch, heads, rows, _ = query.shape
    if not is_ordinary(query, key, key) or block_masks.why_not(mask, batch, heads, rows, key.shape[2]):
        return mask
    return block_masks.authoritative(mask, key.shape[2])


def _in_turn(
    call: Call, score_mod: Callable[..., Any] | None, block_mask: BlockMask | None, made: list[Callable[[], Call]]
) -> Iterator[Callable[[], Call]]:
    """What `calls` has `made`. Of numbers that the functions capture as constants it begins with the kernel that is
    compiled, beside calls; before it is, and for numbers that change, one runs that takes them as arguments."""
    first = made[0]()
    yield lambda: first
    if first.folds:
        call = replace(call, folds=False)
        for in_general in (True, False):
            ways = calls(call, score_mod, block_mask, in_general)
            yield from () if isinstance(ways, str) else ways
    else:
        yield from made[1:]


def _attended(made: Iterable[Callable[[], Call]]) -> Answer | None:
    """The answer by the first call that a kernel serves, and its gradients where they are wanted; None where none
    does."""
    for number, make in enumerate(made):
        with contextlib.suppress(NoKernel), paused() if number else contextlib.nullcontext():
            return attend(make())
    return None


def under_mask(call: Call, mask: BlockMask) -> Tensor | None:
    """The output of a call, which may have a soft cap and sinks, of what a block mask shows, by its lists; None where
    no kernel serves it, or the mask has blocks that kernels have not."""
    made = calls(call, None, mask)
    answer = None if isinstance(made, str) or len(made) < 2 else _attended(made[:1])
    assert answer is None or isinstance(answer, Tensor)  # no log-sum-exp was asked for
    return answer


def flex_attention(  # noqa: PLR0913 - torch's own arguments
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """`torch.nn.attention.flex_attention.flex_attention` by the best known kernel, without a compiler of torch's.

    Arguments, answers and errors are torch's, of compiled code: `score_mod(score, b, h, q_idx, kv_idx)` changes scaled
    scores; a block in neither list of a `BlockMask` is hidden whatever its `mask_mod` says, which is asked in PARTIAL
    blocks alone. `kernel_options` are hints for torch's kernels. A query that sees no key has the output 0 and the
    log-sum-exp -inf.

    The functions are traced when they are new; captured tensors are read at each call. Gradients of query, key, value
    and captured tensors are by kernels, too; those of query, key and value have the same bits in every run under
    torch's deterministic algorithms. Calls that no kernel serves (functions that are no expressions, the largest scores
    …) go to torch's function; `evoattn.explain(…, score_mod=, block_mask=)` says why. In compiled code the call is an
    op in one graph where kernels serve it, else torch's compiled function."""
    words: dict[str, Any] = dict(kernel_options=kernel_options, return_aux=return_aux)
    if torch.compiler.is_compiling():
        refuse("compiled code may get FlexAttention of torch")
        from evoattn.ops.custom_op import marked  # imports torch._dynamo, which a trace has done

        words["kernel_options"] = marked(kernel_options)
        return TORCH(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, **words)
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    wants_largest = return_aux is not None and (return_aux.max_scores or return_lse)  # torch refuses both ways at once
    call = Call(query, key, value, scale=scale, enable_gqa=enable_gqa, return_lse=wants_lse, strict=True)
    call.from_functions, call.folds = True, not is_recording()
    made = MAX_SCORES if wants_largest else calls(call, score_mod, block_mask)
    answer = None if isinstance(made, str) else _attended(_in_turn(call, score_mod, block_mask, made))
    if answer is None:
        refuse(made if isinstance(made, str) else "none serves its functions and mask")
        block_mask = _for_torch(call, block_mask)
        with block_masks.ALONE:
            return TORCH(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, **words)
    output, lse = answer if wants_lse else (answer, None)
    if return_aux is not None:
        return output, AuxOutput(lse=lse, max_scores=None)
    return (output, lse) if return_lse else output


def create_block_mask(
    mask_mod: Any,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = block_masks.BLOCK,
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
            own = _created(mask_mod, MaskShape(*numbers), device, words.get("separate_full_blocks", True))
    if own is not None:
        return own
    if device is not None:  # where none is given versions of torch take another
        words["device"] = device
    if _compile:
        words["_compile"] = True
    return block_masks.TORCH(mask_mod, B, H, Q_LEN, KV_LEN, BLOCK_SIZE=BLOCK_SIZE, **words)


def _created(mask_mod: Any, shape: MaskShape, device: Any, separate: bool) -> BlockMask | None:
    """The mask by a kernel; None where torch's function is to make it, or to refuse it."""
    runtime = current.runtime()
    platform = runtime.platform
    where = torch.device(runtime.device_type if device is None else device)
    made = torch.empty(0)  # of a class of its own where a mode watches
    if platform is None or where.type != runtime.device_type or shape.why_not() or not separate:
        return None
    if not is_ordinary(made, made, made):
        return None
    where = torch.empty(0, device=where).device  # with its number
    try:
        said, general = (said_by((None, mask_mod), where, in_general) for in_general in (False, True))
    except TypeError:  # of what is no function
        return None
    if isinstance(said, str) or isinstance(general, str):
        return None
    bounds = said[0].bounds if said[0].traced.predicate else None
    traced = general[0].traced
    any_length, tables = _of_lengths(general[0], traced.tables(general[1]), (shape.seqlen_q, shape.seqlen_k), where)
    return block_masks.created(mask_mod, shape, where, any_length.traced.predicate, tables, bounds)


_blocks = Blocks[bool]("evoattn.flex")
_users = 0


@functools.wraps(TORCH)
def _named(*arguments: Any, **keywords: Any) -> Any:
    """In the place of torch's name."""
    if not torch.compiler.is_compiling() and (block := _blocks.innermost()) is not None and block.value:
        return flex_attention(*arguments, **keywords)
    return TORCH(*arguments, **keywords)


def _hold(count: int) -> None:
    """Take or give up the name; somebody else's replacement of ours stays."""
    global _users
    with _lock:
        _users += count
        here = torch_flex.flex_attention
        if _users and here is TORCH:
            torch_flex.flex_attention = _named
        elif not _users and here is _named:
            torch_flex.flex_attention = TORCH


@contextlib.contextmanager
def flex(on: bool = True) -> Iterator[None]:
    """`torch.nn.attention.flex_attention.flex_attention` is evoattn's inside of the block where it is called by that
    name and not compiled, for this thread or asyncio task; with `on=False`, torch's. Blocks nest."""
    _hold(1)
    try:
        with _blocks.entered(on):
            yield
    finally:
        _hold(-1)
