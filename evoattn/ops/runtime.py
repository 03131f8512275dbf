"""Decides each call once, keeps what it decided, and runs it: the state behind `evoattn.attention`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evoattn.backends.base import LaunchError
from evoattn.model import forks
from evoattn.ops import asked, cubins, fallback
from evoattn.ops.choice import Choice, Picker, Pickers, choose
from evoattn.ops.cubins import Cubin
from evoattn.ops.kernel import LoadedKernel
from evoattn.ops.kernels import COLD, Kernels
from evoattn.ops.plan import CallPlan, Refusal
from evoattn.ops.platform import Platform

PLANS_KEPT = 4096
"""Each takes some 9 kB, and a sequence that grows makes one for each of its lengths: the oldest go first."""
Plans = dict[tuple[object, ...], CallPlan | Refusal]
GRADIENTS = "gradients are wanted, and kernels compute the forward pass only"


class NoKernel(RuntimeError):
    """`strict=True`, and SDPA would have served the call: the message is the reason."""


class Runtime:
    """Plans by call, kernels by device. One serves all threads.

    `folder` keeps compiled kernels and the records of their checks. `estimated` allows kernels that were measured on
    no GPU of this kind; `forget` makes a change of it, or of what `pick` answers, count.
    """

    def __init__(
        self,
        platform: Platform | None,
        pick: Picker,
        folder: Path,
        build: Callable[..., Cubin] = cubins.get,
        others: Pickers | None = None,
    ) -> None:
        """`platform` None: no device, every call is SDPA's. `build` makes machine code, as `cubins.get` does. `others`:
        what to try where the picked kernel cannot serve a caller's strides."""
        self.platform, self.pick, self._others = platform, pick, others
        self.device_type = platform.device_type if platform else "cuda"
        self.estimated = False
        self.plans: Plans = {}
        """What was decided of each call. `forget` puts an empty one in its place: whoever decides takes this one before
        it looks at anything, and keeps the decision there, so that one that `forget` has overtaken is not found."""
        self.served: dict[tuple[object, ...], bool] = {}
        """What integrations have found out of whether a kernel serves calls to come; `forget` replaces it likewise."""
        self._kernels = Kernels(platform, folder, build, self.forget) if platform else None
        self._lock = forks.Lock()
        forks.tell(self)

    def after_fork(self) -> None:
        """The child of a process that has used CUDA has no context: torch serves its calls, or says why not."""
        if self.platform and self.platform.lost_in_fork():
            self.platform = self._kernels = None
        self.forget()

    def forget(self) -> None:
        """Decide every call anew, those too that another thread is deciding; loaded kernels stay loaded."""
        self.plans, self.served = {}, {}

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        causal: str = "upper_left",
        return_lse: bool = False,
        out: Tensor | None = None,
        strict: bool = False,
        compiled: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See `evoattn.attention`; tensors are ordinary ones, outside of any trace. `out` has been checked.

        `compiled`: the call comes from compiled code.
        """
        plan = reason = None
        try:
            call = (
                query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(),
                query.dtype, key.dtype, value.dtype, query.get_device(), key.get_device(), value.get_device(),
                is_causal, causal, scale, enable_gqa, return_lse, None if out is None else out.stride(),
            )  # fmt: skip
            if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
                reason = GRADIENTS
        except (RuntimeError, AttributeError, TypeError):  # nested or sparse tensors, or no tensors at all
            reason = asked.NOT_STRIDED
        if reason is None:
            plan = self.plans.get(call)
            if plan is None:
                plan = self._decide(call, query, key, value, is_causal, scale, enable_gqa, causal, return_lse, out)
            if plan.__class__ is Refusal:
                reason = plan.reason
        if reason is None:
            assert plan.__class__ is CallPlan and self.platform is not None
            if out is None:
                out = asked.out_like(query, value) if plan.value_dim else torch.empty_like(query)
            answer = out
            lse = None
            if plan.lse_shape is not None:
                lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=query.device)
            try:
                if self.platform.current_device() == plan.index:
                    reason = plan.run(query, key, value, answer, lse, compiled)
                else:
                    with self.platform.guard(plan.index):
                        reason = plan.run(query, key, value, answer, lse, compiled)
            except LaunchError as error:
                reason = self.fail(plan.kernel, str(error).rstrip("."))
            if not reason:
                return answer if lse is None else (answer, lse)
        if strict:
            raise NoKernel(f"No kernel serves this call: {reason}.")
        return fallback.call(query, key, value, is_causal, scale, enable_gqa, causal, return_lse, out)

    def keep(self, plans: Plans, call: tuple[object, ...], plan: CallPlan | Refusal) -> None:
        """Keep a decision in what was `plans` before it was made."""
        with self._lock:
            if len(plans) >= PLANS_KEPT:
                for old in list(islice(plans, PLANS_KEPT // 4)):
                    plans.pop(old, None)
            plans[call] = plan

    def fail(self, kernel: LoadedKernel, reason: str) -> str:
        """Take a kernel out of use for the rest of the process; the reason."""
        assert self._kernels is not None
        return self._kernels.fail(kernel, reason)

    def choice(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        causal: str,
        lse: bool,
        out: Tensor | None,
        fields: Mapping[str, Any] = asked.PLAIN,
    ) -> Choice | Refusal:
        """The kernel for a call, or why none; loads nothing. `fields` are those of a variant (`Variant.fields`)."""
        platform = self.platform
        if reason := asked.why_not_devices(query, key, value, self.device_type) or asked.why_not_scale(scale):
            return Refusal(reason)
        out_strides = (asked.out_like(query, value, "meta") if out is None else out).stride()
        problem = asked.problem_of(
            query, key, value, out_strides, fields, is_causal=is_causal, causal=causal, enable_gqa=enable_gqa, lse=lse
        )
        if isinstance(problem, str):
            return Refusal(problem)
        gpu = platform.spec(query.get_device()) if platform else None
        if gpu is None:
            return Refusal(f"evoattn does not know this GPU ({platform and platform.identity(query.get_device())})")
        return choose(problem, gpu, self.pick, self.estimated, self._others)

    def failure(self, choice: Choice, index: int) -> str:
        """Why the chosen kernel, if it was loaded, is not used any more; empty if nothing is known against it."""
        return self._kernels.failure(choice, index) if self._kernels else ""

    def prepare(self, choice: Choice, index: int, scale: float | None = None) -> CallPlan | Refusal:
        """The plan of a chosen kernel on a device, made ready at first use: see `Kernels.prepare`."""
        assert self._kernels is not None
        return self._kernels.prepare(choice, index, scale)

    def _decide(
        self,
        call: tuple[object, ...],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        causal: str,
        lse: bool,
        out: Tensor | None,
    ) -> CallPlan | Refusal:
        """Decide a new call, and keep the answer unless it holds for a capture only."""
        with self._lock:
            plans = self.plans
            choice = self.choice(query, key, value, is_causal, scale, enable_gqa, causal, lse, out)
            plan = choice if isinstance(choice, Refusal) else self.prepare(choice, query.get_device(), scale)
            if plan.__class__ is Refusal and plan.reason is COLD:
                return plan
            if plan.__class__ is CallPlan or not asked.may_share(key, value):  # the next one may lie elsewhere
                self.keep(plans, call, plan)
            return plan
