"""Rows of the same bits in every batch: what a family promises of a recipe holds on the interpreter, for a row alone
and among others; and a kernel that breaks the promise is found."""

from __future__ import annotations

import torch

from evoattn.backends.interpreter import InterpreterBackend
from evoattn.correctness.cases import Case
from evoattn.correctness.validate import make_arena
from evoattn.families import registry
from evoattn.families.built import BuiltKernel
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, load_space
from tests.families.on_interpreter import Edit, built

KEYS, ROWS = 200, (0, 3, 63, 64, 70, 127, 128, 131, 198, 199)
"""Of a causal sequence, and those of its queries that are computed in other surroundings, too."""
Answer = tuple[torch.Tensor, torch.Tensor]


def tensors_of(head_dim: int, dtype: torch.dtype, heads: int = 2) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values `[1, heads, KEYS, head_dim]` of one K/V head for two; the scores of later keys are the
    higher ones for some queries and the lower ones for others, so that shifts rise at many places."""
    made = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, n, KEYS, head_dim, generator=made) for n in (heads, heads // 2, heads // 2))
    q *= torch.randint(1, 9, (1, heads, KEYS, 1), generator=made)
    k[..., 0] += torch.linspace(-4, 4, KEYS)
    return tuple(one.to(dtype) for one in (q, k, v))


def computed(kernel: BuiltKernel, problem: AttentionProblem, **tensors: torch.Tensor) -> Answer:
    """The answer, and the log-sum-exp if the problem asks for it, by the interpreter."""
    arena = make_arena(Case("", problem, tensors, {}), kernel.workspace(problem), torch.device("cpu"))
    arena.arm()
    faults = InterpreterBackend().run(kernel.compiled, kernel.launches(problem), arena.buffers)
    assert not faults, faults[0]
    out = {name: one.clone() for name, one in arena.outputs.items()}
    return out["o"], out.get("lse", torch.zeros(out["o"].shape[:3]))


def surroundings(many: BuiltKernel, one: BuiltKernel, whole: AttentionProblem, dtype: torch.dtype) -> list[str]:
    """Where rows have other bits than in a causal sequence by `many`: alone, as decoding asks for them, by `one`; as
    the end of a chunk; in a batch with another sequence; and with keys behind the last one in use."""
    q, k, v = tensors_of(whole.head_dim, dtype)
    expected = computed(many, whole, q=q, k=k, v=v)
    found = []

    def compare(where: str, row: int, answer: Answer, at: int) -> None:
        if any(not torch.equal(was[0, :, row], now[-1, :, at]) for was, now in zip(expected, answer, strict=True)):
            found.append(f"{where}: row {row}")

    for row in ROWS:
        decoding = whole.with_(seqlen_q=1, seqlen_k=row + 1, mask="full")
        alone = (q[:, :, row : row + 1], k[:, :, : row + 1], v[:, :, : row + 1])
        compare("alone", row, computed(one, decoding, **dict(zip("qkv", map(torch.Tensor.contiguous, alone)))), 0)
    for begin, end in ((0, 70), (65, 131), (190, 200)):
        chunk = (q[:, :, begin:end], k[:, :, :end], v[:, :, :end])
        shape = whole.with_(seqlen_q=end - begin, seqlen_k=end)
        answer = computed(many, shape, **dict(zip("qkv", map(torch.Tensor.contiguous, chunk))))
        for row in range(begin, end):
            compare(f"chunk {begin} to {end}", row, answer, row - begin)
    batch = [torch.cat((3 * one.flip(2), one)) for one in (q, k, v)]
    answer = computed(many, whole.with_(batch=2), **dict(zip("qkv", batch)))
    for row in range(KEYS):
        compare("batch", row, answer, row)
    return found


def kernels(family: str, gpu: str, whole: AttentionProblem, many: dict, one: dict, *edits: Edit) -> list[BuiltKernel]:
    """For a causal sequence and for decoding, of configs with the recipe's genes, which the family allows."""
    this, card, made = registry.lookup(family), GPUS[gpu], []
    for genes, problem in ((many, whole), (one, whole.with_(seqlen_q=1, mask="full"))):
        base = load_space(family, card).starting_configs()[0].params
        config = KernelConfig(family, {**base, **this.recipe(problem, card), **genes})
        assert edits or not this.why_other_bits(problem.with_(batch_invariant=True), config, card)
        made.append(built(this, problem, config, card, *edits, machine_code=False))
    return made
