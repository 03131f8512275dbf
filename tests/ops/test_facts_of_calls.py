"""What the op makes of calls before any kernel is looked for stays, until a change wants it otherwise: its arguments,
the problem that a call is, the sentence that refuses it, and what keys of plans tell apart."""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import evoattn
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.ops import arguments, attention_fp8, beside, function_keys
from evoattn.ops import given as given_arguments
from evoattn.ops.call import Call, terms_of
from evoattn.ops.choice import Choice, Refusal, choose
from tests.support.facts import answer, changed

PLAIN = AttentionProblem(1, 2, 2, 64, 64, 64, "fp16")
OTHERS: dict[str, Any] = {
    "head_dim": 128,
    "value_dim": 32,
    "dtype": "bf16",
    "mask": "causal_lower_right",
    "lse": True,
    "softcap": 20.0,
    "sink": True,
    "window": "9:0",
    "bias": "s",
    "op": "backward",
}
WORDS: list[dict[str, Any]] = [
    {},
    {"mask": "causal_upper_left"},
    {"window": (9, 0), "mask": "causal_lower_right"},
    {"window": (9, -1)},
    {"softcap": 20.0, "scale": 0.25},
    {"return_lse": True},
    {"enable_gqa": True},
]


REFUSED: list[dict[str, Any]] = [
    {"key": torch.zeros(2, 3, 8, 64).half()},
    {"key": torch.zeros(2, 2, 8, 64).half()},
    {"key": torch.zeros(2, 2, 8, 64).half(), "value": torch.zeros(2, 2, 8, 64).half(), "enable_gqa": True},
    {"key": torch.zeros(2, 4, 8, 32).half()},
    {"value": torch.zeros(2, 4, 7, 64).half()},
    {"value": torch.zeros(3, 4, 8, 64).half()},
    {"key": torch.zeros(2, 4, 8, 64)},
    {"query": torch.zeros(2, 4, 64).half()},
    {"query": torch.zeros(2, 4, 8, 64, dtype=torch.int32)},
    {"out": torch.zeros(2, 4, 8, 32).half()},
    {"out": torch.zeros(2, 4, 8, 64)},
    {"key": torch.zeros(2, 4, 0, 64).half(), "value": torch.zeros(2, 4, 0, 64).half()},
]


def _refused(words: dict[str, Any]) -> str:
    query, key, value = _tensors(4, 4, 8, 8, 64, 64, torch.float16)
    return str(Call(**{"query": query, "key": key, "value": value} | words).require())


def _problem(call: Call) -> str:
    problem = call.problem(call.query.stride())
    return problem if isinstance(problem, str) else problem.describe()


def _tensors(
    heads: int, kv_heads: int, queries: int, keys: int, dim: int, value_dim: int, dtype: Any
) -> tuple[Any, ...]:
    shapes = (2, heads, queries, dim), (2, kv_heads, keys, dim), (2, kv_heads, keys, value_dim)
    return tuple(torch.zeros(shape, dtype=dtype) for shape in shapes)


def _calls() -> Iterator[Call]:
    for shape in ((4, 4, 8, 8, 64, 64), (4, 2, 8, 24, 128, 128), (4, 4, 8, 24, 128, 64), (4, 1, 1, 24, 96, 512)):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            for words in WORDS:
                yield Call(*_tensors(*shape, dtype), **words)
    query, key, value = _tensors(4, 4, 8, 8, 128, 128, torch.float16)
    yield Call(query.requires_grad_(), key, value)
    yield Call(query.detach(), key.bfloat16(), value)
    yield Call(query.detach(), key[:1], value)
    yield Call(query.detach(), key, value, batch_invariant=True)
    yield Call(query.detach()[0], key[0], value[0])


