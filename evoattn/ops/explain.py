"""Kernels before a call: what would run and why, getting it ready before it is needed, and a recorded kernel as a
Python callable, `evoattn.load("best")`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from evoattn.families.registry import load_space
from evoattn.model.errors import WrongUse, in_python, require_text
from evoattn.model.gpu import GpuSpec
from evoattn.model.mask import FULL
from evoattn.model.paths import cubin_cache, database_text, default_database
from evoattn.model.problem import AttentionProblem
from evoattn.ops.arguments import WATCHED, Causal, Score, has_autocast, is_ordinary
from evoattn.ops.attention import run, sinks_apart
from evoattn.ops.attention_fp8 import words_in_eight_bits
from evoattn.ops.call import DROPOUT, DROPOUT_ALONE, GRADIENTS, NO_TENSOR, Call, strided
from evoattn.ops.choice import Choice, Picker, Refusal
from evoattn.ops.given import Scale, call_of, causal_kind, why_only_torch, with_mask
from evoattn.ops.gradients import why_not_differentiable
from evoattn.ops.plan import ADDRESS_BITS, UNALIGNED
from evoattn.ops.runtime import Runtime, current
from evoattn.ops.sdpa import backends_chosen, is_on
from evoattn.ops.shapes import Wanted, problems_of
from evoattn.ops.torch_answer import PROMISE, NoKernel, batches_of, is_promised
from evoattn.portfolio.pick import Pick, grown

if TYPE_CHECKING:
    from evoattn.model.records import Study, Trial


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal: Causal = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    k_scale: Scale = None,
    v_scale: Scale = None,
    q_scale: Scale = None,
    score: Score | None = None,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    return_lse: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
) -> str:
    """One sentence: the kernel that `evoattn.attention`, or SDPA under `evoattn.sdpa`, runs for these arguments, or why
    torch's SDPA runs; where a mask tensor or an `sdpa_kernel` parts the two, of both. With `block_table` query, key and
    value are those of `evoattn.attention_paged`, with `cu_seqlens_q` and the other three those of
    `evoattn.attention_varlen`; their causal mask is `causal=True`. With `score_mod` or `block_mask` it is said of
    `evoattn.flex_attention`. Of a call that wants gradients it says both kernels.

    Nothing is compiled, loaded or launched. Raises `ValueError` and `TypeError` for arguments beyond
    SDPA's that do not fit."""
    words = dict(locals())  # by the names of the table of arguments
    if not all(isinstance(tensor, Tensor) for tensor in (query, key, value)):
        return f"SDPA runs: {NO_TENSOR}."
    if score_mod is not None or block_mask is not None:
        return _of_flex(
            Call(query, key, value, scale=scale, enable_gqa=enable_gqa, return_lse=return_lse), score_mod, block_mask
        )
    call, of_sdpa = call_of(query, key, value, words), ""
    if dropout_p:
        if call.has_variant or return_lse or causal is not None:
            raise ValueError(DROPOUT_ALONE)
        return _left(DROPOUT, batch_invariant)
    if attn_mask is not None:
        if only := why_only_torch(attn_mask, call):
            return _left(only, batch_invariant)
        if causal_kind(attn_mask) is None:
            of_sdpa = "; as SDPA under `evoattn.sdpa` PyTorch's own runs, as there is a mask tensor"
        call = with_mask(call, attn_mask)
    if is_on() and backends_chosen():
        of_sdpa = "; as SDPA under `evoattn.sdpa` PyTorch's own runs, as `sdpa_kernel` or a flag chooses its backends"
    call.require_terms()
    watched = not is_ordinary(query, key, value)
    others = sinks_apart(call)  # before autocast makes 16 bits of them
    if has_autocast(kind := query.device.type):
        call, others = call.autocast(kind), others and others.autocast(kind)
    call.require()
    call = others or call
    found = WATCHED if watched else _found(call)
    eight, of_sdpa = ("", of_sdpa) if watched or not PROMISE.fp8 else _of_eight_bits(call, of_sdpa)
    if eight:
        return f"{eight}{of_sdpa}."
    if isinstance(found, str):
        return _left(found + of_sdpa * bool(PROMISE.fp8), batch_invariant)
    forward, *backward = [choice.words for choice in found]
    promised = "; each row has the same bits in every batch" * is_promised(batch_invariant)
    return "".join((forward, promised, *(f"; for the gradients {words}" for words in backward), of_sdpa, "."))


def _of_eight_bits(call: Call, of_sdpa: str) -> tuple[str, str]:
    """Under `enable(precision="fp8")` what runs in 8 bits, if anything, and what is said behind it: why not, too."""
    eight, why = words_in_eight_bits(current.runtime(), call)
    return eight, why + of_sdpa


def _left(reason: str, batch_invariant: bool) -> str:
    """What is said of a call that no kernel serves. `reason` has no full stop."""
    return f"NoKernel is raised: {reason}." if is_promised(batch_invariant) else f"SDPA runs: {reason}."


def _of_flex(call: Call, score_mod: Callable[..., Any] | None, block_mask: Any) -> str:
    """As `explain`, of `evoattn.flex_attention`."""
    from evoattn.ops import flex  # with torch's compiler, which whoever has a block mask has imported

    if has_autocast(kind := call.query.device.type):
        call = call.autocast(kind)
    made = flex.calls(call, score_mod, block_mask)
    found: tuple[Choice, ...] | str = made if isinstance(made, str) else ""
    for make in () if isinstance(made, str) else made:
        one = make()
        found = _found(one)
        if not isinstance(found, str):
            forward, *backward = [choice.words for choice in found]
            return "".join((forward, *(f"; for the gradients {words}" for words in backward), "."))
    return f"FlexAttention of torch runs: {found}."


