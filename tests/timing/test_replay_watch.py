"""What a watch says of replays that did wrong."""

import torch

from evoattn.correctness.arena import Arena, Layout
from evoattn.timing.replay_watch import ReplayWatch


def test_a_watch_counts_the_replays_that_did_wrong():
    inputs = {"q": torch.ones(4)}
    arena = Arena(inputs, {"o": Layout((4,), (1,), torch.float32)}, {}, torch.device("cpu"))
    right = torch.full((4,), 2.0)

    def replays(*plays, expected=right):
        watch = ReplayWatch(arena, None if expected is None else {"o": expected})
        for play in plays:
            watch.before()
            arena.views["o"].copy_(right)
            play()
            watch.after()
        return watch.fault()

    def honest():
        pass

    def changes_the_input():
        arena.views["q"][1:3] = 7.0

    def leaves_it():
        arena.poison()

    def is_off():
        arena.views["o"][2] = 2.5

    assert replays(honest, honest) == ""
    assert replays(honest, changes_the_input, honest, leaves_it) == "1 of 4 timed replays changed the inputs."
    assert replays(leaves_it, leaves_it, is_off).startswith("2 of 3 timed replays left outputs unwritten: ")
    assert replays(is_off, honest) == "1 of 2 timed replays left another output than the validated one."
    assert replays(leaves_it, expected=None) == ""