def _mods() -> Iterator[tuple[str, Any]]:
    """Functions of scores; those of one name are the same to a key."""
    table, other = torch.zeros(9), torch.ones(9)
    for number in (1, 2):
        yield f"a number {number}", lambda s, b, h, q, k, number=number: s + number
        yield f"a closure {number}", (lambda n: lambda s, b, h, q, k: s + n)(number)
        yield f"a partial {number}", functools.partial(torch.add, number)
        yield f"a nested partial {number}", functools.partial(functools.partial(torch.mul), n=(number, [number]))
        yield f"nested {number}", (lambda n: lambda s: lambda: n + s)((number, (number, "x")))
    yield "a table", (lambda t: lambda s, b, h, q, k: s + t[k])(table)
    yield "a part of it", (lambda t, u: lambda s, b, h, q, k: s + t[k] + u[k])(table, table[3:])
    yield "two tables", (lambda t, u: lambda s, b, h, q, k: s + t[k] + u[k])(table, other[3:])
    yield "one twice", (lambda t, u: lambda s, b, h, q, k: s + t[k] + u[k])(table, table)
    yield "torch's own", torch.maximum
    yield "a module", (lambda m: lambda s: m.exp(s))(math)


def _told_apart() -> list[list[bool]]:
    def keyed(function: Any) -> Any:
        return answer(lambda: function_keys._key(function, [], 0))

    first, again = ([keyed(function) for _, function in _mods()] for _ in "ab")
    assert first[-1] == again[-1] or isinstance(first[-1], str)
    return [[one == other for other in first] for one in first] + [[isinstance(one, str) for one in first]]


def _choices() -> Iterator[Choice]:
    h100, l4 = GPUS["h100"], GPUS["l4"]
    space = load_space("flash_mma", h100)
    config, other = space.starting_configs()[:2]
    family = evoattn.families.registry.lookup("flash_mma")
    whole = Choice(family, config, PLAIN, h100, "", False)
    yield whole
    yield replace(whole, config=other)
    yield replace(whole, gpu=l4)
    yield replace(whole, family=evoattn.families.registry.lookup("split_kv"))
    for name, value in OTHERS.items():
        yield replace(whole, problem=PLAIN.with_(**{name: value}))
    backward = PLAIN.with_(op="backward", bias="s")
    yield replace(whole, problem=backward)
    yield replace(whole, problem=backward.with_(grads="bias"))
    yield replace(whole, problem=backward.with_(deterministic=True))


def _chosen() -> Iterator[Any]:
    """What runs where the pick may run, where nobody timed it, where it cannot serve, and where others can instead."""
    call = Call(*_tensors(4, 4, 8, 24, 64, 64, torch.float16))
    asked, l4 = call.problem(call.query.stride()), GPUS["l4"]
    configs = load_space("flash_scalar", l4).starting_configs()[:2]
    wrong = KernelConfig("flash_scalar", configs[0].params | {"BLOCK_M": 7})
    picks: list[Any] = [
        SimpleNamespace(family="flash_scalar", config=config, why="It was fast.", estimated=guessed, rivals=())
        for config in (*configs, wrong)
        for guessed in (False, True)
    ]
    for first, some, estimated in itertools.product((*picks, None), (None, picks[::-1], picks[4:]), (True, False)):
        others = None if some is None else lambda problem, gpu, some=some: some
        found = choose(asked, l4, lambda problem, gpu, first=first: first, estimated, others)
        yield (
            found.reason if isinstance(found, Refusal) else [found.config.id, found.words, found.estimated, found.name]
        )


def _scales(found: Any) -> Any:
    return found if isinstance(found, str) else [[one.dtype, tuple(one.shape), one.dim()] for one in found]


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _numbers(*shape: int, dtype: Any = torch.float16) -> Any:
    """Rising numbers that 8 bits hold, too."""
    return (torch.arange(math.prod(shape)).view(shape) % 15 - 7).to(torch.float16).to(dtype)


