"""Guard bands, poison and the vault."""

import torch

from evoattn.correctness.arena import BANDS, GUARD_BYTES, UNWRITTEN, Arena, Layout, Vault, bits


def make_arena():
    inputs = {"q": torch.arange(24, dtype=torch.float16).view(2, 3, 4), "k": torch.ones(2, 5).T}
    return inputs, Arena(
        inputs,
        {"o": Layout((2, 3), (3, 1), torch.float16)},
        {"partials": 10, "counters_zeroed": 8},
        torch.device("cpu"),
    )


def test_inputs_are_copied_with_their_strides_and_the_rest_is_poisoned():
    inputs, arena = make_arena()
    arena.arm()
    assert all(torch.equal(arena.views[n], t) and arena.views[n].stride() == t.stride() for n, t in inputs.items())
    assert (bits(arena.views["o"]) == UNWRITTEN).all() and (arena.buffers["partials"] == 0xFF).all()
    assert arena.buffers["counters_zeroed"].tolist() == [0] * 8
    assert arena.buffers["o"].numel() == 6 and arena.buffers["o"].data_ptr() == arena.views["o"].data_ptr()
    assert arena.changed_bands() == 0 and sum(arena.changed_inputs()) == 0 and arena.outputs.keys() == {"o"}


def test_zeros_that_a_kernel_does_not_leave_are_counted():
    _, arena = make_arena()
    arena.arm()
    assert arena.zeroed == ("counters_zeroed",) and [int(n) for n in arena.dirty_zeros()] == [0]
    arena.buffers["counters_zeroed"][3:5] = 7
    assert [int(n) for n in arena.dirty_zeros()] == [2]
    arena.arm()
    assert [int(n) for n in arena.dirty_zeros()] == [0]


def test_every_byte_beside_every_buffer_is_guarded():
    for name in ("q", "k", "o", "partials", "counters_zeroed"):
        for band in BANDS:
            for beside in (-1, -GUARD_BYTES, 0, GUARD_BYTES - 1):
                _, arena = make_arena()
                arena.arm(band)
                piece = arena.buffers[name].view(torch.uint8)
                at = piece.storage_offset() + (beside if beside < 0 else piece.numel() + beside)
                arena.whole[at] = 1
                assert arena.changed_bands() == 1, (name, beside)
                assert arena.touched_band() in arena.buffers


def test_changed_inputs_are_counted_and_restored():
    inputs, arena = make_arena()
    arena.views["k"][0, 0] = -1
    arena.views["k"][4, 1] = float("nan")
    assert [int(n) for n in arena.changed_inputs()] == [0, 2]
    arena.restore()
    assert sum(arena.changed_inputs()) == 0
    arena.refill({n: t + 1 for n, t in inputs.items()}, {})
    assert arena.views["q"][0, 0, 0] == 1 and sum(arena.changed_inputs()) == 0


def test_a_vault_sees_one_changed_bit():
    tensors = [torch.zeros(7), torch.zeros(5, 3, dtype=torch.bfloat16)]
    vault = Vault(tensors)
    assert vault.intact()
    tensors[1][2, 2] = -0.0
    assert not vault.intact()
