"""A recorded kernel as a Python callable: `evoattn.load("best")`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from evoattn.model.errors import WrongUse, require_text
from evoattn.model.gpu import GpuSpec
from evoattn.model.mask import FULL
from evoattn.model.paths import cubin_cache, database_text, default_database
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, load_space
from evoattn.ops import asked, current, variant_call
from evoattn.ops.attention import run
from evoattn.ops.autocast import autocast, has_autocast
from evoattn.ops.choice import Picker
from evoattn.ops.given_out import require_out
from evoattn.ops.ordinary import require_ordinary
from evoattn.ops.runtime import NoKernel, Runtime
from evoattn.ops.variant import Variant, closed

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
        if tuple(v for v in ours.variants if v != "window" or window) != problem.variants:
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
        causal: Literal["upper_left", "lower_right"] = "upper_left",
        return_lse: bool = False,
        out: torch.Tensor | None = None,
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
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """See `evoattn.attention`; with `block_table` `evoattn.attention_paged`, with `cu_seqlens_q` and the other
        three `evoattn.attention_varlen`, whose tensors these are then. Raises `NoKernel` for a call that this kernel
        does not serve, and `ValueError` for a wrong `causal`, `out` or argument beyond SDPA's."""
        asked.require_causal(causal)
        scale = None if scale is None else asked.number("scale", scale)
        softcap = asked.cap(softcap)
        require_ordinary(query, key, value)
        variant = Variant(closed(window), softcap, sinks, alibi_slopes, bias, seqused_k, block_table)
        if cu_seqlens_q is not None and cu_seqlens_k is not None:
            variant = replace(variant, starts=(cu_seqlens_q, cu_seqlens_k), longest=(max_seqlen_q, max_seqlen_k))
        if variant.plain:
            return run(self._runtime, query, key, value, is_causal, scale, enable_gqa, causal, return_lse, out, True)
        if out is not None:
            require_out(out, query, value)
        if block_table is not None:
            query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
            out = None if out is None else out.transpose(1, 2)
            enable_gqa, causal = True, "lower_right"
        elif variant.starts is not None:
            query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
            out = None if out is None else out.transpose(0, 1)[None]
            enable_gqa, causal = True, "lower_right"
        if has_autocast(query.device.type):
            query, key, value = autocast(query.device.type, query, key, value)
            variant = variant.on_all(lambda tensor: autocast(query.device.type, tensor)[0])
        variant.require(query, key)
        done = variant_call.by_kernel(
            self._runtime, query, key, value, variant, is_causal, scale, enable_gqa, causal, return_lse, out
        )
        if isinstance(done, str):
            raise NoKernel(f"No kernel serves this call: {done}.")
        answer, lse = (done, None) if isinstance(done, torch.Tensor) else done
        if block_table is not None:
            answer = answer.transpose(1, 2)
        elif variant.starts is not None:
            answer, lse = answer[0].transpose(0, 1), None if lse is None else lse[0]
        return answer if lse is None else (answer, lse)


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
