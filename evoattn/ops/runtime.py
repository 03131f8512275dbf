"""Decides each call once, keeps what it decided, and runs it: the state behind `evoattn.attention`."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from evoattn.backends.base import LaunchError
from evoattn.backends.cubins import Cubin, get_cubin
from evoattn.backends.loaded import LoadedKernel
from evoattn.backends.platform import Platform, find_platform
from evoattn.families import registry
from evoattn.families.base import Family
from evoattn.model import collector, forks
from evoattn.model.gpu import GpuSpec
from evoattn.model.paths import cubin_cache
from evoattn.model.problem import AttentionProblem
from evoattn.model.remembered import remember
from evoattn.model.scales import ANSWERED
from evoattn.ops import gradients, torch_answer
from evoattn.ops.arguments import STARTS_Q, Given, one_has_gradients
from evoattn.ops.call import (
    GRADIENTS,
    NOT_STRIDED,
    Answer,
    Call,
    StridedProblem,
    has_room,
    may_share,
    out_like,
    why_not_devices,
    why_not_scale,
)
from evoattn.ops.choice import (
    IN_CAPTURE,
    TOO_LONG,
    Choice,
    CudaClock,
    Picker,
    Pickers,
    Race,
    Refusal,
    choose,
    decided,
    foretold,
    keeps_bits,
)
from evoattn.ops.gradients import Backward, Grads, Training, attend_trained, by_torch
from evoattn.ops.kernels import COLD, Kernels
from evoattn.ops.packed import Packed, known_by_room
from evoattn.ops.plan import OF_A_CALL, CallPlan, InTurn, OperationPlan, in_turn
from evoattn.ops.torch_answer import PROMISE, refuse
from evoattn.portfolio.climb import ClimbCache
from evoattn.portfolio.pick import Pick, lasting_pick, next_picks
from evoattn.portfolio.wins import Raced, Races, Wins

FOLDING = "its kernel is compiled beside calls"
LATE = 0.25
"""Part of what a pick takes to be ready that a call waits longer for the compilers of its rivals. Of 46 rivals of 16
problems NVRTC takes more for 9 (CPU time, seed 8361)."""
PLANS_KEPT = 4096
"""Each takes some 9 kB, and a sequence that grows makes one for each of its lengths: the oldest go first."""
FOLDER = "op"
"""Of its kernels, in the user's cache of compiled ones."""
Plan = TypeVar("Plan")
Known = tuple[object, ...]
"""All that the plan of a call depends on."""
Plans = dict[Known, CallPlan | Refusal]


