"""The groups of problems that `landscapes.py` records."""

from __future__ import annotations

from functools import cache
from typing import Any

from evoattn.engine.groups import Group
from evoattn.families import registry
from evoattn.model import named_problems
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import load_space
from evoattn.portfolio.pick import portfolio_kernels
from evoattn.portfolio.workload import draw
from evoattn.search.starting import starting_configs

SEEDS = range(200, 400)
"""Of the problem sampler: beyond those that portfolios are built from and checked on."""
PER_SEED = 60
MOST_FLOPS = {"fp32": 1e10, "fp16": 5e10, "bf16": 5e10}
"""Of a drawn problem: the slowest families take 100 times as long as the fastest."""
GROUPS: tuple[tuple[str, dict[str, Any], str, tuple[str, ...], int, float], ...] = (
    (
        "bf16 d128 causal",
        {"dtype": "bf16", "head_dim": 128, "mask": "causal_upper_left"},
        "many",
        ("llama_gqa_prefill", "fa_d128_512_causal"),
        8,
        1.5,
    ),
    (
        "fp16 d64 full",
        {"dtype": "fp16", "head_dim": 64, "mask": "full"},
        "many",
        (
            "seed_h100",
            "seed_l4_s512",
            "B=8,H=12,S=197,D=64",
            "B=1,H=20,S=1500,D=64",
            "B=3,H=20,Sq=3153,Sk=59,D=64,layout=bshd",  # of seed 252: few keys
            "B=7,H=32,Sq=1990,Sk=128,D=64",  # of seed 376
        ),
        8,
        1.5,
    ),
    (
        "bf16 d128 decode",
        {"dtype": "bf16", "head_dim": 128, "mask": "full"},
        "few",
        ("decode_b1_8k", "decode_b16_8k"),
        8,
        1.5,
    ),
    (
        "bf16 d64 window sink",
        {"dtype": "bf16", "head_dim": 64, "mask": "causal_lower_right", "window": "127:0", "sink": True},
        "any",
        (
            "B=1,H=64,Hkv=8,S=2368,D=64,dtype=bf16,mask=causal_lower_right,layout=bshd,window=127:0,sink=1",
            "B=28,H=16,Hkv=2,Sq=512,Sk=639,D=64,dtype=bf16,mask=causal_lower_right,layout=bshd,window=127:0,sink=1",
            "B=8,H=32,Hkv=4,S=225,D=64,dtype=bf16,mask=causal_lower_right,window=127:0,sink=1",
        ),
        3,
        1.0,
    ),
    ("bf16 d256 causal", {"dtype": "bf16", "head_dim": 256, "mask": "causal_lower_right"}, "any", (), 6, 0.6),
    ("fp16 d96 full", {"dtype": "fp16", "head_dim": 96, "mask": "full"}, "any", (), 8, 0.6),
    ("fp32 d64 full", {"dtype": "fp32", "head_dim": 64, "mask": "full"}, "any", (), 6, 0.6),
    (
        "fp16 d512 full",
        {"dtype": "fp16", "head_dim": 512, "mask": "full"},
        "any",
        (
            "hdim512_fp16",
            "B=2,H=8,Sq=100,Sk=2000,D=512",
            "B=1,H=16,Hkv=4,Sq=1,Sk=8192,D=512",
            "B=4,H=4,S=256,D=512",
            "B=1,H=4,Sq=16,Sk=1024,D=512",
            "B=16,H=16,S=64,D=512",
            "B=1,H=2,S=3000,D=512,layout=bshd",
            "B=8,H=8,Hkv=1,Sq=4,Sk=2048,D=512",
            "B=32,H=8,Sq=1,Sk=500,D=512",
            "B=1,H=1,Sq=300,Sk=6000,D=512",
        ),
        10,
        0.5,
    ),
    (
        "bf16 d384 causal",
        {"dtype": "bf16", "head_dim": 384, "mask": "causal_lower_right"},
        "any",
        tuple(
            f"{shape},D=384,dtype=bf16,mask=causal_lower_right"
            for shape in ("B=2,H=8,S=700", "B=1,H=16,Hkv=4,Sq=5,Sk=4096", "B=20,H=4,S=128", "B=1,H=2,Sq=64,Sk=2500")
        ),
        4,
        0.3,
    ),
    (
        "fp32 d512 full",
        {"dtype": "fp32", "head_dim": 512, "mask": "full"},
        "any",
        (
            "hdim512_fp32",
            "B=1,H=8,Sq=16,Sk=1024,D=512,dtype=fp32",
            "B=2,H=8,Hkv=2,Sq=1,Sk=4096,D=512,dtype=fp32",
            "B=1,H=4,S=256,D=512,dtype=fp32",
            "B=16,H=8,Hkv=1,Sq=2,Sk=300,D=512,dtype=fp32",
            "B=1,H=1,S=1000,D=512,dtype=fp32",
            "B=12,H=4,S=48,D=512,dtype=fp32,layout=bshd",
        ),
        7,
        0.3,
    ),
    (
        "bf16 latent decode",
        {"dtype": "bf16", "head_dim": 576, "value_dim": 512, "shared_kv": True, "mask": "full"},
        "few",
        tuple(
            f"{shape},Hkv=1,Sq=1,D=576,Dv=512,dtype=bf16,shared_kv=1"
            for shape in (
                "B=93,H=16,Sk=5912,layout=bshd",
                "B=1,H=128,Sk=2240,layout=bshd",
                "B=7,H=128,Sk=6485",
                "B=57,H=16,Sk=320,layout=bshd",
                "B=11,H=16,Sk=971",
                "B=43,H=16,Sk=3738",
            )
        ),
        6,
        0.6,
    ),
)
"""Name, what the problems have in common, few queries or many, problems by name or shape, problems in all, and
the share of the compiles. The sampler draws no head_dim of 512; the windows are of seeds 202 and 203 of
an older `evoattn/portfolio/workload.py`, the latent caches of its seed 202."""
LEAST_KEYS = 128
"""Of a drawn problem: on shorter ones most configs are redundant."""
FEW_QUERIES = 16
MOST_PICKS = 8
"""Of the portfolio for each problem."""


