"""A recorded kernel as a Python callable: `evoattn.load("best")`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from evoattn.model.errors import WrongUse, in_python, require_text
from evoattn.model.gpu import GpuSpec
from evoattn.model.mask import FULL
from evoattn.model.paths import cubin_cache, database_text, default_database
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, load_space
from evoattn.ops.arguments import WATCHED, Causal, Score, is_ordinary
from evoattn.ops.attention import run
from evoattn.ops.choice import Picker
from evoattn.ops.given import Scale, call_of
from evoattn.ops.runtime import Runtime, current
from evoattn.ops.torch_answer import NoKernel

if TYPE_CHECKING:
    from evoattn.model.records import Study, Trial


@dataclass(frozen=True)
class _Recorded:
    """What the op reads of a pick (`choice.Picked`): always the recorded config, however it was ranked."""

    family: str
    config: KernelConfig
    why: str
    estimated: bool = False


def _own_runtime(pick: Picker) -> Runtime:
    """A runtime on the device of `evoattn.attention`, which shares its compiled kernels and the records of their
    checks."""
    return Runtime(current.runtime().platform, pick, cubin_cache() / "op")


class RecordedKernel:
    """One recorded kernel, called as `evoattn.attention` is. It serves every batch, length and number of heads of the
    head_dim, dtype and mask that it was found for; `trial` and `problem` say which. `timing` is the recorded one, None
    for an offline trial.

    Today's template renders it from the recorded config, and it is checked on the device before its first use.
    """

    def __init__(
        self,
        trial: Trial,
        study: Study,
        make_runtime: Callable[[Picker], Runtime] = _own_runtime,
        source: str = "",
    ) -> None:
        """`make_runtime` makes the runtime that answers with this kernel only; `source` is the recorded CUDA source.
        Raises `ConfigError` where today's search space lacks the recorded config."""
        self.trial, self.problem = trial.number, AttentionProblem(**study.problem)
        self.family, self.timing, self.source = trial.family, trial.timing, source
        self.config = load_space(trial.family, study.spec).make_config(trial.config)
        self._runtime = make_runtime(self._pick)

    def __repr__(self) -> str:
        return f"RecordedKernel(trial {self.trial}: {self.family} {self.config.describe()}; {self.problem.describe()})"

    def _pick(self, problem: AttentionProblem, gpu: GpuSpec) -> _Recorded | None:
        ours = self.problem
        mask, window = problem.canonical_masking(ours.mask, ours.window)
        if tuple(v for v in ours.compiled_variants if v != "window" or window) != problem.compiled_variants:
            return None
        # With as many queries as keys the two causal masks are one.
        both_causal = FULL not in (ours.mask, problem.mask) and problem.seqlen_q == problem.seqlen_k
        if (ours.head_dim, ours.value_dim, ours.dtype) != (problem.head_dim, problem.value_dim, problem.dtype):
            return None
        if mask != problem.mask and not both_causal:
            return None
        return _Recorded(self.family, self.config, f"it is trial {self.trial}")

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        causal: Causal = None,
        window: tuple[int, int] | None = None,
        softcap: float | None = 0.0,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        max_seqlen_q: int = 0,
        max_seqlen_k: int = 0,
        k_scale: Scale = None,
        v_scale: Scale = None,
        score: Score | None = None,
        return_lse: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """See `evoattn.attention`; with `block_table` `evoattn.attention_paged`, with `cu_seqlens_q` and the other
        three `evoattn.attention_varlen`, whose tensors these are then. Raises `NoKernel` for a call that this kernel
        does not serve, and `ValueError` and `TypeError` for what those functions refuse."""
        words: dict[str, Any] = dict(
            is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, causal=causal, window=window
        )
        words |= dict(softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, bias=bias, seqused_k=seqused_k)
        words |= dict(block_table=block_table, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        words |= dict(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, score=score, return_lse=return_lse, out=out)
        words |= dict(k_scale=k_scale, v_scale=v_scale, strict=True)
        call = call_of(query, key, value, words)
        if not is_ordinary(query, key, value):  # their addresses may not be those of the data
            raise NoKernel(f"No kernel serves this call: {WATCHED}.")
        call.require()
        answer = call.given_back(run(self._runtime, call))
        if out is None:
            return answer
        return out if isinstance(answer, torch.Tensor) else (out, answer[1])


@in_python()
def load(
    trial: int | str = "best",
    *,
    study: str | None = None,
    shape: str | AttentionProblem | None = None,
    gpu: str | None = None,
    db: str | os.PathLike[str] | None = None,
) -> RecordedKernel:
    """The kernel of a recorded trial: by its number, or `best` of the study called `study`, of all studies of `shape`
    (on `gpu`, if several have it), or of the latest study. `db` is a path or URL, the usual database unless given.

    Raises `WrongUse` (an unknown study or trial, a wrong shape) or `StorageError`.
    """
    from evoattn.model.gpu import lookup
    from evoattn.model.named_problems import by_name_or_shape
    from evoattn.storage import Storage
    from evoattn.storage.chosen import chosen_trial

    if study and shape:
        raise WrongUse("Give a study or a shape, not both.")
    require_text(study=study, gpu=gpu)
    if not isinstance(shape, AttentionProblem):
        require_text(shape=shape)
    problem = by_name_or_shape(shape) if isinstance(shape, str) else shape
    spec = None if gpu is None else lookup(gpu)
    storage = Storage.open(database_text(db) or default_database(), create=False)
    try:
        found = chosen_trial(storage, str(trial), study, problem, spec)
        source = storage.source(found.source_hash) if found.source_hash else ""
        return RecordedKernel(found, storage.study(found.study_id), source=source)
    finally:
        storage.close()