FORMS: dict[str, tuple[Any, ...]] = {
    "attention": ((2, 4, 3, 16), (2, 2, 6, 16), {}),
    "attention of three": ((3, 4, 3, 16), (3, 2, 6, 16), {}),
    "varlen of three": (
        *((7, 4, 16), (6, 2, 16)),
        {"cu_seqlens_q": torch.tensor([0, 2, 3, 7]), "cu_seqlens_k": torch.tensor([0, 1, 4, 6]), "max_seqlen_q": 4},
    ),
    "varlen": (
        *((5, 4, 16), (6, 2, 16)),
        {"cu_seqlens_q": torch.tensor([0, 2, 5]), "cu_seqlens_k": torch.tensor([0, 4, 6]), "max_seqlen_q": 3},
    ),
    "paged": (
        (2, 3, 4, 16),
        (5, 4, 2, 16),
        {"block_table": torch.tensor([[3, 1], [0, 9]]), "seqused_k": torch.ones(2)},
    ),
    "packed pages": (
        *((5, 4, 16), (5, 4, 2, 16)),
        {
            "block_table": torch.tensor([[3, 1, 2], [0, 4, 1]]),
            "cu_seqlens_q": torch.tensor([0, 2, 5]),
            "max_seqlen_q": 9,
        },
    ),
}
"""Shapes of query and of keys, and what says which rows are whose."""
SHAPES = (), (2,), (2, 2), (1, 2), (2, 1), (2, 2, 6), (6, 2), (5, 4, 2), (3,), (7, 2), (3, 2), (3, 2, 6)
DRAWN = [torch.rand(of, generator=torch.Generator().manual_seed(len(of))) for of in SHAPES]
SCALES: list[Any] = [None, 2, -1.0, "one", *DRAWN]
GIVEN: list[dict[str, Any]] = [
    *(
        {"causal": True},
        {"is_causal": True},
        {"causal": True, "window": (3, 0)},
        {"window": (3, -1)},
        {"window": "odd"},
    ),
    *({"scale": 0.5, "softcap": 9.0}, {"softcap": -1.0}, {"scale": math.inf}, {"return_lse": True, "strict": True}),
    *(
        {"enable_gqa": True, "deterministic": True},
        {"batch_invariant": 1},
        {"batch_invariant": True},
        {"sinks": torch.zeros(4)},
        {"causal": "both"},
    ),
    *({"max_seqlen_q": 2.5}, {"max_seqlen_q": -1}, {"out": torch.zeros(1)}, {"out": torch.zeros(2, 4, 3, 16).half()}),
    *({"bias": torch.zeros(3, 6).half()}, {"alibi_slopes": torch.ones(4)}, {"max_seqlen_k": 4, "max_seqlen_q": 10}),
]