def make_groups(gpu: GpuSpec, most: int = 8, only: str = "") -> list[Group]:
    """The groups of GROUPS, each with its named problems first and then drawn ones: half as they come, half far apart.

    `most` problems in a group. `only`: how the groups' names begin, several with commas.
    """
    groups = []
    for name, common, rows, named, count, weight in GROUPS:
        if not name.startswith(tuple(only.split(","))):
            continue
        able = {
            p: None
            for p in _drawn()
            if all(getattr(p, field) == value for field, value in common.items())
            and p.flops <= MOST_FLOPS[p.dtype]
            and p.seqlen_k >= LEAST_KEYS
            and rows in ("any", "few" if p.seqlen_q <= FEW_QUERIES else "many")
        }
        problems = [named_problems.by_name_or_shape(n) for n in named]
        if able:
            problems += list(able)[: min(count, most) - len(problems)]
        families = tuple(f.name for f in registry.FAMILIES.values() if not f.why_unsupported(problems[0], gpu))
        group = Group(name, problems[:most], families, weight)
        group.given = _known(group, gpu)
        groups.append(group)
    return groups


@cache
def _drawn() -> tuple[AttentionProblem, ...]:
    """What the seeds draw."""
    return tuple(p for seed in SEEDS for p in draw(seed, PER_SEED))


def _known(group: Group, gpu: GpuSpec) -> list[tuple[str, dict[str, Any]]]:
    """What a search of one of the problems would begin with: the starting configs and the portfolio's picks."""
    known: dict[str, tuple[str, dict[str, Any]]] = {}
    for problem in group.problems:
        starting = [c for f in group.families for c in starting_configs(load_space(f, gpu), problem, gpu)]
        known |= {c.id: (c.family, dict(c.params)) for c in [*starting, *portfolio_kernels(problem, gpu)[:MOST_PICKS]]}
    return [(family, params) for family, params in known.values() if family in group.families]