def _found(call: Call) -> tuple[Choice, ...] | str:
    """The kernel that a call would run, and that of its gradients where they are wanted, or one reason, without a full
    stop, why none."""
    runtime, wanted = current.runtime(), call.wants_gradients
    choices: tuple[Choice, ...] | Refusal | Choice
    if wanted and (reason := why_not_differentiable(call)):
        return reason
    choices = runtime.training_choices(call) if wanted else runtime.choice(call, contends=True)
    if isinstance(choices, Refusal):
        if parts := batches_of(call):
            return _found(parts[0])
        return f"{GRADIENTS}, and {choices.reason}" if wanted else choices.reason
    choices = choices if isinstance(choices, tuple) else (choices,)
    for choice in choices:
        if failure := runtime.failure(choice, call.query.get_device()):
            return failure
    unaligned = (call.query.data_ptr() | call.key.data_ptr() | call.value.data_ptr()) & ADDRESS_BITS
    return UNALIGNED if unaligned else choices


def warmup(shapes: Wanted, device: torch.device | int | None = None, *, up_to_keys: int = 0) -> list[str]:
    """Compile, load and check the kernels of these problems, so that no call waits for a compiler and a CUDA graph can
    capture them; say of each what will run.

    `shapes` are problems, their names or shapes as on the command line
    (`B=1,H=16,S=1024,D=64,dtype=bf16,mask=causal`), or one of these, or what `evoattn.capture` recorded. `device` is
    torch's current CUDA device unless given. With `up_to_keys` the kernels are made ready, too, that each problem comes
    to while its keys grow to so many, as those of a cache do; each that is new has a sentence of its own. Raises
    `ProblemError` on an unknown shape, or where a problem cannot have so many keys."""
    runtime = current.runtime()
    if not isinstance(up_to_keys, int):
        raise WrongUse(f"up_to_keys is a number of keys, not {up_to_keys!r}.")
    problems = problems_of(shapes)
    several = [[one.with_unknown_lengths() for one in grown(problem, up_to_keys)] for problem in problems]
    if runtime.platform is None:
        return ["SDPA runs: there is no CUDA device."] * len(problems)
    index = runtime.platform.current_device() if device is None else torch.device(device).index or 0
    return [sentence for growing in several for sentence in _made_ready(runtime, growing, index)]


def settle() -> None:
    """Wait for the kernels that are compiled beside calls: the next call like them loads its own, unless it is captured
    by a CUDA graph.

    New functions of FlexAttention's language run in a kernel that is compiled sooner, other lengths and masks of them
    in one that is there. Where numbers are captured the second call begins a compile, too. Nothing is compiled without
    a CUDA device."""
    current.runtime().settle()


def _made_ready(runtime: Runtime, problems: Sequence[AttentionProblem], index: int) -> Iterator[str]:
    """What will run for the first of these problems, and for each later one that another kernel serves."""
    gpu = runtime.platform and runtime.platform.spec(index)
    last: object = None
    for problem in problems:
        choice = runtime.choose(strided(problem), gpu, True, index) if gpu else Refusal("unknown GPU")
        kernel = choice.reason if isinstance(choice, Refusal) else (choice.key, choice.config.id)
        if kernel == last:
            continue
        last = kernel
        plan = choice if isinstance(choice, Refusal) else runtime.warmed(choice, index)
        since = "" if problem is problems[0] else f"From {problem.seqlen_k} keys on "
        yield f"{since}SDPA runs: {plan.reason}." if isinstance(plan, Refusal) else f"{since}{plan.words}."


def _own_runtime(pick: Picker) -> Runtime:
    """A runtime on the device of `evoattn.attention`, which shares its compiled kernels and the records of their
    checks."""
    return Runtime(current.runtime().platform, pick, cubin_cache() / "op")


class RecordedKernel:
    """One recorded kernel, called as `evoattn.attention` is. It serves every batch, length and number of heads of the
    head_dim, dtype and mask that it was found for; `trial` and `problem` say which. `timing` is the recorded one, None
    for an offline trial.

    Today's template renders it from the recorded config, and it is checked on the device before its first use."""

    def __init__(
        self, trial: Trial, study: Study, make_runtime: Callable[[Picker], Runtime] = _own_runtime, source: str = ""
    ) -> None:
        """`make_runtime` makes the runtime that answers with this kernel only; `source` is the recorded CUDA source.
        Raises `ConfigError` where today's search space lacks the recorded config."""
        self.trial, self.problem = trial.number, AttentionProblem(**study.problem)
        self.family, self.timing, self.source = trial.family, trial.timing, source
        self.config = load_space(trial.family, study.spec).make_config(trial.config)
        self._runtime = make_runtime(self._pick)

    def __repr__(self) -> str:
        return f"RecordedKernel(trial {self.trial}: {self.family} {self.config.describe()}; {self.problem.describe()})"

    def _pick(self, problem: AttentionProblem, gpu: GpuSpec) -> Pick | None:
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
        return Pick(self.family, self.config, f"it is trial {self.trial}")

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
        q_scale: Scale = None,
        score: Score | None = None,
        return_lse: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """See `evoattn.attention`; with `block_table` `evoattn.attention_paged`, with `cu_seqlens_q` and the other
        three `evoattn.attention_varlen`, whose tensors these are then. Raises `NoKernel` for a call that this kernel
        does not serve, and `ValueError` and `TypeError` for what those functions refuse."""
        call = call_of(query, key, value, {**locals(), "strict": True})
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

    Raises `WrongUse` (an unknown study or trial, a wrong shape) or `StorageError`."""
    from evoattn.model.gpu import lookup
    from evoattn.model.shape_text import by_name_or_shape
    from evoattn.storage import Storage
    from evoattn.storage.storage import chosen_trial

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