def _shown(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    weighed = (tensor.double().flatten() * torch.arange(1, tensor.numel() + 1)).sum().item()
    return [str(tensor.dtype), tuple(tensor.shape), tensor.stride(), round(weighed, 3)]


def _made(query: Any, key: Any, given: dict[str, Any], value: Any = None) -> Any:
    """The call that arguments are, and what torch computes of it where keys have 8 bits."""
    call = answer(given_arguments.call_of, query, key, key if value is None else value, given)
    if isinstance(call, str):
        return call
    words = {field.name: getattr(call, field.name) for field in fields(call)} | {"terms": [*map(_shown, call.terms)]}
    shown = {name: _shown(one) for name, one in words.items() if isinstance(one, torch.Tensor) or one}
    if not given_arguments.is_eight_bits(call.value):
        return shown
    plain = given_arguments.dequantised(call)
    return [shown, *map(_shown, (plain.query, plain.key, plain.value, *plain.terms)), plain.q_scaled, plain.finite]


def _given() -> Iterator[tuple[str, Any]]:
    for name, (of_query, of_key, places) in FORMS.items():
        query, key = _numbers(*of_query), _numbers(*of_key)
        yield f"{name}, arguments", [_made(query, key, places | words) for words in ({}, *GIVEN)]
        others = (query[0], key), (query, key[0]), (query, key[..., :8]), (query, "no"), (query, key[:0])
        values = [_made(query, key, places, value) for value in (key[0], key[:1], "no")]
        yield f"{name}, tensors", [*(_made(*tensors, places) for tensors in others), *values]
        yield f"{name}, scales of nothing", [_made(query, key.to(E4M3), places | {"k_scale": 0, "v_scale": 0.0})]
        longest = {name: one for name, one in places.items() if "max" not in name}
        yield f"{name}, without its longest lengths", _made(query, key, longest)
        eight, scales = key.to(E4M3), itertools.product(SCALES, SCALES[:2] + SCALES[-8:])
        yield f"{name}, scales", [_made(query, eight, places | {"k_scale": k, "v_scale": v}) for k, v in scales]
        keys = eight, key.to(E5M2), key.to(torch.int8), key
        of_dtypes = itertools.product((query.to(E4M3), query.to(torch.int8), query), keys)
        every = [(q, k, scale) for (q, k), scale in itertools.product(of_dtypes, (None, 3.0, *SCALES[5:8], SCALES[9]))]
        yield f"{name}, query", [_made(q, k, places | {"q_scale": s, "k_scale": s}) for q, k, s in every]
        beside = [_made(query, key[..., :8], places | {"v_scale": s}, eight) for s in (None, 2.0, SCALES[5])]
        yield f"{name}, value alone", beside
    cache, latent, places = _numbers(5, 4, 1, 64), _numbers(5, 4, 1, 512).to(E4M3), FORMS["paged"][2]
    of_columns = torch.rand(5, 4, 1, 4, generator=torch.Generator().manual_seed(3))
    for scale in (of_columns, of_columns.double(), of_columns[..., :2], of_columns.mT.contiguous().mT, None):
        yield f"columns {_shown(scale)}", _made(_numbers(2, 3, 4, 576), cache, places | {"v_scale": scale}, latent)


def _masked() -> Iterator[Any]:
    """What calls become beside a mask of torch's, or why torch alone answers to it."""
    shapes = (
        (8, 24),
        (2, 8, 24),
        (4, 8, 24),
        (2, 4, 8, 24),
        (2, 1, 1, 24),
        (1, 4, 8, 1),
        (7, 24),
        (24,),
        (1, 1, 4, 8, 24),
    )
    masks: list[Any] = [torch.ones(of, dtype=torch.half) for of in shapes]
    masks += [one < torch.arange(one.shape[-1]) % 3 for one in masks[:6]] + [masks[0].float(), 1, None]
    masks += [made(*of) for made in (causal_upper_left, causal_lower_right) for of in ((8, 24), (8, 8), (24, 24))]
    plain = Call(*_tensors(4, 4, 8, 24, 64, 64, torch.float16))
    grouped = replace(plain, key=plain.key[:, :2], value=plain.value[:, :2])
    calls = [plain, grouped, replace(grouped, enable_gqa=True), replace(plain, mask="causal_upper_left")]
    calls += [replace(plain, terms=terms_of(bias=masks[0])), replace(plain, query=plain.query[0])]
    calls += [replace(plain, query=plain.query.double()), replace(plain, key="no")]
    for call, mask in itertools.product(calls, masks):
        made = answer(given_arguments.with_mask, call, mask)
        told = made if isinstance(made, str) else [made.mask, *map(_shown, made.terms)]
        yield [given_arguments.causal_kind(mask), answer(given_arguments.why_only_torch, mask, call), told]


def _elsewhere() -> Iterator[Any]:
    """On which device all is that calls of another device than the CPU become."""
    there = lambda one: one.to("meta") if isinstance(one, torch.Tensor) else one
    for of_query, of_key, places in FORMS.values():
        query, key = there(_numbers(*of_query)), there(_numbers(*of_key).to(E4M3))
        placed = {name: there(one) for name, one in places.items()}
        for q, scale in itertools.product((query, query.to(E4M3)), (None, 2.0, *map(there, DRAWN))):
            words = placed | {"k_scale": scale, "v_scale": scale} | ({"q_scale": scale} if q.dtype == E4M3 else {})
            call = answer(given_arguments.call_of, q, key, key, words)
            plain = call if isinstance(call, str) else answer(given_arguments.dequantised, call)
            made = [
                one if isinstance(one, str) else (one.query, one.key, one.value, *one.terms) for one in (call, plain)
            ]
            yield [it if isinstance(it, str) else [one is None or one.device.type for one in it] for it in made]
    mask = torch.ones(8, 24, dtype=torch.bool, device="meta")
    yield given_arguments.as_bias(mask, torch.zeros(1, dtype=torch.half)).device.type


SEEN = (2, 8), (1, 300), (300, 5000)
"""K/V heads, queries and keys."""


def _halves(*shape: int, dtype: Any = torch.float16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def _made_beside() -> Iterator[Any]:
    """The problems of the making of 8 bits."""
    key, value = _halves(2, 4, 300, 64), _halves(2, 300, 4, 32).transpose(1, 2)
    several = (key,), (value,), (key, value), (value, key), (key[..., ::2],), (key[:, :, :, :60],), (key[:1, :, :1],)
    for granularity, tensors in itertools.product(("tensor", "head", "block", "token"), several):
        for dtype, turned in itertools.product((E4M3, torch.int8), (False, True)):
            of = beside.Wanted(dtype, granularity, 2, len(tensors) > 1, turned)
            yield answer(of.problem, tensors), answer(replace(of, smooth=False).problem, tensors)
    yield [answer(beside._turn_problem, one.to(E4M3)) for (one, *_) in several]


def _appended_beside() -> Iterator[Any]:
    """Of new keys and values in caches: what is asked for, and what may be."""
    q, new = _halves(2, 3, 4, 64), (_halves(2, 3, 2, 64), _halves(2, 3, 2, 32))
    used, table, angles = torch.ones(2, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32), _halves(64, 32)
    plain = SimpleNamespace(k=_halves(2, 64, 2, 64), v=_halves(2, 64, 2, 32), used=used, table=None)
    paged = SimpleNamespace(k=_halves(9, 16, 2, 64), v=_halves(9, 16, 2, 32), used=used, table=table)
    wide = SimpleNamespace(**vars(plain) | {"k": _halves(2, 2, 64, 64).transpose(1, 2)})
    changes = {"k": _halves(2, 64, 2, 60), "v": _halves(2, 64, 4, 32), "used": used[:1], "table": table[:1]}
    changes |= {"k ": _halves(3, 64, 2, 64), "v ": _halves(2, 63, 2, 32), "used ": None, "table ": table.long()}
    changes |= {"k  ": plain.k.float(), "used  ": used.long(), "used   ": torch.ones(4, dtype=torch.int32)[::2]}
    caches = [plain, paged, wide]
    caches += [SimpleNamespace(**vars(one) | {n.strip(): to}) for one in (plain, paged) for n, to in changes.items()]
    tables = [None, *((cos, cos[:], pairs) for cos in (angles, angles[:, :16], angles[:63]) for pairs in (False, True))]
    tables += [(angles, angles[1:], False), (angles[0], angles[0], False), (angles[:, :5], angles[:, :5], True)]
    for cache, rotary, moves in itertools.product(caches[:7], tables, (False, True)):
        yield answer(beside._append_problem, q, new, cache, rotary, moves)
    runtime = SimpleNamespace(device_type="cpu")
    others = [
        (q, *new),
        (q[:, :2], *new),
        (q, new[0][:, :, :1], new[1]),
        (q, new[0], new[1][:1]),
        (q.double(), *new),
    ]
    others += [
        (q[..., :32], *new),
        (q[:0], *new),
        (q[0], *new),
        (q[:, :, :3], *new),
        (q.float().requires_grad_(), *new),
    ]
    for given, cache in itertools.product(others, caches):
        yield answer(beside._can_append, (*given, cache.k, cache.v), cache, runtime)
    yield beside._can_append((q, *new, plain.k, plain.v), plain, SimpleNamespace(device_type="cuda"))


def _merged_beside() -> Iterator[Any]:
    parts, sums, out = torch.zeros(3, 5, 7, 16), torch.zeros(3, 5, 7), _halves(5, 7, 16)
    narrow, wanted = parts.half(), parts.clone().requires_grad_()
    odd = [(parts[0], sums, out), (parts, sums[1:], out), (parts, sums, out[1:]), (parts, sums.double(), out)]
    odd += [(parts.mT.contiguous().mT, sums, out), (wanted, sums, out), (parts[..., :12], sums, out[..., :12])]
    for one, of_sums, into in [(parts, sums, out), (narrow, sums, out), *odd, (parts, sums, out.double())]:
        asked = ("cpu", into), ("cuda", into), ("cpu", into.float())
        problems = [beside._merge_problem(SimpleNamespace(device_type=of), one, to) for of, to in asked]
        yield [beside._can_merge(one, of_sums, into), problems]


def facts() -> Iterator[tuple[str, Any]]:
    """See `tests.support.facts`."""
    table = [
        [getattr(one, field.name) for field in fields(one) if field.name != "default"] for one in arguments.ARGUMENTS
    ]
    yield "arguments", [[sorted(it) if isinstance(it, frozenset) else it for it in row] for row in table]
    calls = list(_calls())
    yield "eight bits", [attention_fp8.why_sixteen_bits(call) for call in calls]
    seen = [(_halves(2, 8, rows, 64), _halves(2, heads, keys, 64)) for heads, rows, keys in itertools.product(*SEEN)]
    yield (
        "keys seen",
        [attention_fp8._seen(*pair, *of) for pair in seen for of in itertools.product((False, True), repeat=2)],
    )
    yield "problems", [answer(_problem, call) for call in calls]
    said = ("packed", "paged", "causal", "has_variant", "wants_gradients")
    yield "properties", [[answer(getattr, call, name) for name in said] for call in calls]
    yield "refusals", [[words, answer(_refused, words)] for words in REFUSED]
    yield "functions", _told_apart()
    shapes = itertools.product(
        ((1, 2, 5, 64), (9, 2, 5, 64), (0, 2, 5, 64), (1, 2, 5, 0)), (32, 64, 512), (96, 128, 576)
    )
    apart = [[torch.zeros(1, dtype=torch.half).expand(*of[:3], n) for n in (of[3], v, q)] for of, v, q in shapes]
    yield (
        "apart",
        [arguments.is_apart(q, k, v) for k, v, q in apart] + [arguments.is_apart(q, k.int(), v) for k, v, q in apart],
    )
    query, key = torch.zeros(2, 4, 300, 16), torch.zeros(2, 2, 200, 16)
    descales = [2, 0.5, -1.0, "one", *(torch.rand(of) for of in ((), (1,), (1, 1), (2, 2), (2, 2, 2), (2, 2, 3), (4,)))]
    yield "scales", [_scales(answer(attention_fp8._scales, (one, None, 3.0), query, key)) for one in descales]
    yield "chosen", [*_chosen()]
    yield "masks of torch", [*_masked()]
    yield "on another device", [*_elsewhere()]
    yield from _given()
    yield from (("8 bits", [*_made_beside()]), ("new keys", [*_appended_beside()]), ("merges", [*_merged_beside()]))


def test_what_is_made_of_calls_stays():
    assert not changed("calls")


def test_keys_of_choices_tell_apart_what_compiles_to_other_kernels():
    keys = [choice.key for choice in _choices()]
    assert len(set(keys)) == len(keys) == len(set(map(str, keys)))
