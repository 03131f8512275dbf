"""The backward pass of peers: a forward pass runs once, and calls compute the gradients that the problem asks for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from evoattn.model.backward import parse_grads
from evoattn.model.problem import AttentionProblem
from evoattn.peers.variants import PeerRefused

Tensors = dict[str, torch.Tensor]
Forward = Callable[[AttentionProblem, Tensors], Callable[[], torch.Tensor | Tensors]]
Backward = Callable[[AttentionProblem, Tensors], Callable[[], Tensors]]


def backward_of(forward: Forward) -> Backward:
    """`make` of a peer of the backward pass, by that of the forward one: its call gives the problem's outputs, no `dv`
    where V lies within K. A peer that lacks one of them is refused: it would do less work than ours."""

    def make(problem: AttentionProblem, tensors: Tensors) -> Callable[[], Tensors]:
        if problem.lse:
            raise PeerRefused("It is not asked for the gradient of a log-sum-exp.")
        names = (*problem.tensors, *parse_grads(problem.grads))
        # by `data`, since a bench writes inputs again in place, and `detach` shares the counter that autograd checks
        inputs = {name: tensor.data for name, tensor in tensors.items()}
        leaves = {name: inputs[name].requires_grad_() for name in names}
        with torch.enable_grad(), _deterministic(problem.deterministic):
            out = forward(problem, inputs)()
        if not isinstance(out, torch.Tensor) or not out.requires_grad:
            raise PeerRefused("It has no backward pass.")
        walk = Walk(out, list(leaves.values()))

        def call() -> Tensors:
            with torch.no_grad(), _deterministic(problem.deterministic):
                gradients = walk(tensors["do"])
            return {f"d{name}": one for name, one in zip(names, gradients, strict=True)}

        return call

    return make


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Whether torch takes algorithms that leave the same bits in every run."""
    before, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)


@dataclass
class _Node:
    """A step of torch's recorded graph."""

    step: Any
    outputs: list[Any]
    """What its gradients look like, as torch's engine has it: what is broadcast in them is summed up."""
    zeros: list[torch.Tensor | None]
    """Of outputs that nothing is taken of, for steps in Python, which want a tensor for each."""
    follows: list[tuple[int, int] | None]
    """For each gradient that it gives: the step that takes it and as which, a leaf as a number below 0."""


class Walk:
    """The gradients of leaves by the graph that torch recorded, step by step on the current stream.

    torch's own engine runs each step on the stream of its forward pass, which no other stream's CUDA graph can hold."""

    def __init__(self, out: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        self._leaves, self._out = leaves, out  # torch frees what a step in Python saved with the last answer of it
        places = {id(leaf): -1 - i for i, leaf in enumerate(leaves)}
        order = _topological(out.grad_fn)
        numbers = {step: i for i, step in enumerate(order)}
        self._first = order[0], out.output_nr
        self._nodes = []
        for step in order:
            follows: list[tuple[int, int] | None] = []
            for then, place in step.next_functions:
                if then is None:
                    follows.append(None)
                elif hasattr(then, "variable"):
                    follows.append((places[id(then.variable)], place) if id(then.variable) in places else None)
                else:
                    follows.append((numbers[then], place))
            self._nodes.append(_Node(step, list(step._input_metadata), _zeros(step), follows))

    def __call__(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Of each leaf, that of the sum of `out` times `gradient`. Raises `PeerRefused` for a leaf without one."""
        taken: list[list[torch.Tensor | None]] = [[None] * len(node.outputs) for node in self._nodes]
        found: list[torch.Tensor | None] = [None] * len(self._leaves)
        taken[0][self._first[1]] = gradient
        for node, given in zip(self._nodes, taken, strict=True):
            if all(one is None for one in given):
                continue
            for follow, made in zip(node.follows, _apply(node, given), strict=False):
                if follow is None or made is None:
                    continue
                number, place = follow
                row, at = (found, -1 - number) if number < 0 else (taken[number], place)
                like = self._leaves[at] if number < 0 else self._nodes[number].outputs[place]
                made = made.sum_to_size(like.shape).to(like.dtype)
                row[at] = made if (before := row[at]) is None else before + made
        if any(one is None for one in found):
            raise PeerRefused("Its backward pass does not give all gradients that are asked for.")
        return [one for one in found if one is not None]


def _apply(node: _Node, given: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    if isinstance(node.step, torch.autograd.function.BackwardCFunction):
        made = node.step.apply(*(zero if one is None else one for one, zero in zip(given, node.zeros, strict=True)))
    else:
        made = node.step(*given)
    return made if isinstance(made, tuple) else (made,)


def _zeros(step: Any) -> list[torch.Tensor | None]:
    """One for each output of a step; only a step in Python needs them."""
    metadata = step._input_metadata
    if not isinstance(step, torch.autograd.function.BackwardCFunction):
        return [None] * len(metadata)
    return [torch.zeros(one.shape, dtype=one.dtype, device=one.device) for one in metadata]


def _topological(first: Any) -> list[Any]:
    """The steps that are no leaves, each before those that take what it gives."""
    done: list[Any] = []
    seen = set()
    stack = [(first, False)]
    while stack:
        step, left = stack.pop()
        if left:
            done.append(step)
        elif step not in seen:
            seen.add(step)
            stack.append((step, True))
            following = (then for then, _ in step.next_functions)
            stack += [(then, False) for then in following if then is not None and not hasattr(then, "variable")]
    return done[::-1]
