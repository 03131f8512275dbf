"""Kernels that lie where a check before the timing cannot see it, as fakes (fake_kernels.py), and an honest one."""

import torch

from evoattn.correctness import reference
from tests.cheats.fake_kernels import PROBLEM, Launch

CHECKED = 20
"""Launches before the timing: eight cases and the problem's own shape, twice each, and two to warm up."""


def honest(launch: Launch) -> None:
    launch.write()


def writes_nothing(launch: Launch) -> None:
    pass


def right_on_the_first_call(launch: Launch) -> None:
    if launch.count == 0:
        launch.write()


def works_on_every_second_call(launch: Launch) -> None:
    if launch.count % 2:
        launch.write()


def right_for_the_timed_shape(launch: Launch) -> None:
    if launch.problem.seqlen_q == PROBLEM.seqlen_q:
        launch.write()
    else:
        launch.views["o"].zero_()


def right_for_the_seed_of_the_past(launch: Launch) -> None:
    known = reference.make_inputs(launch.problem, 1, "cpu")["q"]
    launch.views["o"].copy_(launch.answer() if torch.equal(launch.views["q"], known) else launch.answer() * 0.5)


def rests_when_timed(launch: Launch) -> None:
    if not CHECKED + 4 <= launch.count < CHECKED + 60:
        launch.write()


def works_on_every_third_launch_when_timed(launch: Launch) -> None:
    """The others leave one number out."""
    out = launch.views["o"]
    before = out[0, 0, 0, 0].clone()
    launch.write()
    if launch.count >= CHECKED and launch.count % 3:
        out[0, 0, 0, 0] = before


def changes_its_inputs_when_timed(launch: Launch) -> None:
    launch.write()
    if launch.count == CHECKED + 40:
        launch.views["k"][..., 0] += 1


def writes_outside_when_timed(launch: Launch) -> None:
    launch.write()
    if launch.count > CHECKED:
        whole = launch.buffers["o"].untyped_storage()
        whole[launch.buffers["o"].storage_offset() * 2 + launch.buffers["o"].numel() * 2] = 7


def writes_past_its_output(launch: Launch) -> None:
    launch.write()
    launch.buffers["o"].untyped_storage()[
        launch.buffers["o"].storage_offset() * 2 + launch.buffers["o"].numel() * 2
    ] = 7


def reads_before_its_input(launch: Launch) -> None:
    launch.write()
    if launch.buffers["q"].untyped_storage()[launch.buffers["q"].storage_offset() * 2 - 1] != 0x5A:
        launch.views["o"][0, 0, 0] += 1


def depends_on_its_output(launch: Launch) -> None:
    stale = launch.views["o"].clone()
    launch.views["o"].copy_(torch.where(torch.isnan(stale), stale, launch.answer()))


class Cached:
    """Computes an answer once for each address of Q, and copies it from then on."""

    def __init__(self) -> None:
        self.answers: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def __call__(self, launch: Launch) -> None:
        key = launch.buffers["q"].data_ptr(), launch.views["q"].shape
        self.answers.setdefault(key, launch.answer())
        if launch.count < CHECKED:
            self.answers[key] = launch.answer()
        launch.views["o"].copy_(self.answers[key])
