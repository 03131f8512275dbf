"""A kernel that fails to load, to launch or to answer right costs a warning, and SDPA answers; a change that makes all
decisions void counts for those too that another thread is making."""

import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from evoattn.backends.base import LaunchError
from evoattn.backends.compiler import CompileError
from evoattn.families.registry import FAMILIES
from evoattn.integrations.static_cache import kernel_serves
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.ops.attention import attention
from evoattn.ops.explain import explain
from evoattn.ops.runtime import Runtime, current
from evoattn.ops.sdpa import disable, enable
from evoattn.ops.torch_answer import NoKernel
from evoattn.portfolio import kernels
from tests.ops.fake_device import WGMMA, Pick, build, fake_runtime, near, reference, tensors, wgmma_pick


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


@pytest.mark.parametrize(
    "error",
    [ImportError("No module named 'cupy'"), CompileError("error: identifier is undefined", "log"), OSError("no NVRTC")],
    ids=["CuPy is missing", "the compiler refuses", "a library is missing"],
)
def test_a_kernel_that_cannot_be_compiled_costs_a_warning_and_one_try(device, tmp_path, error):
    tries = []

    def build(*arguments):
        tries.append(arguments)
        raise error

    with current.use(Runtime(device, wgmma_pick, tmp_path, build=build)):
        q, k, v = tensors()
        with pytest.warns(RuntimeWarning, match=f"failed: {error}; SDPA runs"):
            answer = attention(q, k, v, enable_gqa=True)
        assert torch.equal(answer, F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
        attention(q[:, :, :9], k, v, enable_gqa=True)  # another shape of the same kernel
        assert len(tries) == 1
        assert str(error) in explain(q, k, v, enable_gqa=True)


def test_a_loaded_kernel_that_the_driver_refuses_is_tried_once_for_all_shapes(device):
    q, k, v = tensors()
    attention(q, k, v, enable_gqa=True, strict=True)
    tries = []

    def refuse(config, function, arguments, extra):
        raise AssertionError("a kernel that is out of use was launched")

    def pack(launches, places):
        tries.append(launches)
        raise LaunchError("The driver could not give a block 200000 bytes of shared memory.")

    (kernel,) = current.runtime()._kernels._loaded.values()
    kernel.bound, device.launch = pack, refuse
    with pytest.warns(RuntimeWarning, match="200000 bytes of shared memory; SDPA runs"):
        attention(q[:, :, :9], k, v, enable_gqa=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in range(10, 15):
            attention(q[:, :, :rows], k, v, enable_gqa=True)
        assert len(tries) == 1
        attention(q, k, v, enable_gqa=True)  # a plan of before
        assert "200000 bytes" in explain(q, k, v, enable_gqa=True)
        with pytest.raises(NoKernel, match="200000 bytes"):
            attention(q, k, v, enable_gqa=True, strict=True)


def test_machine_code_of_another_gpu_costs_a_warning(device, tmp_path):
    """A cache that was copied from elsewhere: the driver refuses the module."""
    other = build(
        FAMILIES["flash_wgmma"],
        AttentionProblem(1, 1, 1, 8, 8, 64),
        KernelConfig("flash_wgmma", WGMMA),
        device.gpu,
        tmp_path,
    )

    def load(cubin):
        assert cubin == other.code
        raise LaunchError("The driver could not load the module: no kernel image is available (CUDA error 209).")

    device.load = load
    with current.use(Runtime(device, wgmma_pick, tmp_path, build=lambda *_: other)):
        with pytest.warns(RuntimeWarning, match="no kernel image is available"):
            answer = attention(*tensors(), enable_gqa=True)
        assert near(answer, reference(*tensors()))


def test_a_damaged_portfolio_costs_a_warning(device, tmp_path):
    (tmp_path / "sm_90a.json").write_text('{"cards": ["h100"], "kernels": [{}]}')

    def pick(problem, gpu):
        return kernels.load("sm_90a", tmp_path)

    with current.use(fake_runtime(device, tmp_path, pick)), pytest.warns(RuntimeWarning, match="no kernel could be"):
        answer = attention(*tensors(), enable_gqa=True)
    assert near(answer, reference(*tensors()))


class Pause:
    """Holds a thread up within `work` until `done` is over."""

    def __init__(self, work):
        self._work, self._begun, self._go = work, threading.Event(), threading.Event()

    def __call__(self, *arguments):
        self._begun.set()
        assert self._go.wait(200)
        return self._work(*arguments)

    def during(self, call, change):
        """What `call`, in a thread of its own, answers where `change` is made while it waits."""
        answers = []
        thread = threading.Thread(target=lambda: answers.append(call()))
        thread.start()
        try:
            assert self._begun.wait(200)
            change()
        finally:
            self._go.set()
            thread.join()
        return answers[0]


@pytest.mark.parametrize("words", [{}, {"window": (9, 0)}], ids=["plain", "variant"])
def test_kernels_that_are_forbidden_while_one_is_compiled_run_no_more(device, tmp_path, words):
    def pick(problem, gpu):
        return Pick("flash_wgmma", wgmma_pick(problem, gpu).config, "of another card", estimated=True)

    q, k, v = tensors()
    compiling = Pause(build)
    with current.use(Runtime(device, pick, tmp_path, build=compiling)):
        enable(estimated=True)
        try:
            compiling.during(lambda: attention(q, k, v, enable_gqa=True, **words), disable)
        finally:
            disable()
        assert "measured on no h100" in explain(q, k, v, enable_gqa=True, **words)
        with pytest.raises(NoKernel, match="measured on no h100"):
            attention(q, k, v, enable_gqa=True, strict=True, **words)


@pytest.mark.parametrize("words", [{}, {"window": (9, 0)}], ids=["plain", "variant"])
def test_a_kernel_that_fails_while_another_call_of_it_is_prepared_runs_no_more(device, tmp_path, words):
    q, k, v = tensors()
    other = q[:, :, :9].contiguous()
    with current.use(fake_runtime(device, tmp_path)) as runtime:
        attention(q, k, v, enable_gqa=True, strict=True, **words)
        (kernel,) = runtime._kernels._loaded.values()
        packing = kernel.bound = Pause(kernel.bound)

        def fail():
            device.status = 719
            with pytest.warns(RuntimeWarning, match="fake error 719; the kernel is not used again"):
                attention(q, k, v, enable_gqa=True, **words)
            device.status = 0

        before = len(device.launches)
        answer = packing.during(lambda: attention(other, k, v, enable_gqa=True, **words), fail)
        if not words:
            assert near(answer, reference(other, k, v))
        with pytest.raises(NoKernel, match="fake error 719"):
            attention(other, k, v, enable_gqa=True, strict=True, **words)
        assert len(device.launches) == before


def test_whether_a_kernel_serves_a_step_is_asked_again(device, tmp_path):
    asked, model = [], SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, hidden_size=256)

    def pick(problem, gpu):
        asked.append(problem)
        runtime.forget()  # as another thread may at this moment

    with current.use(fake_runtime(device, tmp_path, pick)) as runtime:
        for _ in range(2):
            assert not kernel_serves(model, 2, 1, 64, torch.float16, torch.device("cpu"))
    assert len(asked) == 2
