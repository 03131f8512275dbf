#!/usr/bin/env python3
"""Variants of attention on the GPU that is here: each family's kernels against float64-checked answers.

    python -m tests.checks.variants_check [--configs 4] [--only value_dim,window] [--gene GROUP_ROWS=true]
                                     [--change KEY_SPLIT=2]

For each family and variant, starting configs (those with the values of every `--gene`, and with those of every
`--change` in place of their own, where that is valid) with different structures are compiled and run on the ladder of
small cases and on one larger problem, twice each between guarded memory (`correctness/validate.py`). Under a window
they run where their tiles of rows begin at different tiles of keys, too (`case_shapes.begin_apart`). A line for each
family and variant; what is wrong is said in full. Then a line for each variant says which peers serve it and are right.
Exit code 1 if a kernel is wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

import torch

from evoattn.backends.base import Backend, LaunchError
from evoattn.backends.compiler import compile_candidate
from evoattn.backends.cuda import CudaBackend
from evoattn.correctness.cases import Case, begin_apart, device_cases, make_case
from evoattn.correctness.validate import check
from evoattn.families.base import Family
from evoattn.families.built import BuiltKernel
from evoattn.families.registry import FAMILIES
from evoattn.families.render import render
from evoattn.model.gpu import GpuSpec, detect_devices
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompiledKernel
from evoattn.model.space import KernelConfig, SearchSpace, load_space, parse_choices
from evoattn.peers.table import PEERS, PeerRefused, peer_call

DEVICE = torch.device("cuda")
SERVING = ("flash_wgmma", "flash_mma", "split_kv", "latent_wgmma")
PLAIN = AttentionProblem(2, 8, 2, 1500, 1500, 64, "fp16")
VARIANTS = (
    {"mask": "causal_upper_left", "window": "128:0", "sink": True, "dtype": "bf16"},
    {"mask": "causal_lower_right", "window": "300:0", "head_dim": 128},
    {"window": "64:100", "head_dim": 256, "dtype": "bf16"},
    {"mask": "causal_upper_left", "window": "9:0", "batch": 1, "heads": 4, "sink": True, "dtype": "bf16"},
    {"mask": "causal_lower_right", "window": "300:0", "batch": 1, "heads": 4, "head_dim": 128}
    | {"seqlen_q": 600, "seqlen_k": 4000},
    {"mask": "causal_upper_left", "softcap": 50.0, "head_dim": 256, "dtype": "bf16"},
    {"softcap": 20.0, "sink": True, "scale": 0.3},
    {"mask": "causal_upper_left", "alibi": True, "head_dim": 128, "dtype": "bf16"},
    {"alibi": True, "sink": True},
    {"bias": "hs", "scale": 1.0, "dtype": "bf16"},
    {"bias": "bhs", "mask": "causal_lower_right", "window": "200:0", "head_dim": 128, "sink": True},
    {"head_dim": 192, "value_dim": 128, "kv_heads": 8, "mask": "causal_upper_left", "dtype": "bf16"},
    {"head_dim": 192, "value_dim": 128, "mask": "causal_lower_right", "seqlen_q": 700, "sink": True, "layout": "bshd"},
    {"head_dim": 64, "value_dim": 256, "window": "300:20", "dtype": "bf16"},
    {"head_dim": 128, "value_dim": 72, "shared_kv": True},
    {
        "batch": 9,
        "varlen": "log:16:1500",
        "mask": "causal_lower_right",
        "head_dim": 128,
        "layout": "bshd",
        "dtype": "bf16",
    },
    {"batch": 20, "varlen": "1:1500/1:900", "mask": "causal_upper_left", "alibi": True, "sink": True},
    {"batch": 9, "varlen": "log:1:600/log:600:1500", "page": 16, "mask": "causal_lower_right", "head_dim": 128}
    | {"layout": "bshd", "dtype": "bf16"},
    {"batch": 20, "varlen": "1:9/1:1500", "page": 64, "mask": "causal_lower_right", "window": "300:0", "sink": True},
    {"batch": 40, "varlen": "0:300", "layout": "bshd", "head_dim": 256, "window": "100:30", "softcap": 30.0},
    {
        "heads": 160,
        "seqlen_q": 1,
        "seqlen_k": 5000,
        "head_dim": 576,
        "value_dim": 512,
        "shared_kv": True,
        "dtype": "bf16",
    },
    {"heads": 32, "kv_heads": 1, "seqlen_q": 3, "seqlen_k": 2900, "mask": "causal_lower_right", "head_dim": 192}
    | {"value_dim": 128, "shared_kv": True},
    {"seqlen_q": 1, "seqlen_k": 5000, "sink": True, "dtype": "bf16"},
    {"heads": 10, "seqlen_q": 11, "seqlen_k": 5000, "mask": "causal_lower_right", "head_dim": 128, "lse": True},
    {"heads": 140, "seqlen_q": 3, "seqlen_k": 700, "mask": "causal_lower_right", "alibi": True, "sink": True},
    {"seqlen_q": 5, "seqlen_k": 5000, "mask": "causal_lower_right", "window": "700:0", "head_dim": 128},
    {"seqlen_q": 3, "seqlen_k": 2000, "dtype": "fp32", "bias": "s", "softcap": 5.0},
    {"batch": 5, "seqlen_q": 1, "seqlen_k": 5000, "seqused": "0:5000", "dtype": "bf16"},
    {"batch": 5, "seqlen_q": 5, "seqlen_k": 3000, "seqused": "2:2999", "mask": "causal_lower_right", "alibi": True},
    {"batch": 5, "seqlen_q": 1, "seqlen_k": 5000, "seqused": "0:5000", "page": 16, "head_dim": 128, "layout": "bshd"},
    {"batch": 5, "seqlen_q": 5, "seqlen_k": 3000, "seqused": "1:3000", "page": 64, "mask": "causal_lower_right"},
    {"batch": 5, "seqlen_q": 2, "seqlen_k": 3000, "seqused": "9:3000", "page": 256, "window": "700:9", "dtype": "bf16"},
    {"batch": 3, "seqlen_q": 1, "seqlen_k": 2000, "seqused": "9:1999", "page": 32, "dtype": "fp32", "sink": True},
    {"batch": 5, "heads": 128, "kv_heads": 1, "seqlen_q": 1, "seqlen_k": 5000, "head_dim": 576, "value_dim": 512}
    | {"shared_kv": True, "seqused": "0:5000", "page": 64, "dtype": "bf16", "layout": "bshd"},
    {"batch": 3, "heads": 16, "kv_heads": 1, "seqlen_q": 2, "seqlen_k": 3000, "head_dim": 576, "value_dim": 512}
    | {"shared_kv": True, "seqused": "5:3000", "mask": "causal_lower_right", "dtype": "bf16"},
    {"batch": 5, "seqlen_q": 300, "seqused": "0:1500", "mask": "causal_lower_right", "head_dim": 128, "dtype": "bf16"},
    {"batch": 3, "seqlen_q": 700, "seqused": "5:1500", "page": 16, "mask": "causal_lower_right", "head_dim": 128}
    | {"layout": "bshd", "dtype": "bf16"},
    {"batch": 3, "seqlen_q": 130, "seqused": "9:1500", "page": 64, "head_dim": 256, "window": "300:20"},
    {"batch": 3, "seqlen_q": 400, "seqused": "9:1500", "page": 256, "alibi": True, "sink": True, "softcap": 20.0},
)
STRUCTURE = ("SCHEDULE", "RESCALE", "OVERLAP", "SPLITS", "KEY_SPLIT", "COMPUTE", "LOAD", "MERGE", "STORE", "BLOCK_M")


def different(configs: list[KernelConfig], count: int) -> list[KernelConfig]:
    """Up to `count` of the configs, those first that differ most in structure from the ones before."""
    chosen: list[KernelConfig] = []
    rest = list(configs)
    while rest and len(chosen) < count:

        def alike(config: KernelConfig) -> int:
            return max((sum(config.params.get(g) == c.params.get(g) for g in STRUCTURE) for c in chosen), default=0)

        chosen.append(min(rest, key=alike))
        rest.remove(chosen[-1])
    return chosen


def changed(space: SearchSpace, changes: dict[str, tuple[str, ...]]) -> list[KernelConfig]:
    """The starting configs, each with the first value of every change in place of its own.

    Raises as `SearchSpace.restricted` does.
    """
    values = {p.name: p.values[0] for p in space.restricted(changes).parameters if p.name in changes}
    return list({c.id: c for c in (space.make_config(c.params | values) for c in space.starting_configs())}.values())


def apart(problem: AttentionProblem, config: KernelConfig) -> list[AttentionProblem]:
    """The problems of `begin_apart`; none of sequences that have lengths of their own."""
    if problem.varlen or problem.seqused:
        return []
    sizes = (int(config.params.get(name, 1)) for name in ("BLOCK_M", "BLOCK_N", "KEY_SPLIT"))
    return begin_apart(problem.with_(batch=1, heads=2, kv_heads=1), *sizes)


Row = tuple[Family, AttentionProblem, list[KernelConfig]]
Cases = dict[AttentionProblem, list[Case]]


def rows_of(words: argparse.Namespace, gpu: GpuSpec) -> list[Row]:
    """Every family with every variant that it serves, and the configs to check."""
    genes, changes = parse_choices(words.gene), parse_choices(words.change)
    rows: list[Row] = []
    for name in SERVING:
        family, space = FAMILIES[name], load_space(name, gpu).restricted(genes)
        if set(genes | changes) - set(space.names()):
            continue
        for fields in VARIANTS:
            problem = PLAIN.with_(**fields)
            if words.only and not set(words.only.split(",")) & set(problem.variants):
                continue
            if family.why_unsupported(problem, gpu):
                continue
            able = [c for c in changed(space, changes) if not family.why_impossible(problem, c, gpu)]
            rows.append((family, problem, different(able, words.configs)))
    return rows


def made(ladder: Iterable[tuple[str, AttentionProblem, str]]) -> list[Case]:
    """The cases on the GPU."""
    return [make_case(name, problem, 1, DEVICE, kind, double=True) for name, problem, kind in ladder]


def judge(backend: Backend, kernel: BuiltKernel, cases: list[Case]) -> tuple[list[str], float]:
    """What is wrong with a kernel, and the largest share that an error has of what is allowed. A launch that fails ends
    the kernel's cases."""
    found, worst = list[str](), 0.0
    for case in cases:
        try:
            result = check(backend, kernel, case, repeat=True)
        except LaunchError as error:
            return [*found, f"{kernel.config.describe()}: {error}"], worst
        worst = max(worst, result.max_error / result.allowed_error)
        if not result.passed:
            found.append(f"{kernel.config.describe()}: {result.reason}")
    return found, worst


