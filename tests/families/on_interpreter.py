"""Kernels of a family as they are or with a fault in them, and what the interpreter says of them. Problems and configs
of families' tests. What the tests of the families over a latent cache share."""

from collections.abc import Callable, Mapping
from typing import Any

from evoattn.backends.interpreter import InterpreterBackend
from evoattn.correctness.cases import make_case, proof_of
from evoattn.correctness.validate import check
from evoattn.families.base import Family
from evoattn.families.built import BuiltKernel
from evoattn.families.registry import load_space
from evoattn.families.render import render
from evoattn.model.gpu import GPUS, GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CheckResult
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig, Value
from tests.support.compiles import compile_kept, ptx_kept
from tests.support.source_edits import replaced

Edit = tuple[str, str] | tuple[str, str, int | None] | Callable[[str], str]
"""Old text, new text, and in how many places if not in one (None: in any); or a function of the source."""


def built(
    family: Family,
    problem: AttentionProblem,
    config: KernelConfig,
    gpu: GpuSpec,
    *edits: Edit,
    machine_code: bool = False,
) -> BuiltKernel:
    """The kernel for `gpu`, with `edits` of its source. The interpreter reads PTX alone; `machine_code`, which takes
    half of a compile or more, is for tests that ask for registers and spills. Raises `AnchorError` where the source has
    not the places."""
    candidate = render(family, problem, config, gpu)
    source = candidate.source
    for edit in edits:
        source = edit(source) if callable(edit) else replaced(source, *edit)
    return BuiltKernel(family, config, gpu, (compile_kept if machine_code else ptx_kept)(source, candidate.arch))


def judged(
    kernel: BuiltKernel,
    problem: AttentionProblem,
    kind: str = "plain",
    repeat: bool = False,
    seed: int = 1,
    backend: InterpreterBackend | None = None,
) -> CheckResult:
    """Of inputs of `kind`; with `repeat` twice on the same scratch buffers, so that counters must end as they began."""
    case = make_case(kind, problem, seed, "cpu", kind, double=True)
    return check(backend or InterpreterBackend(), kernel, case, repeat=repeat)


def small_faults(kernel: BuiltKernel, problem: AttentionProblem, cases: slice | int = slice(None)) -> list[str]:
    """What the interpreter's small cases, or these of them, find, up to the first that fails; empty for a right
    kernel. A number asks for the first two, and for one of the others in turn: of 60 recorded faults (2026-11-29) the
    first two show 58, and the mean of such three 58.4, of every third case 56.7."""
    backend, every = InterpreterBackend(), proof_of(problem).interpreter_cases(problem, kernel.config)
    if isinstance(cases, slice):
        chosen = every[cases]
    else:
        chosen, others = every[:2], every[2:]
        chosen += [others[cases % len(others)]] if others else []
    for small in chosen:
        result = check(small.backend(backend), small.placed(kernel), small.make(1))
        if not result.passed:
            return [result.reason]
    return []


def problem(
    seqlen_q: int = 1024,
    seqlen_k: int = 1024,
    head_dim: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    batch: int = 1,
    **rest: Any,
) -> AttentionProblem:
    return AttentionProblem(batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, **rest)


def configs(family: str, gpu: GpuSpec, base: Mapping[str, Value]) -> Callable[..., KernelConfig]:
    """A function that makes a config of `base` with other genes."""
    return lambda **genes: load_space(family, gpu).make_config({**base, **genes})


H100 = GPUS["h100"]
NARROW = parse_shape("B=2,H=8,Hkv=1,Sq=1,Sk=3000,D=192,Dv=128,dtype=bf16,shared_kv=1")
