"""A kernel that fails to load, to launch or to answer right costs a warning, and SDPA answers."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from fake_device import WGMMA, Pick, fake_runtime, near, reference, tensors, wgmma_pick

from evoattn.backends.base import LaunchError
from evoattn.model.space import KernelConfig
from evoattn.ops import current
from evoattn.ops.attention import attention
from evoattn.ops.explain import explain
from evoattn.ops.runtime import NoKernel


def test_a_launch_that_fails_falls_back_and_is_not_tried_again(device):
    q, k, v = tensors()
    attention(q, k, v, enable_gqa=True, strict=True)
    device.status = 719
    with pytest.warns(RuntimeWarning, match="fake error 719; the kernel is not used again"):
        answer = attention(q, k, v, enable_gqa=True)
    assert near(answer, reference(q, k, v))
    device.status, before = 0, len(device.launches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(q, k, v, enable_gqa=True)
        attention(q, k, v, enable_gqa=True, is_causal=False, scale=0.2)
    assert len(device.launches) == before
    assert "fake error 719" in explain(q, k, v, enable_gqa=True)


def test_a_kernel_that_answers_wrong_is_never_used_on_this_machine(device, tmp_path):
    device.error = 0.05
    q, k, v = tensors()
    with pytest.warns(RuntimeWarning, match="failed its check on this machine: .*largest error"):
        answer = attention(q, k, v, enable_gqa=True)
    assert torch.equal(answer, F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    device.error = 0.0  # the record counts, in the next process too
    with current.use(fake_runtime(device, tmp_path)):
        with pytest.warns(RuntimeWarning, match="never used here"):
            attention(q, k, v, enable_gqa=True)
        with pytest.raises(NoKernel, match="failed its check"):
            attention(q, k, v, enable_gqa=True, strict=True)


def test_a_check_that_passed_is_not_repeated(device, tmp_path):
    attention(*tensors(), enable_gqa=True)
    assert len(device.launches) > 1
    device.launches.clear()
    with current.use(fake_runtime(device, tmp_path)):
        attention(*tensors(), enable_gqa=True)
    assert len(device.launches) == 1


def test_a_module_that_does_not_load_costs_a_warning(device):
    def refuse(cubin):
        raise LaunchError("The driver could not load the module.")

    device.load = refuse
    with pytest.warns(RuntimeWarning, match="could not load the module; SDPA runs"):
        attention(*tensors(), enable_gqa=True)


def test_a_picker_that_fails_costs_a_warning(device, tmp_path):
    def pick(problem, gpu):
        raise ValueError("a damaged file")

    with current.use(fake_runtime(device, tmp_path, pick)), pytest.warns(RuntimeWarning, match="a damaged file"):
        attention(*tensors(), enable_gqa=True)


def test_an_invalid_pick_is_refused(device, tmp_path):
    def pick(problem, gpu):
        return Pick("flash_wgmma", KernelConfig("flash_wgmma", WGMMA | {"STAGES": 50}))

    with current.use(fake_runtime(device, tmp_path, pick)):
        assert "cannot serve this call" in explain(*tensors(), enable_gqa=True)
        with pytest.raises(NoKernel, match="cannot serve"):
            attention(*tensors(), enable_gqa=True, strict=True)


def test_estimated_kernels_wait_to_be_asked_for(device, tmp_path):
    def pick(problem, gpu):
        return Pick("flash_wgmma", wgmma_pick(problem, gpu).config, "of another card", estimated=True)

    runtime = fake_runtime(device, tmp_path, pick)
    with current.use(runtime):
        with pytest.raises(NoKernel, match=r"measured on no h100; evoattn.enable\(estimated=True\)"):
            attention(*tensors(), enable_gqa=True, strict=True)
        runtime.estimated = True
        runtime.forget()
        attention(*tensors(), enable_gqa=True, strict=True)
