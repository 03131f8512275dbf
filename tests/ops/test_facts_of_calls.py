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

import evoattn
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.ops import arguments, attention_fp8, flex
from evoattn.ops.call import Call
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
        return answer(lambda: flex._key(function, [], 0))

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
        SimpleNamespace(family="flash_scalar", config=config, why="It was fast.", estimated=guessed)
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


def facts() -> Iterator[tuple[str, Any]]:
    """See `tests.support.facts`."""
    table = [
        [getattr(one, field.name) for field in fields(one) if field.name != "default"] for one in arguments.ARGUMENTS
    ]
    yield "arguments", [[sorted(it) if isinstance(it, frozenset) else it for it in row] for row in table]
    calls = list(_calls())
    yield "eight bits", [attention_fp8.why_sixteen_bits(call) for call in calls]
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


def test_what_is_made_of_calls_stays():
    assert not changed("calls")


def test_keys_of_choices_tell_apart_what_compiles_to_other_kernels():
    keys = [choice.key for choice in _choices()]
    assert len(set(keys)) == len(keys) == len(set(map(str, keys)))