class Runtime:
    """Plans by call, kernels by device. One serves all threads.

    `folder` keeps compiled kernels and the records of their checks. `estimated` allows kernels that were measured on
    no GPU of this kind; `forget` makes a change of it, or of what `pick` answers, count."""

    def __init__(
        self,
        platform: Platform | None,
        pick: Picker,
        folder: Path,
        build: Callable[..., Cubin] = get_cubin,
        others: Pickers | None = None,
        lookup: Callable[[str], Family] = registry.lookup,
        race: Race | None = None,
    ) -> None:
        """`platform` None: no device, every call is SDPA's. `build` makes machine code, as `get_cubin` does. `others`:
        what to try where the picked kernel cannot serve a caller's strides. `lookup` finds a family by its name.
        `race`: what lets estimated kernels run that are faster than PyTorch; none runs unasked without it."""
        self.platform, self.pick, self._others, self._lookup = platform, pick, others, lookup
        self.device_type = platform.device_type if platform else "cuda"
        self.estimated, self.races = False, race is not None
        self._race = race
        self._unraced: dict[Known, Refusal] = {}
        """Calls that could not race: an eager one like them may."""
        self.plans: Plans = {}
        """What was decided of each call. `forget` puts an empty one in its place: whoever decides takes this one before
        it looks at anything, and keeps the decision there, so that one that `forget` has overtaken is not found."""
        self._trainings: dict[Known, Training | Refusal] = {}
        """The same of calls that want gradients."""
        self.served: dict[Known, bool] = {}
        """What integrations have found out of whether a kernel serves calls to come; `forget` replaces it likewise."""
        self.helper_plans: dict[Known, OperationPlan | Refusal] = {}
        """Those of operations beside attention: of tensors that are quantised, of new keys, of partial answers."""
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
        self.plans, self._trainings, self.served, self._unraced, self.helper_plans = {}, {}, {}, {}, {}

    def attend(self, call: Call) -> Answer:
        """The answer, and with `return_lse` the log-sum-exp beside it; tensors are ordinary ones, outside of any trace,
        and as autocast makes them. `out` has been checked. Raises `NoKernel` under `strict` and `batch_invariant`
        where no kernel serves the call, and what `Call.require` raises."""
        query, key, value, terms, out = call.query, call.key, call.value, call.terms, call.out
        plan: CallPlan | Refusal | None = None
        reason = None
        if PROMISE.everywhere:
            call.batch_invariant = True
        try:
            known: Known
            if terms and terms[STARTS_Q] is not None and has_room(call):
                known = known_by_room(call)
            else:
                known = (
                    query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(),
                    query.dtype, key.dtype, value.dtype, query.get_device(), key.get_device(), value.get_device(),
                    call.mask, call.scale, call.enable_gqa, call.return_lse, None if out is None else out.stride(),
                    call.window, call.softcap, call.score and call.score.key, call.blocks,
                    call.batch_invariant, call.turned, call.op,
                )  # fmt: skip
                if terms:
                    known = _with_terms(known, call)
            if torch.is_grad_enabled() and (
                query.requires_grad or key.requires_grad or value.requires_grad or (terms and one_has_gradients(terms))
            ):
                reason = GRADIENTS
        except (RuntimeError, AttributeError, TypeError, IndexError):  # nested or sparse tensors, none, no dimensions
            call.require_terms()
            reason = NOT_STRIDED
        if reason is None:
            plan = self.plans.get(known) or self._decide(call, known)
            if plan.__class__ is Refusal:
                reason = plan.reason
        elif reason is GRADIENTS:
            plans = self._trains(call, known)
            if plans.__class__ is Training:
                return attend_trained(self, call, plans)
            reason = plans.reason if plans.__class__ is Refusal else None
        if reason is None:
            assert plan.__class__ is CallPlan
            found = self._answered(plan, call)
            if not isinstance(found, str):
                return found
            reason = found
        if (parts := torch_answer.by_batches(call, self.attend)) is not None:
            return parts
        if call.strict or call.batch_invariant:
            call.require()
            refuse(reason, call.strict, call.batch_invariant)
        return torch_answer.answer(call)

    def trained(self, call: Call, plan: CallPlan) -> tuple[Tensor, Tensor]:
        """The answer to a call that wants gradients, by the kernel of `plan`, and its log-sum-exp."""
        found = self._answered(plan, call)
        out, lse = self.attend(replace(call, return_lse=True)) if isinstance(found, str) else found
        return out, lse

    def _answered(self, plan: CallPlan, call: Call) -> Answer | str:
        """The answer by a plan's kernel, with the log-sum-exp where the plan makes one, or why none was launched."""
        query, value, out = call.query, call.value, call.out
        if out is None:
            out = out_like(query, value) if plan.unlike_query else torch.empty_like(query)
        lse = None if plan.lse_shape is None else plan.empty_lse(query, call.compiled)
        reason = self._launched(plan, call, (query, call.key, value, out), lse)
        if lse is not None and lse.shape[2] > query.shape[2]:  # the plan has room for more
            lse = lse[..., : query.shape[2]]
        return reason or (out if lse is None else (out, lse))

    def _launched(
        self,
        plan: CallPlan,
        call: Call | Packed,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        lse: Tensor | None,
        backward: Sequence[Tensor | None] = (),
    ) -> str:
        """Why a plan's kernel could not be launched, over what `CallPlan.run` takes; empty if it was."""
        platform = self.platform
        assert platform is not None
        try:
            if platform.current_device() == plan.index:
                return plan.run(call, tensors, lse, backward)
            with platform.guard(plan.index):
                return plan.run(call, tensors, lse, backward)
        except LaunchError as error:
            return self.fail(plan.kernel, str(error).rstrip("."))

    def again(self, packed: Packed) -> Answer | None:
        """The answer to packed queries over pages like some that were decided before, in the caller's order of
        dimensions, where that is a kernel's alone; None otherwise, and where gradients are wanted: `attend` knows what
        to do. The tensors are as those of `attend`, and none is negated."""
        plan, query, out = self.plans.get(packed.known), packed.query, packed.out
        if plan.__class__ is not CallPlan or plan.unlike_query:
            return None
        if torch.is_grad_enabled():  # of floating tensors
            sinks, slopes, *_ = packed.terms
            if query.requires_grad or packed.key.requires_grad or packed.value.requires_grad:
                return None
            if (sinks is not None and sinks.requires_grad) or (slopes is not None and slopes.requires_grad):
                return None
        if out is None:
            out = torch.empty_like(query)
        tensors = query, packed.key, packed.value, out
        lse = None if plan.lse_shape is None else plan.empty_lse(query, packed.compiled)
        if self._launched(plan, packed, tensors, lse):
            return None
        return out if lse is None else (out, lse[0, :, : query.size(0)])

    def gradients(self, given: Backward) -> Grads:
        """The gradients of what a backward pass is of, by the best known kernel, or by torch where none serves it.
        Raises `NoKernel` under `batch_invariant` in place of the latter."""
        if self.platform is not None and given.is_ordinary:
            given = given.readable()
            plan = self.plans.get(given.known) or self._decide_backward(given, given.known)
            if plan.__class__ is CallPlan:
                call, made = given.call, given.made()
                tensors = call.query, call.key, call.value, given.out, given.lse
                if self.differentiates(plan, call, tensors, (given.grad, given.grad_lse, *made)):
                    return given.fitted(made)
        refuse("none serves its gradients", batch_invariant=given.call.batch_invariant)
        return by_torch(given)

    def differentiates(
        self, plan: CallPlan, call: Call, tensors: Sequence[Tensor], backward: Sequence[Tensor | None]
    ) -> bool:
        """Whether a plan's backward pass could be launched. `tensors`: query, key, value, answer, log-sum-exp;
        `backward`: those of `BACKWARD_TENSORS`."""
        query, key, value, out, lse = tensors
        return not self._launched(plan, call, (query, key, value, out), lse, backward)

    def _trains(self, call: Call, known: Known) -> Training | Refusal:
        """The plans of both passes of a call that wants gradients, if kernels serve both, else why torch computes
        both."""
        if call.terms and (reason := gradients.why_not_differentiable(call)):  # else `known` says it
            return Refusal(reason)
        key = GRADIENTS, known, gradients.grads_of(call), gradients.are_deterministic(call)
        trainings = self._trainings
        if (kept := trainings.get(key)) is not None:
            return kept
        if reason := gradients.why_not_differentiable(call):
            return Refusal(reason)
        with self._lock:
            call.require()
            if call.folds and not self._is_folded(call, key):
                return Refusal(FOLDING)
            found = self._training(call)
            if isinstance(found, Training) or found.reason is not COLD:
                self.keep(trainings, key, found)
        return found

    def _training(self, call: Call) -> Training | Refusal:
        """As `_trains`, of a new call."""
        choices = self.training_choices(call)
        if isinstance(choices, Refusal):
            return Refusal(f"{GRADIENTS}, and {choices.reason}")
        assert self._kernels is not None
        if (races := bool(choices[1].rivals)) and not self._why_no_race(choices[1], call):
            self._kernels.ahead(choices[1], call.query.get_device())
        plans = []
        for choice, of in zip(choices, (replace(call, return_lse=True), call), strict=True):
            plan = self._prepared(choice, of)
            if isinstance(plan, Refusal):
                return plan if plan.reason is COLD else Refusal(f"{GRADIENTS}, and {plan.reason}")
            plans.append(plan)
        raceable = self.choice(replace(call, return_lse=True), contends=True)
        if isinstance(raceable, Choice) and raceable.rivals and self._race is not None and self.platform is not None:
            self._race.leave(raceable, self.platform.identity(call.query.get_device()))  # else these bits would change
        return gradients.training_of(call, plans, races)

    def planned(self, known: Known, index: int, problem: Callable[[], StridedProblem | str]) -> OperationPlan | None:
        """The plan of an operation beside attention, which PyTorch has no kernel for: of all tensors that `known` does
        not tell apart, on a device. None where no kernel serves it."""
        plans = self.helper_plans
        plan = plans.get(known)
        if plan is None:
            plan = self._decide_operation(problem(), index)
            if not (isinstance(plan, Refusal) and plan.reason is COLD):
                self.keep(plans, known, plan)
        return plan if isinstance(plan, OperationPlan) else None

    def _decide_operation(self, problem: StridedProblem | str, index: int) -> OperationPlan | Refusal:
        assert self.platform is not None and self._kernels is not None
        gpu = self.platform.spec(index)
        if isinstance(problem, str) or gpu is None:
            return Refusal(problem if isinstance(problem, str) else "evoattn does not know this GPU")
        choice = self.choose(problem, gpu, index=index, promised=True)
        return choice if isinstance(choice, Refusal) else self._kernels.operation(choice, index)

    def performs(self, plan: OperationPlan, tensors: Mapping[str, Tensor]) -> bool:
        """Whether an operation over the tensors that its specs name was enqueued on the current stream."""
        assert self.platform is not None
        try:
            with self.platform.guard(plan.index):
                return plan.run(tensors)
        except LaunchError as error:
            self.fail(plan.kernel, str(error).rstrip("."))
            return False

    def keep(self, plans: dict[Known, Plan], call: Known, plan: Plan) -> None:
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

    def choice(self, call: Call, contends: bool = False) -> Choice | Refusal:
        """The kernel for a call that fits, or why none; loads nothing. `contends`: as of `choose`."""
        out = out_like(call.query, call.value, "meta") if call.out is None else call.out
        return self._choice(call, lambda: call.problem(out.stride()), contends)

    def backward_choice(self, given: Backward) -> Choice | Refusal:
        """The kernel for a backward pass, which may have still to race, or why none; loads nothing."""
        return self._choice(given.call, given.problem, contends=True)

    def training_choices(self, call: Call) -> tuple[Choice, Choice] | Refusal:
        """The kernels for both passes of a call that wants gradients, or why torch computes both; loads nothing."""
        forward = self.choice(replace(call, return_lse=True))
        if isinstance(forward, Refusal):
            return forward
        backward = self.backward_choice(gradients.expected(call))
        return backward if isinstance(backward, Refusal) else (forward, backward)

    def _choice(
        self, call: Call, problem_of: Callable[[], StridedProblem | str], contends: bool = False
    ) -> Choice | Refusal:
        platform, query = self.platform, call.query
        reason = call.why_not_terms() or why_not_devices(call, self.device_type) or why_not_scale(call.scale)
        if reason:
            return Refusal(reason)
        problem = problem_of()
        if isinstance(problem, str):
            return Refusal(problem)
        gpu = platform.spec(query.get_device()) if platform else None
        if gpu is None:
            return Refusal(f"evoattn does not know this GPU ({platform and platform.identity(query.get_device())})")
        return self.choose(problem, gpu, contends, query.get_device(), call.batch_invariant, call.from_functions)

    def choose(
        self,
        problem: StridedProblem,
        gpu: GpuSpec,
        contends: bool = False,
        index: int | None = None,
        promised: bool = False,
        alone: bool = False,
    ) -> Choice | Refusal:
        """The kernel for a problem on a GPU, the current one unless `index` says another, or why none. `contends`: a
        kernel that has still to race is an answer, too, and is `estimated` if PyTorch's attention is among its rivals.
        `promised`: nothing of PyTorch's would have to be beaten: the call is batch-invariant, or of another operation.
        Where Q has 8 bits torch has no such attention either. Kernels do not race one another where bits are not to
        depend on times, nor where one runs until another is compiled, as `alone` says of FlexAttention's calls."""
        race, platform = self._race, self.platform
        if PROMISE.everywhere and problem.op == "forward":
            problem = replace(problem, batch_invariant=True)
        allowed = self.estimated or promised or problem.batch_invariant or problem.element.bytes == 1
        forward, races = problem.op == "forward", self.races and race is not None
        races = races and (forward or problem.op == "backward" or problem.op in ANSWERED)
        choice = choose(problem, gpu, self.pick, allowed or (races and forward), self._others, self._lookup, races)
        if isinstance(choice, Refusal):
            return choice
        apart = alone or (choice.estimated and self.estimated) or keeps_bits(problem)
        rivals = () if race is None or not races or apart else race.able(choice)
        choice = replace(choice, estimated=choice.estimated and not allowed, rivals=rivals)
        if not choice.estimated and not rivals:
            return choice
        assert race is not None and platform is not None
        raced = race.known(choice, platform.identity(platform.current_device() if index is None else index))
        if raced is not None:
            return decided(choice, raced)
        if contends:
            return foretold(choice)
        if not choice.estimated:
            return replace(choice, rivals=())
        return Refusal(f"{choice.name} was not measured on {gpu.name}, and has not raced PyTorch's attention yet")

    def settle(self) -> None:
        """Wait for the kernels that are compiled while others run: the next calls, but in a capture, load them."""
        if self._kernels is not None:
            self._kernels.settle()

    def failure(self, choice: Choice, index: int) -> str:
        """Why the chosen kernel, if it was loaded, is not used any more; empty if nothing is known against it."""
        return self._kernels.failure(choice, index) if self._kernels else ""

    def prepare(
        self, choice: Choice, index: int, scale: float | None = None, given: tuple[Given, ...] | None = None
    ) -> CallPlan | Refusal:
        """The plan of a chosen kernel on a device, made ready at first use: see `Kernels.prepare`."""
        assert self._kernels is not None
        return self._kernels.prepare(choice, index, scale, given)

    def warmed(self, choice: Choice, index: int) -> CallPlan | Refusal:
        """As `prepare`, of its rivals, too: the first call races them."""
        assert self._kernels is not None
        rivals = self._kernels.ahead(choice, index)
        plan, *_ = [self.prepare(one, index) for one in (choice, *rivals.values())]
        return plan

    def _decide(self, call: Call, known: Known) -> CallPlan | Refusal:
        """Decide a new call, and keep the answer unless it holds for a capture only."""
        with self._lock:
            plans = self.plans
            call.require()
            unraced = self._unraced.get(known)
            if unraced and (call.compiled or self.platform is None or self.platform.capturing()):
                return unraced
            if call.folds and not self._is_folded(call, known):
                return Refusal(FOLDING)
            choice = self.choice(call, contends=True)
            if isinstance(choice, Choice) and (choice.estimated or choice.rivals):
                plan, keeps = self._by_race(choice, call, partial(in_turn, call))
                if not keeps:
                    assert isinstance(plan, Refusal)
                    return remember(self._unraced, known, plan, PLANS_KEPT)
            else:
                plan = self._prepared(choice, call)
            if plan.__class__ is Refusal and plan.reason is COLD:
                return plan
            if plan.__class__ is CallPlan or not may_share(call.key, call.value):  # the next one may lie elsewhere
                self.keep(plans, known, plan)
            return plan

    def _is_folded(self, call: Call, known: Known) -> bool:
        """See `Kernels.is_folded`; without a device there is nothing to wait for."""
        if self._kernels is None:
            return True
        trains = known[0] is GRADIENTS
        choices = lambda: self.training_choices(call) if trains else (self.choice(call),)
        return self._kernels.is_folded(call, known, choices)

    def _decide_backward(self, given: Backward, known: Known) -> CallPlan | Refusal:
        """As `_decide`, of a backward pass."""
        with self._lock:
            plans = self.plans
            choice = self.backward_choice(given)
            if isinstance(choice, Choice) and choice.rivals:
                plan, _ = self._by_race(choice, given.call, given.in_turn)
                self._trainings = {}  # calls to come have its winner
            else:
                plan = self._prepared(choice, given.call)
            if not (plan.__class__ is Refusal and plan.reason is COLD):
                self.keep(plans, known, plan)
            return plan

    def _prepared(self, choice: Choice | Refusal, call: Call) -> CallPlan | Refusal:
        """The plan of what was chosen for a call, or why there is none."""
        if isinstance(choice, Refusal):
            return choice
        assert self._kernels is not None
        scale, index = call.scale if choice.problem.scale is None else None, call.query.get_device()
        return self.prepare(self._kernels.meanwhile(choice, index, call), index, scale, call.given())

    def _why_no_race(self, choice: Choice, call: Call) -> str:
        assert self._race is not None and self.platform is not None and self._kernels is not None
        if not self.platform.capturing():
            return self._race.why_not(choice, call)
        if choice.estimated:
            self._kernels.say(f"SDPA was captured for {choice.problem.as_searched.describe()}: {IN_CAPTURE}")
        return IN_CAPTURE

    def _by_race(self, choice: Choice, call: Call, in_turn: InTurn) -> tuple[CallPlan | Refusal, bool]:
        """The plan of the kernel that is fastest on this call, else why PyTorch is to run; and whether that holds for
        the next such call, as it does not where one that nobody measured could not race this very time. `in_turn`
        says how each plan is run on the call, by its place, as `plan.in_turn` does."""
        assert self._race is not None and self.platform is not None and self._kernels is not None
        platform, index = self.platform, call.query.get_device()
        machine, why = platform.identity(index), self._why_no_race(choice, call)
        if why and choice.estimated:
            return Refusal(f"{choice.name} was not measured here: {why}"), why is TOO_LONG
        begun = time.monotonic()
        rivals = {} if why else self._kernels.ahead(choice, index)
        plan = self._prepared(choice, call)
        if not isinstance(plan, CallPlan):
            return plan, plan.reason is not COLD
        ready = time.monotonic()
        until = ready + LATE * (ready - begun)
        plans = {0: plan}
        for place, one in rivals.items():
            if self._kernels.compiles_longer(one, index, until - time.monotonic()):
                continue
            if isinstance(other := self._prepared(one, call), CallPlan):
                plans[place] = other
        raced: Raced | str = why
        if len(plans) > 1 or choice.estimated:
            with platform.guard(index):
                raced = self._race.hold(choice, machine, call, in_turn(plans))
            self._unraced = {}  # the size is known now, to compiled code and captures, too
        if not isinstance(raced, str):
            found = decided(choice, raced)
            if isinstance(found, Refusal):
                return found, True
            # Another process may have raced kernels that this one has not compiled.
            best = plans.get(raced.best) or self._prepared(replace(found, is_rival=True), call)
            if isinstance(best, CallPlan):
                plan, best.words = best, found.words
            else:
                self._race.leave(choice, machine)
        elif choice.estimated:
            return Refusal(f"{choice.name} was not measured here: {raced}"), raced not in OF_A_CALL
        else:
            self._race.leave(choice, machine)
        return plan, True