def judge_all(rows: list[Row], compiled: Iterator[CompiledKernel], gpu: GpuSpec) -> tuple[int, Cases]:
    """How many kernels are wrong, a line for each row; and the cases by problem."""
    backend, wrong, cases = CudaBackend(), 0, Cases()
    for family, problem, configs in rows:
        if problem not in cases:
            cases[problem] = made([*device_cases(problem), ("its own shape", problem, "plain")])
        found, worst = list[str](), 0.0
        for config in configs:
            own = made(("rows apart", p, "plain") for p in apart(problem, config))
            kernel = BuiltKernel(family, config, gpu, next(compiled))
            reasons, share = judge(backend, kernel, [*cases[problem], *own])
            found, worst = found + reasons, max(worst, share)
        wrong += len(found)
        said = f"{len(configs)} kernels, {len(found)} wrong, largest error {worst:.2f} of what is allowed"
        print(f"{family.name:12} {said} | {problem.describe()}", flush=True)
        for reason in found[:6]:
            print(f"    {reason}", flush=True)
    return wrong, cases


def ask_peers(names: list[str], problem: AttentionProblem, case: Case) -> None:
    """A line that says which peers serve the problem and are right."""
    told = []
    for name in names:
        try:
            peer_call(PEERS[name], problem, case.tensors, case.answer)
            told.append(f"{name} right")
        except PeerRefused as error:
            told.append(f"{name}: {str(error)[:60]}")
    print(f"{problem.describe()}: {'; '.join(told)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=int, default=4, help="of each family and variant")
    parser.add_argument("--peers", default="cudnn,efficient,fa3,fa4", help="that are asked for the larger problem too")
    parser.add_argument("--only", default="", help="variants, of which a problem has one at least")
    parser.add_argument("--gene", action="append", default=[], help="NAME=VALUE that a config has; may be repeated")
    parser.add_argument("--change", action="append", default=[], help="NAME=VALUE to put in; may be repeated")
    words = parser.parse_args()
    device, started = detect_devices()[0], time.monotonic()
    gpu = device.spec
    if gpu is None:
        sys.exit(f"The {device.product} is not in the table of GPUs.")
    rows = rows_of(words, gpu)
    candidates = [render(family, problem, config, gpu) for family, problem, configs in rows for config in configs]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        compiled = list(pool.map(compile_candidate, candidates))
    print(f"{device.product}: {len(candidates)} kernels compiled in {time.monotonic() - started:.1f} s", flush=True)
    wrong, cases = judge_all(rows, iter(compiled), gpu)
    for problem, ladder in cases.items():
        ask_peers(words.peers.split(","), problem, ladder[-1])
    print(f"{wrong} wrong; {time.monotonic() - started:.1f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
