"""Variants of attention: settings that have one, and the mutants on the lines that have code for it alone."""

import random
from dataclasses import replace
from itertools import zip_longest

from evoattn.backends.compiler import CompileError
from evoattn.families.registry import FAMILIES
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem, ProblemError
from tests.mutation.false_alarms import draw_config, draw_problem, draw_variant
from tests.mutation.settings import Setting
from tests.mutation.sources import Mutant, in_turn, mutants_of, text_of
from tests.mutation.substitutes import KINDS

PREDICATES = tuple(f"((k//3+q//5)%7<3)|({other})" for other in ("(q+h)%2==b", "q%4+k%5<3", "q%4+k%5<b+2"))
"""Of settings with block lists: all batches and heads have the second in common, heads alone the third."""
PREDICATES_BY_TURNS = ("",), PREDICATES[1:], ("", PREDICATES[0])
"""What the first setting with block lists draws from, the second and the third. Kernels read bits of a predicate only
where heads have it in common: without one such setting all faults of those lines would pass."""
VARIANTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "window": (("window",), ("window",)),
    "softcap": (("softcap",), ("softcap",)),
    "sink": (("sink",), ("sink",)),
    "slopes": (("alibi",), ("alibi",)),
    "bias": (("bias",), ("bias",)),
    "expression": (("score",), ("score", "tables")),
    "Dv": (("value_dim",), ("value_dim",)),
    "V within K": (("shared_kv",), ("shared_kv", "value_dim")),
    "rotary columns apart": (("rotary_apart",), ("rotary_apart", "value_dim")),
    "keys in use": (("seqused",), ("seqused",)),
    "pages": (("page",), ("page",)),
    "varlen": (("varlen",), ("varlen",)),
    "varlen over pages": (("varlen", "page"), ("page",)),
    "block lists": (("blocks",), ("blocks", "predicate")),
    "cache of 8 bits": (("kv",), ("kv", "scales")),
    "scales": (("scales",), ("scales", "kv")),
    "V turned round": (("turned",), ("turned",)),
}
"""By name: what `false_alarms.draw_variant` draws, and the fields without which a problem lacks the variant."""
MOST_DRAWN = 400


def serving(variant: str) -> tuple[str, ...]:
    """The families that serve it."""
    drawn, _ = VARIANTS[variant]
    return tuple(name for name in sorted(FAMILIES) if set(drawn) <= set(FAMILIES[name].variants))


def settings_of(family: str, variant: str, count: int, seed: int) -> list[Setting]:
    """`count` of them at random, for an H100 or an L4; fewer where few serve it."""
    rng, found = random.Random(f"{family} {variant} {seed}"), list[Setting]()
    for _ in range(MOST_DRAWN):
        if len(found) == count:
            break
        gpu = "h100" if "wgmma" in family else rng.choice(("h100", "l4"))
        try:
            problem = draw_problem(family, rng)
            fields = [draw_variant(problem, name, rng) for name in VARIANTS[variant][0]]
            merged = {field: value for one in fields for field, value in one.items()}
            if "varlen" in merged:
                merged |= {"seqused": "", "bias": ""}
            if problem.shared_kv and "kv" in merged:  # DeepSeek's
                merged |= {"rotary_apart": True, "shared_kv": False, "kv": "e4m3", "scales": "columns"}
                merged |= {"value_dim": 128, "head_dim": 192}
            if "blocks" in merged:
                merged["predicate"] = rng.choice(PREDICATES_BY_TURNS[len(found) % 3])
            problem = problem.with_(**merged)
        except ProblemError:  # two variants that exclude each other
            continue
        config = draw_config(family, problem, gpu, rng)
        if config is not None:
            found.append(Setting(family, problem, config, gpu))
    return found


def without(problem: AttentionProblem, variant: str) -> AttentionProblem:
    """The problem without the variant."""
    _, fields = VARIANTS[variant]
    return problem.with_(**{field: AttentionProblem.__dataclass_fields__[field].default for field in fields})


def own_lines(setting: Setting, variant: str) -> frozenset[str]:
    """Lines, without indentation, of which the setting has code and the same config without the variant has none; none
    where that cannot be."""
    try:
        plain = replace(setting, problem=without(setting.problem, variant))
        if FAMILIES[setting.family].why_impossible(plain.problem, plain.config, GPUS[plain.gpu]):
            return frozenset()
        return _with_code(setting) - _with_code(plain)
    except (ProblemError, CompileError):
        return frozenset()


def _with_code(setting: Setting) -> frozenset[str]:
    lines = setting.source.splitlines()
    return frozenset(lines[n - 1].strip() for n in setting.lines if n <= len(lines))


def mutants_on(family: str, lines: frozenset[str], seed: str) -> list[Mutant]:
    """The family's mutants that change one of these lines, in a random order: every other one of the kinds that the
    cases were not written for."""
    every = [m for m in mutants_of(family) if text_of(m.file).split("\n")[m.change.line - 1].strip() in lines]
    fresh, others = (in_turn([m for m in every if (m.kind in KINDS) is new], seed) for new in (True, False))
    return [mutant for pair in zip_longest(fresh, others) for mutant in pair if mutant]