def _with_terms(known: Known, call: Call) -> Known:
    """With what decides about the terms of a call."""
    facts: Known = (known, call.longest)
    for which, t in enumerate(call.terms):
        if t is not None:
            facts += (which, t.shape, t.stride(), t.dtype, t.get_device(), t.is_neg())
    return facts


class Current:
    """The runtime behind the op in this process, and what it asks."""

    def __init__(self) -> None:
        self._runtime: Runtime | None = None
        self._wins: Wins | None = None
        self._climbs: ClimbCache | None = None
        self._lock = forks.Lock()

    def wins(self) -> Wins:
        """The user's own finds."""
        if self._wins is None:
            self._wins = Wins()
        return self._wins

    def climbs(self) -> ClimbCache:
        """What picks came to, in earlier processes too: beside the compiled kernels."""
        if self._climbs is None:
            self._climbs = ClimbCache(cubin_cache() / FOLDER)
        return self._climbs

    def best_known(self, problem: AttentionProblem, gpu: GpuSpec) -> Pick | None:
        """The user's own find for exactly this problem, else the portfolio's pick."""
        with collector.paused():
            return self.wins().find(problem, gpu) or lasting_pick(problem, gpu, self.climbs())

    def runtime(self) -> Runtime:
        """The one runtime of the process; on the first call it looks for a CUDA device."""
        if self._runtime is None:
            with self._lock:
                if self._runtime is None:
                    platform = find_platform() if torch.cuda.is_available() else None
                    race = Race(Races(), CudaClock()) if platform else None
                    folder = cubin_cache() / FOLDER
                    self._runtime = Runtime(platform, self.best_known, folder, others=next_picks, race=race)
        return self._runtime

    def forget(self) -> None:
        """Have the runtime, if there is one, ask anew which kernel runs: a search has found another."""
        if self._runtime is not None:
            self._runtime.forget()

    @contextlib.contextmanager
    def use(self, other: Runtime, finds: Wins | None = None) -> Iterator[Runtime]:
        """Put another runtime, and another file of wins if given, behind the op, in all threads, for the length of a
        block."""
        before = self._runtime, self._wins
        self._runtime, self._wins = other, finds or self._wins
        try:
            yield other
        finally:
            self._runtime, self._wins = before


current = Current()
