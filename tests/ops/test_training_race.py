"""Races of backward passes: the first that comes holds one, and no other call changes the kernels of training."""

import dataclasses
import warnings

import pytest
import torch

import evoattn
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.space import KernelConfig
from evoattn.ops import choice, kernels
from evoattn.ops.choice import Race
from evoattn.ops.runtime import current
from evoattn.portfolio.wins import Races
from tests.ops.fake_backward import NAME, TrainingDevice, pick_either, training_runtime
from tests.ops.fake_clock import FakeClock
from tests.ops.fake_device import WGMMA, tensors


@pytest.mark.slow
def test_a_backward_pass_races_at_the_first_that_comes_and_its_winner_runs_from_then_on(tmp_path, monkeypatch):
    """Of layers that began before the race, too; gradients with the same bits in every run are the pick's."""
    slow, fast = (KernelConfig(NAME, {"DETERMINISTIC": True, "SMEM": smem}) for smem in (512, 1024))

    monkeypatch.setattr(choice, "template_digest", lambda name: name)
    monkeypatch.setattr(kernels, "kept_cubin", lambda *recipe: None)

    def pick(problem, gpu):
        found = pick_either(problem, gpu)
        return found if problem.op == "forward" else dataclasses.replace(found, config=slow, rivals=(fast,))

    for process in range(2):
        clock = FakeClock()
        clock.device = device = TrainingDevice()
        held = Race(Races(tmp_path / "races.jsonl"), clock, 2)
        with current.use(training_runtime(device, tmp_path, pick, race=held)):
            leaves = [tensor.requires_grad_() for tensor in tensors()]

            def layer(leaves=leaves, **words):
                return evoattn.attention(*leaves, enable_gqa=True, strict=True, **words)

            def ran(answer, leaves=leaves, device=device):
                grad = torch.autograd.grad(answer, leaves, torch.ones_like(answer))
                return device.launches[-1].smem_bytes, grad

            assert ran(layer(deterministic=True))[0] == 512
            layers = layer(), layer()
            said = evoattn.explain(*leaves, enable_gqa=True)
            assert not clock.asked and ("races 1 other kernel" in said or process)
            assert ran(layers[0])[0] == 1024 and bool(clock.asked) == (not process)
            asked = len(clock.asked)
            assert ran(layers[1])[0] == 1024 and ran(layer(deterministic=True))[0] == 512
            used, grad = ran(layer())
            assert used == 1024 and all(one.isfinite().all() for one in grad) and len(clock.asked) == asked
            assert "in a race on this card" in evoattn.explain(*leaves, enable_gqa=True)


def test_a_backward_pass_that_is_captured_does_not_race(tmp_path, monkeypatch):
    """Its graph has the pick. So have later passes of the process: bits are not to change."""
    slow, fast = (KernelConfig(NAME, {"DETERMINISTIC": True, "SMEM": smem}) for smem in (512, 1024))
    monkeypatch.setattr(choice, "template_digest", lambda name: name)
    monkeypatch.setattr(kernels.Kernels, "compiles_longer", lambda *of: False)
    monkeypatch.setattr(kernels, "kept_cubin", lambda *recipe: None)

    def pick(problem, gpu):
        found = pick_either(problem, gpu)
        return found if problem.op == "forward" else dataclasses.replace(found, config=slow, rivals=(fast,))

    clock = FakeClock()
    clock.device = device = TrainingDevice()
    with current.use(training_runtime(device, tmp_path, pick, race=Race(Races(tmp_path / "races.jsonl"), clock, 2))):
        leaves = [tensor.requires_grad_() for tensor in tensors()]
        for captured in (True, False):
            answer = evoattn.attention(*leaves, enable_gqa=True, strict=True)
            device.is_capturing, loads = captured, device.loads
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a rival that is not loaded yet is said to be none
                torch.autograd.grad(answer, leaves, torch.ones_like(answer))
            device.is_capturing = False
            assert device.launches[-1].smem_bytes == 512 and not clock.asked and device.loads == loads


@pytest.mark.slow
def test_a_call_with_the_log_sum_exp_does_not_change_the_kernel_of_training(tmp_path, monkeypatch):
    """Its rivals may be compiled since an earlier process. Where nothing was trained before it races."""
    rival = load_space("flash_wgmma", GPUS["h100"]).make_config(WGMMA | {"BLOCK_N": 128})
    monkeypatch.setattr(choice, "template_digest", lambda name: name)
    monkeypatch.setattr(kernels, "kept_cubin", lambda *recipe: recipe)

    def pick(problem, gpu):
        found = pick_either(problem, gpu)
        return dataclasses.replace(found, rivals=(rival,)) if problem.op == "forward" else found

    for trained in (True, False):
        clock = FakeClock()
        clock.device = device = TrainingDevice()
        held = Race(Races(tmp_path / f"{trained}.jsonl"), clock, 2)
        with current.use(training_runtime(device, tmp_path, pick, race=held)):
            leaves = [tensor.requires_grad_(trained) for tensor in tensors()]
            evoattn.attention(*leaves, enable_gqa=True, strict=True)
            asked = len(clock.asked)
            evoattn.attention(*(leaf.detach() for leaf in leaves), enable_gqa=True, strict=True, return_lse=True)
            assert (len(clock.asked) > asked) == (not trained)


def test_rivals_of_a_backward_pass_that_cannot_race_are_not_compiled(tmp_path, monkeypatch):
    rival = KernelConfig(NAME, {"DETERMINISTIC": True, "SMEM": 1024})
    monkeypatch.setattr(choice, "template_digest", lambda name: name)
    monkeypatch.setattr(kernels, "kept_cubin", lambda *recipe: None)
    device, begun = TrainingDevice(), []
    monkeypatch.setattr(kernels.Kernels, "ahead", lambda *of: begun.append(of) or {})

    def pick(problem, gpu):
        found = pick_either(problem, gpu)
        return found if problem.op == "forward" else dataclasses.replace(found, rivals=(rival,))

    for room in (10, 1 << 40):
        held = Race(Races(tmp_path / "races.jsonl"), FakeClock(room=room), 2)
        with current.use(training_runtime(device, tmp_path, pick, race=held)):
            evoattn.attention(*[tensor.requires_grad_() for tensor in tensors()], enable_gqa=True, strict=True)
            assert len(begun) == (room > 10)
